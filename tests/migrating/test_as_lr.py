"""torch's schedulers on settings other than the learning rate."""

import copy
import pickle

import pytest
import torch
from contract.schedulers import SCHEDULERS, advance
from contract.training import gradients, parameters, through_file, train
from torch.optim import lr_scheduler
from versions import TORCH

from torchzero_clip import SGD, Adam, ClipNorm, ClipNormGrowth, ClipValue, Modular, WeightDecay, as_lr, before_step


@pytest.mark.parametrize("name", SCHEDULERS)
def test_torchs_schedulers_take_any_setting(name):
    """The limit goes the way that the learning rate of torch's SGD goes; and on from a checkpoint."""
    if name == "SWALR" and TORCH < (2, 11):
        pytest.skip("this torch has functions in the state_dict of SWALR, which weights_only=True refuses")

    def build():
        params = parameters()
        groups = [{"params": params[:2]}, {"params": params[2:], "clip_norm_2/max_norm": 3.0}]
        optimizer = Modular(groups, ClipNorm(9.0), ClipNorm(2.0), Adam(0.5))
        return params, optimizer, SCHEDULERS[name](as_lr(optimizer, "clip_norm_2/max_norm"))

    params, optimizer, scheduler = build()
    reference = torch.optim.SGD([{"params": params[:2]}, {"params": params[2:], "lr": 3.0}], lr=2.0)
    expected = SCHEDULERS[name](reference)
    rows = gradients(params, 6)
    for k, row in enumerate(rows):
        if k == 3:
            saved = through_file((optimizer.state_dict(), scheduler.state_dict()))
            params, optimizer, scheduler = build()
            optimizer.load_state_dict(saved[0])
            scheduler.load_state_dict(saved[1])
        limits = [group["clip_norm_2/max_norm"] for group in optimizer.param_groups]
        assert limits == [group["lr"] for group in reference.param_groups]
        train(optimizer, params, [row])
        reference.step()
        advance(scheduler)
        advance(expected)
    assert [group["max_norm"] for group in optimizer.param_groups] == [9.0, 9.0]
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.5]


def test_keys_that_are_deleted_are_those_that_are_shown():
    optimizer = Modular(parameters(), ClipNorm(2.0), Adam(0.5))
    group = as_lr(optimizer, "max_norm").param_groups[0]
    group["initial_lr"] = 5.0
    assert (group.pop("initial_lr"), group.pop("lr")) == (5.0, 2.0)
    assert "max_norm" not in optimizer.param_groups[0]
    assert optimizer.param_groups[0]["lr"] == 0.5


@pytest.mark.parametrize("loads_first", [False, True])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_load_compares_the_limits_of_constructors_not_those_of_schedulers(name, loads_first):
    def build(limit):
        params = parameters()
        return params, Modular(params, ClipNorm(limit), Adam(0.5))

    params, optimizer = build(2.0)
    scheduler = SCHEDULERS[name](as_lr(optimizer, "max_norm"))
    for row in gradients(params, 3):
        train(optimizer, params, [row])
        advance(scheduler)
    saved = optimizer.state_dict()

    _, same = build(2.0)
    _, other = build(3.0)
    if not loads_first:
        SCHEDULERS[name](as_lr(same, "max_norm"))
        SCHEDULERS[name](as_lr(other, "max_norm"))
    same.load_state_dict(saved)  # without a warning
    with pytest.warns(UserWarning, match=r"^max_norm is 2.0 in the checkpoint and 3.0 in the constructor\. "):
        other.load_state_dict(saved)


def test_schedulers_change_settings_of_transforms_before_the_steps_of_an_optimizer_and_resume():
    def build():
        params = parameters()
        optimizer = torch.optim.SGD([{"params": params[:2]}, {"params": params[2:]}], lr=1.0)
        handle = before_step(optimizer, ClipNorm(8.0), ClipNorm(2.0))
        handle.param_groups[1]["clip_norm_2/max_norm"] = 4.0
        return params, optimizer, handle, lr_scheduler.StepLR(as_lr(handle, "clip_norm_2/max_norm"), 1, 0.5)

    params, optimizer, handle, scheduler = build()
    for k, row in enumerate(gradients(params, 4)):
        if k == 2:
            saved = through_file((optimizer.state_dict(), scheduler.state_dict()))
            params, optimizer, handle, scheduler = build()
            optimizer.load_state_dict(saved[0])
            scheduler.load_state_dict(saved[1])
        assert [group["clip_norm_2/max_norm"] for group in handle.param_groups] == [2.0 * 0.5**k, 4.0 * 0.5**k]
        train(optimizer, params, [row])
        for param, limit in zip(params, [2.0, 2.0, *[4.0] * len(params)], strict=False):
            assert param.grad.norm().item() <= 1.001 * limit * 0.5**k
        scheduler.step()
    assert [group["max_norm"] for group in handle.param_groups] == [8.0, 8.0]
    assert [group["lr"] for group in optimizer.param_groups] == [1.0, 1.0]
    with pytest.raises(ValueError, match="has no setting 'lr'; it has: "):
        as_lr(handle, "lr")


def test_views_work_for_other_optimizers_and_beside_a_schedule_of_the_learning_rate():
    params = parameters()
    for optimizer in (torch.optim.AdamW(params, 0.1, weight_decay=0.5), Modular(params, Adam(0.1), WeightDecay(0.5))):
        schedulers = [
            lr_scheduler.ExponentialLR(optimizer, 0.5),
            lr_scheduler.ExponentialLR(as_lr(optimizer, "weight_decay"), 0.1),
        ]
        train(optimizer, params, gradients(params, 1))
        for scheduler in schedulers:
            scheduler.step()
        assert optimizer.param_groups[0]["lr"] == 0.05
        assert optimizer.param_groups[0]["weight_decay"] == 0.05
        assert optimizer.param_groups[0]["weight_decay:initial_lr"] == 0.5


def test_views_of_what_is_no_number_are_refused():
    optimizer = Modular(parameters(), ClipNorm(1.0), Adam())
    with pytest.raises(ValueError, match="no setting 'max_nrom'; it has: betas, eps, lr, max_norm"):
        as_lr(optimizer, "max_nrom")
    message = r"'betas' is \(0.9, 0.999\) in param group 0: schedulers of torch change only numbers"
    with pytest.raises(ValueError, match=message):
        as_lr(optimizer, "betas")
    with pytest.raises(ValueError, match="'max_norm' is a function of the step already"):
        as_lr(Modular(parameters(), ClipNorm(lambda step: 1.0 + step), Adam()), "max_norm")
    view = as_lr(optimizer, "clip_norm/max_norm")
    assert repr(view) == "as_lr(Modular, 'max_norm')"
    with pytest.raises(RuntimeError, match="call this of the optimizer itself"):
        view.step()


def test_what_schedulers_keep_never_meets_a_setting():
    """OneCycleLR's min_lr, on ``value``, is no ``min_value``."""
    params = parameters()
    optimizer = Modular(params, ClipValue(0.5), ClipNormGrowth(1.0), Adam())
    before = optimizer.param_groups[0]["min_value"]
    lr_scheduler.OneCycleLR(as_lr(optimizer, "value"), 0.3, total_steps=10, cycle_momentum=False)
    assert optimizer.param_groups[0]["min_value"] == before
    optimizer.add_param_group({**optimizer.param_groups[0], "params": [torch.nn.Parameter(torch.zeros(2))]})


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["deepcopy", "pickle"])
def test_schedulers_on_views_are_copied_with_their_optimizer(clone):
    optimizer = Modular(parameters(), ClipNorm(1.0), SGD())
    scheduler = lr_scheduler.ExponentialLR(as_lr(optimizer, "max_norm"), 0.5)
    twin, second = clone((optimizer, scheduler))
    second.step()
    assert (twin.param_groups[0]["max_norm"], optimizer.param_groups[0]["max_norm"]) == (0.5, 1.0)
