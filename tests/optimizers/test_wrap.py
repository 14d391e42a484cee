"""Optimizers of torch.optim at the end of a chain do what they do alone."""

import collections
import copy
import inspect
import pickle
import random
import re
import threading
from functools import partial

import pytest
import torch
from contract.entries import is_2d
from contract.training import (
    assert_equal,
    assert_same_checkpoint,
    assert_same_state,
    gradients,
    parameters,
    set_grads,
    through_file,
    train,
    values,
)
from torch import nn, optim
from torch.optim.optimizer import register_optimizer_step_post_hook
from versions import needs_grad_dtype, needs_muon

from torchzero_clip import LR, Adam, Chain, ClipNorm, ClipNormByEMA, Modular, Muon, WeightDecay, Wrap

MATRICES = [(4, 3), (2, 5)]
ARGUMENTS = {
    "SGD": {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    "Adam": {"betas": (0.5, 0.9), "weight_decay": 0.1},
    "RMSprop": {"momentum": 0.5, "centered": True},
    "Adagrad": {"initial_accumulator_value": 0.1, "lr_decay": 0.1},
    "Adafactor": {"eps": (None, 0.01)},
}
REFUSED = {"LBFGS", "SparseAdam"}
CLASSES = {
    name: c
    for name, c in vars(optim).items()
    if inspect.isclass(c) and issubclass(c, optim.Optimizer) and c is not optim.Optimizer and name not in REFUSED
}
each_class = pytest.mark.parametrize("name", CLASSES)


def pair(name, dtype=torch.float32, **extra):
    shapes = MATRICES if name == "Muon" else None
    params, other = (parameters(dtype, *([shapes] if shapes else [])) for _ in range(2))
    arguments = {**ARGUMENTS.get(name, {}), **extra}
    optimizer = Modular(params, ClipNorm(1e9, dim="global"), Wrap(CLASSES[name], **arguments))
    return params, optimizer, other, CLASSES[name](other, **copy.deepcopy(arguments))


def test_all_optimizers_of_torch_are_here():
    assert len(CLASSES) >= 12 + ("Muon" in CLASSES)


@pytest.mark.parametrize(
    ("name", "dtype", "extra"),
    [
        *((name, dtype, {}) for name in CLASSES for dtype in (torch.float32, torch.bfloat16)),
        ("Adam", torch.float32, {"lr": torch.tensor(0.1)}),
    ],
    ids=str,
)
def test_wrapped_is_bitwise_what_it_is_alone(name, dtype, extra):
    params, optimizer, other, reference = pair(name, dtype, **extra)
    schedulers = [optim.lr_scheduler.ExponentialLR(o, 0.9) for o in (optimizer, reference)]
    for row in gradients(params, 5):
        train(optimizer, params, [row])
        assert_equal([p.grad for p in params], row)
        train(reference, other, [row])
        assert_equal(params, other)
        for scheduler in schedulers:
            scheduler.step()
    for param, twin in zip(params, other, strict=True):
        expected = {f"wrap/{key}": value for key, value in reference.state.get(twin, {}).items()}
        torch.testing.assert_close(dict(optimizer.state.get(param, {})), expected, rtol=0, atol=0)


@pytest.mark.quick_cases(4)
@each_class
def test_it_resumes_exactly_and_can_be_copied(name):
    params, optimizer, *_ = pair(name, torch.bfloat16)
    grads = gradients(params, 6)
    train(optimizer, params, grads[:3])
    saved = through_file(optimizer.state_dict())
    resumed, again, *_ = pair(name, torch.bfloat16)
    with torch.no_grad():
        for param, value in zip(resumed, values(params), strict=True):
            param.copy_(value)
    again.load_state_dict(saved)
    copies = [copy.deepcopy((params, optimizer)), pickle.loads(pickle.dumps((params, optimizer)))]
    train(optimizer, params, grads[3:])
    for others, other in [(resumed, again), *copies]:
        train(other, others, grads[3:])
        assert_equal(others, params)
        assert_same_state(other, optimizer)
        assert repr(other) == repr(optimizer)


@each_class
def test_numbers_are_settings_of_groups_and_are_checked(name):
    params, optimizer, other, reference = pair(name)
    key, value, wrong = ("etas", (0.4, 1.5), (-1.0, 1.5)) if name == "Rprop" else ("weight_decay", 0.5, -1.0)
    for o in (optimizer, reference):
        o.param_groups[0][key] = value
        o.param_groups[0]["lr"] = 0.25
    rows = gradients(params, 2)
    train(optimizer, params, rows)
    train(reference, other, rows)
    assert_equal(params, other)
    optimizer.param_groups[0][key] = wrong
    before, state = values(params), copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match=rf"Wrap\({name}, ...\): .*-1.0"):
        optimizer.step()
    assert_equal(params, before)
    assert_same_checkpoint(optimizer.state_dict(), state)


def test_groups_differ_and_clipping_comes_first():
    params, other = parameters(), parameters()
    groups = [{"params": params[:1]}, {"params": params[1:], "lr": 0.5, "betas": (0.5, 0.5)}]
    optimizer = Modular(groups, ClipNorm(0.5, dim="global"), Wrap(optim.AdamW, lr=0.1))
    same = [{"params": other[:1]}, {"params": other[1:], "lr": 0.5, "betas": (0.5, 0.5)}]
    reference = optim.AdamW(same, lr=0.1)
    for row in gradients(params, 4):
        train(optimizer, params, [row])
        assert_equal([p.grad for p in params], row)
        set_grads(other, row)
        nn.utils.clip_grad_norm_(other, 0.5)
        reference.step()
    torch.testing.assert_close(params, other, rtol=1e-4, atol=1e-6)


class ReadsGroups(optim.Optimizer):
    """Has arguments that are no numbers, and reads keys of groups that are no arguments, as Muon of timm does."""

    def __init__(self, params, lr=0.1, flip=False):
        super().__init__(params, {"lr": lr, "flip": flip})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                update = param.grad * group.get("scale", 1.0)
                if "mix" in group:
                    average = self.state[param].setdefault("average", torch.zeros_like(param))
                    update = average.lerp_(update, group["mix"])
                param.add_(-update if group["flip"] else update, alpha=-group["lr"])


def test_keys_of_groups_that_are_no_settings_reach_the_optimizer():
    keys = [{"flip": True}, {"scale": 0.5, "mix": 0.25}, {}, {}]

    def build(kind):
        params = parameters()
        return params, kind([{"params": [p], **own} for p, own in zip(params, keys, strict=True)])

    def chain(groups):
        return Modular(groups, ClipNorm(1e9, dim="global"), Wrap(ReadsGroups))

    (params, optimizer), (other, reference) = build(chain), build(ReadsGroups)
    rows = gradients(params, 6)
    for o, own in ((optimizer, params), (reference, other)):
        train(o, own, rows[:3])
        o.param_groups[2]["flip"] = True
        train(o, own, rows[3:4])
    assert_equal(params, other)
    resumed, again = build(chain)
    with torch.no_grad():
        for param, value in zip(resumed, values(params), strict=True):
            param.copy_(value)
    again.load_state_dict(through_file(optimizer.state_dict()))
    for o, own in ((optimizer, params), (again, resumed), (reference, other)):
        train(o, own, rows[4:])
    assert_equal(params, other)
    assert_equal(resumed, other)


def test_groups_may_have_arrays_and_tensors_of_other_packages():
    numpy = pytest.importorskip("numpy")

    def build(kind):
        params = parameters()
        return params, kind([{"params": [p], "mask": numpy.ones(2), "slow": [torch.ones(2)]} for p in params])

    def chain(groups):
        return Modular(groups, Wrap(optim.SGD, lr=0.1))

    (params, optimizer), (other, reference) = build(chain), build(partial(optim.SGD, lr=0.1))
    rows = gradients(params, 2)
    train(optimizer, params, rows)
    train(reference, other, rows)
    assert_equal(params, other)


def test_scopes_share_one_checkpoint():
    params, other = parameters(), parameters()

    def build(given):
        return Modular(given, Muon().only(is_2d), Wrap(optim.NAdam, lr=0.1).without(is_2d))

    optimizer, second = build(params), build(other)
    reference_params = parameters()
    reference = optim.NAdam(reference_params[1:], 0.1)
    grads = gradients(params, 4)
    train(optimizer, params, grads)
    for row in grads:
        train(reference, reference_params[1:], [row[1:]])
    assert_equal(params[1:], reference_params[1:])
    second.load_state_dict(optimizer.state_dict())
    assert_same_state(second, optimizer)


@pytest.mark.parametrize(
    ("chain", "message"),
    [
        (lambda: [Wrap(optim.Adam), ClipNorm(1)], r"ClipNorm\(1\) has to come before it"),
        (lambda: [Wrap(optim.Adam), WeightDecay(0.1).only(lambda p: p.ndim == 1)], "has to come before it"),
        (lambda: [LR(0.1), Wrap(optim.Adam)], r"LR\(0.1\) has to come after it"),
        (lambda: [Wrap(optim.Adam), Wrap(optim.SGD), LR(0.1)], "has to come before it"),
        (lambda: Chain(Wrap(optim.Adam), target="update_difference"), "cannot stand inside another transform"),
        (lambda: [Wrap(optim.Adam, lr=0.1), LR(0.1)], "one learning rate"),
        pytest.param(
            lambda: Wrap(optim.Muon),
            r"parameter 1 of its group does not fit: Wrap\(Muon, ...\): Muon only supports 2D",
            marks=needs_muon,
        ),
    ],
)
def test_what_cannot_be_is_refused(chain, message):
    with pytest.raises(ValueError, match=message):
        Modular(parameters(), chain())


def test_step_hooks_run_once():
    calls = []
    handle = register_optimizer_step_post_hook(lambda o, *_: calls.append(type(o).__name__))
    try:
        params, optimizer, *_ = pair("AdamW")
        train(optimizer, params, gradients(params, 2))
    finally:
        handle.remove()
    assert calls == ["Modular", "Modular"]


def test_a_parameter_without_gradient_has_no_state():
    params, optimizer, *_ = pair("Adagrad")
    params[0].grad = torch.ones_like(params[0])
    optimizer.step()
    assert list(optimizer.state) == [params[0]]


def test_a_class_that_replaces_its_state_is_followed():
    class Counting(optim.Optimizer):
        def __init__(self, params, lr=0.1):
            super().__init__(params, {"lr": lr})

        def step(self, closure=None):
            for group in self.param_groups:
                for param in group["params"]:
                    self.state[param] = {"count": self.state[param].get("count", 0) + 1}
                    param.add_(param.grad, alpha=-group["lr"])

    params = parameters()
    optimizer = Modular(params, Wrap(Counting))
    train(optimizer, params, gradients(params, 3))
    assert [state["wrap/count"] for state in optimizer.state.values()] == [3] * len(params)


class Other:
    """An object with an attribute, as an optimizer may hold."""

    def __init__(self, value):
        self.value = value


class Keeping(optim.Optimizer):
    """Keeps something outside of the state of its parameters, which `change` changes in each step."""

    def __init__(self, params, change="", group=None, **attributes):
        super().__init__(params, {"lr": 0.1, **(group or {})})
        vars(self).update(copy.deepcopy(attributes))
        self.change = change

    def step(self):
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param]["seen"] = 1
                param.sub_(group["lr"])
        self.change(self)


def set_in_group(value):
    return lambda o: o.param_groups[0].update(k=value)


def second(optimizer):
    state = optimizer.state[optimizer.param_groups[0]["params"][0]]
    state["steps"] = state.get("steps", 0) + 1
    optimizer.k.value = state["steps"] // 2


GROUP, ATTRIBUTE, STATE = "optimizer.param_groups[0]['k']", "optimizer.k", "optimizer.state['k']"
CHANGES = {
    "number": (lambda o: o.param_groups[0].update(k=o.param_groups[0]["k"] + 1), {"group": {"k": 0}}, GROUP),
    "tensor": (
        lambda o: o.param_groups[0].update(k=o.param_groups[0]["k"] + 1),
        {"group": {"k": torch.zeros(())}},
        GROUP,
    ),
    "a small change of a tensor": (lambda o: o.k.add_(1e-6), {"k": torch.ones(2000)}, ATTRIBUTE),
    "tensor in a tuple": (lambda o: o.k[1][0].neg_(), {"k": (0, (torch.ones(2),))}, ATTRIBUTE),
    "dtype": (lambda o: vars(o).update(k=o.k.double()), {"k": torch.ones(2)}, ATTRIBUTE),
    "bool": (set_in_group(True), {"group": {"k": False}}, GROUP),
    "None": (set_in_group(None), {"group": {"k": False}}, GROUP),
    "from None": (set_in_group(1), {"group": {"k": None}}, GROUP),
    "new key": (set_in_group(1), {}, GROUP),
    "tuple": (set_in_group((0.1, 0.3)), {"group": {"k": (0.1, 0.2)}}, GROUP),
    "set": (lambda o: o.k.add(len(o.k)), {"k": set()}, ATTRIBUTE),
    "dict": (lambda o: o.k.update({len(o.k): 1}), {"k": {}}, ATTRIBUTE),
    "deque": (lambda o: o.k.append(1), {"k": collections.deque()}, ATTRIBUTE),
    "object": (lambda o: vars(o.k).update(value=o.k.value + 1), {"k": Other(1)}, ATTRIBUTE),
    "object in an object": (lambda o: o.k.value[0].value.mul_(2), {"k": Other([Other(torch.ones(1))])}, ATTRIBUTE),
    "generator": (lambda o: torch.rand(1, generator=o.k), {"k": torch.Generator()}, ATTRIBUTE),
    "random": (lambda o: o.k.random(), {"k": random.Random(0)}, ATTRIBUTE),
    "new attribute": (lambda o: vars(o).update(k=1), {}, ATTRIBUTE),
    "attribute that goes": (lambda o: vars(o).pop("k", None), {"k": 1}, ATTRIBUTE),
    "defaults": (lambda o: o.defaults.update(k=1), {}, "optimizer.defaults"),
    "state of no parameter": (lambda o: o.state["k"].update(a=torch.ones(1)), {}, STATE),
    "only in the second step": (second, {"k": Other(0)}, ATTRIBUTE),
    "new group": (lambda o: o.param_groups.append({"params": []}), {}, "optimizer.param_groups[1]['params']"),
}


@pytest.mark.quick_cases(len(CHANGES))
@pytest.mark.parametrize("kind", CHANGES)
def test_what_a_step_changes_elsewhere_is_named(kind):
    change, arguments, name = CHANGES[kind]
    with pytest.raises(ValueError, match=rf"Keeping, whose step changes {re.escape(name)}, .*before_step\("):
        Wrap(Keeping, change=change, **arguments)


def test_what_stays_equal_is_no_change():
    def rebuild(optimizer):
        group = optimizer.param_groups[0]
        group.update(k=group["k"].clone(), betas=tuple(group["betas"]))
        optimizer.params = list(optimizer.param_groups[0]["params"])
        optimizer.nan = torch.full((1,), torch.nan)
        optimizer.itself = optimizer
        optimizer.all_state = optimizer.state
        optimizer.rows = [list(row) for row in optimizer.rows]

    group = {"k": torch.ones(2), "betas": (0.1, 0.2)}
    held = {"rows": [[1], [2]], "lock": None, "nan": torch.full((1,), torch.nan)}
    params = parameters()
    before = values(params)

    class Same(Keeping):
        def __init__(self, params, change="", **kwargs):
            super().__init__(params, change, **kwargs)
            self.lock, self.itself, self.all_state = threading.Lock(), self, self.state
            self.params = list(self.param_groups[0]["params"])

    train(Modular(params, Wrap(Same, change=rebuild, group=group, **held)), params, gradients(params, 2))
    torch.testing.assert_close(params, [value - 0.2 for value in before])


def test_a_class_whose_step_fails_is_refused_with_its_error():
    class NeedsDevice(optim.SGD):
        def step(self, closure=None):
            if not self.param_groups[0]["params"][0].is_cuda:
                raise AssertionError("a kernel for CUDA only")

    if not torch.cuda.is_available():
        message = r"NeedsDevice, whose step .* raises AssertionError\('a kernel for CUDA only'\). before_step\("
        with pytest.raises(ValueError, match=message):
            Wrap(NeedsDevice, lr=0.1)
    else:  # it is tried on the device
        assert Wrap(NeedsDevice, lr=0.1).default_lr == 0.1


def test_a_class_whose_step_fails_for_large_gradients_is_not_taken_to_step_each_tensor_alone():
    class Careful(optim.SGD):
        def step(self, closure=None):
            if any(param.grad.abs().max() > 1e5 for param in self.param_groups[0]["params"]):
                raise ValueError("exploded")
            return super().step(closure)

    assert Wrap(optim.SGD, lr=0.1).each_alone
    assert not Wrap(Careful, lr=0.1).each_alone


@pytest.mark.parametrize("name", ["SGD", "Adagrad", "Adam"])
def test_fused_ones_are_taken(name):
    params, optimizer, other, reference = pair(name, fused=True)
    rows = gradients(params, 2)
    train(optimizer, params, rows)
    train(reference, other, rows)
    assert_equal(params, other)


class Routed(optim.Optimizer):
    """Has a bool in its state, as the Muon of timm, and None, as its SGDW."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    def step(self):
        for param in self.param_groups[0]["params"]:
            state = self.state[param]
            if not state:
                state["is_matrix"], state["mask"], state["none"] = param.ndim == 2, param > 0, None
            param.sub_(param.grad * state["mask"] if state["is_matrix"] else param.grad, alpha=0.1)


def test_state_that_is_a_bool_or_none_is_saved_and_loads():
    params, others = parameters(), parameters()
    rows = gradients(params, 4)
    optimizer, other = (Modular(own, Wrap(Routed)) for own in (params, others))
    train(optimizer, params, rows[:2])
    train(other, others, rows[:2])
    saved = through_file(optimizer.state_dict())
    other.state.clear()
    other.load_state_dict(saved)
    assert [state["wrap/is_matrix"] for state in other.state.values()] == [p.ndim == 2 for p in params]
    train(optimizer, params, rows[2:])
    train(other, others, rows[2:])
    assert_equal(others, params)
    saved["state"][0]["wrap/is_matrix"] = 1
    with pytest.raises(ValueError, match="'wrap/is_matrix' of parameter 0 is of type bool in this chain, got int"):
        other.load_state_dict(saved)


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("name", ["Adam", "NAdam", "SGD"])
def test_state_of_another_dtype_raises_before_anything_changes(name, fast):
    extra = {"momentum": 0.9} if name == "SGD" else {}
    params = parameters()
    optimizer = Modular(params, ClipNormByEMA(), Wrap(CLASSES[name], lr=0.1, **extra), fast=fast)
    rows = gradients(params, 2)
    train(optimizer, params, rows[:1])
    params[-1].data = params[-1].data.double()
    set_grads(params[:-1], rows[1][:-1])
    params[-1].grad = rows[1][-1].double()
    before, state = values(params), copy.deepcopy(optimizer.state_dict())
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"is of torch.float32, and the parameter of torch.float64"):
            optimizer.step()
        assert_equal(params, before)
        assert_same_checkpoint(optimizer.state_dict(), state)
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.step()
    assert all(not torch.equal(p, b) for p, b in zip(params, before, strict=True) if p.numel())


def test_state_that_is_always_wider_than_its_parameter_is_taken():
    class Wide(optim.Optimizer):
        def __init__(self, params, lr=0.1):
            super().__init__(params, {"lr": lr})

        def step(self):
            for param in self.param_groups[0]["params"]:
                state = self.state[param]
                if not state:
                    state["master"] = param.float()
                param.copy_(state["master"].sub_(param.grad, alpha=0.1))

    params, other = (parameters(torch.bfloat16) for _ in range(2))
    rows = gradients(params, 3)
    train(Modular(params, Wrap(Wide)), params, rows)
    with torch.no_grad():
        train(Wide(other), other, rows)
    assert_equal(params, other)


class OfNamed(optim.Optimizer):
    def __init__(self, named_parameters, lr=0.1):
        super().__init__([{"params": [param], "name": name} for name, param in named_parameters], {"lr": lr})


class OfModel(optim.Optimizer):
    def __init__(self, model, lr=0.1):
        super().__init__(model.parameters(), {"lr": lr})


@pytest.mark.parametrize(
    ("construct", "error", "message"),
    [
        (
            lambda: Wrap(optim.LBFGS),
            ValueError,
            "LBFGS, whose step .*without a closure, raises .*'closure'.*\\. Call clip_grad_norm_ in its",
        ),
        (
            lambda: Wrap(optim.SparseAdam),
            ValueError,
            "SparseAdam, whose step on a dense gradient.*does not support dense",
        ),
        (lambda: Wrap(OfNamed), ValueError, r"OfNamed, ...\): it needs named parameters, .*before_step\("),
        (lambda: Wrap(OfModel), ValueError, r"OfModel, ...\): AttributeError.*no attribute 'parameters'.*before_step"),
        (lambda: Wrap(Adam), TypeError, "subclass of torch.optim.Optimizer, got <class 'torchzero_clip"),
        (
            lambda: Wrap(optim.Adam(parameters())),
            TypeError,
            r"the class, not an optimizer. before_step\(",
        ),
        (lambda: Wrap(optim.Adam, lr=-1), ValueError, r"Wrap\(Adam, ...\): Invalid learning rate: -1"),
        (lambda: Wrap(optim.Adam, beta=0.1), TypeError, r"Wrap\(Adam, ...\): .*'beta'"),
        (lambda: Wrap(optim.Adam, maximize=True), ValueError, "maximize is an argument of Modular"),
        (lambda: Wrap(optim.Adam, differentiable=True), ValueError, "maximize is an argument of Modular"),
    ],
)
def test_wrong_arguments_are_refused(construct, error, message):
    with pytest.raises(error, match=message):
        construct()


def test_repr_shows_lists_as_tuples():
    assert repr(Wrap(optim.Adam, lr=0.1, betas=[0.5, 0.9])) == "Wrap(Adam, lr=0.1, betas=(0.5, 0.9))"


@pytest.mark.parametrize("name", ["SGD", "RMSprop"])
def test_momentum_may_come_and_go(name):
    params = parameters()
    optimizer = Modular(params, Wrap(CLASSES[name], lr=0.1))
    rows = gradients(params, 3)
    optimizer.param_groups[0]["momentum"] = 0.9
    train(optimizer, params, rows[:2])
    optimizer.param_groups[0]["momentum"] = 0.0
    train(optimizer, params, rows[2:])
    saved = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(saved)
    assert_same_checkpoint(optimizer.state_dict(), saved)
    assert all("wrap/momentum_buffer" in state for state in optimizer.state.values())


def test_settings_of_groups_are_checked_once_and_not_in_every_step():
    made = []

    class Counted(optim.AdamW):
        def __init__(self, params, **kwargs):
            made.append(kwargs)
            super().__init__(params, **kwargs)

    params = parameters()
    groups = [{"params": params[:2]}, {"params": params[2:], "weight_decay": 0.0}]
    optimizer = Modular(groups, Wrap(Counted, weight_decay=0.1))
    train(optimizer, params, gradients(params, 2))  # the second one finds state, whose dtype is compared
    before = len(made)
    train(optimizer, params, gradients(params, 5))
    assert len(made) == before


def test_a_step_that_fails_keeps_the_state_that_it_made():
    class Failing(optim.SGD):
        fails = False

        def step(self, closure=None):
            super().step(closure)
            if self.fails:
                raise RuntimeError("the device is gone")

    params = parameters()
    optimizer = Modular(params, Wrap(Failing, lr=0.1, momentum=0.9))
    Failing.fails = True
    row = gradients(params, 1)
    with pytest.raises(RuntimeError, match="the device is gone"):
        train(optimizer, params, row)
    assert len(optimizer.state) == len(params)
    assert_equal([p.grad for p in params], row[0])


def test_functions_are_settings_wherever_an_argument_may_be_a_number():
    class NoDefaults(optim.SGD):
        def __init__(self, params, lr, momentum, **kwargs):
            super().__init__(params, lr, momentum, **kwargs)

    params = parameters()
    momentum = [0.5, 0.6, 0.7]
    wrapped = Wrap(NoDefaults, lr=0.1, momentum=lambda step: momentum[step], weight_decay=lambda step: step / 10)
    optimizer = Modular(params, wrapped)
    train(optimizer, params, gradients(params, 2))
    assert optimizer.param_groups[0]["momentum"] == 0.7
    assert optimizer.param_groups[0]["weight_decay"] == 0.2


def test_a_step_without_a_closure_argument_will_do():
    class Plain(optim.SGD):
        def step(self):
            super().step()

    params, other = parameters(), parameters()
    rows = gradients(params, 2)
    train(Modular(params, Wrap(Plain, lr=0.1)), params, rows)
    train(optim.SGD(other, lr=0.1), other, rows)
    assert_equal(params, other)


@needs_grad_dtype
@pytest.mark.parametrize("name", ["Adagrad", "NAdam", "SGD"])
def test_wrap_takes_gradients_of_another_dtype(name):
    param, plain = (nn.Parameter(torch.ones(2, dtype=torch.bfloat16)) for _ in range(2))
    param.grad_dtype = torch.float32
    wrapped = getattr(torch.optim, name)
    optimizer, reference = Modular([param], ClipNorm(1.0), Wrap(wrapped, lr=0.5)), wrapped([plain], lr=0.5)
    for _ in range(2):
        param.grad, plain.grad = torch.tensor([3.0, 4.0]), torch.tensor([0.6, 0.8], dtype=torch.bfloat16)
        optimizer.step()
        reference.step()
        assert param.grad.dtype == torch.float32
        assert param.grad.tolist() == [3.0, 4.0]
    assert_equal([param], [plain])


def test_a_fused_optimizer_steps_gradients_of_another_layout():
    params = [
        nn.Parameter(torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last)),
        nn.Parameter(torch.randn(5, 3).t()),
    ]
    twins = [nn.Parameter(param.detach().clone()) for param in params]
    optimizer = Modular(params, Wrap(torch.optim.AdamW, lr=0.1, fused=True))
    other = torch.optim.AdamW(twins, lr=0.1, foreach=False)
    for param, twin in zip(params, twins, strict=True):
        param.grad = torch.randn(param.shape)  # contiguous, unlike the parameter
        twin.grad = param.grad.clone()
    optimizer.step()
    other.step()
    torch.testing.assert_close(params, twins, rtol=1e-6, atol=1e-6)
