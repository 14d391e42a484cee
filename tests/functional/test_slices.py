"""Norms of slices of many plain tensors at once equal those of each slice."""

import math

import torch

from torchzero_clip import norm
from torchzero_clip.functional.measure import Slicing, Way, measure
from torchzero_clip.functional.scratch import Scratch
from torchzero_clip.functional.slices import plan, sliced_norms


def test_slices_of_many_tensors_at_once():
    """Short and long rows, columns, tensors that need several copies; zeros, squares beyond float32, NaN."""
    shapes = [(3, 5), (7,), (), (2, 3, 4), (40, 1500), (3, 70001), (700, 900), (9, 5), (4, 5), (300, 400), (301, 400)]
    tensors = [torch.randn(shape) for shape in shapes]
    tensors[0][1], tensors[3][0, 1], tensors[7][2], tensors[8][3, 1] = 0.0, 1e30, 1e-30, math.nan
    tensors[6] = tensors[6].T
    for dim in (-1, 0, (1, 2)):
        slicing = Slicing.checked(2, dim, isinstance(dim, tuple), 1)
        own = [t for t in tensors if slicing.reduced_dims(t)]
        for _ in range(2):  # the second time as planned
            fast = measure(own, slicing, way=Way(True, Scratch()))
            assert fast.slices is not None
            readable = measure(own, slicing)
            torch.testing.assert_close(fast.vector, readable.vector, rtol=1e-5, atol=0, equal_nan=True)
            torch.testing.assert_close(fast.total, readable.total, rtol=1e-5, atol=0, equal_nan=True)
            assert [n.shape for n in fast.norms] == [n.shape for n in readable.norms]
            whole_ones = torch.stack([norm(tensor) for tensor in own])
            torch.testing.assert_close(fast.tensor_norms, whole_ones, rtol=1e-5, atol=0, equal_nan=True)
            own = [t.clone() for t in own]


def test_only_tensors_with_a_factor_other_than_1_are_touched():
    tensors = [torch.ones(2, 3), torch.ones(3), torch.ones(2, 2)]
    slices = plan(tensors, [(1,), (0,), (0,)], Scratch())
    assert (slices.counts, slices.owner.tolist()) == ([2, 1, 2], [0, 0, 1, 2, 2])
    versions = [tensor._version for tensor in tensors]
    slices.scale_(tensors, torch.tensor([1.0, 2.0, 1.0, 3.0, 4.0], dtype=torch.float64))
    assert [tensor.tolist() for tensor in tensors] == [[[1, 1, 1], [2, 2, 2]], [1, 1, 1], [[3, 4], [3, 4]]]
    assert [tensor._version > old for tensor, old in zip(tensors, versions, strict=True)] == [True, False, True]


def test_a_plan_measures_other_tensors_of_the_same_shapes():
    shapes, dims, scratch = [(2, 3), (3,), (), (3, 2)], [(1,), (0,), (0,), (0,)], Scratch()
    slices = plan([torch.ones(shape) for shape in shapes], dims, scratch)
    for seed in range(3):
        torch.manual_seed(seed)
        tensors = [torch.randn(shape) for shape in shapes]
        expected = [*tensors[0].double().norm(dim=1), tensors[1].double().norm(), tensors[2].double().abs()]
        expected = torch.stack([*expected, *tensors[3].double().norm(dim=0)])
        torch.testing.assert_close(sliced_norms(tensors, slices), expected, rtol=1e-6, atol=0)
