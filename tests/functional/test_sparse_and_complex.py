"""Sparse gradients, whose zeros count although they are not stored, and complex ones."""

import math

import pytest
import torch
from torch import nn

from torchzero_clip import (
    centralize_grads_,
    clip_grad_norm_,
    clip_grad_value_,
    clip_grads_with_norm_,
    get_total_norm,
    norm,
    normalize_grads_,
)

ORDERS = [2, 1, 3.5, math.inf, -math.inf, -1, 0, "mad", "std", "var", "sum"]
FUNCTIONS = {
    "clip_grad_value_": lambda p, order, dim: clip_grad_value_(p, 0.5),
    "clip_grad_norm_": lambda p, order, dim: clip_grad_norm_(p, 0.5, order, dim),
    "clip_grad_norm_ with a floor": lambda p, order, dim: clip_grad_norm_(p, 5.0, order, dim, min_norm=4.0),
    "normalize_grads_": lambda p, order, dim: normalize_grads_(p, 0.5, order, dim),
    "centralize_grads_": lambda p, order, dim: centralize_grads_(p, dim),
    "clip_grads_with_norm_": lambda p, order, dim: clip_grads_with_norm_(p, 0.5, 2.0),
}


def sparse_gradient(uncoalesced):
    """That of an embedding: whole rows, here with row 4 twice."""
    rows = torch.tensor([[4, 1, 4]]) if uncoalesced else torch.tensor([[1, 4]])
    values = torch.tensor([[2.0, -1.0], [0.25, 0.5], [-0.5, 4.0]], dtype=torch.float64)[: rows.shape[1]]
    grad = torch.sparse_coo_tensor(rows, values, (6, 2), check_invariants=True)
    return grad if uncoalesced else grad.coalesce()


def param_with(grad):
    param = nn.Parameter(torch.zeros(grad.shape, dtype=grad.dtype))
    param.grad = grad
    return param


DIMS = [None, 0, 1, -1, "global", (), (0, 1)]
USED = {
    "clip_grad_value_": [(2, None)],
    "clip_grads_with_norm_": [(2, None)],
    "centralize_grads_": [(2, dim) for dim in DIMS],
}
"""The orders and dimensions of functions that do not take all of them."""
CASES = [
    (name, order, dim)
    for name in FUNCTIONS
    for order, dim in USED.get(name, [(order, dim) for order in ORDERS for dim in DIMS])
]


@pytest.mark.parametrize("uncoalesced", [True, False])
@pytest.mark.parametrize(("name", "order", "dim"), CASES)
def test_sparse_gradients_do_as_dense_ones(name, order, dim, uncoalesced):
    sparse, beside = param_with(sparse_gradient(uncoalesced)), param_with(torch.ones(3, dtype=torch.float64))
    dense, plain = param_with(sparse_gradient(uncoalesced).to_dense()), param_with(torch.ones(3, dtype=torch.float64))
    grad = sparse.grad
    result = FUNCTIONS[name]([sparse, beside], order, dim)
    expected = FUNCTIONS[name]([dense, plain], order, dim)
    torch.testing.assert_close(result, expected)
    assert sparse.grad is grad
    assert grad.layout == torch.sparse_coo
    torch.testing.assert_close(grad.to_dense(), dense.grad, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(beside.grad, plain.grad, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("order", ORDERS)
def test_the_total_norm_of_sparse_tensors_reads_only(order):
    grad = sparse_gradient(True)
    torch.testing.assert_close(get_total_norm([grad], order), get_total_norm([grad.to_dense()], order))
    assert not grad.is_coalesced()


def test_clipping_by_norm_or_value_stores_no_zeros():
    for clip in (lambda p: clip_grad_norm_(p, 0.5), lambda p: clip_grad_value_(p, 0.5)):
        param = param_with(sparse_gradient(True))
        clip(param)
        assert param.grad.coalesce().values().shape == (2, 2)


def test_a_sparse_gradient_without_values_and_one_smaller_than_min_size():
    empty = param_with(
        torch.sparse_coo_tensor(torch.zeros(1, 0, dtype=torch.int64), torch.zeros(0, 2), (6, 2), check_invariants=True)
    )
    assert clip_grad_norm_(empty, 1.0).item() == 0
    single = param_with(torch.sparse_coo_tensor([[1], [1]], [5.0], (6, 2), check_invariants=True))
    clip_grad_norm_(single, 1.0)  # one value, twelve elements
    assert single.grad.to_dense().sum().item() == pytest.approx(1)


def test_nonfinite_sparse_gradients_raise_by_position_and_stay():
    param = param_with(sparse_gradient(True))
    param.grad.mul_(math.inf)
    with pytest.raises(RuntimeError, match=r"NaN: parameter 0 of shape \(6, 2\)"):
        clip_grad_norm_(param, 1.0, error_if_nonfinite=True)
    assert not param.grad.is_coalesced()


@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_other_sparse_layouts_are_refused():
    with pytest.raises(TypeError, match=r"sparse in the COO layout, got one of layout torch.sparse_csr"):
        get_total_norm(torch.eye(2).to_sparse_csr())


def complex_values(dtype=torch.complex128):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator, dtype=torch.complex128).to(dtype) for shape in ((3, 4), (2,), ())]


def magnitudes(values):
    return [value.abs() for value in values]


@pytest.mark.parametrize("dim", [None, 0, -1, "global"])
@pytest.mark.parametrize("order", [2, 1, 3.5, math.inf, -math.inf, -1, 0, "mad"])
def test_the_norm_of_complex_numbers_is_that_of_their_magnitudes(order, dim):
    values = complex_values()
    params, reals = [param_with(v.clone()) for v in values], [param_with(v) for v in magnitudes(values)]
    total = clip_grad_norm_(params, 0.5, order, dim)
    torch.testing.assert_close(total, clip_grad_norm_(reals, 0.5, order, dim))
    assert total.dtype == torch.float64
    for param, real, value in zip(params, reals, values, strict=True):
        torch.testing.assert_close(param.grad, real.grad / value.abs() * value, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("shape", [(3, 4), (2,), (1,)])
def test_complex_metrics_by_hand(shape):
    value = torch.randn(shape, dtype=torch.complex128)
    torch.testing.assert_close(norm(value, "sum"), value.sum().abs())
    torch.testing.assert_close(norm(value), torch.linalg.vector_norm(value))
    if value.numel() > 1:
        torch.testing.assert_close(norm(value, "std"), value.std())


def test_real_and_imaginary_parts_are_clamped_by_themselves():
    param = param_with(torch.tensor([3 + 0.5j, -2 - 7j]))
    clip_grad_value_(param, 1.0)
    assert param.grad.tolist() == [1 + 0.5j, -1 - 1j]


@pytest.mark.parametrize("dim", [None, 0, "global"])
def test_the_mean_of_complex_numbers(dim):
    params = [param_with(value) for value in complex_values()]
    expected = [torch.complex(*(part.clone() for part in (p.grad.real, p.grad.imag))) for p in params]
    centralize_grads_(params, dim)
    for part in ("real", "imag"):
        reals = [param_with(getattr(e, part).clone()) for e in expected]
        centralize_grads_(reals, dim)
        for param, real in zip(params, reals, strict=True):
            torch.testing.assert_close(getattr(param.grad, part), real.grad)


def test_complex_beside_real_of_other_dtypes():
    params = [param_with(v) for v in complex_values(torch.complex64)] + [param_with(torch.ones(2).half())]
    total = clip_grad_norm_(params, 1.0, dim="global")
    assert total.dtype == torch.float32
    assert get_total_norm([p.grad for p in params]).item() == pytest.approx(1, rel=1e-3)
    for order in ("sum", "std", "mad"):
        assert normalize_grads_(params, 1.0, order, "global").isfinite()
    centralize_grads_(params, "global")
    assert all(param.grad.isfinite().all() for param in params)


def test_magnitudes_beyond_the_range_of_their_parts():
    param = param_with(torch.full((4,), 3e38 + 3e38j, dtype=torch.complex64))
    clip_grad_norm_(param, 1.0)
    assert torch.linalg.vector_norm(param.grad).item() == pytest.approx(1, rel=1e-6)


PENDING = {
    "negation": lambda grad: torch._neg_view(grad.neg()),
    "conjugation": lambda grad: grad.conj().resolve_conj().conj(),
}
PENDING_CASES = [("negation", dtype) for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.complex64)]


@pytest.mark.parametrize(("pending", "dtype"), [*PENDING_CASES, ("conjugation", torch.complex64)], ids=str)
@pytest.mark.parametrize("dim", [None, 0, "global"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradients_with_a_pending_operation(name, dim, pending, dtype):
    lazy, plain = ([nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in ((2, 3), (4,), ())] for _ in range(2))
    for i, (param, other) in enumerate(zip(lazy, plain, strict=True)):
        other.grad = torch.randn(param.shape, dtype=dtype)
        param.grad = other.grad.clone() if i == 1 else PENDING[pending](other.grad)
        assert (param.grad.is_neg() or param.grad.is_conj()) == (i != 1)
    results = [FUNCTIONS[name](params, 2, dim) for params in (lazy, plain)]
    torch.testing.assert_close(*results)
    for param, other in zip(lazy, plain, strict=True):
        assert not param.grad.is_neg()
        assert not param.grad.is_conj()
        torch.testing.assert_close(param.grad, other.grad)


@pytest.mark.parametrize("order", ORDERS)
def test_the_total_norm_of_an_imaginary_part_of_a_conjugate(order):
    lazy = torch.tensor([3 - 4j, 1 - 2j]).conj().imag
    assert lazy.is_neg()
    torch.testing.assert_close(get_total_norm(lazy, order), get_total_norm(torch.tensor([4.0, 2.0]), order))
    assert lazy.is_neg()
