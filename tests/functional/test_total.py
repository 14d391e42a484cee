"""The two halves of a global clip: the total norm, and clipping by a known one."""

import math

import pytest
import torch
from functional.params import assert_same_grads, grads_of, params_with_grads, twins
from table import SHAPES
from torch import nn

from torchzero_clip import clip_grad_norm_, clip_grads_with_norm_, get_total_norm

each_order = pytest.mark.parametrize("order", [2, 1, "linf", 0, -1, "mad", "std", "var", "sum"])


@pytest.mark.parametrize("order", [1, 2, 3.5, math.inf, -math.inf, 0.5])
def test_the_two_halves_of_a_global_clip_equal_torch(order):
    params = params_with_grads(torch.float64, SHAPES)
    other = twins(params)
    total = get_total_norm(grads_of(params), order)
    torch.testing.assert_close(total, torch.nn.utils.get_total_norm(grads_of(other), order))
    assert clip_grads_with_norm_(params, 0.01, total) is None
    torch.nn.utils.clip_grads_with_norm_(other, 0.01, total)
    assert_same_grads(params, other, rtol=1e-3)  # torch adds 1e-6 to the norm


@each_order
def test_the_two_halves_equal_the_whole(order):
    params = params_with_grads(torch.float64)
    other = twins(params)
    total = get_total_norm((p.grad for p in params), order)
    torch.testing.assert_close(total, clip_grad_norm_(other, 0.5, order, dim="global"))
    if order != "var":  # whose factor is a root
        clip_grads_with_norm_(params, 0.5, total)
        assert_same_grads(params, other, rtol=1e-12)


def test_a_known_norm_may_be_a_number_or_not_finite():
    param = nn.Parameter(torch.zeros(2))
    for norm, expected in ((10.0, [0.3, 0.4]), (0.0, [3.0, 4.0]), (0.5, [3.0, 4.0]), (math.inf, [0.0, 0.0])):
        param.grad = torch.tensor([3.0, 4.0])
        clip_grads_with_norm_(param, 1.0, norm)
        torch.testing.assert_close(param.grad, torch.tensor(expected))
    clip_grads_with_norm_(param, 1.0, math.nan)
    assert param.grad.isnan().all()


def test_the_total_norm_of_nothing_is_zero_and_one_that_is_not_finite_may_raise():
    assert get_total_norm([]).item() == clip_grad_norm_([], 1.0).item() == clip_grad_norm_([], 1.0, "std").item() == 0
    assert get_total_norm(torch.tensor([3.0, 4.0])).item() == 5
    assert get_total_norm([torch.tensor([math.inf])]).item() == math.inf
    with pytest.raises(RuntimeError, match=r"of the tensors is inf\. .* NaN: tensor 1 of shape .* to get this"):
        get_total_norm([torch.ones(2), torch.tensor([math.inf])], error_if_nonfinite=True)


def test_parameters_instead_of_gradients_give_a_warning():
    param = nn.Parameter(torch.tensor([3.0, 4.0]))
    assert get_total_norm([param]).item() == 5  # weights without gradients may be meant
    param.grad = torch.ones(2)
    with pytest.warns(UserWarning, match="got parameters, and returns the norm of the weights"):
        assert get_total_norm([param]).item() == 5
    assert get_total_norm([param.detach()]).item() == 5


@pytest.mark.parametrize(
    ("max_norm", "total_norm", "message"),
    [(-1.0, 1.0, "max_norm must be >= 0"), (1.0, -1.0, "total_norm must be >= 0"), (1.0, torch.ones(2), "one element")],
)
def test_bad_arguments_leave_gradients_unchanged(max_norm, total_norm, message):
    param = nn.Parameter(torch.zeros(2))
    param.grad = torch.tensor([3.0, 4.0])
    with pytest.raises(ValueError, match=message):
        clip_grads_with_norm_(param, max_norm, total_norm)
    assert param.grad.tolist() == [3.0, 4.0]
