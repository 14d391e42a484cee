"""Norms, largest magnitudes and sums of many tensors and slices at once equal those of each in float64."""

import math

import pytest
import torch
from contract.training import assert_equal

from torchzero_clip import norm
from torchzero_clip.functional.blocks import (
    COPIES,
    IN_CACHE,
    SHORT,
    SHORT_BLOCK,
    Lerp,
    cut_into_blocks,
    in_blocks,
    joint_norm_once,
    joint_norm_with_scratch,
    norms_of_each_once,
    norms_of_each_with_scratch,
    norms_of_plain_slices,
    spans,
    sums_of_each,
)
from torchzero_clip.functional.measure import Resources, Slicing, measure
from torchzero_clip.functional.scratch import Scratch
from torchzero_clip.functional.shards import part
from torchzero_clip.functional.ways import BLOCK

SIZES = [
    1,
    SHORT_BLOCK - 1,
    SHORT_BLOCK,
    SHORT_BLOCK + 1,
    BLOCK + 1,
    16 * BLOCK,
    16 * BLOCK + 1,
    SHORT,
    SHORT + 1,
    80 * BLOCK,
]
LISTS = {
    "each side of each border": SIZES,
    "short ones only": SIZES[:4],
    "long ones only": SIZES[-2:],
    "more blocks than memory": [SHORT_BLOCK + 1] * (COPIES // SHORT_BLOCK),
    "one element": [1],
}


def tensors_of(sizes, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    vectors = [torch.randn(size, generator=generator, dtype=torch.float64) for size in sizes]
    grid = torch.randn(7, 3, 5, 4, generator=generator, dtype=torch.float64)
    others = [grid, grid[0].transpose(0, 1), grid.contiguous(memory_format=torch.channels_last), grid[0, 0, 0, 0]]
    return [tensor.to(dtype) for tensor in [*vectors, *others]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("sizes", LISTS.values(), ids=LISTS)
def test_each_result_is_that_of_a_loop_in_float64(sizes, dtype):
    scratch, rtol = Scratch(), 1e-6 if dtype == torch.float32 else 1e-13
    for seed in (0, 1):  # the second time with memory that was used
        tensors = tensors_of(sizes, dtype, seed)
        wide = [tensor.double() for tensor in tensors]
        norms = torch.stack([tensor.norm() for tensor in wide])
        joint, each = joint_norm_with_scratch(tensors, scratch, beside=True)
        torch.testing.assert_close(each, norms, rtol=rtol, atol=0)
        assert torch.equal(joint, joint_norm_with_scratch(tensors, scratch)[0])
        torch.testing.assert_close(joint, norms.norm(), rtol=rtol, atol=0)
        assert torch.equal(norms_of_each_with_scratch(tensors, scratch), each)
        torch.testing.assert_close(
            torch.tensor(norms_of_each_once(tensors), dtype=norms.dtype), norms, rtol=rtol, atol=0
        )
        torch.testing.assert_close(joint_norm_once(tensors), norms.norm(), rtol=rtol, atol=0)
        maxima = torch.stack([tensor.abs().max() for tensor in wide])
        assert torch.equal(norms_of_each_with_scratch(tensors, scratch, math.inf), maxima)
        sums = torch.stack([tensor.sum() for tensor in wide])
        torch.testing.assert_close(sums_of_each(tensors, scratch), sums, rtol=0, atol=10 * rtol * norms.max().item())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_moving_and_measuring_together_gives_the_bits_of_first_moving_then_measuring(dtype):
    sizes = [*SIZES, (IN_CACHE + 1) * BLOCK, (IN_CACHE + 1) * BLOCK + 5]
    tensors, ends = [tensor.clone() for tensor in tensors_of(sizes, dtype)], tensors_of(sizes, dtype, 1)
    weights = [0.1 + 0.05 * i for i in range(len(tensors))]
    moved = [torch.lerp(tensor, end, weight) for tensor, end, weight in zip(tensors, ends, weights, strict=True)]
    found = joint_norm_with_scratch(tensors, Scratch(), beside=True, lerp=Lerp(tensors, ends, weights))
    assert_equal([*tensors, *found], [*moved, *joint_norm_with_scratch(moved, Scratch(), beside=True)])


def test_the_largest_magnitude_may_be_negative_and_nan_is_not_hidden():
    tensors = [torch.zeros(3), -torch.ones(SHORT + 1), torch.zeros(SHORT_BLOCK + 1)]
    tensors[0][1], tensors[1][-1], tensors[2][-1] = -2.0, -7.0, torch.nan
    maxima = norms_of_each_with_scratch(tensors, Scratch(), math.inf)
    assert maxima[:2].tolist() == [2.0, 7.0]
    assert maxima[2].isnan()


def test_sums_of_long_tensors_lose_no_digits():
    """A sum of ones in float32 stops at 2**24."""
    assert sums_of_each([torch.ones(2**24 + 5)], Scratch()).tolist() == [2**24 + 5]


def test_neighbours_fill_spans():
    assert spans([3, 3, 3, 9, 1], 6) == [slice(0, 2), slice(2, 3), slice(3, 4), slice(4, 5)]
    assert spans([], 6) == []


def test_tensors_fill_whole_blocks_of_memory():
    views, blocks = in_blocks(torch.arange(20.0), [torch.empty(3), torch.empty(2, 3), torch.empty(0)], 4)
    assert [view.tolist() for view in views] == [[0, 1, 2], [[4, 5, 6], [7, 8, 9]], []]
    assert blocks.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]


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
            fast = measure(own, slicing, resources=Resources(True, Scratch()))
            assert fast.slices is not None
            readable = measure(own, slicing)
            torch.testing.assert_close(fast.vector, readable.vector, rtol=1e-5, atol=0, equal_nan=True)
            torch.testing.assert_close(fast.total, readable.total, rtol=1e-5, atol=0, equal_nan=True)
            assert [n.shape for n in fast.norms] == [n.shape for n in readable.norms]
            whole_ones = torch.stack([norm(tensor) for tensor in own])
            torch.testing.assert_close(fast.tensor_norms, whole_ones, rtol=1e-5, atol=0, equal_nan=True)
            own = [t.clone() for t in own]


def cut_along(tensors, dims, scratch):
    return cut_into_blocks(tensors, list(map(part, tensors, dims)), scratch)


def test_only_tensors_with_a_factor_other_than_1_are_touched():
    tensors = [torch.ones(2, 3), torch.ones(3), torch.ones(2, 2)]
    slices = cut_along(tensors, [(1,), (0,), (0,)], Scratch())
    assert (slices.counts, slices.owner.tolist()) == ([2, 1, 2], [0, 0, 1, 2, 2])
    versions = [tensor._version for tensor in tensors]
    slices.scale_(tensors, torch.tensor([1.0, 2.0, 1.0, 3.0, 4.0], dtype=torch.float64))
    assert [tensor.tolist() for tensor in tensors] == [[[1, 1, 1], [2, 2, 2]], [1, 1, 1], [[3, 4], [3, 4]]]
    assert [tensor._version > old for tensor, old in zip(tensors, versions, strict=True)] == [True, False, True]


def test_a_plan_measures_other_tensors_of_the_same_shapes():
    shapes, dims, scratch = [(2, 3), (3,), (), (3, 2)], [(1,), (0,), (0,), (0,)], Scratch()
    slices = cut_along([torch.ones(shape) for shape in shapes], dims, scratch)
    for seed in range(3):
        torch.manual_seed(seed)
        tensors = [torch.randn(shape) for shape in shapes]
        expected = [*tensors[0].double().norm(dim=1), tensors[1].double().norm(), tensors[2].double().abs()]
        expected = torch.stack([*expected, *tensors[3].double().norm(dim=0)])
        torch.testing.assert_close(norms_of_plain_slices(tensors, slices), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_whole_tensors_beside_slices(dtype):
    """Each is one block, or measured alone; plans for other tensors write over their memory."""
    shapes, dims, scratch = (
        [(SHORT_BLOCK + 1,), (6, 5), (SHORT + 1,), (3,), (4, SHORT_BLOCK)],
        [(0,), (1,), (0,), (0,), (0,)],
        Scratch(),
    )
    tensors = [torch.randn(shape, dtype=dtype) for shape in shapes]
    cut = cut_along(tensors, dims, scratch)
    others = [torch.full((3, 2000), 7.0, dtype=dtype), torch.full((SHORT,), 9.0, dtype=dtype)]
    assert norms_of_plain_slices(others, cut_along(others, [(0,), (0,)], scratch))[-1] > 0
    pairs = zip(tensors, dims, strict=True)
    expected = torch.cat([torch.linalg.vector_norm(x.double(), 2, own).view(-1) for x, own in pairs])
    torch.testing.assert_close(norms_of_plain_slices(tensors, cut), expected, rtol=1e-6, atol=0)
    assert [own.dims for own in cut.parts(tensors)] == dims
