"""The promises of Centralize."""

import pytest
import torch
from clipping.updates import SLICINGS, transformed, updates
from hypothesis import given
from hypothesis import strategies as st
from oracles.clipping import centralize

from torchzero_clip import Centralize


@given(updates((torch.float64,)), SLICINGS["dim"], st.booleans(), st.integers(0, 5))
def test_equals_a_loop(tensors, dim, inverse_dims, min_size):
    results = transformed(tensors, Centralize(dim, inverse_dims, min_size))
    for result, expected in zip(results, centralize(tensors, dim, inverse_dims, min_size), strict=True):
        torch.testing.assert_close(result, expected, rtol=1e-9, atol=1e-13 * (1 + expected.abs().sum().item()))


@given(updates())
def test_the_mean_that_remains_is_rounding(tensors):
    for result, tensor in zip(transformed(tensors, Centralize()), tensors, strict=True):
        if tensor.ndim and tensor.numel() > 1:
            largest = tensor.double().abs().max().item()
            rounding = torch.finfo(tensor.dtype).eps * 2 * largest + torch.finfo(tensor.dtype).smallest_normal
            assert abs(result.double().mean().item()) <= rounding


@given(updates((torch.float64, torch.float32)), st.floats(-100, 100))
def test_a_constant_that_is_added_to_all_elements_does_not_matter(tensors, constant):
    shifted = [tensor + constant for tensor in tensors]
    pairs = zip(transformed(tensors, Centralize(min_size=1)), transformed(shifted, Centralize(min_size=1)), strict=True)
    for (a, b), tensor in zip(pairs, tensors, strict=True):
        if tensor.ndim and tensor.numel():
            scale = tensor.abs().max().item() + abs(constant)
            torch.testing.assert_close(a, b, rtol=0, atol=4 * torch.finfo(tensor.dtype).eps * scale)


def test_scalars_and_single_elements():
    tensors = [torch.tensor(3.0), torch.tensor([5.0]), torch.tensor([[1.0], [2.0]])]
    assert [r.tolist() for r in transformed(tensors, Centralize())] == [3.0, [5.0], [[-0.5], [0.5]]]
    assert [r.tolist() for r in transformed(tensors, Centralize(min_size=1))] == [3.0, [0.0], [[-0.5], [0.5]]]
    joint = [r.tolist() for r in transformed(tensors, Centralize("global", min_size=100))]
    assert joint == [0.25, [2.25], [[-1.75], [-0.75]]]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_means_of_many_elements_are_exact(dtype):
    tensor = torch.full((100_000,), 300.0, dtype=dtype)
    (result,) = transformed([tensor], Centralize())
    assert not result.any()
