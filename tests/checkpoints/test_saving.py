"""Saving and loading param groups, state and state of the whole chain, whoever holds them."""

import copy
import linecache

import pytest
import torch
from contract.entries import TrackJointNorm
from contract.training import (
    assert_equal,
    assert_same_checkpoint,
    gradients,
    parameters,
    set_grads,
    stepped,
    train,
    trained,
    values,
)
from torch import nn

from torchzero_clip import (
    SGD,
    AdamW,
    AutoClip,
    Chain,
    ClipNorm,
    ClipNormByEMA,
    ClipRMS,
    ClipValueByEMA,
    Modular,
    SkipStep,
    Transform,
    ZClip,
)
from torchzero_clip.checkpoints.saving import Load, complete, new_chain_state
from torchzero_clip.core.learning_rate import with_learning_rate
from torchzero_clip.core.schedules import Schedules


class Holder:
    """Param groups and state of a chain, without an optimizer."""

    def __init__(self, *chain):
        self.weight = nn.Parameter(torch.zeros(2))
        self.nodes = Chain(*with_learning_rate(chain)).nodes()
        self.chain_state = new_chain_state(self.nodes, {})
        self.groups = [{"params": [self.weight], **self.nodes.defaults()}]
        self.state = {}
        self.chain_state.show(self.groups)

    def load(self, state_dict, **arguments):
        schedules = Schedules({}, (), self.chain_state)
        load = Load(self.nodes, schedules, self.chain_state, None, **{"new": (), "dropped": (), **arguments})
        checked = load.check(state_dict, self.groups)
        for group, saved in zip(self.groups, checked["param_groups"], strict=True):
            group.update(copy.deepcopy({key: value for key, value in saved.items() if key != "params"}))
        load.restore(self.groups, self.state)

    def shown(self):
        return copy.deepcopy(([{k: v for k, v in g.items() if k != "params"} for g in self.groups], self.state))


def saved_by(*chain):
    """The checkpoint of a chain after a step on a gradient of norm 5."""
    return stepped(list(chain), [3.0, 4.0])[1].state_dict()


def test_a_checkpoint_loads_without_an_optimizer():
    holder = Holder(ClipNormByEMA(0.5), TrackJointNorm())
    saved = saved_by(ClipNormByEMA(0.5), TrackJointNorm())
    saved["param_groups"][0]["beta"] = 0.25
    holder.load(saved)
    assert holder.groups[0]["beta"] == 0.25
    assert holder.groups[0]["track_joint_norm/average"] is holder.chain_state.values["track_joint_norm/average"]
    assert holder.groups[0]["track_joint_norm/average"] == saved["param_groups"][0]["track_joint_norm/average"] > 0
    assert holder.state[holder.weight]["clip_norm_by_ema/prev"] == saved["state"][0]["clip_norm_by_ema/prev"] > 0
    saved["state"][0]["clip_norm_by_ema/prev"].zero_()
    saved["param_groups"][0]["track_joint_norm/average"].zero_()
    assert holder.state[holder.weight]["clip_norm_by_ema/prev"] > 0
    assert holder.groups[0]["track_joint_norm/average"] > 0


def test_the_checkpoint_of_another_chain_is_converted():
    holder = Holder(ClipNorm(3.0), ClipNormByEMA(0.5))
    holder.load(saved_by(ClipNormByEMA(0.25), SkipStep(9.0)), new="clip_norm", dropped=["skip_step"])
    assert (holder.groups[0]["max_norm"], holder.groups[0]["beta"]) == (3.0, 0.25)
    assert {key.partition("/")[0] for key in holder.state[holder.weight]} == {"clip_norm_by_ema"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s["param_groups"][0].update(beta=2.0), r"beta must be in \[0, 1\], got 2.0"),
        (lambda s: s["state"][0].pop("clip_norm_by_ema/prev"), "missing: 'clip_norm_by_ema/prev'"),
        (lambda s: s["param_groups"][0].pop("track_joint_norm/average"), "lacks the state 'track_joint_norm/average'"),
        (lambda s: s["param_groups"][0].update(params=[[]]), "numbers of parameters, or their names"),
        (lambda s: s["state"].update({0: None}), "the state of parameter 0 is a dict, got NoneType"),
    ],
)
def test_a_checkpoint_that_does_not_fit_changes_nothing(change, message):
    holder = Holder(ClipNormByEMA(0.5), TrackJointNorm())
    saved = saved_by(ClipNormByEMA(0.5), TrackJointNorm())
    before = holder.shown()
    change(saved)
    with pytest.raises(ValueError, match=message):
        holder.load(saved)
    assert holder.shown() == before


def test_an_error_of_any_kind_is_a_checkpoint_that_does_not_fit():
    def limit(step):
        raise OSError(f"no limit for step {step}")

    holder = Holder(ClipNorm(1.0))
    holder.nodes.checked_settings = lambda groups: limit(7)
    with pytest.raises(ValueError, match="the checkpoint does not fit: no limit for step 7") as caught:
        holder.load(saved_by(ClipNorm(1.0)))
    assert isinstance(caught.value.__cause__, OSError)


class Swaps(Transform):
    """State of the whole chain that is replaced by new tensors and exchanged, and a number."""

    def __init__(self):
        super().__init__({})

    def init_global_state(self):
        return {"now": torch.ones(()), "before": torch.zeros(()), "calls": 0}

    def apply_tensors(self, updates, step):
        state = step.global_state
        state["now"], state["before"] = state["before"], state["now"] + 1
        state["calls"] += 1
        return updates


def everything():
    """State of each parameter and of the whole chain: numbers, tensors, rings and counts."""
    joint = [ZClip(max_norm=None, warmup_steps=2), AutoClip(50.0, window=4)]
    return [SkipStep(max_ratio=500.0), Swaps(), *joint, ClipNormByEMA(0.5), ClipValueByEMA(0.5), AdamW(0.1)]


def tensors_of(saved):
    """All tensors of a checkpoint, by where they are."""
    places = [("state", saved["state"].items()), ("group", enumerate(saved["param_groups"]))]
    rows = [((what, i, key), value) for what, own in places for i, values in own for key, value in values.items()]
    return {place: value for place, value in rows if isinstance(value, torch.Tensor)}


@pytest.mark.parametrize("missing", [False, True], ids=["all", "some"])
@pytest.mark.parametrize("fast", [True, False])
def test_a_state_dict_that_is_kept_shows_the_last_step_in_every_tensor(fast, missing):
    """As that of torch's optimizers. If it were half of an older step, loading it would mix two steps."""
    params = parameters()
    groups = [{"params": params[:1]}, {"params": params[1:]}]
    optimizer = Modular(groups, everything(), fast=fast)
    rows = gradients(params, 12)
    train(optimizer, params, rows[:2])
    kept, copied = optimizer.state_dict(), copy.deepcopy(optimizer.state_dict())
    before = tensors_of(copied)
    assert tensors_of(kept).keys() == before.keys()
    assert {key.rpartition("/")[2] for _, _, key in before} >= {"now", "before", "mean", "ring", "prev", "ema", "step"}
    for i, row in enumerate(rows[2:]):
        set_grads(params, row)
        if missing and i % 2:
            params[0].grad = None
        optimizer.step()
    shown, live = tensors_of(kept), tensors_of(optimizer.state_dict())
    assert shown.keys() == live.keys()
    assert all(torch.equal(shown[place], live[place]) for place in live)
    constant = {place for place in live if place[2].endswith(("started", "z_clip/ring"))}
    assert not [place for place in live.keys() - constant if torch.equal(live[place], before[place])]

    current, weights = copy.deepcopy(optimizer.state_dict()), values(params)
    for group, own in zip(kept["param_groups"], optimizer.param_groups, strict=True):  # numbers of groups are of then
        assert (group["swaps/calls"], own["swaps/calls"]) == (2, 12)
        group["swaps/calls"] = 12
    optimizer.load_state_dict(kept)
    assert_same_checkpoint(optimizer.state_dict(), current)
    optimizer.load_state_dict(copied)
    assert_same_checkpoint(optimizer.state_dict(), copied)
    assert_equal(params, weights)


def test_a_counter_that_was_set_by_hand_is_saved_in_every_group():
    holder = Holder(SkipStep(1.0))
    chain_state = new_chain_state(holder.nodes, {"skipped_steps": 0, "consecutive_skips": 0})
    groups = [{"params": []}, {"params": [], "skipped_steps": 7}]
    saved = {"state": {}, "param_groups": [{}, {}]}
    complete(saved, groups, chain_state)
    assert [group["skipped_steps"] for group in (*saved["param_groups"], *groups)] == [7] * 4
    assert saved["param_groups"][0]["chain"] == saved["param_groups"][1]["chain"]


@pytest.mark.parametrize("damage", [lambda s: s.clear(), lambda s: s["param_groups"][0].update(max_norm=-1.0)])
def test_a_load_that_failed_leaves_no_hook(damage):
    optimizer = trained(ClipNorm(1.0), SGD(0.1))
    saved = copy.deepcopy(optimizer.state_dict())
    damaged = copy.deepcopy(saved)
    damage(damaged)
    with pytest.raises((ValueError, KeyError)):
        optimizer.load_state_dict(damaged)
    names = ("state_dict_post", "load_state_dict_pre", "load_state_dict_post")
    assert not any(getattr(optimizer, f"_optimizer_{name}_hooks") for name in names)
    optimizer.load_state_dict(saved)
    assert not any(getattr(optimizer, f"_optimizer_{name}_hooks") for name in names)


class Name(str):
    """The name of a parameter, which counts how often it is looked up."""

    hashes = 0

    def __hash__(self):
        Name.hashes += 1
        return super().__hash__()


def lookups_of_a_load(count):
    params = [nn.Parameter(torch.zeros(2)) for _ in range(count)]
    optimizer = Modular(params, AdamW())
    train(optimizer, params, [[torch.ones_like(param) for param in params]])
    saved, names = optimizer.state_dict(), [Name(i) for i in range(count)]
    saved["state"] = {name: saved["state"][i] for i, name in enumerate(names)}
    saved["param_groups"][0]["params"] = names
    Name.hashes = 0
    optimizer.load_state_dict(saved)
    return Name.hashes


def test_the_lookups_of_a_load_grow_with_the_number_of_parameters():
    assert lookups_of_a_load(80) < 4.2 * lookups_of_a_load(20)


def test_a_limit_that_differs_from_the_checkpoint_is_named_once():
    (param,) = parameters(shapes=[(2,)])
    chain = [SkipStep(max_ratio=10.0), ClipNorm(1.0), ClipRMS(0.5), SGD(0.1)]
    saved = Modular([{"params": [param]}, {"params": parameters(shapes=[(3,)])}], *chain).state_dict()
    chain[1:3] = ClipNorm(2.0), ClipRMS(lambda step: 0.1)
    optimizer = Modular([{"params": [param]}, {"params": parameters(shapes=[(3,)])}], *chain)
    with pytest.warns(UserWarning, match=r"^max_norm is 1.0 in the checkpoint and 2.0 in the constructor\. ") as found:
        optimizer.load_state_dict(saved)
    ((name, line),) = [(warning.filename, warning.lineno) for warning in found]
    assert "load_state_dict(saved)" in linecache.getline(name, line)
    assert optimizer.param_groups[0]["max_norm"] == 1.0
