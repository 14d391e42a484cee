"""Wrong results of a transform are named."""

import pytest
import torch
from contract.entries import Mul
from contract.training import gradients, parameters, stepped, train, trained

from torchzero_clip import Modular, Scaling, TensorwiseTransform


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: torch.ones(3), r"returned factors of shape \(3,\) for 2 slices: see Measured.joined"),
        (lambda: [1.0, 1.0], r"returned factors of list for 2 slices"),
        (lambda: None, r"returned factors of NoneType"),
    ],
)
def test_wrong_factors_are_named(make, message):
    class Wrong(Scaling):
        def factors(self, measured, updates, step):
            return make()

    params = parameters(shapes=[(2,), (3,)])
    with pytest.raises(RuntimeError, match=message):
        train(Modular(params, Wrong({})), params, gradients(params, 1))


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (lambda updates: None, "returned NoneType instead of a list of tensors"),
        (lambda updates: updates[:1], "returned 1 tensors for 4"),
    ],
)
def test_a_transform_that_returns_no_list_or_a_shorter_one_is_named(returned, message):
    own = type("Own", (Mul,), {"apply_tensors": lambda self, updates, step: returned(updates)})
    with pytest.raises(RuntimeError, match=message):
        trained(own(1.0))


class Lazy(TensorwiseTransform):
    """Keeps state of matrices that it does not declare."""

    def apply_tensor(self, tensor, param, grad, loss, state, setting):
        if param.ndim == 2:
            state["count"] = 1
        return tensor


class LazyScaling(Scaling):
    def factors(self, measured, updates, step):
        step.states[-1]["count"] = 1
        return torch.ones_like(measured.joined(measured.norms))


@pytest.mark.parametrize("lazy", [Lazy, LazyScaling])
def test_state_that_is_not_declared_is_named_whichever_parameter_has_it(lazy):
    params = parameters(shapes=[(2,), (2, 2)])
    with pytest.raises(RuntimeError, match=r"keeps state \['count'\] that its init_state does not return"):
        train(Modular(params, lazy({})), params, gradients(params, 1))


class Returns(Mul):
    def __init__(self, function):
        super().__init__(1.0)
        self.function = function

    def apply_tensors(self, updates, step):
        return [self.function(update, state) for update, state in zip(updates, step.states, strict=True)]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda tensor, state: None, "returned NoneType instead of a tensor"),
        (lambda tensor, state: tensor.sum(), r"shape \(\) of torch.float32 for one of shape \(2,\)"),
        (lambda tensor, state: tensor.double(), r"of torch.float64 for one"),
        (lambda tensor, state: state.setdefault("seen", tensor), r"keeps state \['seen'\] that its init_state"),
    ],
)
def test_slips_of_an_author_are_named(function, message):
    with pytest.raises(RuntimeError, match=message):
        stepped(Returns(function), [3.0, 4.0])


class Window(Mul):
    """Stores past norms in the value that it is given."""

    def __init__(self, values, *, late=False, joint=False) -> None:
        super().__init__(1.0)
        self.values, self.late, self.joint = values, late, joint

    def init_state(self, param, setting):
        return {} if self.joint else {"window": torch.zeros(3) if self.late else self.values}

    def init_global_state(self):
        return {"window": self.values} if self.joint else {}

    def apply_tensors(self, updates, step):
        if self.late:
            step.states[0]["window"] = self.values
        return updates


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(("values", "kind"), [([1.0], "list"), (None, "NoneType"), ("a", "str"), ({1}, "set")])
def test_state_that_checkpoints_cannot_hold_is_refused(values, kind, late):
    params = parameters()
    before = [p.detach().clone() for p in params]
    optimizer = Modular(params, Window(values, late=late))
    with pytest.raises(TypeError, match=rf"has {kind} as state 'window'.*torch.zeros\(100, device=param.device\)"):
        train(optimizer, params, gradients(params, 1))
    assert all(torch.equal(p, b) for p, b in zip(params, before, strict=True))


def test_state_of_the_chain_is_refused_when_the_optimizer_is_made():
    with pytest.raises(TypeError, match="has list as state 'window'"):
        Modular(parameters(), Window([1.0], joint=True))


@pytest.mark.parametrize("value", [1, 0.5, True, torch.zeros(3)])
def test_tensors_and_numbers_are_state(value):
    params = parameters()
    train(Modular(params, Window(value)), params, gradients(params, 1))
