"""Norms: right at every size and magnitude, in every dtype."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracles.clipping import metric
from table import PIECES

from torchzero_clip import get_total_norm, norm, rms
from torchzero_clip.functional.measure import Resources, Slicing, measure
from torchzero_clip.functional.norms import joint_norm, norms_of_each
from torchzero_clip.functional.scratch import Scratch
from torchzero_clip.functional.ways import BLOCK

NUMBERS = [0, 1, 2, 3, 0.5, -1, -2, 10, math.inf, -math.inf]
ORDERS = [*NUMBERS, "l0", "l1", "l2", "l3", "l4", "linf", "mad", "std", "var", "sum"]


def root(numbers, order):
    value, degree = metric(numbers, order)
    return value ** (1 / degree)


@pytest.mark.parametrize("order", ORDERS)
def test_hand_computed(order):
    expected = {
        0: 3, 1: 10, 2: math.sqrt(42), 3: (1 + 64 + 125) ** (1 / 3), 0.5: (1 + 2 + math.sqrt(5)) ** 2, -1: 0.0, -2: 0.0,
        10: (1 + 4**10 + 5**10) ** 0.1, math.inf: 5, -math.inf: 0, "l0": 3, "l1": 10, "l2": math.sqrt(42),
        "l3": (1 + 64 + 125) ** (1 / 3), "l4": (1 + 256 + 625) ** 0.25, "linf": 5, "mad": 2.5,
        "std": math.sqrt((1 + 16 + 25 - 0) / 3), "var": math.sqrt(42 / 3), "sum": 0.0,
    }  # fmt: skip
    assert norm(torch.tensor([1.0, 0.0, 4.0, -5.0]), order).item() == pytest.approx(expected[order], rel=1e-6)


@pytest.mark.parametrize("largest", [1e-40, 1.0, 3e38, math.inf, math.nan])
def test_largest_magnitudes_of_many_tensors_at_once(largest):
    tensors = [torch.randn(shape).clamp(-3, 3) for shape in (*PIECES, (1200, 300))]
    for k, tensor in enumerate(tensors):
        tensor.view(-1)[-1 - k % tensor.numel()] = -largest * 10.0 ** (largest == 1.0)
    slicing = Slicing.checked("linf", None, False, 1)
    fast, readable = measure(tensors, slicing, resources=Resources(True, Scratch())), measure(tensors, slicing)
    torch.testing.assert_close(fast.vector, readable.vector, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(fast.total, readable.total, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 5), (2, 3, 4)])
def test_equals_a_loop(order, shape):
    value = torch.randn(shape, dtype=torch.float64)
    if order in ("std", "var") and value.numel() < 2:
        pytest.skip("undefined")
    assert norm(value, order).item() == pytest.approx(root(value.flatten().tolist(), order), rel=1e-12)


@pytest.mark.parametrize("size", [1e20, 3e38, 1e-25, 1e-44])
@pytest.mark.parametrize("order", ORDERS)
def test_float32_never_overflows_or_vanishes(order, size):
    value = torch.full((100,), size)
    value[::3] *= -1
    assert norm(value, order).item() == pytest.approx(root(value.tolist(), order), rel=1e-5)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("size", [1e200, 1e300, 1e-200, 1e-300])
def test_float64_never_overflows_or_vanishes(order, size):
    value = torch.tensor([3.0, -4.0, 5.0], dtype=torch.float64)
    scaled = norm(value * size, order).item()
    factor = 1 if order in (0, "l0") else size
    assert scaled == pytest.approx(norm(value, order).item() * factor, rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_accumulates_in_float32(dtype):
    assert norm(torch.full((1000,), 300.0, dtype=dtype)).item() == pytest.approx(300 * math.sqrt(1000), rel=1e-6)
    assert norm(torch.full((2000,), 4096.0, dtype=dtype), 1).item() == 4096 * 2000
    assert rms(torch.full((1000,), 300.0, dtype=dtype)).item() == pytest.approx(300, rel=1e-6)


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("layout", ["flat", "matrix", "transposed", "strided"])
@pytest.mark.parametrize("order", [1, 2, 3])
def test_many_elements_lose_no_precision(order, layout):
    value = torch.rand(1 << 22) + 0.5
    value = {"flat": value, "matrix": value.view(2, -1), "transposed": value.view(-1, 4).t(), "strided": value[::2]}[
        layout
    ]
    expected = torch.linalg.vector_norm(value.double(), order).item()
    assert norm(value, order).item() == pytest.approx(expected, rel=6e-7)


@pytest.mark.parametrize("length", [BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 3 * BLOCK + 5])
@pytest.mark.parametrize("order", [1, 2, 3, math.inf])
def test_block_boundaries(order, length):
    value = torch.randn(length)
    expected = torch.linalg.vector_norm(value.double(), order).item()
    assert norm(value, order).item() == pytest.approx(expected, rel=6e-7)
    assert norm(value.view(length, 1).expand(length, 3), order).item() == pytest.approx(
        torch.linalg.vector_norm(value.double().view(-1, 1).expand(-1, 3), order).item(), rel=6e-7
    )


@pytest.mark.parametrize("order", ORDERS)
def test_empty_and_zero(order):
    assert norm(torch.zeros(5), order).item() == 0
    if order not in (-1, -2, -math.inf):
        assert norm(torch.zeros(0), order).item() == 0
    assert rms(torch.zeros(0)).item() == 0


def test_non_finite_values_are_not_hidden():
    for order in (1, 2, 3, 0.5, 10, math.inf, "mad", "std", "sum"):
        assert norm(torch.tensor([1.0, math.nan]), order).isnan()
        assert not norm(torch.tensor([1.0, math.inf]), order).isfinite()


def test_order_may_be_a_tensor():
    assert norm(torch.tensor([3.0, 4.0]), torch.tensor(2)).item() == 5


@given(
    st.lists(st.floats(-1, 1, width=32), min_size=1, max_size=30),
    st.integers(-120, 120),
    st.sampled_from([1, 2, 3, 0.5, math.inf, "mad"]),
)
def test_scale_equivariance(numbers, exponent, order):
    value = torch.tensor(numbers, dtype=torch.float64)
    scaled = norm(value * 2.0**exponent, order).item()
    assert scaled == pytest.approx(norm(value, order).item() * 2.0**exponent, rel=1e-12, abs=0.0)


@pytest.mark.parametrize("order", [-0.5, -2, -10])
def test_negative_orders_of_tensors_far_apart(order):
    tensors = [torch.full((1,), value, dtype=torch.float64) for value in (1e-200, 1e200)]
    assert get_total_norm(tensors, order).item() == pytest.approx(1e-200, rel=1e-12, abs=0)


@pytest.mark.parametrize("order", [-0.05, -1, -2, -3, -4, -10])
@pytest.mark.parametrize("numbers", [[1e15, 1.5e15, 2e15], [2e21, 3e21], [1e-25, 1e-20], [1e-45, 3e38], [3.0, 0.0]])
def test_negative_orders_at_every_magnitude(numbers, order):
    value = torch.tensor(numbers)
    assert norm(value, order).item() == pytest.approx(root(value.tolist(), order), rel=1e-6)


def test_just_above_the_range_where_squares_lose_digits():
    value = torch.full((10000,), 2e-20)
    assert norm(value).item() == pytest.approx(value.double().norm().item(), rel=1e-7)


@pytest.mark.parametrize(("order", "size"), [(2, 1e200), (20, 1e30)])
def test_norms_of_several_large_tensors_combine_without_overflow(order, size):
    tensors = [torch.full((3,), size, dtype=torch.float64) for _ in range(4)]
    expected = size * 12 ** (1 / order)
    assert get_total_norm(tensors, order).item() == pytest.approx(expected, rel=1e-12)


def test_a_norm_can_be_differentiated():
    value = torch.tensor([3.0, -4.0], requires_grad=True)
    for order, expected in ((2, [0.6, -0.8]), ("linf", [0.0, -1.0])):
        (gradient,) = torch.autograd.grad(norm(value, order), value)
        assert gradient.tolist() == pytest.approx(expected)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dim", [0, 1, -1, (0, 2), (-3, 1), [2, 1, 0]])
@pytest.mark.parametrize("keepdim", [False, True])
def test_norms_of_slices_equal_a_loop(order, dim, keepdim):
    value = torch.randn(3, 4, 5, dtype=torch.float64)
    dims = sorted({d % 3 for d in ([dim] if isinstance(dim, int) else dim)})
    found = norm(value, order, dim, keepdim)
    assert found.shape == torch.linalg.vector_norm(value, dim=dims, keepdim=keepdim).shape
    slices = value.permute(*[d for d in range(3) if d not in dims], *dims).flatten(0, 2 - len(dims))
    slices = slices.reshape(-1, math.prod(value.shape[d] for d in dims))
    expected = [root(row.tolist(), order) for row in slices]
    assert found.flatten().tolist() == pytest.approx(expected, rel=1e-9)


def test_shapes_of_norms():
    assert norm(torch.zeros(2, 3), keepdim=True).shape == (1, 1)
    assert norm(torch.zeros(())).shape == norm(torch.zeros(()), dim=0, keepdim=True).shape == ()
    assert norm(torch.zeros(2, 0), dim=1).tolist() == [0, 0]
    assert norm(torch.full((2, 1000), 300.0, dtype=torch.float16), dim=1).tolist() == pytest.approx([9486.83] * 2)


@pytest.mark.parametrize("dim", [2, -3, (), "global", "rows", 0.5])
def test_dimensions_that_a_tensor_does_not_have(dim):
    with pytest.raises(TypeError if dim == 0.5 else ValueError, match="dim must"):
        norm(torch.zeros(2, 3), dim=dim)


@pytest.mark.parametrize("sizes", [[70_000, 5, 3], [5, 3], [7, 200_000], [1, 65_536, 65_537, 131_072, 7]])
def test_the_joint_norm_beside_single_ones_is_the_same_to_the_last_bit(sizes):
    tensors = [torch.randn(size) for size in sizes]
    joint, norms = joint_norm(tensors, Scratch(), beside=True)
    assert torch.equal(joint, joint_norm(tensors, Scratch())[0])
    torch.testing.assert_close(norms, torch.stack([t.double().norm() for t in tensors]), rtol=1e-6, atol=0)
    tensors[-1][0] = 1e-20
    tensors[-1][1:] = 0
    torch.testing.assert_close(joint_norm(tensors, Scratch(), beside=True)[1][-1].item(), 1e-20, rtol=1e-6, atol=0)
    tensors[0][0] = torch.nan
    assert joint_norm(tensors, Scratch(), beside=True) is None


@pytest.mark.parametrize("p", [2.0, math.inf])
def test_tensors_have_the_norms_of_each_in_every_way(p):
    tensors = [torch.randn(shape) for shape in ((3, 5), (), (700, 200), (2000,))]
    tensors[0][:] = 1e-30
    expected = torch.stack([torch.linalg.vector_norm(tensor.double(), p) for tensor in tensors])
    for scratch, plain in ((Scratch(), None), (None, None), (None, True), (Scratch(), False)):
        torch.testing.assert_close(norms_of_each(tensors, scratch, p, plain=plain), expected, rtol=1e-6, atol=0)
    assert norms_of_each([]).tolist() == []


def test_other_tensors_have_no_joint_norm_in_one_pass():
    """Each of them has to be measured; on one rank this takes as long."""
    assert joint_norm([torch.ones(4)]) == (torch.tensor(2.0, dtype=torch.float64), None)
    assert joint_norm([torch.ones(4), torch.ones(4, dtype=torch.float64)]) is None
    assert joint_norm([torch.ones(4, dtype=torch.bfloat16)]) is None
