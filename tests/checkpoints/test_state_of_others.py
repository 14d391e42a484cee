"""Another package keeps state of its own in the optimizer: it is saved and loaded as it is."""

import copy
import pickle

import pytest
import torch
import torch.distributed.checkpoint as dcp
from contract.training import (
    assert_equal,
    assert_same_checkpoint,
    gradients,
    parameters,
    set_grads,
    through_file,
    train,
    values,
)
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict

from torchzero_clip import SGD, Adam, AdamW, ClipNorm, ClipNormByEMA, Modular, RMSprop


class Lookahead:
    """Keeps slow weights in the state and counts in the groups of another optimizer, as timm's does."""

    def __init__(self, base, alpha=0.5, k=2):
        self.base = base
        own = {"lookahead_alpha": alpha, "lookahead_k": k, "lookahead_step": 0}
        base.defaults.update(own)
        for group in base.param_groups:
            group.update(own)

    def slow(self, param):
        state = self.base.state[param]
        if "lookahead_slow_buff" not in state:
            state["lookahead_slow_buff"] = param.detach().clone()
        return state["lookahead_slow_buff"]

    @torch.no_grad()
    def step(self):
        self.base.step()
        for group in self.base.param_groups:
            group["lookahead_step"] += 1
            if group["lookahead_step"] % group["lookahead_k"] == 0:
                for param in group["params"]:
                    self.slow(param).lerp_(param, group["lookahead_alpha"])
                    param.copy_(self.slow(param))


def through_load(optimizer, params):
    """A new optimizer for copies of the parameters, which has loaded the checkpoint of the old one."""
    optimizer = optimizer.base
    copies = [nn.Parameter(value) for value in values(params)]
    resumed = Lookahead(Modular(copies, chain()))
    resumed.base.load_state_dict(through_file(optimizer.state_dict()))
    return resumed, copies


def through_copy(optimizer, params):
    return copy.deepcopy((optimizer, params))


def through_pickle(optimizer, params):
    return pickle.loads(pickle.dumps((optimizer, params)))


def through_states(optimizer, params):
    """As torch.distributed.checkpoint hands states over."""
    saved = get_optimizer_state_dict(Holder(params), optimizer.base)
    copies = [nn.Parameter(value) for value in values(params)]
    resumed = Lookahead(Modular(copies, chain()))
    set_optimizer_state_dict(Holder(copies), resumed.base, copy.deepcopy(saved))
    return resumed, copies


class Holder(nn.Module):
    """A module with these very parameters."""

    def __init__(self, params):
        super().__init__()
        self.held = nn.ParameterList(params)


def chain():
    return [ClipNormByEMA(tensorwise=False), ClipNorm(1), AdamW(0.1)]


@pytest.mark.parametrize("steps", [1, 2, 5])
@pytest.mark.parametrize("way", [through_load, through_copy, through_pickle, through_states])
def test_lookahead_resumes_exactly(way, steps):
    params = parameters()
    optimizer = Lookahead(Modular(params, chain()))
    grads = gradients(params, steps + 4)
    for row in grads[:steps]:
        set_grads(params, row)
        optimizer.step()
    resumed, copies = way(optimizer, params)
    assert resumed.base.param_groups[0]["lookahead_step"] == steps
    for trained, own in ((optimizer, params), (resumed, copies)):
        for row in grads[steps:]:
            set_grads(own, row)
            trained.step()
    assert_equal(copies, params)
    assert_same_checkpoint(resumed.base.state_dict(), optimizer.base.state_dict())
    assert "lookahead_slow_buff" in resumed.base.state_dict()["state"][0]


def test_lookahead_moves_as_around_torchs_optimizer():
    """State of others takes the columns of neither parameters nor gradients, nor is it one of ours."""
    params, other = parameters(torch.float64), parameters(torch.float64)
    ours, theirs = Lookahead(Modular(params, ClipNorm(1e9), AdamW(0.1))), Lookahead(torch.optim.AdamW(other, 0.1))
    for row in gradients(params, 12):
        for optimizer, own in ((ours, params), (theirs, other)):
            set_grads(own, row)
            optimizer.step()
    torch.testing.assert_close(params, other, rtol=1e-10, atol=1e-10)


def test_state_under_the_names_of_columns_is_no_column():
    params, other = parameters(), parameters()
    optimizer, plain = Modular(params, ClipNorm(1), Adam(0.1)), Modular(other, ClipNorm(1), Adam(0.1))
    for param in params:
        optimizer.state[param].update(params=torch.zeros_like(param), grads=torch.full_like(param, 1e3))
    for row in gradients(params, 8):
        train(optimizer, params, [row])
        train(plain, other, [row])
    torch.testing.assert_close(params, other, rtol=1e-6, atol=1e-6)
    assert optimizer.state[params[0]]["grads"].unique().tolist() == [1e3]


OTHERS = {
    "buffer": torch.arange(3, dtype=torch.float64),  # another shape and dtype than the parameter
    "count": torch.tensor(3),
    "mask": torch.tensor([True, False]),
    "z": None,
    "history": [1.0, 2.0],
    "note": "text",
}


def test_values_stay_as_they_are_and_share_no_memory():
    param = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    optimizer = Modular([param], ClipNorm(1), Adam())
    optimizer.state[param].update(copy.deepcopy(OTHERS))  # before the first step
    saved = through_file(optimizer.state_dict())
    twin = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    resumed = Modular([twin], ClipNorm(1), Adam())
    resumed.load_state_dict(saved)
    saved["state"][0]["buffer"].zero_()
    saved["state"][0]["history"].append(3.0)
    state = resumed.state[twin]
    assert state["buffer"].dtype == torch.float64
    assert state["buffer"].tolist() == [0, 1, 2]
    assert state["mask"].tolist() == [True, False]
    assert (state["count"].item(), state["count"].dtype) == (3, torch.int64)
    assert [state[key] for key in ("z", "history", "note")] == [None, [1.0, 2.0], "text"]
    train(resumed, [twin], gradients([twin], 3))
    resumed.load_state_dict(through_file(resumed.state_dict()))
    assert resumed.state[twin]["adam/step"].item() == 3
    assert resumed.state[twin].keys() >= OTHERS.keys()


def with_own(optimizer, param, **state):
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"].setdefault(0, {}).update(state)
    return saved


@pytest.mark.parametrize(
    ("rule", "key"),
    [(Adam(), "exp_avg"), (Adam(), "step"), (SGD(momentum=0.9), "momentum_buffer"), (RMSprop(), "square_avg")],
)
@pytest.mark.parametrize("steps", [0, 2])
def test_bare_keys_of_torchs_optimizer_are_not_of_others(rule, key, steps):
    param = nn.Parameter(torch.ones(2))
    optimizer = Modular([param], ClipNorm(1), rule)
    train(optimizer, [param], gradients([param], steps))
    saved = with_own(optimizer, param, **{key: torch.ones(2)})
    with pytest.raises(ValueError, match=f"extra: '{key}'; keys without the name of a transform .* from_torch_optim"):
        optimizer.load_state_dict(saved)


def test_keys_with_the_name_of_a_transform_are_checked_as_before():
    param = nn.Parameter(torch.ones(2))
    optimizer = Modular([param], ClipNorm(1), Adam())
    train(optimizer, [param], gradients([param], 1))
    for key in ("adam/slow", "clip_norm/slow", "other/slow"):
        with pytest.raises(ValueError, match=f"extra: '{key}'"):
            optimizer.load_state_dict(with_own(optimizer, param, slow=torch.ones(2), **{key: torch.ones(2)}))
    saved = with_own(optimizer, param, slow=torch.ones(2))
    del saved["state"][0]["adam/exp_avg"]
    with pytest.raises(ValueError, match="missing: 'adam/exp_avg'"):
        optimizer.load_state_dict(saved)


@pytest.mark.filterwarnings("ignore:.* in the checkpoint and .* in the constructor")
@pytest.mark.parametrize("steps", [0, 2])
def test_a_chain_with_another_transform_takes_the_state_of_others_along(steps):
    params = parameters()
    optimizer = Modular(params, ClipNorm(0.5), Adam())
    for param in params:
        optimizer.state[param]["slow"] = torch.full((3,), 7.0)
    train(optimizer, params, gradients(params, steps))
    twins = parameters()
    changed = Modular(twins, ClipNormByEMA(), ClipNorm(1), Adam())
    changed.load_state_dict(through_file(optimizer.state_dict()), new="clip_norm_by_ema")
    assert changed.state[twins[0]]["slow"].tolist() == [7.0] * 3
    assert ("clip_norm_by_ema/ema" in changed.state[twins[0]]) == (steps > 0)
    train(changed, twins, gradients(twins, 1))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("flatten", [False, True], ids=["plain", "flattened"])
def test_torchs_distributed_checkpoint_restores_what_the_optimizer_has(flatten, tmp_path):
    """It reads the keys of the optimizer that loads."""
    options = StateDictOptions(flatten_optimizer_state_dict=flatten)

    def made(value):
        params = parameters()
        optimizer = Modular(params, ClipNorm(1), Adam())
        train(optimizer, params, gradients(params, 1))
        for param in params if value else []:
            optimizer.state[param]["slow"] = torch.full_like(param, value)
        return optimizer, params

    optimizer, params = made(7.0)
    dcp.save({"o": get_optimizer_state_dict(Holder(params), optimizer, options=options)}, checkpoint_id=tmp_path)
    for value, found in ((3.0, 7.0), (None, None)):
        resumed, copies = made(value)
        state = get_optimizer_state_dict(Holder(copies), resumed, options=options)
        dcp.load({"o": state}, checkpoint_id=tmp_path)
        set_optimizer_state_dict(Holder(copies), resumed, state, options=options)
        slow = resumed.state[copies[0]].get("slow")
        assert (None if slow is None else slow.unique().tolist()) == (None if found is None else [found])
