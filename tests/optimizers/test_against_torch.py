"""Optimizers follow torch.optim step by step in float64, with schedules and all-zero gradients."""

import pytest
import torch
from optimizers.twins import same, same_gradients, two_of
from table import SHAPES
from torch import nn, optim

from torchzero_clip import LR, SGD, Adam, AdamW, Modular, RMSprop, WeightDecay

PAIRS = {
    "Adam": same(Adam, optim.Adam, 0.01),
    "Adam default lr": same(Adam, optim.Adam),
    "Adam betas eps": same(Adam, optim.Adam, 0.01, (0.5, 0.6), eps=0.1),
    "Adam amsgrad": same(Adam, optim.Adam, 0.01, amsgrad=True),
    "Adam L2": same(Adam, optim.Adam, 0.01, decay=0.1),
    "AdamW": same(AdamW, optim.AdamW, 0.01),
    "AdamW written out": (
        lambda: [Adam(), WeightDecay(0.1), LR(0.01)],
        lambda p: optim.AdamW(p, 0.01, weight_decay=0.1),
    ),
    "SGD": same(SGD, optim.SGD, 0.1),
    "SGD default lr": same(SGD, optim.SGD),
    "SGD momentum": same(SGD, optim.SGD, 0.1, 0.9),
    "SGD dampening": same(SGD, optim.SGD, 0.1, 0.9, dampening=0.3),
    "SGD nesterov L2": same(SGD, optim.SGD, 0.1, 0.9, nesterov=True, decay=0.1),
    "RMSprop": same(RMSprop, optim.RMSprop, 0.01),
    "RMSprop default lr": same(RMSprop, optim.RMSprop),
    "RMSprop momentum": (
        lambda: RMSprop(0.01, 0.9, 1e-6, 0.8),
        lambda p: optim.RMSprop(p, 0.01, 0.9, 1e-6, momentum=0.8),
    ),
    "RMSprop centered L2": same(RMSprop, optim.RMSprop, 0.01, momentum=0.5, centered=True, decay=0.1),
}


@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("name", PAIRS)
def test_50_steps(name, maximize):
    ours, theirs = PAIRS[name]
    params, other = two_of([torch.randn(shape, dtype=torch.float64) for shape in SHAPES])
    optimizer, reference = Modular(params, ours(), maximize=maximize), theirs(other)
    reference.param_groups[0]["maximize"] = maximize
    schedulers = [optim.lr_scheduler.CosineAnnealingLR(o, 20) for o in (optimizer, reference)]
    for k in range(50):
        same_gradients(params, other, 0.0 if k == 0 or k % 7 == 3 else 10.0 ** (k % 5 - 2))
        optimizer.step()
        reference.step()
        torch.testing.assert_close(params, other, rtol=1e-12, atol=1e-13)
        for scheduler in schedulers:
            scheduler.step()


@pytest.mark.parametrize("fast", [True, False])
def test_adam_adds_eps_after_the_bias_correction(fast):
    """A gradient as small as eps: before the correction eps would make this 0.0307."""
    param = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    param.grad = torch.tensor([1e-8], dtype=torch.float64)
    Modular([param], Adam(1.0), fast=fast).step()
    assert param.item() == pytest.approx(-0.5, rel=1e-9)


def test_float16_adam_survives_zero_gradients():
    param = nn.Parameter(torch.ones(3, dtype=torch.float16))
    param.grad = torch.zeros(3, dtype=torch.float16)
    Modular([param], Adam()).step()
    assert param.tolist() == [1, 1, 1]


def test_state_dtype_keeps_averages_wide():
    param = nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
    optimizer = Modular([param], Adam(0.01, state_dtype=torch.float32))
    wide = nn.Parameter(torch.zeros(3))
    reference = optim.Adam([wide], 0.01)
    for _ in range(20):
        param.grad = torch.randn(3).bfloat16()
        wide.grad = param.grad.float()
        optimizer.step()
        reference.step()
    state = optimizer.state[param]
    assert {key: value.dtype for key, value in state.items()} == dict.fromkeys(state, torch.float32)
    torch.testing.assert_close(state["adam/exp_avg"], reference.state[wide]["exp_avg"])
    torch.testing.assert_close(state["adam/exp_avg_sq"], reference.state[wide]["exp_avg_sq"])


def test_momentum_may_begin_later_and_end():
    params, other = two_of([torch.ones(3, dtype=torch.float64)])
    optimizer, reference = Modular(params, SGD(0.1)), optim.SGD(other, 0.1)
    for momentum in (0.0, 0.9, 0.9, 0.0, 0.5):
        optimizer.param_groups[0]["momentum"] = reference.param_groups[0]["momentum"] = momentum
        same_gradients(params, other)
        optimizer.step()
        reference.step()
        torch.testing.assert_close(params, other, rtol=1e-13, atol=0)


def test_betas_may_differ_by_group():
    params, other = two_of([torch.zeros(2, dtype=torch.float64)] * 2)
    own = {"betas": (0.5, 0.9), "eps": 0.1, "lr": 0.5}
    optimizer = Modular([{"params": params[0]}, {"params": params[1], **own}], Adam(0.01))
    reference = optim.Adam([{"params": other[0]}, {"params": other[1], **own}], 0.01)
    for _ in range(5):
        same_gradients(params, other)
        optimizer.step()
        reference.step()
    torch.testing.assert_close(params, other, rtol=1e-12, atol=1e-13)
