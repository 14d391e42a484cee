"""Operations on lists of tensors equal those on each tensor, and round once."""

import math

import pytest
import torch

from torchzero_clip.functional import foreach

HALF, FLOAT, DOUBLE = torch.bfloat16, torch.float32, torch.float64


def tensors_of(*dtypes):
    generator = torch.Generator().manual_seed(0)
    shapes = [(3, 5), (), (7,)]
    return [torch.randn(s, generator=generator, dtype=DOUBLE).to(d) for s, d in zip(shapes, dtypes, strict=True)]


def vector(*numbers):
    return torch.tensor(numbers, dtype=DOUBLE)


def test_factors_of_half_precision_are_not_rounded_before_the_product():
    tensors, factors = tensors_of(HALF, HALF, HALF), vector(1 / 3, 0.999, 1.001)
    expected = [(t.float() * f.float()).to(HALF) for t, f in zip(tensors, factors, strict=True)]
    for scale in (foreach.scale_, foreach.multiply_each_):
        own = [tensor.clone() for tensor in tensors]
        scale(own, list(factors) if scale is foreach.scale_ else factors)
        assert all(map(torch.equal, own[::2], expected[::2])), scale
        torch.testing.assert_close(own[1], expected[1], rtol=0.01, atol=0)  # a scalar takes the rounded factor


def test_one_factor_for_all_and_factors_beyond_float32():
    tensors = [torch.full((2,), 1e-30), torch.full((3,), 2e-30)]
    foreach.multiply_each_(tensors, vector(0.5).expand(2))
    assert [tensor[0].item() for tensor in tensors] == pytest.approx([5e-31, 1e-30])
    foreach.scale_(tensors, list(vector(1e50, 1e55)), exact=True)
    assert [tensor[0].item() for tensor in tensors] == pytest.approx([5e19, 1e25])
    largest = torch.finfo(FLOAT).max
    assert foreach.as_factors(vector(1e50, -1e50, 0.5), FLOAT).tolist() == [largest, -largest, 0.5]
    assert foreach.as_factors(vector(1e50), DOUBLE).item() == 1e50


@pytest.mark.parametrize("dtype", [FLOAT, DOUBLE])
def test_one_factor_for_all_is_passed_as_one_tensor(dtype, monkeypatch):
    factors = []
    monkeypatch.setattr(torch, "_foreach_mul_", lambda tensors, factor: factors.append(factor))
    foreach.multiply_each_([torch.ones(2, dtype=dtype)] * 3, vector(0.5).expand(3))
    assert factors == [torch.tensor(0.5)]


def test_a_decay_rate_is_not_rounded_to_half_precision():
    """In bfloat16 0.999 is 1."""
    squares = [torch.full((2,), 100.0, dtype=HALF), torch.full((2,), 100.0)]
    foreach.decay_squares_(squares[:1], [torch.zeros(2, dtype=HALF)], 0.99)
    foreach.decay_squares_(squares[1:], [torch.tensor([3.0, 0.0])], 0.99)
    assert squares[0].tolist() == [99.0, 99.0]
    assert squares[1].tolist() == pytest.approx([99.09, 99.0])
    numbers = [torch.full((2,), 100.0, dtype=HALF)]
    foreach.multiply_(numbers, 0.99)
    assert numbers[0].tolist() == [99.0, 99.0]


def test_arithmetic_of_lists_of_several_dtypes():
    tensors, others = tensors_of(FLOAT, DOUBLE, HALF), tensors_of(FLOAT, DOUBLE, HALF)
    before = [tensor.clone() for tensor in tensors]
    foreach.add_(tensors, others, alpha=2)
    foreach.subtract_(tensors, others)
    torch.testing.assert_close(tensors, [2 * tensor for tensor in before])
    differences = foreach.subtract(tensors, others)
    torch.testing.assert_close(differences, before)
    assert not any(a.data_ptr() == b.data_ptr() for a, b in zip(differences, tensors, strict=True))
    foreach.copy_(tensors, before)
    assert all(map(torch.equal, tensors, before))
    assert [t.dtype for t in foreach.at_least_float32(tensors)] == [FLOAT, DOUBLE, FLOAT]
    assert [t.dtype for t in foreach.cast(foreach.at_least_float32(tensors), tensors)] == [FLOAT, DOUBLE, HALF]
    for operation in (foreach.add_, foreach.subtract_, foreach.copy_):
        operation([], [])


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=str)
def test_parts_of_complex_numbers_are_elements(dtype):
    numbers = torch.tensor([3 - 4j, -1 + 2j], dtype=torch.complex128)
    tensor = numbers if dtype.is_complex else numbers.real.contiguous()
    squared = foreach.subtract_squares([torch.zeros_like(tensor)], [tensor])[0]
    roots = foreach.square_roots([-squared])[0]
    maxima = [tensor.clone()]
    foreach.maximum_(maxima, [torch.zeros_like(tensor)])
    clamped = [tensor.clone()]
    foreach.clamp_(clamped, 2.0)
    added = [tensor.clone()]
    foreach.add_number_(added, 1.0)
    divisors = [2 * torch.ones_like(torch.view_as_real(tensor) if dtype.is_complex else tensor)]
    divisors = [torch.view_as_complex(divisors[0])] if dtype.is_complex else divisors
    quotients = foreach.divide([tensor], divisors)
    assert quotients[0] is divisors[0]
    found = [-squared, roots, maxima[0], clamped[0], added[0], quotients[0]]
    expected = [
        *([9 + 16j, 1 + 4j], [3 + 4j, 1 + 2j], [3 + 0j, 0 + 2j]),
        *([2 - 2j, -1 + 2j], [4 - 3j, 0 + 3j], [1.5 - 2j, -0.5 + 1j]),
    ]
    for own, numbers in zip(found, expected, strict=True):
        assert own.tolist() == (numbers if dtype.is_complex else [number.real for number in numbers])


def test_clamping_keeps_nan_and_takes_limits_beyond_the_dtype():
    tensors = [torch.tensor([math.nan, math.inf, -3.0, 1.0]), torch.tensor([6e4, -math.inf], dtype=torch.float16)]
    foreach.clamp_(tensors, 1e6)
    assert tensors[0][1:].tolist() == [1e6, -3.0, 1.0]
    assert tensors[0][0].isnan()
    assert tensors[1].tolist() == [torch.tensor(6e4, dtype=torch.float16).item(), -math.inf]
    assert foreach.usable_limit(-1e39, FLOAT) == -math.inf


@pytest.mark.parametrize("dtype", [FLOAT, HALF], ids=str)
def test_rows_that_are_not_chosen_may_end_anywhere(dtype):
    tensors = [torch.zeros(2), torch.zeros(3)]
    ends = [torch.full((2,), 8.0, dtype=dtype), torch.full((3,), math.nan, dtype=dtype)]
    foreach.lerp_chosen_(torch.tensor([True, False]), tensors, ends, 0.25)
    assert [tensor.tolist() for tensor in tensors] == [[2, 2], [0, 0, 0]]
    foreach.lerp_where_(torch.tensor([True, False, False]), tensors[1], torch.tensor([4.0, math.nan, math.inf]), 0.25)
    assert tensors[1].tolist() == [1, 0, 0]
    foreach.lerp_(tensors, [torch.full((2,), 4.0), torch.zeros(3)], 0.5)
    assert [tensor.tolist() for tensor in tensors] == [[3, 3], [0.5, 0, 0]]


def test_values_of_slices_are_subtracted():
    tensors = [torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([257.0, 1.0]).to(HALF)]
    foreach.subtract_slices_(tensors, [vector(1.0, 2.0).view(2, 1), vector(1.0).squeeze()])
    assert [tensor.tolist() for tensor in tensors] == [[[0, 1], [1, 2]], [255, 0]]


GRID = torch.arange(120.0).view(2, 3, 4, 5)


@pytest.mark.parametrize(
    ("tensor", "dense", "is_view"),
    [
        (GRID, True, True),
        (GRID.transpose(0, 2), True, True),
        (GRID.contiguous(memory_format=torch.channels_last), True, True),
        (GRID[:, :1].transpose(0, 2), False, False),
        (GRID[..., ::2], False, False),
        (GRID[0, 0, 0, 0], True, True),
        (torch.zeros(1, 2).expand(3, 2), False, False),
    ],
)
def test_a_flat_tensor_has_all_elements_and_is_a_view_where_it_can_be(tensor, dense, is_view):
    flat = foreach.flat(tensor)
    assert foreach.is_dense(tensor) == dense
    assert flat.shape == (tensor.numel(),)
    assert sorted(flat.tolist()) == sorted(tensor.flatten().tolist())
    assert (flat.data_ptr() == tensor.data_ptr()) == is_view


IMAGES = GRID.contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize(
    ("columns", "fit"),
    [
        ([[GRID, GRID[0]], [GRID.clone(), GRID[1]]], True),
        ([[IMAGES], [IMAGES.clone(memory_format=torch.preserve_format)]], True),
        ([[IMAGES], [GRID]], False),  # other strides
        ([[GRID.transpose(0, 1)], [GRID.transpose(0, 1)]], False),  # neither of the two layouts
        ([[GRID, GRID], [GRID, GRID[0]]], False),  # other shapes
        ([[GRID], [GRID.double()]], False),
        ([[GRID.to(torch.complex64)], [GRID.to(torch.complex64)]], False),
        ([[GRID, GRID.double()]], False),
    ],
)
def test_what_fits_torchs_kernels(columns, fit):
    assert foreach.fit_kernels(columns) == fit


def test_the_kind_of_tensors():
    negated = torch.zeros(2, dtype=torch.complex64).conj().imag
    assert foreach.kind([GRID, GRID[0]]) == (FLOAT, True, torch.device("cpu"))
    for others in ([GRID, GRID.double()], [negated], [GRID.long()], [torch.zeros(1, dtype=torch.complex64)]):
        assert foreach.kind(others) is None
    assert [foreach.are_plain(own) for own in ([], [GRID], [GRID, torch.empty(0)])] == [False, True, False]
    assert foreach.are_plain([torch.empty(0)], 0)
    assert [foreach.is_one_number(v) for v in (torch.ones(1), torch.ones(1).expand(4), torch.ones(4))] == [
        True, True, False,
    ]  # fmt: skip
    assert [d in foreach.WIDE for d in (HALF, FLOAT, DOUBLE, torch.complex64)] == [False, True, True, False]
    assert [foreach.wide_dtype(d) for d in (HALF, FLOAT, DOUBLE)] == [FLOAT, FLOAT, DOUBLE]
