"""Norms of slices one by one, and joint norms from them, at every magnitude."""

import math

import pytest
import torch

from torchzero_clip.functional.shards import part
from torchzero_clip.functional.slices import joint_of_norms, local_norm, merged, norms_of_slices


@pytest.mark.parametrize("p", [0, 1, 2, 3, -1, math.inf, -math.inf])
def test_a_whole_tensor_is_a_slice(p):
    value = torch.tensor([[3.0, 4.0], [-6.0, 8.0]])
    whole, row, column = norms_of_slices([part(value, (0, 1)), part(value, (1,)), part(value, (0,))], p)
    assert (whole.shape, row.shape, column.shape) == ((1, 1), (2, 1), (1, 2))
    expected = torch.linalg.vector_norm(value.double(), p, (0, 1), keepdim=True)
    torch.testing.assert_close(whole, expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(row, torch.linalg.vector_norm(value.double(), p, 1, keepdim=True), rtol=1e-6, atol=0)
    torch.testing.assert_close(joint_of_norms(row.view(-1), p), expected.view(()), rtol=1e-6, atol=0)


def test_only_extreme_norms_are_taken_again():
    tensors = [torch.full((4,), 1e30), torch.full((4,), 1e-30), torch.full((4,), 1.0)]
    parts = [part(tensor, (0,)) for tensor in tensors]
    assert [local_norm(own, 2.0).item() for own in parts] == [math.inf, 0, 2]
    assert [norm.item() for norm in norms_of_slices(parts, 2.0)] == pytest.approx([2e30, 2e-30, 2], rel=1e-6, abs=0)


@pytest.mark.parametrize("p", [0, 1, 2, math.inf, -1])
def test_without_other_ranks_norms_stay_the_same(p):
    norms = [torch.ones(1)]
    assert merged([part(torch.ones(3), (0,))], norms, p) is norms
    assert norms_of_slices([], p) == []
    assert joint_of_norms(torch.zeros(0), p).item() == 0


EXACT = {(3, 4): 5, (2, 3, 6): 7, (1, 4, 8): 9, (2, 6, 9): 11, (3, 4, 12): 13, (1, 1, 1, 1, 2, 2, 2): 4}
"""Vectors of integers whose norm is an integer."""


@pytest.mark.parametrize("exponent", [-149, -140, -126, -90, -60, 0, 60, 100, 124])
@pytest.mark.parametrize("values", EXACT, ids=str)
def test_joint_norms_in_float32_are_exact_where_squares_are(values, exponent):
    norms = torch.tensor([value * 2.0**exponent for value in values])
    assert norms.dtype == torch.float32
    assert joint_of_norms(norms, 2.0).item() == EXACT[values] * 2.0**exponent


@pytest.mark.parametrize("p", [-16.0, -4.0, -1.0, 0.5, 1.0, 2.0, 4.0, 5.0, 16.0, 100.0])
@pytest.mark.parametrize("size", [2.0**-149, 2.0**-126, 1.0, 2.0**100])
def test_joint_norms_in_float32_have_a_place_for_every_power(size, p):
    norms = torch.tensor([1.0, 3.0, 2.0]) * size
    expected = torch.linalg.vector_norm(norms.double() / size, p).item() * size
    assert joint_of_norms(norms, p).item() == pytest.approx(expected, rel=1e-6, abs=0)


@pytest.mark.parametrize("p", [0.5, 1.0, 2.0, 8.0])
def test_joint_norms_in_float32_pass_on_what_is_not_finite(p):
    largest = torch.finfo(torch.float32).max
    assert joint_of_norms(torch.tensor([1.0, math.inf]), p).item() == math.inf
    assert math.isnan(joint_of_norms(torch.tensor([math.inf, math.nan]), p).item())
    assert largest < joint_of_norms(torch.tensor([largest, largest]), p).item() < math.inf  # the CPU has float64
    assert joint_of_norms(torch.zeros(2), p).item() == 0
