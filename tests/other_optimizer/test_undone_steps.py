"""If the optimizer does not take a step, its transforms have not acted: the step can be repeated."""

import copy
import random

import pytest
import torch
from contract.training import assert_equal, assert_same_checkpoint, gradients, parameters, set_grads, values
from fast.test_before_step_runs import FRONTS
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from torchzero_clip import (
    AdaGC,
    ClipNorm,
    ClipNormByEMA,
    ClipValueByEMA,
    Recorder,
    SkipStep,
    TensorwiseTransform,
    ZClip,
    before_step,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:a max_norm of 0"),
    pytest.mark.filterwarnings(r"ignore:step \d+. the gradients of"),
]


class Fails(torch.optim.AdamW):
    """Raises in its own step when it is asked to."""

    error = None

    def step(self, closure=None):
        if closure is not None:
            with torch.enable_grad():
                closure()
        if self.error is not None:
            raise self.error
        return super().step()


class Keeps(TensorwiseTransform):
    """An author's transform, which changes state in place and replaces it."""

    def __init__(self):
        super().__init__({})

    def init_state(self, param, setting):
        return {"sum": torch.zeros_like(param), "count": torch.zeros(()), "calls": 0}

    def apply_tensor(self, tensor, param, grad, loss, state, setting):
        state["sum"] += tensor
        state["count"] = state["count"] + 1
        state["calls"] += 1
        return tensor + state["sum"] / state["count"]


CHAINS = {name: lambda make=make: make(random.Random(0)) for name, make in FRONTS.items()}
CHAINS["author"] = lambda: [Keeps(), ClipNormByEMA(0.5)]
CHAINS["author between"] = lambda: [ClipValueByEMA(0.5), Keeps().only(lambda p: p.ndim == 2), ZClip(warmup_steps=1)]
SHAPES = [(40,), (3, 5), (70, 9), (1,)]


def run(chain, *, fails, recorder=False, options=(), steps=7, kind=Fails, fast=True):
    params = parameters(torch.float32, SHAPES)
    optimizer = kind([{"params": params[:2]}, {"params": params[2:], "lr": 0.01}], **dict(options))
    handle = before_step(optimizer, CHAINS[chain](), fast=fast)
    record = Recorder(optimizer) if recorder else None
    for k, row in enumerate(gradients(params, steps)):
        if k in fails:
            set_grads(params, row)
            before, saved = values(params), copy.deepcopy(optimizer.state_dict())
            taken = handle.steps_taken
            optimizer.error = MemoryError("no memory")
            with pytest.raises(MemoryError, match="no memory"):
                optimizer.step()
            optimizer.error = None
            assert_equal(params, before)
            assert_same_checkpoint(optimizer.state_dict(), saved)
            assert handle.steps_taken == taken
            assert handle.metrics().keys() <= {"skipped_steps"}  # not those of the step before
        set_grads(params, row)
        optimizer.step()
    return params, optimizer, handle, record


@pytest.mark.parametrize("chain", ["ema", "adagc", "author between", "several 3", "entry ClipValueByEMA-tfm", "growth"])
def test_a_repeated_step_is_one_step_in_the_readable_way(chain):
    params, optimizer, handle, _ = run(chain, fails={0, 1, 4}, fast=False)
    others, plain, *_ = run(chain, fails=(), fast=False)
    assert_equal(params, values(others))
    assert_same_checkpoint(optimizer.state_dict(), plain.state_dict())
    assert handle.steps_taken == 7


@pytest.mark.parametrize("chain", ["zclip", "ema", "schedule"])
def test_a_recorder_leaves_out_a_step_that_was_not_taken(chain):
    *_, recorder = run(chain, fails={1, 3}, recorder=True)
    *_, expected = run(chain, fails=(), recorder=True)
    reasons = recorder.record().reasons
    assert [k for k, reason in enumerate(reasons) if reason] == [1, 4]
    assert {reason for reason in reasons if reason} == {"error"}
    taken = [norm for norm, reason in zip(recorder.record().norm.tolist(), reasons, strict=True) if not reason]
    assert taken == expected.record().norm.tolist()


class Interrupted(TorchDispatchMode):
    """Raises at one of the operations, counted from 0."""

    def __init__(self, place):
        super().__init__()
        self.place, self.count = place, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.namespace != "profiler"  # with which torch surrounds a step and its hooks
        if self.count == self.place + 1:
            raise KeyboardInterrupt
        return func(*args, **(kwargs or {}))


class OnlyTransforms(torch.optim.SGD):
    """An optimizer that does nothing."""

    def step(self, closure=None):
        pass


INTERRUPTED = ["ema", "zclip", "autoclip", "schedule", "author", "author between", "entry ClipValueByEMA-tfm"]
INTERRUPTED += ["entry AdaGC", "entry ClipValueGrowth", "entry ClipNormGrowth", "entry SkipStep"]


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("chain", [name for name in INTERRUPTED if name in CHAINS])
@pytest.mark.parametrize("before", [0, 1, 4])
def test_an_interrupt_at_any_operation_of_the_transforms_leaves_no_trace(chain, before):
    rows = gradients(parameters(torch.float32, SHAPES), before + 2)

    def started():
        params = parameters(torch.float32, SHAPES)
        optimizer = OnlyTransforms(params)
        before_step(optimizer, CHAINS[chain]())
        for row in rows[:before]:
            set_grads(params, row)
            optimizer.step()
        return params, optimizer

    params, optimizer = started()
    set_grads(params, rows[before])
    with Interrupted(-2) as counted:
        optimizer.step()
    expected = copy.deepcopy(optimizer.state_dict())
    set_grads(params, rows[before + 1])
    optimizer.step()
    later = copy.deepcopy(optimizer.state_dict())
    places = random.Random(f"{chain} {before}").sample(range(counted.count), min(counted.count, 25))
    for place in places:
        params, optimizer = started()
        saved = copy.deepcopy(optimizer.state_dict())
        set_grads(params, rows[before])
        with pytest.raises(KeyboardInterrupt), Interrupted(place):
            optimizer.step()
        assert_same_checkpoint(optimizer.state_dict(), saved)
        set_grads(params, rows[before])
        optimizer.step()
        assert_same_checkpoint(optimizer.state_dict(), expected)
        set_grads(params, rows[before + 1])
        optimizer.step()
        assert_same_checkpoint(optimizer.state_dict(), later)


@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("kind", ["pre", "post"])
def test_an_error_of_another_hook(kind, order):
    """An error of a pre-hook prevents the step. That of a post-hook comes after it, so the step was taken."""
    weight = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([weight], 1.0)

    def raises(*args):
        raise OSError("full disk")

    register = getattr(optimizer, f"register_step_{kind}_hook")
    hook = register(raises) if order == "before" else None
    handle = before_step(optimizer, ClipNormByEMA(0.5), AdaGC())
    hook = hook or register(raises)
    weight.grad = torch.tensor([3.0, 4.0])
    with pytest.raises(OSError, match="full disk"):
        optimizer.step()
    was_taken = kind == "post"
    assert handle.steps_taken == was_taken
    assert bool(optimizer.state) == was_taken
    assert bool(weight.any()) == was_taken
    hook.remove()
    weight.grad = torch.tensor([3.0, 4.0])
    optimizer.step()
    assert handle.steps_taken == 1 + was_taken


def test_a_closure_whose_optimizer_fails_after_it():
    weight = nn.Parameter(torch.zeros(2))
    optimizer = Fails([weight])
    handle = before_step(optimizer, ClipNormByEMA(0.5), ClipNorm(lambda step: 1.0 + step, name="limit"))

    def closure():
        weight.grad = torch.tensor([3.0, 4.0])

    optimizer.error = MemoryError()
    with pytest.raises(MemoryError):
        optimizer.step(closure)
    assert (handle.steps_taken, handle.param_groups[0]["max_norm"]) == (0, 1.0)
    assert not optimizer.state
    optimizer.error = None
    optimizer.step(closure)
    assert (handle.steps_taken, handle.param_groups[0]["max_norm"]) == (1, 2.0)


def test_a_refused_step_stays_counted_when_the_limit_of_skips_raises():
    weight = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([weight], 1.0)
    handle = before_step(optimizer, SkipStep(max_norm=1.0, max_ratio=None), max_consecutive_skips=1)
    for _ in range(2):
        weight.grad = torch.tensor([3.0, 4.0])
        if handle.skipped_steps == 0:
            optimizer.step()
        else:
            with pytest.raises(RuntimeError, match="in a row"):
                optimizer.step()
    assert handle.skipped_steps == 2


def stepped(optimizer, handle, grad=1.0, loss=None, *, fails=False):
    """Take a step, which the optimizer refuses if it fails. Return the gradients that it got."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for param in params:
        param.grad = torch.full_like(param, grad)
    optimizer.error = RuntimeError("the optimizer fails") if fails else None
    if loss is not None:
        handle.report_loss(loss)
    if fails:
        with pytest.raises(RuntimeError, match="the optimizer fails"):
            optimizer.step()
    else:
        optimizer.step()
    return [param.grad.clone() for param in params]


def test_a_value_of_a_schedule_that_came_late_is_undone_too():
    table = [1.0, 0.5]
    optimizer = Fails([nn.Parameter(torch.zeros(3))])
    handle = before_step(optimizer, ClipNorm(lambda step: table[step], dim="global"))
    stepped(optimizer, handle, 9.0)
    stepped(optimizer, handle, 9.0)  # the schedule has no value for the next step
    table.append(0.25)
    stepped(optimizer, handle, 9.0, fails=True)
    table.append(0.125)
    (grad,) = stepped(optimizer, handle, 9.0)
    assert grad.norm().item() == pytest.approx(0.25)


@pytest.mark.parametrize("change", ["reversed", "appended", "removed"])
def test_names_that_were_changed_in_place_are_those_of_their_parameters_after_a_step_that_is_undone(change):
    first, second, third = (nn.Parameter(torch.zeros(3)) for _ in range(3))
    optimizer = Fails([("first", first), ("second", second)])
    handle = before_step(optimizer, ClipNorm(0.5).only("second"))
    group = optimizer.param_groups[0]
    for key, item in (("params", third), ("param_names", "third")):
        if change == "reversed":
            group[key].reverse()
        elif change == "appended":
            group[key].append(item)
        else:
            del group[key][0]
    stepped(optimizer, handle, fails=True)
    grads = stepped(optimizer, handle)
    norms = dict(zip(group["param_names"], [grad.norm().item() for grad in grads], strict=True))
    expected = {name: 0.5 if name == "second" else 3**0.5 for name in group["param_names"]}
    assert norms == pytest.approx(expected)
    assert handle.param_groups[0]["param_names"] == group["param_names"]
