"""The in-place functions, beyond the worked cases."""

import math

import pytest
import torch
from defaults import DEFAULTS
from functional.params import SHAPES, assert_same_grads, grads_of, params_with_grads, twins
from oracles.clipping import as_double, centralize, clip_norm, norm_of_all, normalize
from torch import nn

import torchzero_clip
from torchzero_clip import (
    centralize_grads_,
    clip_grad_norm_,
    clip_grad_value_,
    clip_grads_with_norm_,
    get_total_norm,
    normalize_grads_,
)

each_dim = pytest.mark.parametrize("dim", [None, 0, -1, (0, 2), (0, -3), "global", ()])
each_inverse = pytest.mark.parametrize("inverse_dims", [False, True])
each_order = pytest.mark.parametrize("order", [2, 1, "linf", 0, -1, "mad", "std", "var", "sum"])


@pytest.mark.parametrize("order", [1, 2, 3.5, math.inf, 0.5])
def test_global_equals_torch(order):
    params = params_with_grads(torch.float64)
    other = twins(params)
    total = clip_grad_norm_(params, 0.5, order, dim="global")
    expected = torch.nn.utils.clip_grad_norm_([p for p in other if p.numel()], 0.5, order)
    torch.testing.assert_close(total, expected)
    assert_same_grads(params, other, rtol=1e-5)  # torch adds 1e-6 to the norm


@each_dim
@each_inverse
@each_order
def test_equals_a_loop(order, dim, inverse_dims):
    # a bias before a matrix, and no empty tensor, with which norms of whole tensors are taken in another way
    for shapes, min_size, min_norm in ((SHAPES, 1, None), (SHAPES, 3, 0.2), ([(3,), (4, 3)], 1, None)):
        params = params_with_grads(torch.float64, shapes)
        before = grads_of(params)
        total = clip_grad_norm_(params, 0.5, order, dim, inverse_dims, min_size, min_norm)
        expected = clip_norm(before, 0.5, order, dim, inverse_dims, min_size, min_norm)
        torch.testing.assert_close(grads_of(params), expected, rtol=1e-12, atol=1e-14)
        assert total.item() == pytest.approx(norm_of_all(before, order), rel=1e-12)


@each_dim
@each_inverse
@each_order
def test_normalizing_equals_a_loop(order, dim, inverse_dims):
    for min_size in (1, 3):
        params = params_with_grads(torch.float64)
        before = grads_of(params)
        total = normalize_grads_(params, 0.5, order, dim, inverse_dims, min_size)
        expected = normalize(before, 0.5, order, dim, inverse_dims, min_size)
        torch.testing.assert_close(grads_of(params), expected, rtol=1e-12, atol=1e-14)
        assert total.item() == pytest.approx(norm_of_all(before, order), rel=1e-12)


@each_dim
@each_inverse
def test_centralizing_equals_a_loop(dim, inverse_dims):
    for min_size in (1, 2, 3):
        params = params_with_grads(torch.float64)
        expected = centralize(grads_of(params), dim, inverse_dims, min_size)
        assert centralize_grads_(params, dim, inverse_dims, min_size) is None
        torch.testing.assert_close(grads_of(params), expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_returns_a_0d_tensor_of_float32_or_wider(dtype):
    total = clip_grad_norm_(params_with_grads(dtype), 1.0)
    assert total.shape == ()
    assert total.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


def test_mixed_dtypes():
    params = params_with_grads(torch.float16) + params_with_grads(torch.float64)
    before = as_double(grads_of(params))
    total = clip_grad_norm_(params, 0.5, dim="global")
    assert total.dtype == torch.float64
    assert total.item() == pytest.approx(norm_of_all(before, 2), rel=1e-6)
    expected = clip_norm(before, 0.5, dim="global")
    torch.testing.assert_close(as_double(grads_of(params)), expected, rtol=1e-3, atol=1e-4)


def test_a_norm_beyond_float32_is_reported_in_float64():
    param = nn.Parameter(torch.zeros(100))
    param.grad = torch.full((100,), 3e38)
    assert clip_grad_norm_([param], 1.0).item() == pytest.approx(3e39, rel=1e-6)
    torch.testing.assert_close(param.grad, torch.full((100,), 0.1), rtol=1e-5, atol=0)


IN_PLACE = {
    "clip_grad_norm_": lambda p: clip_grad_norm_(p, 1.0),
    "clip_grad_norm_ global": lambda p: clip_grad_norm_(p, 1.0, dim="global"),
    "clip_grad_value_": lambda p: clip_grad_value_(p, 0.5),
    "normalize_grads_": lambda p: normalize_grads_(p, 10.0),
    "centralize_grads_": centralize_grads_,
    "clip_grads_with_norm_": lambda p: clip_grads_with_norm_(p, 1.0, 5.0),
}
each_function = pytest.mark.parametrize("function", IN_PLACE.values(), ids=IN_PLACE)


@each_function
@pytest.mark.filterwarnings("ignore:none of the parameters has a gradient", "ignore:params is an iterator that has")
def test_nothing_to_do_is_no_error(function):
    weight = nn.Parameter(torch.zeros(2))
    function([])
    function([weight])
    function(weight)
    function(p for p in ())
    assert weight.grad is None


def test_a_single_tensor_and_a_generator():
    param = nn.Parameter(torch.zeros(2))
    for given in (lambda: param, lambda: (p for p in [param])):
        param.grad = torch.tensor([3.0, 4.0])
        assert clip_grad_norm_(given(), 1.0).item() == 5
        torch.testing.assert_close(param.grad, torch.tensor([0.6, 0.8]))
        param.grad = torch.tensor([3.0, 0.5])
        clip_grad_value_(given(), 1.0)
        assert param.grad.tolist() == [1.0, 0.5]


@each_function
def test_shared_parameters_count_once(function):
    param = nn.Parameter(torch.zeros(2))
    param.grad = torch.tensor([3.0, 4.0])
    plain = twins([param])
    function([param, param])
    function(plain)
    assert_same_grads([param], plain)


def test_nonfinite_gradients_raise_by_position_and_stay():
    params = params_with_grads()
    params[1].grad = None
    params[2].grad[0, 0, 0] = math.inf
    before = [None if p.grad is None else p.grad.clone() for p in params]
    with pytest.raises(RuntimeError, match=r"gradients is inf: .* NaN: parameter 2 of shape \(2, 3, 2\)\. .* to clip"):
        clip_grad_norm_(params, 1.0, error_if_nonfinite=True)
    for param, grad in zip(params, before, strict=True):
        assert param.grad is None or torch.equal(param.grad, grad)
    assert clip_grad_norm_(params, 1.0).item() == math.inf


def test_parameters_of_one_name_are_told_apart_by_position():
    params = params_with_grads()[:3]
    params[1].grad.fill_(math.nan)
    named = list(zip(("weight", "weight", "bias"), params, strict=True))
    with pytest.raises(RuntimeError, match=r"with inf or NaN: weight \(parameter 1\)\. Pass"):
        clip_grad_norm_(named, 1.0, error_if_nonfinite=True)


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_nonfinite_gradients_do_as_in_torch(bad):
    mine, theirs = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3))
    mine.grad, theirs.grad = torch.tensor([1.0, bad, 2.0]), torch.tensor([1.0, bad, 2.0])
    clip_grad_norm_([mine], 1.0)
    torch.nn.utils.clip_grad_norm_([theirs], 1.0)
    torch.testing.assert_close(mine.grad, theirs.grad, equal_nan=True)


@pytest.mark.parametrize("value", [1e6, math.inf])
def test_value_beyond_the_range_of_the_dtype(value):
    param = nn.Parameter(torch.zeros(3, dtype=torch.float16))
    param.grad = torch.tensor([60000.0, -math.inf, math.nan], dtype=torch.float16)
    clip_grad_value_(param, value)
    torch.testing.assert_close(param.grad, torch.tensor([60000.0, -math.inf, math.nan]).half(), equal_nan=True)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda p: clip_grad_norm_(p, -1.0), ValueError, "max_norm must be >= 0"),
        (lambda p: clip_grad_norm_(p, math.nan), ValueError, "max_norm must be >= 0"),
        (lambda p: clip_grad_norm_(p, torch.tensor(-1.0)), ValueError, "max_norm must be >= 0, got -1.0"),
        (lambda p: clip_grad_norm_(p, torch.ones(2)), ValueError, "max_norm must have one element if it is a tensor"),
        (lambda p: clip_grad_norm_(p, 1.0, min_norm=2.0), ValueError, "min_norm must be <= max_norm"),
        (lambda p: clip_grad_norm_(p, torch.ones(1), min_norm=2.0), ValueError, "min_norm must be <= max_norm"),
        (lambda p: clip_grad_norm_(p, 1.0, min_norm=-1.0), ValueError, "min_norm must be >= 0"),
        (lambda p: clip_grad_norm_(p, 1.0, "l7"), ValueError, "ord must be a number or one of"),
        (lambda p: clip_grad_norm_(p, 1.0, dim="rows"), ValueError, "dim must be None, an int"),
        (lambda p: clip_grad_norm_(p, 1.0, min_size=-2), ValueError, "min_size must be >= 0"),
        (lambda p: clip_grad_norm_([1.0], 1.0), TypeError, "got float at index 0"),
        (lambda p: clip_grad_norm_(3, 1.0), TypeError, "params must be a tensor or an iterable of tensors, got int"),
        (
            lambda p: clip_grad_norm_(p, 1.0, error_if_nonfinite=1),
            TypeError,
            "error_if_nonfinite must be True or False",
        ),
        (lambda p: normalize_grads_(p, -1.0), ValueError, "norm_value must be >= 0"),
        (lambda p: normalize_grads_(p, 1.0, "l7"), ValueError, "ord must be a number or one of"),
        (lambda p: normalize_grads_(p, 1.0, dim=0.5), TypeError, "dim must be None, an int"),
        (lambda p: centralize_grads_(p, "rows"), ValueError, "dim must be None, an int"),
        (lambda p: centralize_grads_(p, inverse_dims=1), TypeError, "inverse_dims must be True or False"),
        (lambda p: centralize_grads_(p, min_size=-1), ValueError, "min_size must be >= 0"),
        (lambda p: clip_grads_with_norm_(p, -1.0, 1.0), ValueError, "max_norm must be >= 0"),
        (lambda p: clip_grads_with_norm_(p, 1.0, -1.0), ValueError, "total_norm must be >= 0"),
        (lambda p: clip_grads_with_norm_(p, 1.0, torch.ones(2)), ValueError, "total_norm must have one element"),
        (lambda p: get_total_norm(p, "l7"), ValueError, "ord must be a number or one of"),
        (lambda p: get_total_norm([None]), TypeError, "tensors must be a tensor or an iterable of tensors, got None"),
        (lambda p: clip_grad_value_(p, -1.0), ValueError, "value must be >= 0"),
        (lambda p: clip_grad_value_(p, "a"), TypeError, "value must be a number"),
    ],
)
def test_bad_arguments_change_nothing(call, error, message):
    params = params_with_grads()
    before = grads_of(params)
    with pytest.raises(error, match=message):
        call(params)
    assert all(torch.equal(a, b) for a, b in zip(grads_of(params), before, strict=True))


def test_min_norm_scales_up_but_not_from_zero():
    small, zero = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    small.grad, zero.grad = torch.tensor([0.03, 0.04]), torch.zeros(2)
    clip_grad_norm_([small, zero], None, min_norm=0.5)
    torch.testing.assert_close(small.grad, torch.tensor([0.3, 0.4]))
    assert zero.grad.tolist() == [0, 0]


@pytest.mark.parametrize(
    ("grad", "max_norm", "min_norm"),
    [
        ([1e-39, 0.0], None, 1.0),
        ([1e-30, 0.0], None, 1e10),
        ([0.6e38, 0.8e38], 1e-5, None),
        ([0.6e38, 0.8e38], 1e-8, None),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_factors_beyond_float32(grad, max_norm, min_norm, dtype):
    param = nn.Parameter(torch.zeros(2, dtype=dtype))
    param.grad = torch.tensor(grad, dtype=dtype)
    clip_grad_norm_([param], max_norm, min_norm=min_norm)
    assert param.grad.double().norm().item() == pytest.approx(
        max_norm or min_norm, rel=4e-3 if dtype == torch.bfloat16 else 1e-6
    )


@pytest.mark.parametrize("dim", [None, "global"])
@pytest.mark.parametrize(("order", "bound"), [(2, 1e-6), (math.inf, 1e-6), (0.5, 3e-5), (1, 3e-5), (3, 3e-5)])
def test_rounding_of_equal_elements_is_within_the_documented_bound(order, bound, dim):
    for count in (900, 70_000):
        for value in (0.1, 0.3471, 0.5189, 0.9):
            param = nn.Parameter(torch.zeros(count))
            param.grad = torch.full((count,), value)
            clip_grad_norm_([param], 1e-3, order, dim=dim)
            found = torch.linalg.vector_norm(param.grad.double(), order).item()
            assert found == pytest.approx(1e-3, rel=bound)


def test_no_limit_changes_nothing_even_beside_a_nan():
    param = nn.Parameter(torch.zeros(2))
    param.grad = torch.tensor([5.0, math.nan])
    clip_grad_norm_([param], math.inf)
    torch.testing.assert_close(param.grad, torch.tensor([5.0, math.nan]), equal_nan=True)


def test_the_smallest_element_is_that_of_tensors_with_elements():
    params = params_with_grads(shapes=[(0, 3), (2,)])
    expected = params[1].grad.abs().min().item()
    assert clip_grad_norm_(params, 1.0, -math.inf).item() == pytest.approx(expected)
    assert clip_grad_norm_(params, 1.0, -math.inf, dim="global").item() == pytest.approx(min(expected, 1.0))


@each_function
def test_gradients_whose_elements_share_memory(function):
    params = [torch.zeros(3, requires_grad=True), torch.zeros(2, 3, requires_grad=True)]
    params[0].grad, params[1].grad = torch.ones(1).expand(3), torch.tensor([[2.0], [3.0]]).expand(2, 3)
    plain = twins(params)
    function(params)
    function(plain)
    assert_same_grads(params, plain)


@each_function
def test_two_parameters_with_one_gradient_are_scaled_once(function):
    params = [torch.zeros(2, requires_grad=True) for _ in range(2)]
    params[0].grad = params[1].grad = torch.tensor([3.0, 4.0])
    plain = twins(params)
    function(params)
    function(plain)
    assert_same_grads(params, plain)


@pytest.mark.parametrize("default", DEFAULTS)
@pytest.mark.parametrize("dim", [None, 0, "global"])
@pytest.mark.parametrize("order", [2, 0, -1, math.inf, "mad", "std", "sum"])
def test_defaults_of_the_process_do_not_matter(order, dim, default):
    values = [torch.randn(shape) for shape in ((4, 3), (3,), (), (70_000,))]  # the last one is cut into blocks

    def results():
        params = [nn.Parameter(value.clone()) for value in values]
        for param, value in zip(params, values, strict=True):
            param.grad = 3 * value
        found = [clip_grad_norm_(params, 0.5, order, dim, min_norm=0.1), normalize_grads_(params, 0.7, order, dim)]
        centralize_grads_(params, dim)
        clip_grad_value_(params, 0.3)
        found += [get_total_norm(values, order), get_total_norm([], order), torchzero_clip.norm(values[0], order, 0)]
        clip_grads_with_norm_(params, 0.5, 2.0)
        return [*found, *(param.grad for param in params)]

    expected = results()
    with DEFAULTS[default]():
        found = results()
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
