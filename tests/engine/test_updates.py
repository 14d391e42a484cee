"""Which memory a step may write to, and what it leaves alone."""

import pytest
import torch
from contract.entries import Mul
from contract.training import assert_equal, gradients, parameters, set_grads, stepped, train, values
from torch import nn

from torchzero_clip import (
    LR,
    SGD,
    Adam,
    Centralize,
    ClipNorm,
    ClipValue,
    Modular,
    RMSprop,
    TensorwiseTransform,
    UpdateRule,
    Wrap,
)


@pytest.mark.parametrize(
    "make", [lambda: ClipNorm(1.0), lambda: [ClipNorm(1.0), SGD(1.0)], lambda: ClipValue(0.5), lambda: Centralize(),
             lambda: [ClipNorm(1.0, target="grad"), SGD(1.0)]],
)  # fmt: skip
def test_expanded_gradients_are_gradients_like_others(make):
    params, plain = parameters(shapes=[(3,), (2, 3)]), parameters(shapes=[(3,), (2, 3)])
    params[0].grad, params[1].grad = torch.ones(1).expand(3), torch.tensor([[2.0], [3.0]]).expand(2, 3)
    set_grads(plain, [grad.grad.contiguous() for grad in params])
    Modular(params, make()).step()
    Modular(plain, make()).step()
    assert_equal(params, plain)
    assert_equal([p.grad for p in params], [p.grad for p in plain])


@pytest.mark.parametrize("dim", [None, "global"])
@pytest.mark.parametrize("keep_grads", [False, True])
def test_parameters_that_share_one_gradient_are_scaled_once(dim, keep_grads):
    params, plain = parameters(shapes=[(2,), (2,)]), parameters(shapes=[(2,), (2,)])
    shared = torch.tensor([3.0, 4.0])
    params[0].grad = params[1].grad = shared
    set_grads(plain, [shared, shared])
    for each in (params, plain):
        Modular(each, ClipNorm(1.0, dim=dim), SGD(1.0), keep_grads=keep_grads).step()
    assert_equal(params, plain)
    assert_equal([p.grad for p in params], [p.grad for p in plain])


class Remembering(UpdateRule):
    """Returns its own state, as `kind` says."""

    default_lr = 1.0

    def __init__(self, kind):
        super().__init__({})
        self.kind = kind

    def init_state(self, param, setting):
        return {"sum": torch.zeros_like(param)}

    def apply_tensors(self, updates, step):
        for update, state in zip(updates, step.states, strict=True):
            state["sum"].add_(update)
        if self.kind == "grads":
            return step.grads
        return step.params if self.kind == "params" else [state["sum"] for state in step.states]


@pytest.mark.filterwarnings("ignore:two optimizers act on")
@pytest.mark.parametrize("kind", ["state", "grads", "params"])
@pytest.mark.parametrize("later", [lambda: Mul(0.5), lambda: [SGD(), Mul(0.5)], lambda: ClipNorm(0.1)])
def test_what_a_rule_returns_of_its_own_is_not_written_to(kind, later):
    params = parameters(torch.float64)
    rows = gradients(params, 2)
    optimizer = Modular(params, Remembering(kind), later(), LR(0.0))
    before = values(params)
    train(optimizer, params, rows)
    assert_equal(params, before)
    assert_equal([p.grad for p in params], rows[-1])
    assert_equal([optimizer.state[p]["remembering/sum"] for p in params], [a + b for a, b in zip(*rows, strict=True)])


@pytest.mark.filterwarnings("ignore:two optimizers act on")
def test_parameters_that_a_transform_returns_are_not_scaled_by_a_clip():
    params = parameters()
    before = values(params)
    train(Modular(params, Remembering("params"), ClipNorm(0.01), Adam(lr=0.0)), params, gradients(params, 1))
    assert_equal(params, before)


@pytest.mark.filterwarnings("ignore:two optimizers act on")
@pytest.mark.parametrize(
    ("rule", "key"), [(lambda: SGD(momentum=0.9), "sgd/momentum_buffer"), (lambda: RMSprop(momentum=0.9), None)]
)
@pytest.mark.parametrize(
    "later",
    [
        lambda: [ClipNorm(0.01), Adam(lr=0.1)],
        lambda: [ClipNorm(0.01, dim="global"), Mul(2.0)],
        lambda: Wrap(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, foreach=True),
    ],
)
def test_state_that_a_rule_returns_is_scaled_by_nothing_behind_it(rule, key, later):
    params, plain = parameters(torch.float64), parameters(torch.float64)
    optimizer, reference = Modular(params, rule(), later()), Modular(plain, rule())
    for row in gradients(params, 3):
        train(optimizer, params, [row])
        train(reference, plain, [row])
    for param, other in zip(params, plain, strict=True):
        for name, value in reference.state[other].items():
            torch.testing.assert_close(optimizer.state[param][name], value, rtol=0, atol=0)


class SameForAll(UpdateRule):
    """Returns one tensor for all parameters: a new one, or state of the whole chain."""

    default_lr = 1.0

    def __init__(self, of_the_chain):
        super().__init__({})
        self.of_the_chain = of_the_chain

    def init_global_state(self):
        return {"direction": torch.ones(2)}

    def apply_tensors(self, updates, step):
        return [step.global_state["direction"] if self.of_the_chain else torch.ones(2)] * len(updates)


@pytest.mark.parametrize("of_the_chain", [False, True])
def test_one_tensor_for_two_parameters_is_scaled_once_for_each(of_the_chain):
    params = [nn.Parameter(torch.zeros(2)) for _ in range(2)]
    optimizer = Modular(params, SameForAll(of_the_chain), Mul(2.0), Mul(2.0))
    train(optimizer, params, [[torch.ones(2)] * 2] * 2)
    assert [param.tolist() for param in params] == [[-8.0, -8.0]] * 2


def test_one_tensor_for_two_parameters_is_scaled_for_those_in_scope_only():
    first, second = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    named = [("first", first), ("second", second)]
    optimizer = Modular(named, SameForAll(False), ClipNorm(0.1).only("first"))
    train(optimizer, [first, second], [[torch.ones(2)] * 2])
    assert first.tolist() == pytest.approx([-(0.005**0.5)] * 2)
    assert second.tolist() == [-1.0, -1.0]


class Keeps(TensorwiseTransform):
    """Puts what it is given into its state, and returns it."""

    def init_state(self, param, setting):
        return {"last": torch.zeros_like(param)}

    def apply_tensor(self, tensor, param, grad, loss, state, setting):
        state["last"] = tensor
        return tensor


@pytest.mark.parametrize("before", [list, lambda: Centralize(min_size=99)])
def test_what_a_transform_kept_of_its_updates_is_not_written_to(before):
    params = parameters()
    rows = gradients(params, 1)
    optimizer = Modular(params, before(), Keeps({}), ClipNorm(0.01), LR(1.0))
    train(optimizer, params, rows)
    assert_equal([optimizer.state[p]["keeps/last"] for p in params], rows[0])


@pytest.mark.parametrize("limit", [100.0, 1.0])
def test_a_clip_that_does_nothing_has_acted_all_the_same(limit):
    weight = nn.Parameter(torch.zeros(3))
    optimizer = Modular([weight], ClipNorm(limit), ClipValue(0.02, target="grad"), SGD(1.0))
    train(optimizer, [weight], [[torch.tensor([3.0, 4.0, 0.0])]])
    expected = [-3.0, -4.0, 0.0] if limit == 100.0 else [-0.6, -0.8, 0.0]
    assert weight.tolist() == pytest.approx(expected)


def test_sgd_keeps_no_reference_to_grad():
    param, optimizer = stepped(SGD(1.0, 0.5), [3.0, 4.0])
    optimizer.zero_grad(set_to_none=False)
    assert optimizer.state[param]["sgd/momentum_buffer"].tolist() == [3, 4]
