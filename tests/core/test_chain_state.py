"""State of the whole chain belongs to the optimizer, whatever happens to its param groups."""

import copy
import math
import pickle

import pytest
import torch
import torch.distributed.checkpoint as dcp
from contract.entries import TrackJointNorm
from contract.training import gradients, parameters, train, values
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict

from torchzero_clip import SGD, ClipNorm, ClipNormByEMA, Modular, SkipStep

KEYS = {"skip_step/mean", "skip_step/started", "clip_norm_by_ema/prev", "clip_norm_by_ema/started", "skipped_steps"}
KEYS |= {"consecutive_skips", "schedule_step", "track_joint_norm/average", "track_joint_norm/unit"}


def limit(step):
    return 1.0 + step


def chain():
    joint = [ClipNormByEMA(0.5, tensorwise=False), TrackJointNorm()]
    return [SkipStep(max_ratio=500.0), ClipNorm(limit, dim="global"), *joint, SGD(0.1)]


class Model(nn.Module):
    def __init__(self, initial):
        super().__init__()
        self.first, self.second = (nn.ParameterList(v.clone() for v in initial[i : i + 2]) for i in (0, 2))

    def groups(self, turned):
        groups = [{"params": list(self.first), "lr": 0.1}, {"params": list(self.second), "lr": 0.2}]
        return groups[::-1] if turned else groups


def rows(count=5):
    """Gradients; those of the second step are skipped."""
    grads = gradients(parameters(), count)
    grads[1] = [g * 1e6 for g in grads[1]]
    return grads


def after_three_steps():
    model = Model(values(parameters()))
    optimizer, params = Modular(model.groups(False), *chain()), list(model.parameters())
    train(optimizer, params, rows()[:3])
    return optimizer, params


def shown(optimizer):
    return [{key: group[key] for key in KEYS} for group in optimizer.param_groups]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("flatten", [False, True], ids=["plain", "flattened"])
def test_groups_in_another_order_go_on_alike(flatten, tmp_path):
    options = StateDictOptions(flatten_optimizer_state_dict=flatten)
    model = Model(values(parameters()))
    params = list(model.parameters())
    optimizer = Modular(model.groups(False), *chain())
    train(optimizer, params, rows()[:3])
    halfway = values(params)
    dcp.save({"optimizer": get_optimizer_state_dict(model, optimizer, options=options)}, checkpoint_id=tmp_path)
    train(optimizer, params, rows()[3:])

    second = Model(halfway)
    resumed = Modular(second.groups(True), *chain())
    saved = get_optimizer_state_dict(second, resumed, options=options)
    dcp.load({"optimizer": saved}, checkpoint_id=tmp_path)
    set_optimizer_state_dict(second, resumed, saved, options=options)
    assert resumed.metrics()["skipped_steps"].item() == 1
    assert resumed.param_groups[0]["schedule_step"] == 2
    train(resumed, list(second.parameters()), rows()[3:])
    torch.testing.assert_close(list(second.parameters()), params, rtol=1e-6, atol=1e-7)
    assert resumed.param_groups[1]["max_norm"] == 5.0
    torch.testing.assert_close(shown(resumed), shown(optimizer)[::-1], rtol=1e-6, atol=0)


def test_the_first_group_may_be_taken_out_and_come_back_and_others_may_be_added():
    optimizer, params = after_three_steps()
    before = shown(optimizer)[1]
    popped = optimizer.param_groups.pop(0)
    assert shown(optimizer) == [before]
    train(optimizer, params, rows()[3:4])
    assert optimizer.param_groups[0]["schedule_step"] == 3
    optimizer.add_param_group(popped)  # what it shows is out of date
    assert shown(optimizer)[0] == shown(optimizer)[1]
    assert optimizer.param_groups[1]["schedule_step"] == 3
    train(optimizer, params, rows()[4:])
    copied = {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}
    for settings in (copied, {}):
        optimizer.add_param_group({**settings, "params": [nn.Parameter(torch.zeros(1))]})
        assert shown(optimizer)[-1] == shown(optimizer)[0]
    optimizer.load_state_dict(optimizer.state_dict())


def test_groups_of_an_optimizer_make_another_with_a_state_of_its_own():
    optimizer, _ = after_three_steps()
    again = Modular(optimizer.param_groups, *chain())
    assert again.metrics()["skipped_steps"].item() == 0
    assert [group["lr"] for group in again.param_groups] == [0.1, 0.2]
    assert again.param_groups[1]["skip_step/mean"].item() == 0
    assert optimizer.param_groups[1]["skip_step/mean"].item() > 0


@pytest.mark.parametrize("group", [0, 1])
def test_a_counter_may_be_written_by_hand_into_any_group(group):
    optimizer, params = after_three_steps()
    optimizer.param_groups[group]["skipped_steps"] = 7
    assert optimizer.metrics()["skipped_steps"].item() == 7
    optimizer.param_groups[group]["schedule_step"] = 10
    optimizer.load_state_dict(optimizer.state_dict())
    train(optimizer, params, rows()[3:4])
    assert [(g["skipped_steps"], g["schedule_step"], g["max_norm"]) for g in optimizer.param_groups] == [
        (7, 11, 12)
    ] * 2
    optimizer.param_groups[group]["skipped_steps"] = -1
    with pytest.raises(ValueError, match="skipped_steps must be >= 0, got -1"):
        optimizer.step()


def untied(state_dict):
    """What Accelerate and offloading make of a checkpoint: every tensor is another."""
    if isinstance(state_dict, torch.Tensor):
        return state_dict.clone()
    if isinstance(state_dict, dict):
        return {key: untied(value) for key, value in state_dict.items()}
    return [untied(item) for item in state_dict] if isinstance(state_dict, list) else state_dict


ORDERS = {"unchanged": lambda groups: None, "reversed": list.reverse, "turned": lambda g: g.append(g.pop(0))}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("load", [untied, copy.deepcopy, lambda s: pickle.loads(pickle.dumps(s))])
def test_loading_its_own_state_is_an_identity_and_ties_the_groups_in_any_order(load, order):
    model, other = (Model(values(parameters())) for _ in range(2))
    optimizer, reference = (Modular(m.groups(False), *chain()) for m in (model, other))
    for row in rows():
        ORDERS[order](optimizer.param_groups)
        optimizer.load_state_dict(load(optimizer.state_dict()))
        first, second = optimizer.param_groups
        assert first["skip_step/mean"] is second["skip_step/mean"]
        train(optimizer, list(model.parameters()), [row])
        train(reference, list(other.parameters()), [row])
    rounding = 0 if order == "unchanged" else 1e-6  # joint norms add up in the order of groups
    torch.testing.assert_close(list(model.parameters()), list(other.parameters()), rtol=rounding, atol=rounding / 10)
    torch.testing.assert_close(shown(optimizer), shown(reference), rtol=rounding, atol=0)


@pytest.mark.parametrize(("key", "value"), [("skipped_steps", 5), ("skip_step/mean", torch.tensor(math.pi).double())])
def test_saved_groups_that_disagree_are_refused(key, value):
    optimizer, _ = after_three_steps()
    saved = optimizer.state_dict()
    saved["param_groups"][1][key] = value
    before = shown(optimizer)
    with pytest.raises(ValueError, match=rf"groups of the checkpoint disagree about '{key}', .*set it to one value"):
        optimizer.load_state_dict(saved)
    assert shown(optimizer) == before


def test_saved_groups_that_agree_about_a_nan_are_refused_for_the_nan():
    optimizer, _ = after_three_steps()
    saved = copy.deepcopy(optimizer.state_dict())
    for group in saved["param_groups"]:
        group["skip_step/mean"].fill_(math.nan)
    with pytest.raises(ValueError, match="'skip_step/mean' of the chain is not finite"):
        optimizer.load_state_dict(saved)
