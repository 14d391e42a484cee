"""Defects seen in other implementations, each with numbers that it would get wrong."""

import io
import math

import pytest
import torch
from torch import nn

from torchzero_clip import (
    SGD,
    Adam,
    Chain,
    ClipNorm,
    ClipNormByEMA,
    ClipNormGrowth,
    ClipValueByEMA,
    ClipValueGrowth,
    Modular,
    Normalize,
    NormalizeByEMA,
    centralize_grads_,
    clip_grad_norm_,
    clip_grad_value_,
    normalize_grads_,
)


def param(*gradient, dtype=torch.float64):
    result = nn.Parameter(torch.zeros(len(gradient), dtype=dtype))
    result.grad = torch.tensor(gradient, dtype=dtype)
    return result


def updates(transform, *steps):
    """What is subtracted in each step from one tensor."""
    weight = param(*steps[0])
    optimizer = Modular([weight], transform)
    results = []
    for step in steps:
        weight.data.zero_()
        weight.grad = torch.tensor(step, dtype=torch.float64)
        optimizer.step()
        results.append((-weight.data).tolist())
    return results


def test_the_dims_of_the_first_tensor_are_not_those_of_the_others():
    bias, weight = param(3.0, 4.0), nn.Parameter(torch.zeros(2, 2).double())
    weight.grad = torch.full((2, 2), 10.0).double()
    Modular([bias, weight], ClipNorm(1)).step()
    torch.testing.assert_close(weight.data, torch.full((2, 2), -0.5).double())


@pytest.mark.parametrize("transform", [ClipNorm(1.0, 1, dim="global"), Normalize(1.0, 1, dim="global")])
def test_a_joint_l1_norm_is_no_signed_sum(transform):
    first, second = param(-3.0), param(1.0)
    Modular([first, second], transform).step()
    assert (first.item(), second.item()) == (0.75, -0.25)


def test_zeros_are_not_normalized_to_nan():
    assert updates(Normalize(1.0, dim="global"), [0.0, 0.0]) == [[0.0, 0.0]]
    weight = param(0.0, 0.0)
    normalize_grads_(weight, 1.0, dim="global")
    assert weight.grad.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("order", ["std", "var"])
def test_the_deviation_of_one_element_is_not_nan(order):
    transforms = [
        ClipNorm(1, order), Normalize(1, order), ClipNormByEMA(ord=order), NormalizeByEMA(ord=order),
        ClipNormGrowth(ord=order), ClipNormGrowth(ord=order, parameterwise=False),
    ]  # fmt: skip
    for transform in transforms:
        assert updates(transform, [5.0], [7.0]) == [[5.0], [7.0]]


def test_a_norm_of_1e_12_and_less_is_no_norm_of_1():
    assert updates(ClipNorm(1e-20), [1e-15]) == [[pytest.approx(1e-20)]]
    assert updates(ClipNorm(1.0), [1e-15]) == [[1e-15]]
    assert updates(ClipNormGrowth(min_value=None), [1e-15], [1.0]) == [[1e-15], [pytest.approx(1.5e-15)]]


@pytest.mark.parametrize("order", ["l0", "l1", "l2", "l3", "l4", "linf", "mad", "std", "var", "sum"])
@pytest.mark.parametrize("joint", [False, True])
def test_named_metrics_work_in_transforms_that_remember(order, joint):
    for transform in (ClipNormByEMA, NormalizeByEMA):
        (first, second) = updates(transform(0.5, order, tensorwise=not joint, ema_init="update"), [1.0, -3.0], [1, -3])
        torch.testing.assert_close([first, second], [[1.0, -3.0]] * 2)
    growth = ClipNormGrowth(ord=order, parameterwise=not joint)
    assert updates(growth, [1.0, -3.0], [1.0, -3.0]) == [[1.0, -3.0]] * 2


def test_a_joint_average_leaves_a_zero_first_gradient():
    results = updates(ClipNormByEMA(0.5, tensorwise=False), [0.0, 0.0], [3.0, 4.0], [3.0, 4.0])
    torch.testing.assert_close(results, [[0.0, 0.0], [1.5, 2.0], [2.25, 3.0]])
    steps = [[1e-9, 0.0], *[[3.0, 4.0]] * 60]  # and grows out of a tiny one
    assert math.hypot(*updates(ClipNormByEMA(0.5, tensorwise=False), *steps)[-1]) > 4.9


def test_a_floor_of_the_growth_does_not_divide_constant_gradients():
    assert updates(ClipNormGrowth(min_value=2.0), [1.0], [1.0], [1.0]) == [[1.0]] * 3


@pytest.mark.parametrize("transform", [ClipNormGrowth, ClipValueGrowth])
def test_no_growth_limit_keeps_no_state(transform):
    weight = param(1.0)
    optimizer = Modular([weight], transform(add=None, mul=None))
    optimizer.step()
    assert optimizer.state_dict()["state"] == {}
    optimizer.load_state_dict(optimizer.state_dict())


def test_no_gradients_at_all_is_no_error():
    weight = nn.Parameter(torch.zeros(2))
    for function in (clip_grad_norm_, clip_grad_value_, normalize_grads_):
        function([weight], 1.0)
    centralize_grads_([weight])
    for transform in (ClipNorm(1), Normalize(), ClipNormByEMA(), ClipValueByEMA(), ClipNormGrowth(), ClipValueGrowth()):
        Modular([weight], transform).step()
    assert weight.tolist() == [0, 0]


def test_a_single_tensor_is_not_silently_left_alone():
    weight = param(3.0, 4.0)
    clip_grad_norm_(weight, 1.0)
    assert weight.grad.tolist() == [pytest.approx(0.6), pytest.approx(0.8)]
    clip_grad_value_(weight, 0.7)
    assert weight.grad.tolist() == [pytest.approx(0.6), 0.7]


def test_every_group_has_its_own_settings():
    first, second = param(3.0), param(4.0)
    groups = [{"params": first, "max_norm": 1.0}, {"params": second, "max_norm": 2.0}]
    Modular(groups, ClipNorm(0.5)).step()
    assert (first.item(), second.item()) == (-1.0, -2.0)
    groups = [{"params": first, "norm_value": 1.0}, {"params": second, "norm_value": 2.0}]
    first.data.zero_(), second.data.zero_()
    Modular(groups, Normalize(0.5)).step()
    assert (first.item(), second.item()) == (-1.0, -2.0)


def test_a_loaded_optimizer_steps_its_own_parameters_with_its_schedulers_and_children():
    def made(weight):
        optimizer = Modular([weight], Chain(ClipNormByEMA(0.5), target="update_difference"), SGD(0.1, 0.9))
        return optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

    weight, other = param(3.0, 4.0), param(3.0, 4.0)
    (optimizer, _), (second, scheduler) = made(weight), made(other)
    optimizer.step()
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    second.load_state_dict(torch.load(file, weights_only=True))
    other.data.copy_(weight.data)
    before = weight.data.clone()
    second.step()
    scheduler.step()
    assert torch.equal(weight.data, before)
    assert second.param_groups[0]["lr"] == 0.05
    optimizer.step()
    assert torch.equal(weight.data, other.data)


@pytest.mark.parametrize("bad", [math.inf, math.nan])
@pytest.mark.parametrize("transform", [ClipNormGrowth, ClipValueGrowth, ClipNormByEMA, ClipValueByEMA, NormalizeByEMA])
def test_one_bad_gradient_neither_opens_the_limit_nor_closes_it_for_ever(transform, bad):
    _, _, after, steady = updates(transform(), [1.0], [bad], [1000.0], [1.0])
    assert 0 < after[0] <= 100  # 10 of it, the share of a new gradient in the average, by default
    assert 0 < steady[0] < 100
    _, huge = updates(transform(), [1.0], [1000.0])
    assert after == huge


@pytest.mark.parametrize("clip", [clip_grad_norm_, lambda p, limit: Modular([p], ClipNorm(limit)).step()])
def test_a_negative_limit_does_not_turn_the_gradient_around(clip):
    weight = param(3.0, 4.0)
    with pytest.raises(ValueError, match=r"max_norm must be >= 0, got -1\.0"):
        clip(weight, -1.0)
    assert weight.grad.tolist() == [3, 4]


def test_eps_of_adam_comes_after_the_bias_correction():
    assert updates(Adam(lr=1.0), [1e-8]) == [[pytest.approx(0.5)]]
