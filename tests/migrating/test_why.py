"""The README's table of what becomes of hard gradients: each cell is a run of the package that it names."""

import math
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from torchzero_clip import SGD, ClipNorm, ConstantFlatClipper, Modular, PerSampleGradientClipper, SkipStep

optax = pytest.importorskip("optax", reason="optax is not installed")
jnp = pytest.importorskip("jax.numpy", reason="jax is not installed")
accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
optimizers = pytest.importorskip("opacus.optimizers", reason="Opacus is not installed")
pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]

README = (Path(__file__).parents[2] / "README.md").read_text()
COLUMNS = ("`clip_grad_norm_`", "Accelerate, HF Trainer", "optax", "Opacus", "torchzero_clip")


def row(name):
    """The cells of a row of the table, by column."""
    line = re.search(rf"^\| {re.escape(name)} \|(.*)\|$", README, re.MULTILINE)
    assert line is not None, name
    return dict(zip(COLUMNS, [cell.strip() for cell in line[1].split("|")], strict=True))


def by_torch(grads):
    params = [nn.Parameter(torch.zeros_like(grad)) for grad in grads]
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad.clone()
    torch.nn.utils.clip_grad_norm_(params, 1.0)
    return [param.grad for param in params]


def by_accelerate(grads):
    params = [nn.Parameter(torch.zeros_like(grad)) for grad in grads]
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad.clone()
    accelerate.Accelerator(cpu=True).clip_grad_norm_(params, 1.0)
    return [param.grad for param in params]


def by_optax(grads):
    clip = optax.clip_by_global_norm(1.0)
    arrays = [jnp.asarray(grad.numpy()) for grad in grads]
    updates, _ = clip.update(arrays, clip.init(arrays))
    return [torch.tensor(update.tolist()) for update in updates]


def by_opacus(grads, samples=None):
    """Each gradient is that of one sample, unless there are ``samples`` in the first dimension."""
    params = [nn.Parameter(torch.zeros_like(grad)) for grad in grads]
    inner = torch.optim.SGD(params, 1.0)
    size = 1 if samples is None else len(samples)
    optimizer = optimizers.DPOptimizer(inner, noise_multiplier=0.0, max_grad_norm=1.0, expected_batch_size=size)
    for param, grad in zip(params, grads, strict=True):
        param.grad_sample = grad[None].clone() if samples is None else samples
    optimizer.step()
    return [-param.detach() for param in params]


def by_us(grads, *gates, **options):
    params = [nn.Parameter(torch.zeros_like(grad)) for grad in grads]
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad.clone()
    Modular(params, *gates, ClipNorm(1, dim="global"), SGD(1.0), **options).step()
    return [-param.detach() for param in params]


CLIPS = dict(zip(COLUMNS, (by_torch, by_accelerate, by_optax, by_opacus, by_us), strict=True))


def outcome(updates: list[Tensor]) -> str:
    """In words, what a step would apply."""
    joint = torch.cat([update.double().flatten() for update in updates])
    if joint.isnan().all():
        return "all become NaN"
    if not joint.any():
        return "all become 0"
    return "clipped to 1" if math.isclose(joint.norm(), 1, rel_tol=2e-3) else f"a norm of {joint.norm():g}"


@pytest.mark.parametrize("column", COLUMNS)
@pytest.mark.parametrize(
    ("name", "grads"),
    [
        ("float16 gradients with a norm of 300,000", [torch.full((1000, 1000), 300.0, dtype=torch.float16)]),
        ("float32 gradients with a norm of 1e20", [torch.full((100,), 1e19)]),
    ],
)
def test_large_gradients(name, grads, column):
    assert row(name)[column] == outcome(CLIPS[column](grads))


@pytest.mark.parametrize("column", COLUMNS[:4])
def test_one_nan_for_others(column):
    grads = [torch.tensor([1.0, math.nan]), torch.ones(3)]
    assert row("one element is NaN")[column] == outcome(CLIPS[column](grads))


def test_one_nan_for_us():
    grads = [torch.tensor([1.0, math.nan]), torch.ones(3)]
    assert outcome(by_us(grads, nonfinite="skip")) == "all become 0"  # parameters do not move
    assert row("one element is NaN")["torchzero_clip"] == 'no step, with `nonfinite="skip"`'


@pytest.mark.parametrize("column", COLUMNS[:4])
def test_a_spike_for_others(column):
    assert row("a norm 100 times the usual one")[column] == outcome(CLIPS[column]([torch.full((4,), 50.0)]))


def test_a_spike_for_us():
    param = nn.Parameter(torch.zeros(4))
    optimizer = Modular([param], SkipStep(max_ratio=10.0), ClipNorm(1, dim="global"), SGD(1.0))
    moves = []
    for norm in (1.0, 1.0, 1.0, 100.0):
        before = param.detach().clone()
        param.grad = torch.full((4,), norm / 2)
        optimizer.step()
        moves.append((param.detach() - before).norm().item())
    assert moves == [1, 1, 1, 0]
    assert row("a norm 100 times the usual one")["torchzero_clip"] == "clipped to 1, or no step with `SkipStep`"


def test_one_sample_of_a_batch():
    """The gradient of one sample is a thousand times that of the others: how much of the mean is it after clipping?"""
    x = torch.eye(4)
    x[0] *= 1000

    def share(grad):
        return f"{grad[0, 0] / grad.sum():.0%} of the step"

    model = nn.Linear(4, 1, bias=False)
    model(x).sum().div(4).backward()
    name = "one of four samples has a gradient 1,000 times larger"
    for column in COLUMNS[:3]:
        assert row(name)[column] == share(CLIPS[column]([model.weight.grad])[0])
    assert row(name)["Opacus"] == share(by_opacus([model.weight.grad], x[:, None, :])[0])
    model.zero_grad()
    with PerSampleGradientClipper(model, ConstantFlatClipper(1.0)) as clipper:
        clipper.backward(model(x).flatten())
    assert row(name)["torchzero_clip"] == f"{share(model.weight.grad)}, [per sample](docs/per_sample.md)"
