"""The promises of Normalize."""

import math

import pytest
import torch
from clipping.updates import ROUNDING, SLICINGS, transformed, updates
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.clipping import norm_of_all, normalize
from torch import nn

from torchzero_clip import Modular, Normalize

DTYPES = (torch.float64, torch.float32, torch.bfloat16)


@given(updates(DTYPES), st.floats(0.1, 10), st.sampled_from([1, 2, 3, math.inf, "mad"]))
def test_the_norm_becomes_the_value(tensors, value, order):
    for result, tensor in zip(transformed(tensors, Normalize(value, order)), tensors, strict=True):
        if norm_of_all([tensor.double()], order) > 1e-11:
            norm = norm_of_all([result.double()], order)
            assert norm == pytest.approx(value, rel=2 * ROUNDING[tensor.dtype])
        else:
            assert torch.equal(result, tensor)


@given(updates(DTYPES), st.floats(0.1, 10))
def test_the_joint_norm_becomes_the_value(tensors, value):
    results = [result.double() for result in transformed(tensors, Normalize(value, dim="global"))]
    if norm_of_all([t.double() for t in tensors], 2) > 1e-11:
        assert norm_of_all(results, 2) == pytest.approx(value, rel=2 * ROUNDING[tensors[0].dtype])


@given(updates(), st.floats(0, 10), st.sampled_from([None, 0, "global"]), st.sampled_from([2, "std", "l0", "sum"]))
def test_zero_stays_zero_and_signs_stay(tensors, value, dim, order):
    zeros = [torch.zeros_like(tensor) for tensor in tensors]
    assert not any(result.any() for result in transformed(zeros, Normalize(value, order, dim)))
    for result, tensor in zip(transformed(tensors, Normalize(value, order, dim)), tensors, strict=True):
        assert ((result == 0) | (result.sign() == tensor.sign())).all()


@given(updates((torch.float64, torch.float32)), st.integers(-20, 20))
def test_the_size_of_the_gradient_does_not_matter(tensors, exponent):
    scaled = [tensor * 2.0**exponent for tensor in tensors]
    kept = [i for i, t in enumerate(tensors) if min(t.double().norm(), t.double().norm() * 2.0**exponent) > 1e-11]
    first, second = transformed(tensors, Normalize(2.0)), transformed(scaled, Normalize(2.0))
    for i in kept:
        torch.testing.assert_close(first[i], second[i], rtol=1e-6, atol=0)


@settings(max_examples=60)
@given(tensors=updates((torch.float64,)), **SLICINGS)
def test_equals_a_loop(tensors, order, dim, inverse_dims, min_size):
    results = transformed(tensors, Normalize(0.7, order, dim, inverse_dims, min_size))
    expected = normalize(tensors, 0.7, order, dim, inverse_dims, min_size)
    torch.testing.assert_close(results, expected, rtol=1e-9, atol=1e-13)


def test_each_group_has_its_own_value_also_under_one_joint_norm():
    first, second = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    groups = [{"params": first}, {"params": second, "norm_value": 10.0}]
    optimizer = Modular(groups, Normalize(1.0, dim="global"))
    first.grad, second.grad = torch.tensor([3.0]), torch.tensor([4.0])
    optimizer.step()
    assert first.item() == pytest.approx(-3 / 5)
    assert second.item() == pytest.approx(-8)


def test_metrics_are_the_norm_before_the_mean_factor_and_the_share():
    param = nn.Parameter(torch.zeros(2, 2))
    optimizer = Modular([param], Normalize(1.0, dim=1))
    param.grad = torch.tensor([[3.0, 4.0], [0.0, 0.0]])
    optimizer.step()
    metrics = {name: round(value.item(), 6) for name, value in optimizer.metrics().items()}
    assert metrics == {"normalize/norm": 5, "normalize/factor": 0.6, "normalize/clipped": 0.5}
