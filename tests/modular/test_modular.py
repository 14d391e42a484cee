"""The chain as an optimizer: settings between steps, state of the chain, metrics."""

import copy
import pickle

import pytest
import torch
from contract.entries import TrackJointNorm
from contract.training import gradients, parameters, stepped, train, values
from versions import needs_compiler

from torchzero_clip import SGD, AdamW, ClipNorm, Modular, SkipStep, step_in_backward


def test_settings_can_be_changed_between_steps():
    param, optimizer = stepped(ClipNorm(1.0), [3.0, 4.0])
    optimizer.param_groups[0]["max_norm"] = 2.0
    param.data.zero_()
    param.grad = torch.tensor([3.0, 4.0])
    optimizer.step()
    assert param.tolist() == pytest.approx([-1.2, -1.6])


def test_state_of_the_chain_is_shown_by_every_group_as_plain_scalars():
    params = parameters()
    optimizer = Modular([{"params": params[:1]}, {"params": params[1:]}], TrackJointNorm())
    train(optimizer, params, gradients(params, 1))
    average = optimizer.param_groups[0]["track_joint_norm/average"]
    joint = torch.cat([g.flatten() for g in gradients(params, 1)[0]]).norm().item()
    assert average.item() == pytest.approx(joint / 2, rel=1e-6)
    assert optimizer.param_groups[1]["track_joint_norm/average"] is average
    assert not any(optimizer.state.values())
    twin = Modular([{"params": params[:1]}, {"params": params[1:]}], TrackJointNorm())
    twin.load_state_dict(optimizer.state_dict())
    loaded = twin.param_groups[0]["track_joint_norm/average"]
    assert loaded.item() == average.item()
    assert loaded.dtype == torch.float64
    assert loaded.data_ptr() != average.data_ptr()


@pytest.mark.parametrize("reason", ["grad is None", "frozen"])
def test_a_step_without_gradients_has_no_metrics_of_an_earlier_step(reason):
    param, optimizer = stepped(ClipNorm(1.0), [3.0, 4.0])
    if reason == "frozen":
        param.requires_grad_(False)
    else:
        param.grad = None
    optimizer.step()
    assert optimizer.metrics() == {}


def steps_of(optimizer, params, rows):
    """What the optimizer says after each step: who refused it, and how many were taken."""
    said = []
    for row in rows:
        train(optimizer, params, [row])
        said.append((optimizer.skipped_by, optimizer.steps_taken))
    return said


def scaled(params, *scales):
    return [[scale * torch.ones_like(param) for param in params] for scale in scales]


@pytest.mark.parametrize("fast", [True, False])
def test_a_step_says_who_refused_it_and_how_many_were_taken(fast):
    params = parameters()
    gates = SkipStep(max_norm=100.0, name="size"), SkipStep(max_ratio=5.0)
    optimizer = Modular(params, *gates, SGD(0.1), nonfinite="skip", fast=fast)
    assert (optimizer.skipped_by, optimizer.steps_taken) == ((), 0)
    said = steps_of(optimizer, params, scaled(params, 1.0, 10.0, 1.0, 1000.0, torch.nan, 1.0))
    assert said == [
        ((), 1),
        (("skip_step",), 1),
        ((), 2),
        (("size", "skip_step"), 2),
        (("size", "skip_step", "nonfinite"), 2),
        ((), 3),
    ]


def test_steps_without_gradients_are_not_taken():
    params = parameters()
    optimizer = Modular(params, ClipNorm(1), SGD(0.1))
    optimizer.step()
    assert optimizer.steps_taken == 0
    train(optimizer, params, scaled(params, 0.0))
    optimizer.zero_grad()
    optimizer.step()
    assert optimizer.steps_taken == 1


def test_a_step_that_raises_is_not_taken():
    params = parameters()
    optimizer = Modular(params, SkipStep(max_norm=1.0), SGD(0.1), nonfinite="raise", max_consecutive_skips=0)
    for scale, by in [(torch.inf, ("skip_step", "nonfinite")), (9.0, ("skip_step",))]:
        with pytest.raises(RuntimeError):
            train(optimizer, params, scaled(params, scale))
        assert (optimizer.skipped_by, optimizer.steps_taken) == (by, 0)
    optimizer.param_groups[0]["lr"] = -1.0
    with pytest.raises(ValueError, match="lr must be"):
        optimizer.step()
    assert (optimizer.skipped_by, optimizer.steps_taken) == ((), 0)


def test_an_error_of_a_transform_is_no_refusal():
    class Broken(ClipNorm):
        def factors(self, measured, updates, step):
            raise ArithmeticError

    params = parameters()
    optimizer = Modular(params, Broken(1), SGD(0.1))
    with pytest.raises(ArithmeticError):
        train(optimizer, params, scaled(params, 1.0))
    assert (optimizer.skipped_by, optimizer.steps_taken) == ((), 0)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["deepcopy", "pickle"])
def test_copies_know_what_happened_and_count_for_themselves(copied):
    params = parameters()
    optimizer = Modular(params, ClipNorm(1), SGD(0.1), nonfinite="skip")
    steps_of(optimizer, params, scaled(params, 1.0, 1.0, torch.nan))
    twin = copied(optimizer)
    assert (twin.skipped_by, twin.steps_taken) == (("nonfinite",), 2)
    train(twin, twin.param_groups[0]["params"], scaled(params, 1.0))
    assert (twin.skipped_by, twin.steps_taken) == ((), 3)
    assert (optimizer.skipped_by, optimizer.steps_taken) == (("nonfinite",), 2)


def test_a_checkpoint_does_not_change_the_count():
    params = parameters()
    optimizer = Modular(params, ClipNorm(1), SGD(0.1))
    train(optimizer, params, scaled(params, 1.0, 1.0))
    optimizer.load_state_dict(Modular(parameters(), ClipNorm(1), SGD(0.1)).state_dict())
    assert optimizer.steps_taken == 2


def test_steps_in_the_backward_count_once():
    params = parameters()
    optimizer = Modular(params, ClipNorm(1), AdamW())
    handle = step_in_backward(optimizer, bucket_bytes=0)
    optimizer.step()
    assert optimizer.steps_taken == 0
    for count in (1, 2):
        sum(param.square().sum() for param in params).backward()
        optimizer.step()
        assert optimizer.steps_taken == count
    handle.remove()
    train(optimizer, params, scaled(params, 1.0))
    assert optimizer.steps_taken == 3


def test_a_step_that_a_scaler_skips_is_not_taken():
    params = parameters()
    optimizer, scaler = Modular(params, ClipNorm(1), SGD(0.1)), torch.amp.GradScaler("cpu", init_scale=4.0)
    for loss, count in [(1.0, 1), (torch.inf, 1), (1.0, 2)]:
        optimizer.zero_grad()
        scaler.scale(sum(loss * param.sum() for param in params)).backward()
        scaler.step(optimizer)
        scaler.update()
        assert optimizer.steps_taken == count


@pytest.mark.slow
@needs_compiler
def test_a_compiled_step_leaves_the_count():
    """A number that changes in each step would make torch compile the step again for each."""
    params = parameters()
    optimizer = Modular(params, ClipNorm(1), SGD(0.1))
    train(optimizer, params, scaled(params, 1.0))
    torch._dynamo.reset()
    step = torch.compile(optimizer.step, backend="eager", fullgraph=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for row in scaled(params, 1.0, 1.0):
            for param, grad in zip(params, row, strict=True):
                param.grad = grad
            step()
            train(optimizer, params, scaled(params, 1.0))
    assert optimizer.steps_taken == 3


@pytest.mark.parametrize("option", ["maximize", "keep_grads", "fast"])
def test_an_option_may_be_changed_between_steps(option):
    runs = []
    for late in (False, True):
        params = parameters()
        value = option != "fast"
        optimizer = Modular(params, ClipNorm(0.5), AdamW(), **({} if late else {option: value}))
        if late:
            setattr(optimizer, option, value)
        assert getattr(optimizer, option) is value
        train(optimizer, params, gradients(params, 6))
        runs.append([*values(params), *(param.grad for param in params)])
    assert all(map(torch.equal, *runs))
    with pytest.raises(TypeError, match=option):
        setattr(optimizer, option, "no")
