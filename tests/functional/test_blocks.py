"""Norms, largest magnitudes and sums of many tensors at once equal those of each tensor in float64."""

import pytest
import torch
from contract.training import assert_equal

from torchzero_clip.functional.blocks import (
    BLOCK,
    ROW,
    ROWS,
    SHORT,
    Moves,
    block_maxima,
    block_norms,
    block_sums,
    direct_joint_norm,
    direct_norms,
    in_rows,
    joint_norm,
    spans,
)
from torchzero_clip.functional.scratch import Scratch

SIZES = [1, ROW - 1, ROW, ROW + 1, BLOCK + 1, 16 * BLOCK, 16 * BLOCK + 1, SHORT, SHORT + 1, 80 * BLOCK]
LISTS = {
    "each side of each border": SIZES,
    "short ones only": SIZES[:4],
    "long ones only": SIZES[-2:],
    "more rows than memory": [ROW + 1] * ROWS,
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
        joint, each = joint_norm(tensors, scratch, beside=True)
        torch.testing.assert_close(each, norms, rtol=rtol, atol=0)
        assert torch.equal(joint, joint_norm(tensors, scratch)[0])
        torch.testing.assert_close(joint, norms.norm(), rtol=rtol, atol=0)
        assert torch.equal(block_norms(tensors, scratch), each)
        torch.testing.assert_close(torch.tensor(direct_norms(tensors), dtype=norms.dtype), norms, rtol=rtol, atol=0)
        torch.testing.assert_close(direct_joint_norm(tensors), norms.norm(), rtol=rtol, atol=0)
        maxima = torch.stack([tensor.abs().max() for tensor in wide])
        assert torch.equal(block_maxima(tensors, scratch), maxima)
        sums = torch.stack([tensor.sum() for tensor in wide])
        torch.testing.assert_close(block_sums(tensors, scratch), sums, rtol=0, atol=10 * rtol * norms.max().item())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_moving_and_measuring_together_gives_the_bits_of_first_moving_then_measuring(dtype):
    sizes = [*SIZES, (ROWS + 1) * BLOCK, (ROWS + 1) * BLOCK + 5]
    tensors, ends = [tensor.clone() for tensor in tensors_of(sizes, dtype)], tensors_of(sizes, dtype, 1)
    weights = [0.1 + 0.05 * i for i in range(len(tensors))]
    moved = [torch.lerp(tensor, end, weight) for tensor, end, weight in zip(tensors, ends, weights, strict=True)]
    found = joint_norm(tensors, Scratch(), beside=True, moves=Moves(tensors, ends, weights))
    assert_equal([*tensors, *found], [*moved, *joint_norm(moved, Scratch(), beside=True)])


def test_the_largest_magnitude_may_be_negative_and_nan_is_not_hidden():
    tensors = [torch.zeros(3), -torch.ones(SHORT + 1), torch.zeros(ROW + 1)]
    tensors[0][1], tensors[1][-1], tensors[2][-1] = -2.0, -7.0, torch.nan
    assert block_maxima(tensors, Scratch())[:2].tolist() == [2.0, 7.0]
    assert block_maxima(tensors, Scratch())[2].isnan()


def test_sums_of_long_tensors_lose_no_digits():
    """A sum of ones in float32 stops at 2**24."""
    assert block_sums([torch.ones(2**24 + 5)], Scratch()).tolist() == [2**24 + 5]


def test_neighbours_fill_spans():
    assert spans([3, 3, 3, 9, 1], 6) == [slice(0, 2), slice(2, 3), slice(3, 4), slice(4, 5)]
    assert spans([], 6) == []


def test_tensors_fill_whole_rows_of_memory():
    views, rows = in_rows(torch.arange(20.0), [torch.empty(3), torch.empty(2, 3), torch.empty(0)], 4)
    assert [view.tolist() for view in views] == [[0, 1, 2], [[4, 5, 6], [7, 8, 9]], []]
    assert rows.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
