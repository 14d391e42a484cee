"""`grad_scale` and `found_inf` of a fused optimizer belong to others: they are as before after each step."""

import copy
import itertools

import pytest
import torch
from contract.training import gradients, parameters, set_grads
from torch import nn

from torchzero_clip import ClipNorm, ClipNormByEMA, SkipStep, before_step

JOINT = [ClipNorm(0.01, dim="global")]  # of which the kernel takes the factor


def made(transforms=JOINT, **options):
    params = parameters()
    optimizer = torch.optim.AdamW(params, 0.01, fused=True)
    return params, optimizer, before_step(optimizer, *copy.deepcopy(transforms), **options)


def scaler_of():
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000)
    scaler.scale(torch.ones(()))  # as in a loop, makes the scale exist
    return scaler


EVENTS = ["plain", "scaler", "unscaled", "removed", "user"]


@pytest.mark.quick_cases(12)
@pytest.mark.parametrize("events", list(itertools.product(EVENTS, repeat=3)), ids="-".join)
@pytest.mark.parametrize("transforms", [JOINT, [SkipStep(max_ratio=1e9), *JOINT], [ClipNormByEMA(0.5)]], ids=str)
def test_plain_steps_steps_of_a_scaler_and_scales_of_users_follow_each_other(transforms, events):
    """Each step has the result of the step with gradients that nobody has scaled."""
    params, optimizer, handle = made(transforms)
    others, plain, other = made(transforms)
    scaler = scaler_of()
    for row, event in zip(gradients(params, 3), events, strict=True):
        scale = {"scaler": 1024.0, "unscaled": 1024.0, "user": 8.0}.get(event, 1.0)  # powers of two are exact
        set_grads(params, [grad * scale for grad in row])
        set_grads(others, row)
        if event == "removed":
            handle.remove()
            other.remove()
        if event in ("scaler", "unscaled"):
            if event == "unscaled":
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            assert "grad_scale" not in vars(optimizer)
        elif event == "user":
            optimizer.grad_scale = of_user = torch.tensor(8.0)
            optimizer.step()
            assert optimizer.grad_scale is of_user
            assert of_user.item() == 8.0
            del optimizer.grad_scale
        else:
            optimizer.step()
            assert "grad_scale" not in vars(optimizer)
        plain.step()
        for param, reference in zip(params, others, strict=True):
            torch.testing.assert_close(param, reference, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
@pytest.mark.parametrize("before", ["absent", None, 8.0])
def test_an_interrupted_step_leaves_the_scale_that_was_there(before, error, monkeypatch):
    params, optimizer, _ = made()
    if before != "absent":
        optimizer.grad_scale = before if before is None else torch.tensor(before)
    kept = vars(optimizer).get("grad_scale", "absent")

    def fail(*args, **kwargs):
        assert optimizer.grad_scale is not kept
        raise error

    monkeypatch.setattr(torch, "_fused_adamw_", fail)
    set_grads(params, gradients(params, 1)[0])
    with pytest.raises(error):
        optimizer.step()
    assert vars(optimizer).get("grad_scale", "absent") is kept


@pytest.mark.parametrize("place", range(4))
def test_an_interrupt_between_two_lines_leaves_no_scale(place, monkeypatch):
    """At the writes of the attributes that tell what was there, and at the write of the scale itself."""
    params, optimizer, handle = made()
    writes = []

    def setter(target, name, value):
        if name in ("_grad_scale_before", "_has_set_grad_scale", "grad_scale"):
            writes.append(name)
            if len(writes) == place + 1:
                raise KeyboardInterrupt
        object.__setattr__(target, name, value)

    monkeypatch.setattr(type(handle), "__setattr__", setter, raising=False)
    monkeypatch.setattr(torch.optim.AdamW, "__setattr__", setter, raising=False)
    set_grads(params, gradients(params, 1)[0])
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    monkeypatch.undo()
    if place < 3:  # later the step itself ends
        set_grads(params, gradients(params, 1)[0])
        optimizer.step()
    assert "grad_scale" not in vars(optimizer)


def test_a_scaler_steps_after_a_plain_step_and_after_remove():
    weight = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([weight], 1.0, fused=True)
    scaler = scaler_of()
    handle = before_step(optimizer, ClipNorm(1, dim="global"))
    for k, expected in enumerate(([-0.6, -0.8], [-1.2, -1.6], [-4.2, -5.6])):
        weight.grad = torch.tensor([3.0, 4.0]) * (1024.0 if k else 1.0)
        if k == 2:
            handle.remove()
        scaler.step(optimizer) if k else optimizer.step()
        scaler.update() if k else None
        assert weight.tolist() == pytest.approx(expected)
