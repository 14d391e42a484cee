"""Optimizers of torch.optim at the end of a chain do what they do alone."""

import copy
import inspect
import pickle

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
from versions import needs_grad_dtype

from torchzero_clip import LR, Adam, Chain, ClipNorm, Modular, Muon, WeightDecay, Wrap

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
    assert len(CLASSES) >= 13


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
        (lambda: [Wrap(optim.Adam), ClipNorm(1)], r"ClipNorm\(1\) would have no meaning: put it before"),
        (lambda: [Wrap(optim.Adam), WeightDecay(0.1).only(lambda p: p.ndim == 1)], "put it before"),
        (lambda: [LR(0.1), Wrap(optim.Adam)], r"LR\(0.1\) would have no meaning: leave it out"),
        (lambda: [Wrap(optim.Adam), Wrap(optim.SGD), LR(0.1)], "put it before"),
        (lambda: Chain(Wrap(optim.Adam), target="update_difference"), "cannot stand inside another transform"),
        (lambda: [Wrap(optim.Adam, lr=0.1), LR(0.1)], "one learning rate"),
        (lambda: Wrap(optim.Muon), r"Muon cannot take parameter 1 of its group: Muon only supports 2D"),
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


class GroupCounter(optim.Optimizer):
    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr, "k": 0})

    def step(self, closure=None):
        for group in self.param_groups:
            group["k"] += 1


class AttributeCounter(GroupCounter):
    def __init__(self, params, lr=0.1):
        super().__init__(params, lr)
        self.buffers = {}

    def step(self, closure=None):
        self.buffers[len(self.buffers)] = 1


@pytest.mark.parametrize(
    ("construct", "error", "message"),
    [
        (lambda: Wrap(optim.LBFGS), ValueError, "LBFGS, which evaluates the closure itself"),
        (lambda: Wrap(optim.SparseAdam), ValueError, "sparse gradients only"),
        (lambda: Wrap(GroupCounter), ValueError, "keeps k outside of the state of its parameters"),
        (lambda: Wrap(AttributeCounter), ValueError, "keeps buffers outside of the state of its parameters"),
        (lambda: Wrap(Adam), TypeError, "subclass of torch.optim.Optimizer, got <class 'torchzero_clip"),
        (
            lambda: Wrap(optim.Adam(parameters())),
            TypeError,
            r"the class, not an optimizer: write Wrap\(torch.optim.Adam",
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
    train(optimizer, params, gradients(params, 1))
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
