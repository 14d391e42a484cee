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
