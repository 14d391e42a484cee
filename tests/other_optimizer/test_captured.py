"""`captured` on a CPU, where there is nothing to capture. `pretended.captures` has a device."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from torchzero_clip import SGD, AdamW, ClipNorm, ClipRMS, ClipValue, Modular, Recorder, SkipStep, before_step, captured
from torchzero_clip.other_optimizer.captured import CapturedStep


def model_of():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))


def chained(model):
    return Modular(model, SkipStep(max_ratio=10.0), ClipNorm(1, dim="global"), AdamW(0.01), nonfinite="skip")


def behind(model):
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    before_step(optimizer, ClipNorm(0.5))
    return optimizer


@pytest.mark.parametrize("start", [chained, behind])
def test_on_a_cpu_it_is_the_ordinary_step(start, monkeypatch):
    monkeypatch.setattr(CapturedStep, "capture", None)
    found = []
    for is_captured in (True, False):
        model = model_of()
        optimizer = start(model)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        step = captured(optimizer) if is_captured else optimizer.step
        for k in range(20):
            optimizer.zero_grad(set_to_none=False)
            model(
                torch.full((2, 3), float("nan") if k == 9 and start is chained else float(k))
            ).square().mean().backward()
            step()
            scheduler.step()
        found.append([param.detach().clone() for param in model.parameters()])
    assert all(map(torch.equal, *found))


def test_a_closure_is_called_once_and_its_loss_is_returned():
    model = model_of()
    calls = []

    def closure():
        calls.append(None)
        loss = model(torch.ones(2, 3)).sum()
        loss.backward()
        return loss

    step = captured(chained(model))
    assert step(closure).item() != 0
    assert len(calls) == 1


def test_after_release_steps_are_ordinary_and_the_hook_is_gone():
    optimizer = chained(model_of())
    hooks = len(optimizer._optimizer_load_state_dict_post_hooks)
    step = captured(optimizer)
    step.release()
    assert len(optimizer._optimizer_load_state_dict_post_hooks) == hooks
    step.release()
    step()


def test_a_captured_step_is_not_copied():
    step = captured(chained(model_of()))
    for copied in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="call captured on the copy of the optimizer"):
            copied(step)


def test_who_cannot_be_captured_is_refused_on_a_cpu_too():
    recorded = chained(model_of())
    Recorder(recorded)
    with pytest.raises(ValueError, match=r"a Recorder sees each step on the host. Call close\(\)"):
        captured(recorded)
    assert len(recorded._optimizer_load_state_dict_post_hooks) == 0
    hooked = chained(model_of())
    hooked.register_step_pre_hook(print)
    with pytest.raises(ValueError, match=r"replays do not call .*print"):
        captured(hooked)
    with pytest.raises(TypeError, match="optimizer must be of class Optimizer"):
        captured(model_of())


LIMITED = {
    "each": ClipNorm,
    "joint": lambda limit: ClipNorm(limit, dim="global"),
    "rms": ClipRMS,
    "value": ClipValue,
}


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("name", LIMITED)
def test_a_limit_may_be_a_tensor(name, fast):
    make, found = LIMITED[name], []
    for limit in (torch.tensor([0.25], dtype=torch.float64), 0.25):
        model = model_of()
        optimizer = Modular(model, make(limit), SGD(0.1), fast=fast)
        for k in range(12):
            optimizer.zero_grad()
            model(torch.full((2, 3), k / 3)).square().mean().backward()
            optimizer.step()
            if k == 6:
                optimizer.load_state_dict(optimizer.state_dict())
        found.append([*(param.detach() for param in model.parameters()), *optimizer.metrics().values()])
    assert all(map(torch.equal, *found))


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("name", LIMITED)
def test_a_negative_limit_in_a_tensor_gives_nan(name):
    param = torch.nn.Parameter(torch.ones(3))
    optimizer = Modular([param], LIMITED[name](torch.tensor(2.0)), SGD(0.1))
    for sign in (1.0, -1.0):
        param.grad = torch.ones(3)
        for limit in (value for value in optimizer.param_groups[0].values() if isinstance(value, torch.Tensor)):
            limit.mul_(sign)
        optimizer.step()
        assert param.isnan().all() == (sign < 0)


def test_a_limit_that_cannot_be_a_tensor_or_is_none_is_named():
    for make, key in ((ClipNorm, "max_norm"), (ClipRMS, "max_rms"), (ClipValue, "value")):
        with pytest.raises(ValueError, match=f"{key} must have one element"):
            make(torch.ones(2))
        with pytest.raises(ValueError, match=f"{key} must be >= 0"):
            make(-1.0)
    with pytest.raises(TypeError, match=r"max_norm must be a number, got tensor\(1.\) \(Tensor\): write float\(...\)"):
        SkipStep(torch.tensor(1.0))


def test_on_a_cpu_hooks_of_all_optimizers_are_called():
    calls = []
    handle = register_optimizer_step_pre_hook(lambda *args: calls.append(args))
    try:
        model = model_of()
        step = captured(chained(model))
        model(torch.ones(2, 3)).sum().backward()
        step()
    finally:
        handle.remove()
    assert len(calls) == 1
