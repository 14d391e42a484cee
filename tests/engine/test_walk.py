"""One step of a chain: its number of calls, its checks and errors, and the memory that it may write to."""

import sys
import threading
from collections import Counter
from pathlib import Path

import pytest
import torch
from contract.entries import Mul
from contract.training import assert_equal, gradients, parameters, set_grads, train, values
from torch import nn

import torchzero_clip
from torchzero_clip import (
    Adam,
    AdamW,
    Chain,
    ClipNorm,
    ClipNormByEMA,
    ClipNormGrowth,
    ClipValueByEMA,
    ClipValueGrowth,
    Modular,
    Transform,
)
from torchzero_clip.checks import non_negative

PACKAGE = str(Path(torchzero_clip.__file__).parent)
COMPREHENSIONS = {"<listcomp>", "<dictcomp>", "<setcomp>", "<genexpr>"}
HOOKS = {"warn_of_copy"}  # of all optimizers, once a test has put transforms before one
HOOKED = f"{PACKAGE}/per_sample"
"""Clippers of other tests have hooks before the steps of all optimizers."""


def calls_of_a_step(tensors, **options):
    """The code objects of this package that the third step calls, one entry per call, comprehensions apart."""
    params = [nn.Parameter(torch.randn(4, 3)) for _ in range(tensors)]
    optimizer = Modular(params, ClipNorm(1, dim="global"), AdamW(), **options)
    train(optimizer, params, [[torch.randn_like(p) for p in params] for _ in range(2)])
    set_grads(params, [torch.randn_like(p) for p in params])
    return calls_of(optimizer.step)


def calls_of(function):
    """The code objects of this package that a function calls, one entry per call, comprehensions apart."""
    calls = []

    def record(frame, event, _):
        code = frame.f_code
        is_ours = code.co_filename.startswith(PACKAGE) and not code.co_filename.startswith(HOOKED)
        if event == "call" and is_ours and code.co_name not in COMPREHENSIONS | HOOKS:
            calls.append(code)

    sys.setprofile(record)
    try:
        function()
    finally:
        sys.setprofile(None)
    return calls


class Counted(ClipNorm):
    """Counts how often its setting is checked."""

    seen: list[float] = []
    checks = {"max_norm": lambda name, value: (non_negative(name, value), Counted.seen.append(value))}


@pytest.mark.parametrize("nested", [False, True])
def test_every_setting_is_checked_once_a_step_and_again_after_a_closure(nested):
    params = parameters()
    clip = Counted(0.5)
    chain = Chain(Chain(clip, target="update_difference"), target="update_difference") if nested else clip
    optimizer = Modular([{"params": params[:2]}, {"params": params[2:]}], chain, Adam())
    set_grads(params, gradients(params, 1)[0])
    Counted.seen.clear()
    optimizer.step()
    assert Counted.seen == [0.5, 0.5]  # one for each group
    optimizer.step(lambda: None)
    assert Counted.seen == [0.5] * 6


def test_a_closure_may_change_settings_and_add_groups():
    first, second = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    optimizer = Modular([first], ClipNorm(1.0))

    def closure():
        if len(optimizer.param_groups) == 1:
            optimizer.add_param_group({"params": [second], "max_norm": 0.5})
        optimizer.param_groups[0]["max_norm"] = 2.0
        first.grad, second.grad = torch.tensor([3.0, 4.0]), torch.tensor([3.0, 4.0])

    optimizer.step(closure)
    assert first.tolist() == pytest.approx([-1.2, -1.6])
    assert second.tolist() == pytest.approx([-0.3, -0.4])

    before = values([first, second])

    def bad():
        optimizer.param_groups[1]["max_norm"] = -1.0

    with pytest.raises(ValueError, match=r"max_norm must be >= 0, got -1.0"):
        optimizer.step(bad)
    assert_equal([first, second], before)


@pytest.mark.slow
def test_two_optimizers_that_share_instances_step_in_two_threads():
    shared = [
        ClipNorm(0.5, dim="global"),
        ClipValueByEMA(0.5, ema_tfm=Mul(2.0)),
        ClipNormByEMA(0.5, tensorwise=False),
        ClipValueGrowth(),
        ClipNormGrowth(),
        Adam(),
    ]
    runs = [(parameters(torch.float64), gradients(parameters(torch.float64), 60, seed)) for seed in (1, 2)]
    expected = [(parameters(torch.float64), rows) for _, rows in runs]
    for params, rows in expected:
        train(Modular(params, *shared), params, rows)
    optimizers = [Modular(params, *shared) for params, _ in runs]
    barrier, errors = threading.Barrier(2), []

    def run(optimizer, params, rows):
        try:
            for row in rows:
                barrier.wait(timeout=60)
                train(optimizer, params, [row])
        except Exception as error:
            errors.append(error)
            barrier.abort()

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=run, args=(o, *r)) for o, r in zip(optimizers, runs, strict=True)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not errors
    for (params, _), (other, _) in zip(runs, expected, strict=True):
        assert_equal(params, other)


def test_metrics_stay_those_of_the_step_before_if_a_step_fails():
    params = parameters()
    optimizer = Modular(params, ClipNorm(1.0), AdamW())
    train(optimizer, params, gradients(params, 1))
    before = optimizer.metrics()
    params[0].data = torch.zeros(7)
    with pytest.raises(RuntimeError, match="has shape"):
        optimizer.step()
    assert Counter(optimizer.metrics()) == Counter(before)


class Lacking(Transform):
    """A transform whose operation the device lacks."""

    def __init__(self):
        super().__init__({})

    def apply_tensors(self, updates, step):
        raise NotImplementedError("The operator 'aten::lacking' is not currently implemented for the MPS device")


@pytest.mark.parametrize("fast", [True, False])
def test_an_operation_that_a_device_lacks_is_named_with_the_way_out(fast):
    weight = nn.Parameter(torch.ones(2))
    optimizer = Modular([weight], Lacking(), fast=fast)
    weight.grad = torch.ones(2)
    with pytest.raises(NotImplementedError, match="aten::lacking") as caught:
        optimizer.step()
    notes = " ".join(caught.value.__notes__)
    assert "Lacking" in notes
    assert "PYTORCH_ENABLE_MPS_FALLBACK=1" in notes
    assert "fast=False" in notes
    assert weight.tolist() == [1.0, 1.0]
