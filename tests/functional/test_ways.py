"""The way in which tensors are measured, the dtype of sums, and what is read of factors on CPU."""

import math

import pytest
import torch

from torchzero_clip.functional.ways import all_ones, beyond_float32, extent, may_look, power_dtype, way_of

F16, F32, F64 = torch.float16, torch.float32, torch.float64


@pytest.mark.parametrize(
    ("device", "dtype", "p", "way"),
    [
        ("cpu", F32, 2.0, "blocks"), ("cpu", F64, math.inf, "blocks"), ("cpu", F16, 2.0, "slices"),
        ("meta", F32, 2.0, "lists"), ("meta", F16, 2.0, "lists"), ("meta", F64, 2.0, "slices"),
        ("meta", F64, math.inf, "lists"),
    ],
)  # fmt: skip
def test_the_way_of_plain_tensors(device, dtype, p, way):
    tensors = [torch.ones(2, dtype=dtype, device=device)]
    assert way_of(tensors, p) == way


@pytest.mark.parametrize(("device", "dtype", "wide"), [("cpu", F16, F32), ("cpu", F64, F64), ("meta", F32, F64)])
def test_sums_are_added_up_in_float64_except_on_cpu(device, dtype, wide):
    assert power_dtype(torch.ones(2, dtype=dtype, device=device)) == wide


def vector(*numbers):
    return torch.tensor(numbers, dtype=torch.float64)


def test_only_the_cpu_is_read():
    assert may_look(torch.ones(1), torch.ones(2))
    assert not may_look(torch.ones(1), torch.ones(1, device="meta"))
    assert not all_ones(torch.ones(1, device="meta"))
    assert beyond_float32(torch.ones(1, device="meta"))


def test_the_extent_of_a_vector():
    assert extent(vector(2, -1, 3)) == (-1, 3)
    assert extent(vector(2).expand(5)) == (2, 2)
    assert extent(vector()) == (1, 1)
    assert all(math.isnan(number) for number in extent(vector(2, math.nan, 3)))


def test_all_ones():
    assert all_ones(vector(1, 1))
    assert not all_ones(vector(1, 1 - 1e-15))
    assert not all_ones(vector(1, math.nan))


@pytest.mark.parametrize(
    ("numbers", "beyond"),
    [((1, 0), False), ((1e-39, 1), True), ((0, 1e-39), True), ((0, 1e39), True), ((1, 1e38), False)],
)
def test_factors_beyond_float32(numbers, beyond):
    assert beyond_float32(vector(*numbers)) is beyond
    assert beyond_float32(vector(1), extent(vector(*numbers))) is (beyond and numbers != (0, 1e-39))
