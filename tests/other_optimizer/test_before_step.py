"""Transforms before the steps of any optimizer: what they do, what they leave alone, and what they refuse."""

import copy
import gc
import io
import math
import pickle
import re
import subprocess
import sys
import weakref
from typing import ClassVar

import pytest
import torch
from contract.training import assert_same_checkpoint, gradients, parameters, set_grads, train, values
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from versions import needs_compiler

from torchzero_clip import (
    LR,
    SGD,
    AdamW,
    AdaptiveGradientClip,
    AutoClip,
    ClipNorm,
    ClipNormByEMA,
    ClipValue,
    Modular,
    Recorder,
    SkipStep,
    TensorwiseTransform,
    Transform,
    WeightDecay,
    ZClip,
    before_step,
)
from torchzero_clip.core.group_keys import BEFORE_STEP
from torchzero_clip.engine.listener import Listener

JOINTLY = {"dim": "global"}


def sgd(params, lr=1.0, **options):
    return torch.optim.SGD(params, lr=lr, **options)


class Negate(TensorwiseTransform):
    """Returns new tensors."""

    def __init__(self):
        super().__init__({})

    def apply_tensor(self, tensor, param, grad, loss, state, setting):
        return -tensor


def one(value=0.0):
    return nn.Parameter(torch.full((2,), value))


def stepped(optimizer, param, *grad):
    param.grad = torch.tensor(grad)
    optimizer.step()


def test_the_worked_case():
    weight = one()
    optimizer = sgd([weight])
    handle = before_step(optimizer, ClipNorm(1, dim="global"))
    stepped(optimizer, weight, 3.0, 4.0)
    assert weight.tolist() == pytest.approx([-0.6, -0.8])
    assert weight.grad.tolist() == pytest.approx([0.6, 0.8])
    assert {key: value.item() for key, value in handle.metrics().items()} == pytest.approx(
        {"clip_norm/norm": 5.0, "clip_norm/factor": 0.2, "clip_norm/clipped": 1.0}
    )
    assert handle.skipped_by == ()
    assert handle.skipped_steps == 0


@pytest.mark.parametrize("make", [lambda p: sgd(p, 0.1), lambda p: torch.optim.AdamW(p, 0.1, fused=True)])
@pytest.mark.parametrize("transform", [ClipNorm(1e-3, dim="global"), ClipNorm(1e-3), ClipValue(1e-3)], ids=repr)
def test_transforms_write_to_the_memory_of_the_gradients(make, transform):
    params = parameters()
    optimizer = make(params)
    before_step(optimizer, transform)
    for row in gradients(params, 8):
        set_grads(params, row)
        before = [(param.grad, param.grad.data_ptr()) for param in params]
        optimizer.step()
        assert [(param.grad, param.grad.data_ptr()) for param in params] == before
        assert all(param.grad.abs().max() <= 1.001e-3 for param in params)


KEYS = "ema", "prev", "started"  # the state of a ClipNormByEMA


class Allocations(TorchDispatchMode):
    """Notes operations that copy a large tensor, or return one in new memory."""

    def __init__(self, allowed):
        super().__init__()
        self.allowed, self.operations = allowed, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        arguments = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        allowed = self.allowed | {tensor.untyped_storage().data_ptr() for tensor in arguments}
        for tensor in out if isinstance(out, list | tuple) else [out]:
            is_large = isinstance(tensor, torch.Tensor) and tensor.numel() >= 300_000
            if is_large and (tensor.untyped_storage().data_ptr() not in allowed or "copy" in str(func)):
                self.operations.append(str(func))
        return out


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(
    "chain",
    [
        [ClipNorm(0.5, dim="global")],
        [ClipNorm(0.5), ClipValue(0.1), ClipNorm(0.1, dim="global")],
        [ZClip(), ClipNormByEMA(), AutoClip(50.0)],
        [SkipStep(1e-9), ClipNorm(1)],
    ],
    ids=["joint", "three clips", "statistics", "refused"],
)
def test_nothing_of_the_size_of_a_parameter_is_copied(chain, fused):
    params = [nn.Parameter(torch.randn(500, 600)) for _ in range(3)]
    optimizer = torch.optim.SGD(params, 0.1, fused=fused)
    handle = before_step(optimizer, *chain)
    for k in range(6):
        for param in params:
            param.grad = torch.randn(500, 600)
        states = [value for state in handle._followed.state.values() for value in state.values()]
        held = [tensor for param in params for tensor in (param, param.grad)] + states
        with Allocations({tensor.untyped_storage().data_ptr() for tensor in held}) as seen:
            optimizer.step()
        assert k < 2 or seen.operations == []  # before, memory for pieces is allocated once
    assert handle.skipped_steps == (6 if isinstance(chain[0], SkipStep) else 0)


def test_parameters_are_those_of_the_groups_at_each_step():
    first, second, third = one(), one(), one()
    optimizer = sgd([first])
    handle = before_step(optimizer, ClipNormByEMA(0.5))
    stepped(optimizer, first, 3.0, 4.0)
    optimizer.add_param_group({"params": [second]})
    handle.param_groups[1]["beta"] = 0.25
    for param in (first, second):
        param.grad = torch.tensor([3.0, 4.0])
    optimizer.step()
    assert [len(group["params"]) for group in handle.param_groups] == [1, 1]
    assert handle.param_groups[1]["beta"] == 0.25
    # a parameter that takes the place of another begins anew, in the settings of its group
    optimizer.param_groups[1]["params"][0] = third
    third.grad = torch.tensor([3.0, 4.0])
    optimizer.step()
    assert handle.param_groups[1]["beta"] == 0.25
    saved, states = optimizer.state_dict()["param_groups"], optimizer.state_dict()["state"]
    assert [set(state["before_step"]) for state in states.values()] == [{f"clip_norm_by_ema/{k}" for k in KEYS}] * 2
    assert [len(group["params"]) for group in saved] == [1, 1]
    del optimizer.param_groups[0]
    optimizer.step()
    assert [group["beta"] for group in handle.param_groups] == [0.25]


def test_a_group_that_does_not_fit_raises_before_a_step_and_changes_nothing():
    weight, scalar = one(), nn.Parameter(torch.zeros(()))

    class NoScalars(ClipNorm):
        def check_parameter(self, name, param):
            if param.ndim == 0:
                raise ValueError(f"{name} is a scalar")

    optimizer = sgd([weight])
    handle = before_step(optimizer, NoScalars(1))
    optimizer.add_param_group({"params": [scalar]})
    weight.grad, scalar.grad = torch.tensor([3.0, 4.0]), torch.tensor(2.0)
    with pytest.raises(ValueError, match="is a scalar"):
        optimizer.step()
    assert weight.tolist() == [0.0, 0.0]
    assert weight.grad.tolist() == [3.0, 4.0]
    del optimizer.param_groups[1]
    optimizer.step()
    assert weight.tolist() == pytest.approx([-0.6, -0.8])
    assert len(handle.param_groups) == 1


@pytest.mark.parametrize("copied", [False, True])
def test_settings_stay_with_their_parameters_when_groups_are_exchanged(copied):
    params = [one() for _ in range(4)]
    optimizer = sgd([{"params": [param]} for param in params[:3]])
    handle = before_step(optimizer, ClipNorm(1))
    for group, limit in zip(handle.param_groups, (1.0, 2.0, 3.0), strict=True):
        group["max_norm"] = limit
    del optimizer.param_groups[0]
    optimizer.add_param_group({"params": [params[3]]})  # as many groups as before
    if copied:
        optimizer.param_groups = [{**group, "params": list(group["params"])} for group in optimizer.param_groups[::-1]]
    for param in params:
        param.grad = torch.tensor([30.0, 40.0])
    optimizer.step()
    assert [group["max_norm"] for group in handle.param_groups] == ([1.0, 3.0, 2.0] if copied else [2.0, 3.0, 1.0])
    assert [param.norm().item() for param in params] == pytest.approx([0.0, 2.0, 3.0, 1.0])


@pytest.mark.parametrize("fused", [False, True])
def test_the_gradient_of_a_frozen_parameter_is_left_alone(fused):
    """The optimizers of torch step with it too."""
    weight, frozen = one(), one().requires_grad_(False)
    optimizer = sgd([weight, frozen], fused=fused)
    before_step(optimizer, ClipNorm(1, dim="global"))
    for k in range(1, 7):
        frozen.grad = torch.tensor([3.0, 4.0])
        stepped(optimizer, weight, 3.0, 4.0)
        assert weight.norm().item() == pytest.approx(k)
        assert frozen.tolist() == [-3.0 * k, -4.0 * k]


def test_the_kernel_multiplies_only_if_all_groups_are_fused():
    """The step of a group without ``fused`` raises if it gets a factor."""
    params, others = (parameters(shapes=[(2,), (2, 2)]) for _ in range(2))
    for each in (params, others):
        optimizer = torch.optim.AdamW([{"params": each[:1]}, {"params": each[1:], "fused": False}], fused=True)
        clips = each is params and before_step(optimizer, ClipNorm(0.1, dim="global"))
        for row in gradients(each, 4):
            set_grads(each, row)
            if not clips:
                nn.utils.clip_grad_norm_(each, 0.1)
            optimizer.step()
    torch.testing.assert_close(params, others)


class Seer(Listener):
    """Notes the loss of each step."""

    def __init__(self, seen):
        self.seen = seen

    def begin(self, step):
        pass

    def end(self, step):
        self.seen.append(float(step.loss.value))


class Twice(torch.optim.AdamW):
    """A subclass whose step calls that of its base class, which runs the hooks once more."""

    @torch.no_grad()
    def step(self, closure=None):
        return super().step(closure)


@pytest.mark.parametrize("by_closure", [False, True])
def test_transforms_act_once_in_a_step_that_calls_that_of_the_base_class(by_closure):
    params, others = parameters(), parameters()
    optimizer, plain = Twice(params, 0.1), torch.optim.AdamW(others, 0.1)
    handles = [
        before_step(o, ClipNorm(lambda step: 1.0 / (1 + step), dim="global"), AutoClip(50)) for o in (optimizer, plain)
    ]
    torch.optim.AdamW([one()])  # hooks the base class too
    for row in gradients(params, 6):
        for group, chosen in ((params, optimizer), (others, plain)):
            set_grads(group, row)
            chosen.step(lambda: 1.0) if by_closure else chosen.step()
    assert all(map(torch.equal, values(params), values(others)))
    first, second = (handle.param_groups[0] for handle in handles)
    assert first["schedule_step"] == second["schedule_step"] == 6
    assert all(torch.equal(value, second[key]) for key, value in first.items() if isinstance(value, torch.Tensor))


@pytest.mark.parametrize(
    "transform",
    [AdamW(), LR(0.1), ClipNorm(1, target="params_direct"), ClipNorm(1, target="params_difference"), WeightDecay(0.1)],
    ids=repr,
)
def test_what_changes_parameters_is_refused(transform):
    if isinstance(transform, WeightDecay):
        before_step(sgd([one()]), transform)
        return
    with pytest.raises(TypeError, match=re.escape(f"the optimizer takes the step: leave out {transform!r}")):
        before_step(sgd([one()]), ClipNorm(1), transform)


def test_refusals_of_optimizers():
    weight = one()
    with pytest.raises(TypeError, match=r"Modular\(params, ClipNorm\(1\), ...\)"):
        before_step(Modular([weight], AdamW()), ClipNorm(1))
    with pytest.raises(TypeError, match="LBFGS takes no step without a closure"):
        before_step(torch.optim.LBFGS([weight]), ClipNorm(1))
    with pytest.raises(TypeError, match="got list"):
        before_step([weight], ClipNorm(1))
    with pytest.raises(TypeError, match="got ClipNorm"):
        before_step(ClipNorm(1), sgd([one()]))
    optimizer = sgd([weight])
    with pytest.raises(ValueError, match="at least one transform"):
        before_step(optimizer)
    with pytest.raises(TypeError, match=r"no argument 'max_norm'; write ClipNorm\(max_norm=...\)$"):
        before_step(optimizer, ClipNorm(1), max_norm=2)
    with pytest.raises(TypeError, match="no argument 'lr'; there are: optimizer, transforms"):
        before_step(optimizer, ClipNorm(1), lr=2)
    handle = before_step(optimizer, ClipNorm(1))
    with pytest.raises(RuntimeError, match="already has transforms before its steps"):
        before_step(optimizer, ClipNorm(1))
    handle.remove()
    other = before_step(optimizer, ClipNorm(2))
    handle.remove()
    assert "before_step" in optimizer.param_groups[0]
    other.remove()
    with before_step(optimizer, ClipNorm(1)):
        stepped(optimizer, weight, 3.0, 4.0)
    assert weight.tolist() == pytest.approx([-0.6, -0.8])
    stepped(optimizer, weight, 3.0, 4.0)
    assert weight.tolist() == pytest.approx([-3.6, -4.8])
    assert "before_step" not in optimizer.param_groups[0]
    assert "step" not in vars(optimizer)


class Lookahead(torch.optim.Optimizer):
    """As timm's: it does not call the constructor of Optimizer, and its state dict is that of the optimizer inside."""

    def __init__(self, base):
        self._base_optimizer = base
        self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = {}, {}
        self.param_groups, self.defaults, self.state = base.param_groups, base.defaults, base.state

    def step(self, closure=None):
        return self._base_optimizer.step(closure)


class Sharpness(torch.optim.Optimizer):
    """As SAM: it moves parameters before the closure, so that a step cannot be refused after it."""

    def __init__(self, base):
        self.base_optimizer = base
        super().__init__(base.param_groups, {})

    def step(self, closure=None):
        return self.base_optimizer.step(closure)


class Scaler:
    """A wrapper that is no optimizer, and may change gradients."""

    def __init__(self, optimizer):
        self.optimizer = optimizer


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Lookahead, "Lookahead takes its steps by another optimizer: call before_step on optimizer._base_optimizer"),
        (Sharpness, "Sharpness takes its steps by another optimizer: call before_step on optimizer.base_optimizer"),
        (Scaler, "optimizer must be a torch.optim.Optimizer, got Scaler: call before_step on optimizer.optimizer"),
    ],
)
def test_what_wraps_another_optimizer_names_it(kind, message):
    weight = one()
    inside = sgd([weight])
    with pytest.raises(TypeError, match=message):
        before_step(kind(inside), ClipNorm(1))
    before_step(inside, ClipNorm(1))
    stepped(kind(inside) if kind is not Scaler else inside, weight, 3.0, 4.0)
    assert weight.tolist() == pytest.approx([-0.6, -0.8])


class Bare(torch.optim.Optimizer):
    def __init__(self, params):
        self.param_groups, self.defaults, self.state = [{"params": params}], {}, {}


def test_an_optimizer_without_hooks_is_refused():
    with pytest.raises(TypeError, match="Bare lacks hooks"):
        before_step(Bare([one()]), ClipNorm(1))


class SavesAlone(torch.optim.SGD):
    def state_dict(self):
        return {"state": {}, "param_groups": []}


def test_an_optimizer_that_saves_without_hooks_is_refused_and_left_as_it_was():
    optimizer = SavesAlone([one()], 0.1)
    with pytest.raises(TypeError, match=r"SavesAlone.state_dict runs no hooks"):
        before_step(optimizer, ClipNorm(1))
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_load_state_dict_pre_hooks
    assert "step" not in vars(optimizer)
    assert "before_step" not in optimizer.param_groups[0]


class NotGathered(torch.optim.SGD):
    def state_dict(self):
        raise RuntimeError("the state was not gathered")


def test_an_optimizer_that_cannot_save_is_left_as_it_was():
    optimizer = NotGathered([one()], 0.1)
    with pytest.raises(RuntimeError, match="was not gathered"):
        before_step(optimizer, ClipNorm(1))
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_load_state_dict_pre_hooks
    assert "step" not in vars(optimizer)
    assert "before_step" not in optimizer.param_groups[0]


class Counts(torch.optim.Optimizer):
    """Counts everywhere, whether or not there are gradients."""

    def __init__(self, params):
        super().__init__(params, {"lr": 1.0, "k": 0, "history": [0], "step": torch.zeros(())})
        self.steps, self.total, self.kept = 0, torch.zeros(3), {"deep": [torch.zeros(1), {1}]}

    @torch.no_grad()
    def step(self, closure=None):
        self.steps += 1
        self.total += 1
        self.kept["deep"][0] += 1
        self.kept["deep"][1].add(self.steps + 1)
        self.new = self.steps
        self.state["calls"] = self.state.get("calls", 0) + 1
        for group in self.param_groups:
            group["k"] += 1
            group["history"].append(group["k"])
            group["step"] += 1
            for param in group["params"]:
                if param.grad is not None:
                    param -= group["lr"] * param.grad / self.steps
        return "result"


def counted(optimizer):
    group = {key: copy.deepcopy(value) for key, value in optimizer.param_groups[0].items() if key != "params"}
    counts = {key: copy.deepcopy(getattr(optimizer, key, None)) for key in ("steps", "total", "kept", "new")}
    return repr((group, counts, {k: v for k, v in optimizer.state.items() if isinstance(k, str)}))


@pytest.mark.parametrize("how", ["gate", "nonfinite"])
def test_a_refused_step_changes_nothing(how):
    weight = one()
    optimizer = Counts([weight])
    handle = before_step(optimizer, SkipStep(10.0), ZClip(), nonfinite="skip")
    stepped(optimizer, weight, 3.0, 4.0)
    before, at = counted(optimizer), weight.tolist()
    bad = torch.tensor([300.0, 400.0] if how == "gate" else [torch.nan, 1.0])
    weight.grad = bad
    assert optimizer.step() is None  # the optimizer is not called
    assert weight.grad is bad
    assert weight.tolist() == at
    assert counted(optimizer) == before
    assert handle.skipped_by == (("skip_step",) if how == "gate" else ("skip_step", "nonfinite"))
    assert handle.skipped_steps == 1
    if how == "nonfinite":
        assert handle.bad_gradients.total == 1
    assert {k: v.item() for k, v in handle.metrics().items()} == {"skip_step/mean": 5, "skipped_steps": 1}
    stepped(optimizer, weight, 3.0, 4.0)
    assert handle.skipped_by == ()
    assert optimizer.steps == 2
    assert weight.tolist() != at


class NeedsGradients(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure=None):
        max(
            param.grad.abs().max() for group in self.param_groups for param in group["params"] if param.grad is not None
        )
        return super().step(closure)


def test_a_refused_step_is_not_taken_by_an_optimizer_that_cannot_step_without_gradients():
    weight = one()
    optimizer = NeedsGradients([weight], 1.0)
    before_step(optimizer, SkipStep(10.0))
    stepped(optimizer, weight, 3.0, 4.0)
    stepped(optimizer, weight, 30.0, 40.0)
    assert weight.grad.tolist() == [30.0, 40.0]
    assert weight.tolist() == [-3.0, -4.0]
    stepped(optimizer, weight, 3.0, 4.0)
    assert weight.tolist() == [-6.0, -8.0]


def test_a_step_that_raises_is_followed_by_ordinary_steps():
    weight = one()
    optimizer = sgd([weight])
    handle = before_step(optimizer, ClipNorm(1, dim="global"))
    hook = optimizer.register_step_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        stepped(optimizer, weight, 3.0, 4.0)
    hook.remove()
    stepped(optimizer, weight, 3.0, 4.0)
    assert weight.tolist() == pytest.approx([-0.6, -0.8])
    assert handle.skipped_by == ()


def test_a_step_that_is_called_around_the_wrapper_is_the_same_step():
    """Accelerate calls a method that it kept from before."""
    weight = one()
    optimizer = sgd([weight])
    kept = optimizer.step
    handle = before_step(optimizer, SkipStep(10.0), ClipNorm(1, dim="global"))
    for grad, expected in (((3.0, 4.0), [-0.6, -0.8]), ((30.0, 40.0), [-0.6, -0.8]), ((3.0, 4.0), [-1.2, -1.6])):
        weight.grad = torch.tensor(grad)
        kept()
        assert weight.tolist() == pytest.approx(expected)
        assert weight.grad is not None
    assert handle.skipped_steps == 1


@pytest.mark.parametrize("again", ["kept", "step"])
def test_a_step_around_the_wrapper_that_raises_is_followed_by_ordinary_steps(again):
    weight = one()
    optimizer = sgd([weight])
    kept = optimizer.step
    handle = before_step(optimizer, ClipNorm(lambda step: 1.0 / (1 + step), dim="global"))
    hook = optimizer.register_step_pre_hook(lambda *_: 1 / 0)
    weight.grad = torch.tensor([3.0, 4.0])
    with pytest.raises(ZeroDivisionError):
        kept()
    hook.remove()
    weight.grad = torch.tensor([3.0, 4.0])
    kept() if again == "kept" else optimizer.step()
    assert weight.tolist() == pytest.approx([-0.6, -0.8])
    assert handle.steps_taken == 1


def test_a_step_around_the_wrapper_that_calls_that_of_its_base_is_refused():
    weight = one()
    torch.optim.AdamW([one()])  # hooks the base class
    optimizer = Twice([weight], 0.1)
    kept = optimizer.step
    before_step(optimizer, ClipNorm(1, dim="global"))
    weight.grad = torch.tensor([3.0, 4.0])
    with pytest.raises(RuntimeError, match=r"step of Twice, which may call .* cannot know where it ends: call before_"):
        kept()
    assert (weight.tolist(), weight.grad.tolist()) == ([0.0, 0.0], [3.0, 4.0])


def test_a_step_around_the_wrapper_that_is_inherited_runs_its_hooks_once():
    """Torch hooks the same function for both classes."""
    for kind in (torch.optim.AdamW, torch.optim.Adam):
        kind([one()])
    weight = one()
    optimizer = torch.optim.AdamW([weight], 0.1)
    kept = optimizer.step
    handle = before_step(optimizer, ClipNorm(1, dim="global"))
    weight.grad = torch.tensor([3.0, 4.0])
    kept()
    assert handle.metrics()["clip_norm/norm"].item() == pytest.approx(5.0)


def test_a_step_around_the_wrapper_of_another_optimizer_than_torchs_is_not_refused_in_silence():
    """It may count steps without gradients."""
    weight = one()
    optimizer = NeedsGradients([weight], 1.0)
    kept = optimizer.step
    before_step(optimizer, SkipStep(10.0), ClipNorm(1, dim="global"))
    weight.grad = torch.tensor([3.0, 4.0])
    with pytest.raises(RuntimeError, match=r"step of NeedsGradients was stored before.*call before_step first"):
        kept()
    assert (weight.tolist(), weight.grad.tolist()) == ([0.0, 0.0], [3.0, 4.0])
    optimizer.step()
    assert weight.tolist() == pytest.approx([-0.6, -0.8])


def _shorter(saved):
    saved["param_groups"][0]["params"].pop()


def _another_group(saved):
    saved["param_groups"].append(copy.deepcopy(saved["param_groups"][0]))


def _another_shape(saved):
    saved["state"][0]["before_step"]["clip_norm_by_ema/ema"]["step"] = torch.zeros(7)


def _another_value(saved):
    saved["param_groups"][0]["before_step"]["settings"]["beta"] = 7.0


def _less_state(saved):
    del saved["state"][0]["before_step"]


def _only_tensors(saved):
    saved["param_groups"][0]["before_step"] = saved["param_groups"][0]["before_step"]["settings"]["beta"]


def _no_settings(saved):
    del saved["param_groups"][0]["before_step"]["settings"]


def test_a_checkpoint_of_other_transforms_names_the_call_that_loads_what_fits():
    params = parameters()
    optimizer = torch.optim.AdamW(params)
    before_step(optimizer, AutoClip(50))
    saved = torch.optim.AdamW(params)
    before_step(saved, ClipNormByEMA())
    with pytest.raises(
        ValueError,
        match=r"pass new=\['auto_clip'\], dropped=\['clip_norm_by_ema'\] to load_state_dict, or to before_step",
    ):
        optimizer.load_state_dict(saved.state_dict())


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (_shorter, "param groups of"),
        (_another_group, "param groups of"),
        (_another_shape, r"is a tensor of shape \(7,\)"),
        (_another_value, "beta must be in"),
        (_less_state, "lacks state of the transforms"),
        (_only_tensors, "lacks state of the transforms"),
        (_no_settings, "lacks state of the transforms"),
    ],
)
def test_a_checkpoint_that_does_not_fit_changes_nothing(spoil, message):
    params = parameters()
    optimizer = torch.optim.AdamW(params)
    before_step(optimizer, ClipNormByEMA(), AutoClip(50))
    train(optimizer, params, gradients(params, 3))
    saved = copy.deepcopy(optimizer.state_dict())
    spoil(saved)
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match=message) as raised:
        optimizer.load_state_dict(saved)
    assert "new=" not in str(raised.value)  # it would not help
    assert_same_checkpoint(optimizer.state_dict(), before)


@pytest.mark.parametrize("part", ["state", "param_groups"])
def test_what_is_no_checkpoint_gets_the_error_of_torch_and_changes_nothing(part):
    params = parameters()
    optimizer = torch.optim.AdamW(params)
    before_step(optimizer, ClipNormByEMA())
    train(optimizer, params, gradients(params, 2))
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(KeyError, match=part):
        optimizer.load_state_dict({key: value for key, value in before.items() if key != part})
    assert_same_checkpoint(optimizer.state_dict(), before)


def test_closures_are_evaluated_once_and_transforms_act_after_them():
    weight = one()
    optimizer = sgd([weight])
    handle = before_step(optimizer, SkipStep(10.0), ClipNorm(1, dim="global"))

    def closure(size=1.0):
        weight.grad = torch.tensor([3.0, 4.0]) * size
        return 7.0 * size

    assert optimizer.step(closure) == 7.0
    assert optimizer.step(closure=closure) == 7.0
    assert optimizer.step(lambda: closure(100.0)) == 700.0
    assert handle.skipped_by == ("skip_step",)
    assert weight.tolist() == pytest.approx([-1.2, -1.6])


def test_a_second_evaluation_of_a_closure_raises_and_shows_the_function():
    class Line(torch.optim.SGD):
        def step(self, closure=None):
            closure()
            return closure()

    weight = one()
    optimizer = Line([weight], 1.0)
    before_step(optimizer, ClipNorm(1))

    def measured_loss():
        weight.grad = torch.ones(2)
        return 1.0

    with pytest.raises(RuntimeError, match=r"Line evaluates its closure several times in one step.*measured_loss"):
        optimizer.step(measured_loss)


class Moves(torch.optim.SGD):
    """Like schedule-free optimizers that take a closure, it moves parameters before it evaluates the closure."""

    @torch.no_grad()
    def step(self, closure=None):
        for param in self.param_groups[0]["params"]:
            param.add_(1.0)
        with torch.enable_grad():
            loss = closure()
        super().step()
        return loss


@pytest.mark.parametrize(
    ("transform", "nonfinite", "raises"),
    [(SkipStep(10.0), "propagate", True), (ClipNorm(1), "skip", True), (ClipNorm(1), "propagate", False)],
)
def test_gates_raise_for_an_optimizer_that_moves_parameters_before_its_closure(transform, nonfinite, raises):
    weight = one()
    optimizer = Moves([weight], 1.0)
    handle = before_step(optimizer, transform, nonfinite=nonfinite)

    def closure():
        weight.grad = torch.tensor([3.0, 4.0])
        return 1.0

    if raises:
        with pytest.raises(RuntimeError, match=r"Moves moves parameters before it evaluates its closure.*leave out"):
            optimizer.step(closure)
        assert handle.steps_taken == 0
    else:
        optimizer.step(closure)
        assert weight.tolist() == pytest.approx([0.4, 0.2])


def through_file(saved):
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def test_the_checkpoint_of_the_optimizer_has_the_state_and_loads_into_the_same_transforms_only():
    params, others = parameters(), parameters()
    chain = lambda: [ZClip(warmup_steps=2), ClipNormByEMA(), AutoClip(50)]  # noqa: E731
    optimizer, second = torch.optim.AdamW(params), torch.optim.AdamW(others)
    first, other = before_step(optimizer, *chain()), before_step(second, *chain())
    rows = gradients(params, 10)
    train(optimizer, params, rows[:5])
    saved = through_file(optimizer.state_dict())
    assert set(saved["param_groups"][0]["before_step"]) == {"settings", "each"}
    with torch.no_grad():
        for param, source in zip(others, params, strict=True):
            param.copy_(source)
    second.load_state_dict(saved)
    assert "settings" in saved["param_groups"][0]["before_step"]  # the checkpoint of the caller is not changed
    train(optimizer, params, rows[5:])
    train(second, others, rows[5:])
    assert all(map(torch.equal, values(params), values(others)))
    assert [{k: v.item() for k, v in handle.metrics().items()} for handle in (first,)] == [
        {k: v.item() for k, v in handle.metrics().items()} for handle in (other,)
    ]
    third = torch.optim.AdamW(parameters())
    before_step(third, ZClip(warmup_steps=2))
    before = copy.deepcopy(third.state_dict())
    with pytest.raises(ValueError, match="the checkpoint belongs to another chain"):
        third.load_state_dict(saved)
    assert repr(third.state_dict()) == repr(before)
    fourth = torch.optim.AdamW(parameters())
    before_step(fourth, ZClip(warmup_steps=2), dropped=["clip_norm_by_ema", "auto_clip"])
    fourth.load_state_dict(saved)
    ours, theirs = (o.state_dict()["param_groups"][0]["before_step"]["settings"] for o in (fourth, optimizer))
    assert ours["z_clip/started"] != 0 if "z_clip/started" in ours else ours.keys() < theirs.keys()


def test_a_checkpoint_that_was_loaded_before_the_call_is_taken_over():
    params, others = parameters(), parameters()
    optimizer = torch.optim.AdamW(params)
    before_step(optimizer, ClipNormByEMA())
    rows = gradients(params, 10)
    train(optimizer, params, rows[:5])
    saved = through_file([optimizer.state_dict(), values(params)])
    second = torch.optim.AdamW(others)
    with torch.no_grad():
        for param, source in zip(others, params, strict=True):
            param.copy_(source)
    second.load_state_dict(saved[0])
    before_step(second, ClipNormByEMA())
    train(optimizer, params, rows[5:])
    train(second, others, rows[5:])
    assert all(map(torch.equal, values(params), values(others)))


def test_a_checkpoint_without_the_entry_loads_and_warns_once():
    weight = one()
    plain = torch.optim.AdamW([weight]).state_dict()
    optimizer = torch.optim.AdamW([one()])
    handle = before_step(optimizer, ZClip())
    with pytest.warns(UserWarning, match="has no state of the transforms"):
        optimizer.load_state_dict(plain)
    optimizer.load_state_dict(plain)  # a warning would raise
    assert len(handle.param_groups) == 1
    stepped(optimizer, optimizer.param_groups[0]["params"][0], 3.0, 4.0)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))], ids=["deepcopy", "pickle"])
def test_a_copy_has_no_transforms_and_warns_once_by_name(copied):
    optimizer = sgd([one()])
    before_step(optimizer, ClipNorm(1, dim="global"))
    other = copied(optimizer)
    weight = other.param_groups[0]["params"][0]
    with pytest.warns(UserWarning, match="the SGD that this one was copied or loaded from had transforms"):
        stepped(other, weight, 3.0, 4.0)
    stepped(other, weight, 3.0, 4.0)  # a warning would raise
    assert weight.tolist() == [-6.0, -8.0]
    before_step(other, ClipNorm(1, dim="global"))
    stepped(other, weight, 3.0, 4.0)
    assert weight.tolist() == pytest.approx([-6.6, -8.8])


@pytest.mark.slow
def test_a_copy_in_another_process_warns_after_the_first_call_there(tmp_path):
    optimizer = sgd([one()])
    before_step(optimizer, ClipNorm(1, dim="global"))
    tmp_path.joinpath("pickle").write_bytes(pickle.dumps([optimizer, optimizer.state_dict()]))
    script = """
import pathlib, pickle, sys, torch, torchzero_clip
optimizer, saved = pickle.loads(pathlib.Path(sys.argv[1]).read_bytes())
optimizer.step()
torchzero_clip.before_step(torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))]), torchzero_clip.ClipNorm(1))
optimizer.step()
resumed = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))])
resumed.load_state_dict(saved)
resumed.step()
"""
    command = [sys.executable, "-c", script, str(tmp_path / "pickle")]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    warned = [line for line in run.stderr.splitlines() if "call before_step on it" in line]
    assert [line.split(":")[:2] for line in warned] == [["<string>", "6"], ["<string>", "9"]]


def test_a_checkpoint_that_is_loaded_after_remove_warns_that_transforms_are_missing():
    weight = one()
    optimizer = sgd([weight])
    handle = before_step(optimizer, ClipNorm(1, dim="global"))
    saved = copy.deepcopy(optimizer.state_dict())
    handle.remove()
    optimizer.load_state_dict(saved)
    with pytest.warns(UserWarning, match="had transforms before its steps. This one has none"):
        stepped(optimizer, weight, 3.0, 4.0)
    assert weight.tolist() == [-3.0, -4.0]


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps], ids=["copy", "deepcopy", "pickle"])
def test_a_handle_cannot_be_copied(copied):
    """A copy would belong to the optimizer of the original, and its remove() to the hooks of that one."""
    handle = before_step(sgd([one()]), ClipNorm(1))
    with pytest.raises(TypeError, match="call before_step on the copy of the optimizer"):
        copied({"handle": handle} if copied is not copy.copy else handle)


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate parameters")
def test_a_parameter_that_is_listed_twice_is_refused():
    weight = one()
    with pytest.raises(ValueError, match="listed twice"):
        before_step(sgd([weight, weight]), ClipNorm(1))
    optimizer = sgd([weight])
    before_step(optimizer, ClipNorm(1))
    optimizer.param_groups[0]["params"].append(weight)
    for _ in range(2):
        with pytest.raises(ValueError, match="listed twice"):
            stepped(optimizer, weight, 3.0, 4.0)
    assert weight.tolist() == [0.0, 0.0]
    assert weight.grad.tolist() == [3.0, 4.0]
    optimizer.param_groups[0]["params"].pop()
    stepped(optimizer, weight, 3.0, 4.0)
    assert weight.tolist() == pytest.approx([-0.6, -0.8])


def test_the_loss_of_a_step_that_a_scaler_refuses_is_forgotten():
    weight = one()
    optimizer = torch.optim.AdamW([weight], fused=True)
    handle = before_step(optimizer, SkipStep(sigma=3.0, window=4))
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(()))
    seen = []
    handle.runner.listener = Seer(seen)
    for loss, size in ((1.0, 1.0), (1e6, torch.inf), (2.0, 1.0)):
        handle.report_loss(loss)
        weight.grad = torch.full((2,), size) * scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
    assert seen == [1.0, 2.0]


def test_a_deleted_optimizer_is_freed_at_once():
    weight = one()
    optimizer = sgd([weight])
    handle = before_step(optimizer, ClipNorm(1))
    stepped(optimizer, weight, 3.0, 4.0)
    assert repr(handle) == "before_step(SGD, ClipNorm(1))"
    reference, step, zero_grad = weakref.ref(optimizer), optimizer.step, optimizer.zero_grad
    gc.disable()
    try:
        del optimizer
        assert reference() is None
    finally:
        gc.enable()
    for call in (lambda: handle.param_groups, step, zero_grad):
        with pytest.raises(ReferenceError, match="was deleted"):
            call()
    assert repr(handle) == "before_step(deleted, ClipNorm(1))"
    handle.remove()


@pytest.mark.parametrize("is_first", [False, True])
def test_schedulers_of_torch_find_their_step(is_first):
    weight = one()
    optimizer = sgd([weight])
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5) if is_first else None
    before_step(optimizer, ClipNorm(1, dim="global")).remove()
    before_step(optimizer, ClipNorm(1, dim="global"))
    scheduler = scheduler or torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    for expected in ([-0.6, -0.8], [-0.9, -1.2]):
        stepped(optimizer, weight, 3.0, 4.0)
        scheduler.step()  # it would warn if its wrapper of step were lost
        assert weight.tolist() == pytest.approx(expected)


@pytest.mark.parametrize("unscaled", [False, True])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("transform", [ClipNorm(0.01, dim="global"), ZClip(warmup_steps=2), ClipValue(1e-3)], ids=repr)
def test_a_gradient_scaler_shows_unscaled_gradients(transform, fused, unscaled):
    params, others = parameters(), parameters()
    optimizer, plain = (torch.optim.AdamW(ours, 0.01, fused=fused) for ours in (params, others))
    handle, other = before_step(optimizer, transform), before_step(plain, copy.deepcopy(transform))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000)
    for k, row in enumerate(gradients(params, 8)):
        set_grads(params, [grad * scaler.get_scale() for grad in row])
        scaler.scale(torch.ones(()))  # as in a loop, makes the scale exist
        if k == 4:
            params[0].grad.view(-1)[0] = torch.inf
        if unscaled:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        if k == 4:
            assert handle.skipped_by == (("found_inf",) if fused else ())
            continue
        set_grads(others, row)
        plain.step()
    for ours, theirs in zip(params, others, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6 if fused else 1e-7)
    for key, value in other.metrics().items():
        torch.testing.assert_close(handle.metrics()[key], value)


def test_a_template_step_of_zeros_moves_nothing():
    params = parameters()
    optimizer = torch.optim.AdamW(params, lr=0.0)
    handle = before_step(optimizer, AutoClip(50), ClipNorm(lambda step: 1.0 + step), ClipNormByEMA())
    for param in params:
        param.grad = torch.zeros_like(param)
    optimizer.step()
    assert handle.param_groups[0]["schedule_step"] == 0
    assert handle.metrics() == {}
    assert all(state["before_step"] for state in optimizer.state_dict()["state"].values())
    assert len(optimizer.state) == len(params)


@pytest.mark.parametrize("order", ["before", "after"])
def test_a_recorder_sees_the_norms_before_the_transforms_and_what_they_did(order):
    weight = one()
    optimizer = sgd([weight])
    recorder = Recorder(optimizer, ratios_every=1) if order == "before" else None
    handle = before_step(optimizer, SkipStep(100.0), ClipNorm(1, dim="global"))
    recorder = recorder or Recorder(optimizer, ratios_every=1)
    weight.data.fill_(1.0)
    for grad in ((0.0, 0.0), (3.0, 4.0), (300.0, 400.0), (0.3, 0.4)):
        stepped(optimizer, weight, *grad)
    record = recorder.record()
    assert record.norm.tolist() == pytest.approx([0.0, 5.0, 500.0, 0.5])
    assert not record.norm.requires_grad
    assert list(record.reasons) == ["", "", "skip_step", ""]
    assert record.share_clipped.tolist()[1] == 1.0
    assert record.ratios[1].relative.tolist() == pytest.approx([1.0 / 2**0.5])
    recorder.close()
    handle.remove()


def test_after_remove_a_recorder_goes_on_by_itself():
    weight = one()
    optimizer = sgd([weight])
    recorder = Recorder(optimizer)
    handle = before_step(optimizer, ClipNorm(1, dim="global"))
    stepped(optimizer, weight, 3.0, 4.0)
    handle.remove()
    stepped(optimizer, weight, 6.0, 8.0)
    assert recorder.record().norm.tolist() == pytest.approx([5.0, 10.0])


class Reads(Transform):
    """Returns the gradient, whatever came before."""

    def __init__(self):
        super().__init__({})

    def apply_tensors(self, updates, step):
        return [grad.clone() for grad in step.grads]


def test_a_transform_of_an_author_sees_the_gradients_as_they_were():
    weight = one()
    optimizer = sgd([weight])
    before_step(optimizer, ClipNorm(1), ClipValue(0.1), Reads())
    stepped(optimizer, weight, 3.0, 4.0)
    assert weight.tolist() == [-3.0, -4.0]


@pytest.mark.parametrize("limit", [1.0, 1e9])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_new_tensors_of_a_transform_reach_the_optimizer_through_a_joint_clip(limit, fused, dtype):
    """A clip may leave its factor to the optimizer, except after a transform that returns other tensors."""
    results = []
    for fast in (True, False):
        params = parameters(dtype)
        optimizer = sgd(params, 0.1, fused=fused)
        before_step(optimizer, Negate(), ClipNorm(limit, dim="global"), fast=fast)
        train(optimizer, params, gradients(params, 6))
        results.append([*values(params), *(param.grad for param in params)])
    for one_of, other in zip(*results, strict=True):
        torch.testing.assert_close(one_of, other, rtol=1e-5, atol=1e-6)


def test_scopes_need_names_of_the_module_or_the_optimizer():
    model = nn.Sequential(nn.Linear(2, 1, bias=False), nn.Linear(1, 1, bias=False))
    optimizer = sgd(model.parameters())
    with pytest.raises(ValueError, match="chooses parameters by name"):
        before_step(optimizer, ClipNorm(1).only("0"))
    before_step(optimizer, ClipNorm(1).only("0"), model=model)
    for param in model.parameters():
        param.data.zero_()
        param.grad = torch.full_like(param, 5.0)
    optimizer.step()
    assert model[1].weight.tolist() == [[-5.0]]
    assert model[0].weight.norm().item() == pytest.approx(1.0)


@pytest.mark.parametrize("order", [1, -1])
def test_a_group_may_be_empty(order):
    """As the group without weight decay of the Trainer of Hugging Face, if only matrices are trained."""
    model = nn.Linear(2, 1, bias=False)
    optimizer = sgd([{"params": list(model.parameters())}, {"params": []}][::order])
    handle = before_step(optimizer, ClipNorm(1).only("weight"), model=model)
    model.weight.data.zero_()
    stepped(optimizer, model.weight, [3.0, 4.0])
    assert model.weight.tolist() == [pytest.approx([-0.6, -0.8])]
    saved = through_file(optimizer.state_dict())
    optimizer.load_state_dict(saved)
    optimizer.add_param_group({"params": []})
    stepped(optimizer, model.weight, [0.0, 0.0])
    assert [len(group["params"]) for group in handle.param_groups] == [*[1, 0][::order], 0]


@pytest.mark.filterwarnings("ignore:.* in the checkpoint and .* in the constructor")
def test_settings_of_groups_may_be_changed_and_are_saved():
    first, second = one(), one()
    optimizer = sgd([{"params": [first]}, {"params": [second]}])
    handle = before_step(optimizer, ClipNorm(1))
    handle.param_groups[1]["max_norm"] = 0.5
    for param in (first, second):
        param.grad = torch.tensor([3.0, 4.0])
    optimizer.step()
    assert second.tolist() == pytest.approx([-0.3, -0.4])
    assert first.tolist() == pytest.approx([-0.6, -0.8])
    other = sgd([{"params": [one()]}, {"params": [one()]}])
    fresh = before_step(other, ClipNorm(1))
    other.load_state_dict(optimizer.state_dict())
    assert [group["max_norm"] for group in fresh.param_groups] == [1, 0.5]


def test_overrides_of_transforms_are_refused():
    weight = one()
    with pytest.raises(ValueError, match="set_param_groups"):
        before_step(sgd([weight]), ClipNorm(1).set_param_groups([{"params": weight, "max_norm": 2}]))


@needs_compiler
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_compiled_step_is_the_step():
    params, others = parameters(), parameters()
    optimizer, plain = torch.optim.AdamW(params), torch.optim.AdamW(others)
    handle = before_step(optimizer, SkipStep(1e6), ClipNorm(0.1, dim="global"))
    before_step(plain, SkipStep(1e6), ClipNorm(0.1, dim="global"))
    compiled = torch.compile(optimizer.step, backend="eager")
    rows = gradients(params, 4)
    rows[2][0].fill_(1e9)
    for row in rows:
        set_grads(params, row)
        compiled()
        set_grads(others, row)
        plain.step()
    assert handle.skipped_steps == 1
    for ours, theirs in zip(params, others, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own import
def test_an_optimizer_of_parts_of_the_parameters_is_refused_without_naming_the_one_inside():
    from torch.distributed.optim import ZeroRedundancyOptimizer

    outer = object.__new__(ZeroRedundancyOptimizer)  # its __init__ needs several processes
    outer.optim = sgd([one()])
    with pytest.raises(TypeError, match=r"norms would be those of one process: use fully_shard"):
        before_step(outer, ClipNorm(1, dim="global"))


def test_another_optimizer_may_have_its_name():
    param = one()
    optimizer = type("ZeroRedundancyOptimizer", (torch.optim.SGD,), {})([param], 1.0)
    before_step(optimizer, ClipNorm(1, dim="global"))
    before, param.grad = param.detach().clone(), torch.full_like(param, 3.0)
    optimizer.step()
    torch.testing.assert_close(before - param, torch.ones_like(param) / param.numel() ** 0.5)


def test_a_wrapper_of_a_trainer_without_an_optimizer_is_none():
    placeholder = type("DummyOptim", (), {"__module__": "accelerate.utils"})()
    with pytest.raises(TypeError, match=r"optimizer must be a torch.optim.Optimizer, got DummyOptim"):
        before_step(placeholder, ClipNorm(1))


@pytest.mark.parametrize("module", ["accelerate.optimizer", "lightning.fabric.wrappers", "lightning_fabric.wrappers"])
def test_the_optimizer_in_a_wrapper_of_a_trainer_is_followed(module):
    param = one()
    optimizer = torch.optim.SGD([param], 1.0)
    wrapper = type("Wrapper", (torch.optim.Optimizer,), {"__module__": module, "__init__": lambda self: None})()
    wrapper.optimizer = optimizer
    before_step(wrapper, ClipNorm(1, dim="global"))
    before, param.grad = param.detach().clone(), torch.full_like(param, 3.0)
    optimizer.step()
    torch.testing.assert_close(before - param, torch.ones_like(param) / param.numel() ** 0.5)


def test_a_limit_that_reads_parameters_is_that_of_a_chain():
    """Parameters require a gradient, also in steps that are planned."""

    def trained(make):
        params = [nn.Parameter(torch.linspace(-1, 1, 24).view(shape)) for shape in [(6, 4), (2, 3, 4), (24,)] * 2]
        optimizer = make(params)
        for row in gradients(params, 6):
            set_grads(params, row)
            optimizer.step()
        return params, optimizer

    def with_transform(params):
        optimizer = sgd(params, 0.1)
        handles.append(before_step(optimizer, AdaptiveGradientClip(0.01)))
        return optimizer

    handles = []
    ours, _ = trained(with_transform)
    expected, _ = trained(lambda params: Modular(params, AdaptiveGradientClip(0.01), SGD(lr=0.1)))
    torch.testing.assert_close(values(ours), values(expected))
    metrics = handles[0].metrics()
    assert metrics["adaptive_gradient_clip/clipped"].item() > 0
    assert not [key for key, value in metrics.items() if value.requires_grad]


@pytest.mark.parametrize("way", ["scaler", "closure", "template", "step"])
def test_a_reported_loss_belongs_to_one_step(way):
    """A gradient scaler that refuses a step does not call it. Then `zero_grad` ends the step of the loss."""
    (param,) = params = parameters(shapes=[(3,)])
    optimizer = torch.optim.SGD(params, 0.1)
    handle = before_step(optimizer, SeesLoss())
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    handle.report_loss(8.0)
    if way == "scaler":
        scaler.scale((param * math.inf).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    elif way == "closure":
        with pytest.raises(ZeroDivisionError):
            optimizer.step(lambda: 1 / 0)
    elif way == "template":
        optimizer.param_groups[0]["lr"] = 0.0
        param.grad = torch.zeros(3)
        optimizer.step()
        optimizer.param_groups[0]["lr"] = 0.1
    else:
        param.grad = torch.ones(3)
        optimizer.step()
    optimizer.zero_grad()
    SeesLoss.seen.clear()
    handle.report_loss(2.0)
    handle.report_loss(4.0)
    param.grad = torch.ones(3)
    optimizer.step()
    assert SeesLoss.seen == [3.0]
    handle.remove()
    assert "zero_grad" not in vars(optimizer)


class SeesLoss(TensorwiseTransform):
    seen: ClassVar[list[float]] = []

    def __init__(self):
        super().__init__({})

    def apply_tensor(self, tensor, param, grad, loss, state, setting):
        self.seen.append(float(loss) if loss is not None else None)
        return tensor


@pytest.mark.parametrize(
    "transforms", [(ZClip(max_norm=1.0),), (ClipNorm(1.0, dim="global"), ClipValue(2.0))], ids=repr
)
def test_an_added_group_has_the_settings_that_all_groups_share(transforms):
    """So that a joint limit that was changed stays one limit."""
    optimizer = torch.optim.SGD(parameters(shapes=[(3,)]), 0.1)
    handle = before_step(optimizer, *transforms)
    handle.param_groups[0]["max_norm"] = 0.5
    optimizer.add_param_group({"params": parameters(shapes=[(2,)])})
    assert [group["max_norm"] for group in handle.param_groups] == [0.5, 0.5]
    optimizer.state_dict()
    for group in optimizer.param_groups:
        for param in group["params"]:
            param.grad = torch.ones_like(param)
    optimizer.step()


@pytest.mark.parametrize("where", ["closure", "hook"])
def test_remove_in_a_step_leaves_nothing_behind(where):
    (param,) = params = parameters(shapes=[(3,)])
    optimizer = torch.optim.SGD(params, 0.1)
    handle = before_step(optimizer, ClipNormByEMA(0.5))
    param.grad = torch.ones(3)
    optimizer.step()

    def closure():
        handle.remove()
        param.grad = torch.ones(3)
        return torch.tensor(1.0)

    if where == "hook":
        optimizer.register_step_pre_hook(lambda *_: handle.remove())
    optimizer.step(closure if where == "closure" else None)
    assert BEFORE_STEP not in str(optimizer.state_dict())


def test_a_checkpoint_of_a_copy_says_that_copies_lose_transforms():
    (param,) = params = parameters(shapes=[(3,)])
    optimizer = torch.optim.SGD(params, 0.1)
    before_step(optimizer, ClipNormByEMA(0.5))
    param.grad = torch.ones(3)
    optimizer.step()
    saved = copy.deepcopy(optimizer).state_dict()
    other = torch.optim.SGD(parameters(shapes=[(3,)]), 0.1)
    before_step(other, ClipNormByEMA(0.5))
    with pytest.raises(ValueError, match=r"copied or unpickled.*load it before the call of before_step"):
        other.load_state_dict(saved)
    bare = torch.optim.SGD(parameters(shapes=[(3,)]), 0.1)
    bare.load_state_dict(saved)
    handle = before_step(bare, ClipNormByEMA(0.5))
    assert handle.steps_taken == 0


def test_an_error_in_the_closure_is_no_refused_step():
    (param,) = params = parameters(shapes=[(3,)])
    optimizer = torch.optim.SGD(params, 0.1)
    handle = before_step(optimizer, SkipStep(max_norm=1.0))
    param.grad = torch.full((3,), 9.0)
    optimizer.step()
    assert handle.skipped_by == ("skip_step",)
    with pytest.raises(ZeroDivisionError):
        optimizer.step(lambda: 1 / 0)
    assert handle.skipped_by == ()


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_save_after_a_group_was_removed_is_that_of_the_optimizer(momentum):
    first, second = (parameters(shapes=[(3,)]) for _ in range(2))
    optimizer = torch.optim.SGD([{"params": first}, {"params": second}], 0.1, momentum=momentum)
    before_step(optimizer, ClipNormByEMA(0.5))
    for param in first + second:
        param.grad = torch.ones(3)
    optimizer.step()
    del optimizer.param_groups[1]
    if momentum:  # torch has no number for the state of the parameter either
        with pytest.raises(KeyError):
            optimizer.state_dict()
    else:
        assert len(optimizer.state_dict()["state"]) == 1
