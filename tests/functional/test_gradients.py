"""Arguments and results of the in-place functions."""

import itertools
import math

import pytest
import torch
from torch import nn

from torchzero_clip.functional.gradients import (
    as_reported,
    gradients,
    named_tensors,
    names_of_bad,
    new_gradient,
    opened,
    own_gradients,
    values_tell_all,
    with_gradients,
)
from torchzero_clip.functional.measure import Slicing
from torchzero_clip.functional.metric import parse_ord


def with_grad(grad):
    param = nn.Parameter(torch.zeros_like(grad).contiguous())
    param.grad = grad
    return param


def test_a_tensor_or_tensors_or_pairs():
    a, b = torch.zeros(1), nn.Parameter(torch.zeros(2))
    cases = [a, [a, b], (x for x in (a, b)), [("a", a), b], iter([("a", a), ("b", b)])]
    found = [named_tensors("params", case) for case in cases]
    names = [[name for name, _ in pairs] for pairs in found]
    assert names == [[None], [None, None], [None, None], ["a", None], ["a", "b"]]
    assert all(pairs[0][1] is a and (len(pairs) == 1 or pairs[1][1] is b) for pairs in found)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (nn.Linear(1, 1).parameters, r"got method: pass model\.parameters\(\)$"),
        (3, "got int$"),
        ([torch.zeros(1), "a"], "got str at index 1$"),
        ([(1, torch.zeros(1))], "got tuple at index 0$"),
    ],
)
def test_what_is_no_tensor_is_named(given, message):
    with pytest.raises(TypeError, match=message):
        named_tensors("params", given)


def test_parameters_with_a_gradient_count_once_each():
    first, without, second = with_grad(torch.ones(1)), nn.Parameter(torch.zeros(2)), with_grad(torch.ones(3))
    found = with_gradients([second, without, first, second])
    assert [(param is own, grad is own.grad) for (param, grad), own in zip(found, [second, first], strict=True)] == [
        (True, True)
    ] * 2
    assert gradients([first], [first])[0] is first.grad
    with pytest.warns(UserWarning, match="none of the parameters has a gradient"):
        assert gradients([without], [without]) == []


def test_gradients_that_share_memory_are_replaced_and_others_are_not():
    ordinary, expanded = with_grad(torch.ones(2)), with_grad(torch.ones(1).expand(3))
    shared = [with_grad(torch.ones(2)) for _ in range(2)]
    shared[1].grad = shared[0].grad
    params = [ordinary, expanded, *shared]
    before = [param.grad for param in params]
    found = own_gradients(params)
    assert [a is b for a, b in zip(found, before, strict=True)] == [True, False, True, False]
    assert all(param.grad is grad for param, grad in zip(params, found, strict=True))
    found[1][0], found[2][0] = 5.0, 7.0
    assert [grad.tolist() for grad in found] == [[1, 1], [5, 1, 1], [7, 1], [1, 1]]


def sparse():
    """[0, 3, 0, 5] with two entries for the 3."""
    return torch.sparse_coo_tensor([[1, 1, 3]], [1.0, 2.0, 5.0], (4,))


@pytest.mark.parametrize(("suffices", "dense"), [(True, [3.0, 5.0]), (False, [0.0, 3.0, 0.0, 5.0])])
@pytest.mark.parametrize("write", [True, False])
def test_sparse_tensors_are_dense_within_the_block(suffices, dense, write):
    plain, own = torch.ones(2), sparse()
    with opened([plain, own], lambda values: suffices, write=write) as found:
        assert found[0] is plain
        assert found[1].tolist() == dense
        found[1].mul_(2.0)
    assert own.to_dense().tolist() == ([0, 6, 0, 10] if write else [0, 3, 0, 5])


@pytest.mark.parametrize(
    ("slicing", "expected"),
    [
        (Slicing(parse_ord(2)), True),
        (Slicing(parse_ord(2), min_size=3), False),  # of two stored values
        (Slicing(parse_ord(2), "global", min_size=3), True),
        (Slicing(parse_ord(2), 0), False),
        (Slicing(parse_ord(2), None, True), False),
        (Slicing(parse_ord("sum")), True),
        (Slicing(parse_ord("mad")), False),
        (Slicing(parse_ord(-1)), False),
    ],
)
def test_whether_stored_values_are_enough(slicing, expected):
    assert values_tell_all(slicing)(torch.ones(2)) == expected


@pytest.mark.parametrize(
    ("dtypes", "total", "dtype", "value"),
    [
        ([], 2.0, torch.float32, 2.0),
        ([torch.bfloat16, torch.float16], 2.0, torch.float32, 2.0),
        ([torch.complex64], 2.0, torch.float32, 2.0),
        ([torch.bfloat16, torch.complex128], 1e50, torch.float64, 1e50),
        ([torch.float32], 1e50, torch.float64, 1e50),
        ([torch.float32], 1e-50, torch.float64, 1e-50),
        ([torch.float32], 0.0, torch.float32, 0.0),
        ([torch.float32], math.inf, torch.float32, math.inf),
    ],
)
def test_the_width_of_a_reported_norm(dtypes, total, dtype, value):
    found = as_reported(torch.tensor(total, dtype=torch.float64), [torch.ones(1, dtype=dtype) for dtype in dtypes])
    assert (found.dtype, found.item()) == (dtype, value)


def test_names_of_bad_gradients_in_one_process():
    owners = [torch.zeros(1), torch.zeros(2), torch.zeros(3)]
    named = [("a", owners[0]), (None, torch.zeros(9)), (None, owners[1]), ("c", owners[2])]
    values = [torch.tensor([math.inf]), torch.tensor([0.0, math.nan]), torch.ones(3)]
    assert names_of_bad("parameter", named, owners, values, None) == "a, parameter 2 of shape (2,)"


def permuted(order, *shape):
    inverse = torch.tensor(order).argsort().tolist()
    return torch.randn([shape[dim] for dim in order]).permute(inverse)


@pytest.mark.parametrize("own", [*itertools.permutations(range(3)), None])
@pytest.mark.parametrize("given", list(itertools.permutations(range(3))))
@pytest.mark.parametrize("shape", [(2, 3, 4), (2, 1, 4), (1, 3, 1), (0, 2, 3)])
def test_new_gradients_have_the_layout_that_torch_chooses(own, given, shape):
    param = torch.randn(*shape, 2)[..., 0] if own is None else permuted(own, *shape)
    param.requires_grad_()
    value = permuted(given, *shape)
    (param * 1.0).backward(value)  # torch stores the value in the layout of the parameter
    grad, sizes = new_gradient(value, param), [dim for dim, size in enumerate(shape) if size != 1]
    assert torch.equal(grad, value)
    if value.numel():
        assert [grad.stride(dim) for dim in sizes] == [param.grad.stride(dim) for dim in sizes]


def test_new_gradients_have_memory_of_their_own_and_no_graph():
    param, bucket, factor = torch.zeros(2, 3), torch.arange(12.0), torch.ones(3, requires_grad=True)
    for value in (bucket[:6].view(2, 3), torch.ones(1, 3).expand(2, 3), torch.ones(2, 3) * factor):
        grad = new_gradient(value, param)
        assert torch.equal(grad, value)
        assert grad.untyped_storage().nbytes() == grad.nbytes
        assert not grad.requires_grad
    whole = torch.ones(2, 3)
    assert new_gradient(whole, param).data_ptr() == whole.data_ptr()  # it is not copied without need


def test_gradients_made_for_expanded_and_shared_ones_have_the_layout_of_their_parameter():
    params = [torch.zeros(4, 3, 2, 2).to(memory_format=torch.channels_last).requires_grad_() for _ in range(3)]
    params[0].grad = torch.ones(1, 3, 2, 2).expand(4, 3, 2, 2)
    params[1].grad = params[2].grad = torch.ones(4, 3, 2, 2)
    with_gradients(params)
    assert [param.grad.stride() for param in params[::2]] == [params[0].stride()] * 2
    assert params[1].grad.is_contiguous()  # that of the user
