"""The parts of plain tensors; `contract/sharded` has distributed ones."""

import pytest
import torch
from torch.distributed import ReduceOp

from torchzero_clip.functional.shards import (
    aligned,
    all_reduce,
    elements_at,
    laid_out_as,
    local,
    memories,
    pack,
    part,
    replicated,
    wholes,
)


@pytest.mark.parametrize(
    ("shape", "dims", "size", "slice_shape"),
    [
        ((2, 3, 4), (0, 1, 2), 24, [1, 1, 1]),
        ((2, 3, 4), (1,), 3, [2, 1, 4]),
        ((2, 3, 4), (0, 2), 8, [1, 3, 1]),
        ((2, 3, 4), (), 1, [2, 3, 4]),
        ((), (0,), 1, [1]),
        ((0, 3), (0,), 0, [1, 3]),
    ],
)
def test_slices_of_a_part(shape, dims, size, slice_shape):
    tensor = torch.zeros(shape)
    found = part(tensor, dims)
    assert (found.size, found.slice_shape, found.slice_count) == (size, slice_shape, torch.Size(slice_shape).numel())
    assert (found.groups, found.spread) == ((), ())
    assert found.tensor.data_ptr() == tensor.data_ptr()


def test_a_whole_tensor_is_one_slice_and_a_scalar_a_vector():
    tensors = [torch.zeros(2, 3), torch.tensor(5.0)]
    parts = [(p.dims, p.size, tuple(p.tensor.shape)) for p in wholes(tensors)]
    assert parts == [((0, 1), 6, (2, 3)), ((0,), 1, (1,))]
    memories(tensors)[1].add_(2.0)
    assert tensors[1].item() == 7.0


def test_numbers_of_any_dtype_and_shape_are_packed_in_float64():
    values = [torch.tensor(1, dtype=torch.int64), torch.tensor([[0.1], [0.2]]), torch.empty(0)]
    assert pack(values).tolist() == [1.0, torch.tensor(0.1).item(), torch.tensor(0.2).item()]
    assert pack(values[1:2]).dtype == pack([]).dtype == torch.float64


def test_elements_of_a_vector():
    vector = torch.tensor([5.0, 6.0, 7.0])
    assert [elements_at(vector, at).tolist() for at in ([], [0, 1, 2], [2], [0, 2])] == [[], [5, 6, 7], [7], [5, 7]]


def test_plain_tensors_pass_through():
    tensor = torch.arange(3.0)
    assert all(found is tensor for found in (local(tensor), replicated(tensor), laid_out_as(tensor, torch.zeros(3))))
    assert aligned(tensor, torch.zeros(3)) is tensor
    values = [tensor]
    assert all_reduce(wholes([tensor]), values, ReduceOp.SUM) is values
    assert tensor.tolist() == [0.0, 1.0, 2.0]


def test_conjugations_and_negations_are_carried_out():
    number = torch.tensor([1 + 2j])
    for pending, value in [(number.conj(), 1 - 2j), (number.conj().imag, -2.0)]:
        found = aligned(pending, torch.zeros(1))
        assert not found.is_conj()
        assert not found.is_neg()
        assert found.tolist() == [value]
