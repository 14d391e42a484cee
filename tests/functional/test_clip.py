"""Factors by hand, and clipping, centralizing and scaling of lists of tensors."""

import math

import pytest
import torch

from torchzero_clip.functional.clip import TINY, centralize_, clip_by_, clip_factors, inverse, normalize_factors
from torchzero_clip.functional.foreach import MAX32
from torchzero_clip.functional.measure import Slicing
from torchzero_clip.functional.metric import Metric, parse_ord

NAN, INF = math.nan, math.inf


def vector(*numbers):
    return torch.tensor(numbers, dtype=torch.float64)


@pytest.mark.parametrize(
    ("order", "limit", "floor", "norms", "factors"),
    [
        (2, 1.0, 0.0, [0.0, 0.5, 1.0, 4.0, INF, NAN], [1.0, 1.0, 1.0, 0.25, 0.0, NAN]),
        (2, 0.0, 0.0, [0.0, 2.0, INF], [1.0, 0.0, 0.0]),
        (2, INF, 0.0, [0.0, 2.0, INF, NAN], [1.0, 1.0, 1.0, 1.0]),
        (2, 4.0, 1.0, [0.0, 0.25, 2.0, 8.0, NAN], [1.0, 4.0, 1.0, 0.5, NAN]),
        (2, INF, 1.0, [0.0, 0.25, 2.0], [1.0, 4.0, 1.0]),
        ("var", 4.0, 1.0, [0.5, 1.5, 4.0], [2.0, 1.0, 0.5]),  # the norms are roots
        (2, 1e-309, 0.0, [2e-309, 1e-310], [0.5, 1.0]),  # the inverses of both are inf
    ],
)
def test_factors_by_hand(order, limit, floor, norms, factors):
    metric = parse_ord(order)
    found = clip_factors(metric, vector(*norms), limit, floor)
    torch.testing.assert_close(found, vector(*factors), rtol=1e-12, atol=0, equal_nan=True)
    alone = [clip_factors(metric, vector(norm), limit, floor) for norm in norms]  # another branch
    torch.testing.assert_close(torch.cat(alone), found, rtol=1e-12, atol=0, equal_nan=True)
    if limit < INF:
        unread = clip_factors(metric, vector(*norms), vector(limit), floor)  # as it is for a limit on another device
        torch.testing.assert_close(unread, found, rtol=1e-12, atol=0, equal_nan=True)


def test_a_negative_limit_that_was_not_read_shows():
    assert clip_factors(parse_ord(2), vector(0.5, 2.0), torch.tensor(-1.0)).isnan().all()


def test_what_is_almost_zero_is_not_normalized():
    found = normalize_factors(parse_ord(2), vector(0.0, TINY, 2 * TINY, 4.0), 2.0)
    torch.testing.assert_close(found, vector(1.0, 1.0, 1 / TINY, 0.5), rtol=1e-12, atol=0)
    assert normalize_factors(parse_ord("var"), vector(0.5), 4.0).tolist() == [4.0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
def test_all_tensors_are_scaled_by_one_factor_and_none_is_touched_below_the_limit(dtype):
    tensors = [torch.tensor(8.0, dtype=dtype), torch.tensor([2.0, -4.0], dtype=dtype)]
    clip_by_(tensors, 5.0, torch.tensor(20.0))
    assert [tensor.tolist() for tensor in tensors] == [2.0, [0.5, -1.0]]
    versions = [tensor._version for tensor in tensors]
    clip_by_(tensors, 5.0, torch.tensor(5.0))
    assert [tensor._version for tensor in tensors] == versions


MATRIX = [[1.0, 3.0], [2.0, 8.0]]


@pytest.mark.parametrize(
    ("dim", "inverse_dims", "matrix", "vector_"),
    [
        (None, False, [[-2.5, -0.5], [-1.5, 4.5]], [-1.0, 1.0]),
        (1, False, [[-1.0, 1.0], [-3.0, 3.0]], [4.0, 6.0]),  # a vector has no such dimension
        (0, False, [[-0.5, -2.5], [0.5, 2.5]], [-1.0, 1.0]),
        (0, True, [[-1.0, 1.0], [-3.0, 3.0]], [4.0, 6.0]),
        ("global", False, [[-3.0, -1.0], [-2.0, 4.0]], [0.0, 2.0]),  # the mean of all seven is 4
    ],
)
def test_means_by_hand(dim, inverse_dims, matrix, vector_):
    tensors = [torch.tensor(MATRIX), torch.tensor([4.0, 6.0]), torch.tensor(4.0), torch.empty(0, 2)]
    centralize_(tensors, Slicing(parse_ord(2), dim, inverse_dims))
    scalar = 0.0 if dim == "global" else 4.0
    assert [tensor.tolist() for tensor in tensors[:3]] == [matrix, vector_, scalar]


EXTREME = [0.0, -0.0, 1e-300, -1e-300, 3e-39, 1e-20, 0.3, 1.0, -2.5, 1e20, 1e300, torch.inf, -torch.inf]


@pytest.mark.parametrize("factor", EXTREME)
def test_kernels_divide_by_the_inverse_within_float32(factor):
    exact = math.copysign(math.inf, factor) if factor == 0 else min(max(1 / factor, -MAX32), MAX32)
    expected = torch.tensor([exact], dtype=torch.float32)
    # a vector takes the way of devices
    assert inverse(torch.tensor([factor], dtype=torch.float64)).tolist() == expected.tolist()


def test_kernels_divide_by_nan_for_a_factor_of_nan():
    assert inverse(torch.tensor([torch.nan], dtype=torch.float64)).isnan().all()


@pytest.mark.parametrize("limit", [1e-30, 1e-3, 0.5, 1e30])
def test_factors_of_vectors_are_those_of_numbers(limit):
    norms = [0.0, 5e-324, 1e-310, limit, math.nextafter(limit, 1e99), 2 * limit, 1e40, 1e300, math.inf]
    factors = clip_factors(Metric("norm"), torch.tensor(norms, dtype=torch.float64), limit)
    assert factors.tolist() == [1.0 if norm <= limit else limit / norm for norm in norms]
    assert clip_factors(Metric("norm"), torch.tensor([math.nan, 1.0], dtype=torch.float64), limit)[0].isnan()
