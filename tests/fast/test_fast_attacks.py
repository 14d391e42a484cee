"""Cases in which the fast way of a step gave another result than the readable way once."""

import gc
import weakref

import pytest
import torch
from contract.training import assert_equal, set_grads, train
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from typing_extensions import override

from torchzero_clip import (
    SGD,
    AdamW,
    ClipNorm,
    ClipNormGrowth,
    ClipValue,
    ClipValueByEMA,
    ClipValueGrowth,
    Modular,
    SkipStep,
)


def both(make, shapes, dtype=torch.float32):
    """Parameters and optimizers of the fast and of the readable way."""
    for fast in (True, False):
        torch.manual_seed(0)
        params = [nn.Parameter(torch.randn(shape, dtype=dtype)) for shape in shapes]
        yield params, Modular(params, *make(), fast=fast)


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64])
def test_another_default_dtype(default):
    params = [nn.Parameter(torch.ones(3, dtype=torch.float32))]
    optimizer = Modular(params, ClipNorm(0.1, dim="global"), AdamW(0.1))
    torch.set_default_dtype(default)
    try:
        train(optimizer, params, [[torch.ones(3, dtype=torch.float32)]] * 2)
    finally:
        torch.set_default_dtype(torch.float32)
    assert params[0].tolist() == pytest.approx([0.8] * 3, abs=0.01)


class Halves(ClipValue):
    @override
    def change_(self, x, state, setting, usable, started):
        x.mul_(0.5)
        return torch.zeros(())


class Negates(ClipValueGrowth):
    @override
    def apply_tensor(self, tensor, param, grad, loss, state, setting):
        return -tensor


@pytest.mark.parametrize(
    ("transform", "expected"), [(Halves(1.0), -1.5), (Negates(), 3.0)], ids=["change_", "apply_tensor"]
)
@pytest.mark.parametrize("fast", [True, False])
def test_what_a_subclass_overrides_is_used(transform, expected, fast):
    weight = nn.Parameter(torch.zeros(2))
    optimizer = Modular([weight], transform, SGD(1.0), fast=fast)
    train(optimizer, [weight], [[torch.full((2,), 3.0)]])
    assert weight.tolist() == [expected] * 2


@pytest.mark.parametrize("clip", [ClipValue(1), ClipValueByEMA(), ClipValueGrowth()], ids=repr)
def test_an_elementwise_clip_behind_a_norm_clip_does_not_wait_for_the_device(clip):
    with FakeTensorMode():
        params = [nn.Parameter(torch.empty(3, device="cuda"))]
        optimizer = Modular(params, ClipNorm(1), clip, AdamW())
        for _ in range(2):
            params[0].grad = torch.empty(3, device="cuda")
            optimizer.step()
        assert all(value.device.type == "cuda" for value in optimizer.metrics().values())


def test_gradients_are_released_after_a_step_and_checked_after_a_skipped_one():
    param = nn.Parameter(torch.ones(4, 6))
    optimizer = Modular([param], ClipValue(0.1), SkipStep(max_norm=10.0), AdamW(0.1))
    for size in (1.0, 1.0, 1e3):  # the last step is skipped
        param.grad = torch.full((4, 6), size)
        grad = weakref.ref(param.grad)
        optimizer.step()
    before = param.detach().clone()
    param.grad.data = torch.full((6, 4), 1.0).T  # the same tensor with other strides
    optimizer.step()
    torch.testing.assert_close(before - param.detach(), torch.full((4, 6), 0.1), rtol=0.1, atol=0)
    param.grad = None
    assert grad() is None


def test_parameters_that_get_other_strides_in_the_same_memory():
    results = []
    for params, optimizer in both(lambda: [ClipValue(0.5), AdamW(0.1)], [(4, 4)]):
        train(optimizer, params, [[torch.ones(4, 4)]])
        params[0].data = params[0].data.t()
        train(optimizer, params, [[torch.arange(16.0).view(4, 4)]])
        results.append(params[0].detach())
    torch.testing.assert_close(*results)


def test_a_parameter_that_becomes_a_part_of_its_buffer():
    buffer = torch.zeros(20)
    param = nn.Parameter(buffer[:10])
    optimizer = Modular([param], AdamW(0.1))
    train(optimizer, [param], [[torch.ones(10)]])
    param.data = buffer[::2]
    before = buffer[1::2].clone()
    train(optimizer, [param], [[torch.ones(10)]])
    assert_equal([buffer[1::2]], [before])


@pytest.mark.parametrize("clip", [ClipValueByEMA(), ClipValueGrowth()], ids=repr)
def test_a_parameter_that_is_listed_twice_has_one_statistic(clip):
    states = []
    for fast in (True, False):
        weight = nn.Parameter(torch.ones(3))
        with pytest.warns(UserWarning, match="duplicate parameters"):
            optimizer = Modular([weight, weight], clip, AdamW(), fast=fast)
        train(optimizer, [weight], [[torch.tensor([1.0, 2.0, 3.0]) * k] for k in (1, 2)])
        states.append({key: value for key, value in optimizer.state[weight].items() if value.ndim})
    torch.testing.assert_close(*states)


def test_state_that_is_moved_away_frees_its_memory():
    params = [nn.Parameter(torch.ones(3)) for _ in range(3)]
    optimizer = Modular(params, ClipNormGrowth(), AdamW())
    train(optimizer, params, [[torch.ones(3)] * 3] * 3)
    kept = [weakref.ref(optimizer.state[p]["adam/exp_avg"]) for p in params]
    for param in params:
        optimizer.state[param]["adam/exp_avg"] = optimizer.state[param]["adam/exp_avg"].clone()
    gc.collect()
    assert [reference() for reference in kept] == [None] * 3


def test_a_setting_that_the_dtype_cannot_hold_changes_nothing():
    params = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))]
    groups = [{"params": params[:1]}, {"params": params[1:]}]
    optimizer = Modular(groups, ClipValueGrowth(), AdamW())
    train(optimizer, params, [[torch.ones(3), torch.ones(2)]] * 2)
    optimizer.param_groups[1]["min_value"] = 1e39
    before = [p.detach().clone() for p in params]
    set_grads(params, [torch.ones(3), torch.ones(2)])
    with pytest.raises(RuntimeError):
        optimizer.step()
    assert_equal(params, before)
    assert {float(optimizer.state[p]["adam/step"]) for p in params} == {2.0}


def test_a_step_in_inference_mode_does_not_break_those_after_it():
    weight = nn.Parameter(torch.ones(2))
    optimizer = Modular([weight], ClipNorm(1), AdamW())
    with torch.inference_mode():
        weight.grad = torch.ones(2)
        optimizer.step()
    train(optimizer, [weight], [[torch.ones(2)]] * 2)
    assert weight.tolist() == pytest.approx([1 - 3e-3] * 2, abs=1e-4)


def test_another_default_device():
    params = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(70001))]
    optimizer = Modular(params, ClipNormGrowth(), ClipNorm(1, dim="global"), AdamW())
    torch.set_default_device("meta")
    try:
        for _ in range(2):
            for param in params:
                param.grad = torch.ones(param.shape, device="cpu")
            optimizer.step()
    finally:
        torch.set_default_device(None)
    assert all(param.isfinite().all() and (param < 1).all() for param in params)
