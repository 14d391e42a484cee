"""What the tests of transforms that remember share."""

import math

import torch
from hypothesis import strategies as st
from torch import nn

from torchzero_clip import Modular

ORDERS = st.sampled_from([2, 1, 3, 0.5, torch.inf, 0, "mad", "std", "var", "sum"])
ELEMENTS = st.sampled_from([0.0, 1.0, -1.0, 0.25, -3.0, 1e-3, 40.0, -700.0])
WITH_BAD = st.one_of(ELEMENTS, st.sampled_from([math.inf, -math.inf, math.nan]))


@st.composite
def runs(draw, elements=ELEMENTS):
    """Steps of rows of numbers, one row per tensor."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    count = draw(st.integers(1, 6))
    return [[draw(st.lists(elements, min_size=n, max_size=n)) for n in sizes] for _ in range(count)]


def outputs(transform, steps, dtype=torch.float64, *, fast=True):
    """What the transform makes of each step, and the optimizer."""
    params = [nn.Parameter(torch.zeros(len(row), dtype=dtype)) for row in steps[0]]
    optimizer = Modular(params, transform, fast=fast)
    results = []
    for rows in steps:
        for param, row in zip(params, rows, strict=True):
            param.data.zero_()
            param.grad = torch.tensor(row, dtype=dtype)
        optimizer.step()
        results.append([(-param.data).tolist() for param in params])
    return results, optimizer


def assert_follows(transform, reference, steps, *, fast=True):
    results, _ = outputs(transform, steps, fast=fast)
    for rows, result in zip(steps, results, strict=True):
        expected = reference.step(rows)
        torch.testing.assert_close(result, expected, rtol=1e-9, atol=1e-12, equal_nan=True)
