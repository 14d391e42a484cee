"""Transforms before each optimizer of torch are our functions before it, and a refused step is one that is left out."""

import copy

import pytest
import torch
from contract.training import assert_same_checkpoint, gradients, parameters, set_grads, through_file, values

from torchzero_clip import (
    AutoClip,
    Centralize,
    ClipNorm,
    ClipNormByEMA,
    ClipValue,
    Normalize,
    SkipStep,
    ZClip,
    before_step,
    centralize_grads_,
    clip_grad_norm_,
    clip_grad_value_,
    normalize_grads_,
)

MATRICES = [(4, 3), (3, 5), (2, 2)]
OPTIMIZERS = {
    **{name: (getattr(torch.optim, name), {}) for name in ("ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax")},
    **{name: (getattr(torch.optim, name), {}) for name in ("NAdam", "RAdam", "RMSprop", "Rprop", "SGD")},
    **{f"fused {name}": (getattr(torch.optim, name), {"fused": True}) for name in ("Adagrad", "Adam", "AdamW", "SGD")},
    "fused SGD with momentum": (torch.optim.SGD, {"fused": True, "momentum": 0.9, "nesterov": True}),
    "foreach AdamW": (torch.optim.AdamW, {"foreach": True, "maximize": True}),
    "tensor rate": (torch.optim.AdamW, {"lr": torch.tensor(0.01), "foreach": False}),
    **{name: (getattr(torch.optim, name), {}) for name in ("Adafactor", "Muon") if hasattr(torch.optim, name)},
}
STATELESS = {
    "joint": ([ClipNorm(0.5, dim="global")], lambda params: clip_grad_norm_(params, 0.5, dim="global")),
    "each": ([ClipNorm(0.5, min_size=2)], lambda params: clip_grad_norm_(params, 0.5)),
    "linf": ([ClipNorm(0.1, "linf", dim="global")], lambda params: clip_grad_norm_(params, 0.1, "linf", dim="global")),
    "normalize": ([Normalize(0.5)], lambda params: normalize_grads_(params, 0.5)),
    "value": ([ClipValue(0.1)], lambda params: clip_grad_value_(params, 0.1)),
    "centralize and clip": (
        [Centralize(), ClipNorm(0.5, dim="global")],
        lambda params: (centralize_grads_(params), clip_grad_norm_(params, 0.5, dim="global")),
    ),
}


def made(name, dtype=torch.float64):
    """Parameters with an optimizer."""
    kind, options = OPTIMIZERS[name]
    options = copy.deepcopy(options)
    params = parameters(dtype, MATRICES) if name == "Muon" else parameters(dtype)
    return params, kind(params, **options)


def stepped(optimizer, params, row):
    set_grads(params, row)
    optimizer.step()


@pytest.mark.quick_cases(6)
@pytest.mark.parametrize("chain", STATELESS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_stateless_chains_are_our_functions(name, chain):
    transforms, function = STATELESS[chain]
    (params, optimizer), (others, plain) = made(name), made(name)
    before_step(optimizer, *transforms)
    for row in gradients(params, 8):
        stepped(optimizer, params, row)
        set_grads(others, row)
        function(others)
        plain.step()
    for ours, theirs in zip(params, others, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-11)
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-11, atol=1e-11)


@pytest.mark.quick_cases(6)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_refused_step_is_one_that_is_left_out(name):
    (params, optimizer), (others, plain) = made(name), made(name)
    handle = before_step(optimizer, SkipStep(1e3), nonfinite="skip")
    second = before_step(plain, SkipStep(1e3), nonfinite="skip")
    for k, row in enumerate(gradients(params, 9)):
        if k in (0, 4, 5):  # also the first step, before there is state
            row[0].view(-1)[0] = torch.nan if k != 4 else 1e9
            before, saved = values(params), copy.deepcopy(plain_state(optimizer))
            stepped(optimizer, params, row)
            assert handle.skipped_by == ("skip_step", "nonfinite") if k != 4 else ("skip_step",)
            assert all(map(torch.equal, params, before))
            assert_same_checkpoint(plain_state(optimizer), saved)
            assert all(torch.equal(p.grad, g) or g.isnan().any() for p, g in zip(params, row, strict=True))
            continue
        stepped(optimizer, params, row)
        stepped(plain, others, row)
    assert (handle.skipped_steps, second.skipped_steps) == (3, 0)
    assert all(map(torch.equal, params, others))
    assert_same_checkpoint(plain_state(optimizer), plain_state(plain))


def plain_state(optimizer):
    """The checkpoint without the state of the transforms, which counts refused steps."""
    saved = optimizer.state_dict()
    groups = [{k: v for k, v in group.items() if k != "before_step"} for group in saved["param_groups"]]
    return {"state": saved["state"], "param_groups": groups}


@pytest.mark.quick_cases(6)
@pytest.mark.parametrize("early", [False, True], ids=["loaded after the call", "loaded before the call"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_it_resumes_through_a_file(name, early):
    # of float64 parameters, torch loads numbers of ASGD and NAdam in another dtype
    chain = [ZClip(warmup_steps=2), ClipNormByEMA(0.5), AutoClip(50.0, window=3)]
    params, optimizer = made(name, torch.float32)
    handle = before_step(optimizer, *chain)
    rows = gradients(params, 9)
    for row in rows[:5]:
        stepped(optimizer, params, row)
    saved, halfway = through_file(optimizer.state_dict()), values(params)
    others, second = made(name, torch.float32)
    with torch.no_grad():
        for param, value in zip(others, halfway, strict=True):
            param.copy_(value)
    other = None if early else before_step(second, *chain)
    second.load_state_dict(saved)
    other = other or before_step(second, *chain)
    for row in rows[5:]:
        stepped(optimizer, params, row)
        stepped(second, others, row)
    assert all(map(torch.equal, params, others))
    assert handle.metrics() == other.metrics()
    assert_same_checkpoint(second.state_dict(), optimizer.state_dict())
