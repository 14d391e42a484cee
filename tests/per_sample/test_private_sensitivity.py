"""What one sample can change: the sums by its limit at most, and without noise nothing but the result."""

import copy
from contextlib import nullcontext

import pytest
import torch
from contract.entries import ENTRIES
from per_sample.harness import Net, losses_of
from torch import nn

from torchzero_clip import (
    AutomaticClipper,
    ConstantFlatClipper,
    ConstantPerLayerClipper,
    Modular,
    PrivateGradientClipper,
    Recorder,
)


def bfloat16(enabled):
    return torch.autocast("cpu", torch.bfloat16) if enabled else nullcontext()


def sums_of(model, parts, norm_clipper, autocast, *, around=False):
    """All sums of a step as one vector in float64. They are what noise is added to."""
    clipper = PrivateGradientClipper(model, norm_clipper, noise_multiplier=0.0, expected_batch_size=1.0)
    for part in parts:
        with bfloat16(autocast):
            losses = losses_of(model(part)) if len(part) else torch.zeros(0)
        with bfloat16(around):
            clipper.backward(losses)
    released = [clipper._sums.get(name, torch.zeros_like(p, dtype=torch.float32)) for name, p in named(model)]
    clipper.discard()
    return torch.cat([value.double().flatten() for value in released])


def named(model):
    return [(name, param) for name, param in model.named_parameters() if param.requires_grad]


@pytest.mark.parametrize("form", ["float32", "bfloat16", "float16", "autocast"])
@pytest.mark.parametrize(
    "norm_clipper",
    [
        lambda: ConstantFlatClipper(0.3),
        lambda: AutomaticClipper(0.3),
        lambda: ConstantPerLayerClipper([0.1, 0.2, 0.2, 0.0]),  # their norm is 0.3
    ],
    ids=["flat", "automatic", "per layer"],
)
@pytest.mark.parametrize("sizes", [[1], [6], [4, 0, 2]], ids=str)
def test_without_one_sample_the_sums_change_by_the_limit_at_most(sizes, norm_clipper, form):
    dtype = torch.float32 if form == "autocast" else getattr(torch, form)
    model = nn.Sequential(nn.Linear(3, 40), nn.Tanh(), nn.Linear(40, 2)).to(dtype)
    rows = (torch.randn(sum(sizes), 3) * 10).to(dtype)
    parts = list(rows.split(sizes))
    full = sums_of(model, parts, norm_clipper(), form == "autocast")
    largest = 0.0
    for i, part in enumerate(parts):
        for j in range(len(part)):
            left = [*parts[:i], torch.cat([part[:j], part[j + 1 :]]), *parts[i + 1 :]]
            change = full - sums_of(model, left, norm_clipper(), form == "autocast")
            largest = max(largest, change.norm().item())
    assert 0.29 < largest <= 0.3 * (1 + 1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_one_of_many_samples_moves_the_sum_by_its_limit(dtype):
    model = nn.Linear(64, 1, bias=False).to(dtype)
    rows = torch.randn(64).expand(4096, 64).to(dtype)  # all in one direction: rounding has most to do
    full = sums_of(model, [rows], ConstantFlatClipper(1.0), False)
    assert full.norm() > 4090
    change = full - sums_of(model, [rows[1:]], ConstantFlatClipper(1.0), False)
    assert 0.99 < change.norm() < 1.0003  # float32 holds 4096 to 2e-4


@pytest.mark.parametrize("precision", ["highest", "medium"])
@pytest.mark.parametrize("around", [False, True])
def test_autocast_around_backward_and_fast_matmuls_do_not_round_sums(around, precision):
    model = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 64))
    rows = torch.randn(64).expand(4096, 64)
    torch.set_float32_matmul_precision(precision)
    try:
        full, less = (
            sums_of(model, [part], ConstantFlatClipper(1.0), True, around=around) for part in (rows, rows[1:])
        )
    finally:
        torch.set_float32_matmul_precision("highest")
    assert 0.99 < (full - less).norm() < 1.0003


LIMIT = 1e-20  # so small that float32 noise of standard deviation 1 swallows what samples add


def trained(make, batches, noise_multiplier=1 / LIMIT):
    """Everything that can be seen after some private steps, and the results of backwards, which are private."""
    torch.manual_seed(0)
    model = Net(lambda m, x: m.last(torch.tanh(m.first(x))) * m.scale, first=nn.Linear(3, 4), last=nn.Linear(4, 2))
    model.scale = nn.Parameter(torch.ones(()))
    clipper = PrivateGradientClipper(
        model,
        ConstantFlatClipper(LIMIT),
        noise_multiplier=noise_multiplier,
        expected_batch_size=3.0,
        generator=torch.Generator().manual_seed(1),
    )
    optimizer = Modular(model, make())
    recorder = Recorder(optimizer, ratios_every=2)
    results = []
    for rows in batches:
        optimizer.zero_grad()
        if len(rows):
            results.append(clipper.backward(losses_of(model(rows))))
        clipper.pre_step()
        optimizer.step()
    seen = [*model.parameters(), *(p.grad for p in model.parameters()), *optimizer.metrics().values()]
    state = copy.deepcopy((optimizer.state_dict(), clipper.state_dict(), recorder.state_dict()))
    texts = repr((clipper, optimizer, clipper.releases, state))
    return [torch.as_tensor(value).detach().clone() for value in seen], texts, results


def seen_alike(one, other):
    (values, texts, _), (others, other_texts, _) = one, other
    return texts == other_texts and all(torch.equal(a, b) for a, b in zip(values, others, strict=True))


@pytest.mark.filterwarnings("ignore:the chain has no optimizer")
@pytest.mark.parametrize("entry", [entry for entry in ENTRIES if not entry.varies], ids=str)
def test_batches_that_differ_look_the_same_behind_every_chain(entry):
    rows = torch.randn(9, 3) * 10
    one = trained(entry.make, [rows[:5], rows[5:5], rows[5:6], rows[6:]])
    other = trained(entry.make, [rows[1:5], rows[:1], rows[5:5], 100 * rows[:2]])
    assert seen_alike(one, other)
    assert [len(result.norms) for result in one[2]] != [len(result.norms) for result in other[2]]


def test_without_noise_they_do_not_look_the_same():
    entry = next(entry for entry in ENTRIES if entry.name == "SGD")
    rows = torch.randn(9, 3)
    assert not seen_alike(*(trained(entry.make, [part], 0.0) for part in (rows, rows[1:])))
