"""Sums, means and deviations of slices and of tensors joined."""

import math

import pytest
import torch

from torchzero_clip import norm
from torchzero_clip.functional.metric import parse_ord
from torchzero_clip.functional.moments import (
    joint_mean,
    joint_moments,
    means_of_each,
    metrics_of_slices,
    moments_of_slices,
    root_of_moments,
    sums_of_slices,
)
from torchzero_clip.functional.scratch import Scratch
from torchzero_clip.functional.shards import part, wholes


@pytest.mark.parametrize("number", [0.1, 1e200, 3.3e-7])
@pytest.mark.parametrize("order", ["std", "var"])
def test_equal_elements_deviate_by_nothing(order, number):
    value = torch.full((3,), number, dtype=torch.float64)
    assert norm(value, order).item() == 0
    (rows,) = metrics_of_slices([part(value.view(1, 3), (1,))], parse_ord(order))
    assert rows.tolist() == [[0]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("order", ["sum", "std", "var"])
def test_the_moments_of_two_halves_give_the_metric_of_all(order, dtype):
    tensors, metric = (
        [torch.randn(shape, dtype=dtype) + 3 for shape in ((3, 5), (), (70,), (2, 3, 4))],
        parse_ord(order),
    )
    halves = [joint_moments(wholes(own), metric) for own in (tensors[:2], tensors[2:])]
    everything = torch.cat([tensor.double().flatten() for tensor in tensors])
    expected = everything.sum().abs() if order == "sum" else everything.std()
    for rows in (torch.stack(halves), joint_moments(wholes(tensors), metric).unsqueeze(0)):
        torch.testing.assert_close(root_of_moments(metric, rows), expected, rtol=1e-12, atol=0)


def test_direct_moments_are_those_of_deviations():
    parts, metric = [part(torch.randn(6, 50), (1,)), part(torch.randn(4, 5), (0, 1))], parse_ord("std")
    known = moments_of_slices(parts, metric)
    wide = [own._replace(tensor=own.tensor.double()) for own in parts]
    assert known is not None
    assert moments_of_slices(wide, metric) is None
    assert moments_of_slices(parts, parse_ord("sum")) is None
    pairs = zip(metrics_of_slices(parts, metric, known), metrics_of_slices(wide, metric), strict=True)
    for found, expected in pairs:
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_means_of_tensors_and_sums_of_slices(dtype):
    tensors = [
        torch.arange(6.0).view(2, 3).to(dtype),
        torch.tensor(-2.0, dtype=dtype),
        torch.full((2,), 3e38).to(dtype),
    ]
    counts = torch.tensor([6.0, 1.0, 2.0], dtype=torch.float64)
    assert means_of_each(tensors, counts, Scratch()).tolist() == pytest.approx([2.5, -2, 3e38], rel=1e-2)
    assert sums_of_slices([part(tensors[0], (1,))])[0].tolist() == [[3], [12]]
    assert joint_mean(wholes(tensors[:2])).item() == 13 / 7
    assert joint_mean([]).item() == 0
    assert math.isnan(means_of_each([torch.tensor([math.nan])], counts[1:2], Scratch()).item())
