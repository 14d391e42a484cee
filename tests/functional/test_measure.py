"""Measuring and scaling slices, against loops in float64, and joining the numbers of several processes."""

import math

import pytest
import torch
from oracles.clipping import metric as metric_of

from torchzero_clip.functional.measure import (
    NOTHING,
    Resources,
    Slicing,
    counted_elements,
    effect,
    effect_numbers,
    effect_of,
    joint_root,
    measure,
    measured_like,
    no_numbers,
    scale_measured_,
)
from torchzero_clip.functional.metric import parse_ord
from torchzero_clip.functional.scratch import Scratch

SHAPES = [(4, 3), (5,), (), (2, 3, 2)]
ORDERS = [2, 1, 0, 3.5, "linf", -1, -math.inf, "mad", "std", "var", "sum"]


def tensors_of(shapes=SHAPES, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


@pytest.mark.parametrize(
    ("dim", "inverse_dims", "expected"),
    [
        (None, False, [(0, 1), (0,), (0,), (0, 1, 2)]),
        ("global", False, [(0, 1), (0,), (0,), (0, 1, 2)]),
        (0, False, [(0,), (0,), (0,), (0,)]),
        (-1, False, [(1,), (0,), (0,), (2,)]),
        (1, False, [(1,), (), (), (1,)]),  # a vector has no such dimension
        (0, True, [(1,), (), (), (1, 2)]),
        ((0, -1), False, [(0, 1), (0,), (0,), (0, 2)]),
        (None, True, [(), (), (), ()]),
        ((), True, [(0, 1), (0,), (0,), (0, 1, 2)]),
    ],
)
def test_the_dimensions_of_slices(dim, inverse_dims, expected):
    slicing = Slicing.checked(2, dim, inverse_dims, 1)
    assert [slicing.reduced_dims(torch.zeros(shape)) for shape in SHAPES] == expected


@pytest.mark.parametrize("dim", [None, 0, -1, (0, 1)])
@pytest.mark.parametrize("order", ORDERS)
def test_norms_are_those_of_a_loop(order, dim):
    tensors, slicing = tensors_of(), Slicing.checked(order, dim, False, 2)
    measured = measure(tensors, slicing)
    expected, indices = [], []
    for i, tensor in enumerate(tensors):
        dims = slicing.reduced_dims(tensor)
        rest = [d for d in range(max(tensor.ndim, 1)) if d not in dims]
        given = tensor if tensor.ndim else tensor.view(1)
        rows = given.permute(*rest, *dims).reshape(math.prod(given.shape[d] for d in rest), -1)
        if rows.shape[1] >= 2:
            indices.append(i)
            values = [metric_of(row.tolist(), order) for row in rows]
            expected += [value ** (1 / degree) for value, degree in values]
    assert measured.indices == indices
    assert measured.vector.tolist() == pytest.approx(expected, rel=1e-12, abs=1e-12)
    assert torch.cat([n.flatten() for n in measured.norms]).tolist() == measured.vector.tolist()
    joint = metric_of([x for tensor in tensors for x in tensor.flatten().tolist()], order)[0]
    assert measured.total.item() == pytest.approx(joint, rel=1e-12)
    assert measured_like(measured, [tensors[i] * 2 for i in indices]).tolist() == pytest.approx(
        [norm * (1 if order == 0 else 2) for norm in expected], rel=1e-12, abs=1e-12
    )


@pytest.mark.parametrize("order", [2, "linf"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dim", [None, 0, "global"])
def test_plain_tensors_have_the_same_norms_in_fewer_operations(order, dtype, dim):
    tensors, slicing, scratch = (
        tensors_of([*SHAPES, (300, 301)], dtype),
        Slicing.checked(order, dim, False, 1),
        Scratch(),
    )
    usual = measure(tensors, slicing, resources=Resources(each=True))
    for _ in range(2):
        quick = measure(tensors, slicing, resources=Resources(True, scratch, each=True))
        torch.testing.assert_close((quick.vector, quick.total), (usual.vector, usual.total), rtol=1e-6, atol=0)
        if dim != 0:
            torch.testing.assert_close(quick.tensor_norms, usual.tensor_norms, rtol=1e-6, atol=0)


@pytest.mark.parametrize("order", ORDERS)
def test_the_joint_metric_of_several_processes_is_that_of_one(order):
    tensors, slicing = tensors_of(), Slicing.checked(order, "global", False, 1)
    whole = measure(tensors, slicing)
    parts = [tensors[:1], tensors[1:3], tensors[3:]]
    own = [measure(part, slicing) for part in parts]
    rows = [m.numbers(sum(t.numel() for t in part)) for m, part in zip(own, parts, strict=True)]
    rows = torch.stack([*rows, no_numbers(slicing.metric, torch.device("cpu"))])
    for measured in own:
        found = measured.of_processes(rows)
        torch.testing.assert_close((found.total, found.vector[0]), (whole.total, whole.vector[0]), rtol=1e-12, atol=0)


def test_processes_without_tensors_are_not_a_norm_of_zero():
    smallest = parse_ord(-1)
    assert joint_root(smallest, torch.tensor([[2.0], [NOTHING], [2.0]])).item() == 1.0
    assert joint_root(smallest, torch.tensor([[NOTHING]])).item() == 0.0
    assert joint_root(parse_ord("mad"), torch.zeros(2, 2)).item() == 0.0


def vector(*numbers):
    return torch.tensor(numbers, dtype=torch.float64)


@pytest.mark.parametrize("plain", [True, False])
@pytest.mark.parametrize("dim", [None, 0])
def test_each_slice_is_scaled_by_its_factor(plain, dim):
    tensors = [torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([5.0, 6.0])]
    measured = measure(tensors, Slicing.checked(2, dim, False, 1), resources=Resources(plain, Scratch()))
    scale_measured_(measured, vector(2.0, 0.5) if dim is None else vector(2.0, 1.0, 0.5))
    assert tensors[0].tolist() == ([[2, 4], [6, 8]] if dim is None else [[2, 2], [6, 4]])
    assert tensors[1].tolist() == [2.5, 3.0]
    versions = [tensor._version for tensor in tensors]
    scale_measured_(measured, torch.ones(measured.vector.numel(), dtype=torch.float64))
    assert [tensor._version for tensor in tensors] == versions
    if dim is None and plain:
        scale_measured_(measured, vector(2.0, 1.0), Scratch())
        assert [tensor._version for tensor in tensors] == [versions[0] + 1, versions[1]]
        assert tensors[0].tolist() == [[4, 8], [12, 16]]


def test_a_factor_beyond_float32():
    for plain in (True, False):
        tensor = torch.tensor([1e-30, 2e-30])
        scale_measured_(measure([tensor], Slicing.checked(2, None, False, 1), resources=Resources(plain)), vector(1e50))
        assert tensor.tolist() == pytest.approx([1e20, 2e20])


def test_the_effect_is_the_mean_factor_and_the_share_of_slices():
    tensors = [torch.tensor([3.0]), torch.tensor([4.0])]
    measured = measure(tensors, Slicing.checked(2, None, False, 1))
    found = effect(measured, vector(0.5, 1.0))
    assert {key: value.item() for key, value in found.items()} == {"norm": 5.0, "factor": 0.75, "clipped": 0.5}
    joint = measure(tensors, Slicing.checked(2, "global", False, 1))
    found = effect(joint, vector(0.25).expand(2))
    assert {key: value.item() for key, value in found.items()} == {"norm": 5.0, "factor": 0.25, "clipped": 1.0}
    nothing = effect(measure([], Slicing.checked(2, None, False, 1)), vector())
    assert {key: value.item() for key, value in nothing.items()} == {"norm": 0.0, "factor": 1.0, "clipped": 0.0}
    rows = torch.stack([effect_numbers(measured, vector(0.5, 1.0)), vector(0.0, 0.0, 0.0), vector(1.5, 2.0, 2.0)])
    found = effect_of(vector(7.0), rows)
    assert {key: value.item() for key, value in found.items()} == {"norm": 7.0, "factor": 0.5, "clipped": 0.75}


def test_elements_are_counted_with_both_parts_of_complex_numbers():
    found, elements = counted_elements(
        [torch.zeros(3), torch.zeros(2, dtype=torch.complex64)], [torch.tensor(2), torch.tensor(1)]
    )
    assert (found.item(), elements) == (3.0, 7)
