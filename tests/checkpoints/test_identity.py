"""A checkpoint belongs to its chain: no transform takes a number that is not its own."""

import copy
import json

import numpy as np
import pytest
import torch
from contract.entries import ENTRIES, Mul
from contract.training import assert_same_checkpoint, parameters, trained
from torch import nn

from torchzero_clip import (
    LR,
    Adam,
    AdamW,
    Chain,
    ClipNorm,
    ClipValue,
    ClipValueByEMA,
    Modular,
    Muon,
    Normalize,
    WeightDecay,
    Wrap,
)


def clips(*names):
    return [ClipNorm(1, name=name) for name in names]


@pytest.mark.parametrize(
    ("saver", "loader"),
    [
        ([ClipNorm(1), ClipValue(2)], [ClipValue(2), ClipNorm(1)]),
        (ClipNorm(1), ClipNorm(1, "linf")),
        (ClipNorm(1), ClipNorm(1, dim="global")),
        (ClipNorm(1), ClipNorm(1, target="grad")),
        (ClipNorm(1), Normalize(1)),
        (clips("first"), clips("first", "second")),
        (clips("first", "second"), clips("second", "first")),
        (clips("first", "second"), clips("third", "fourth")),
        (Chain(ClipNorm(1), target="grad"), Chain(ClipNorm(1, "l1"), target="grad")),
        (Chain(ClipNorm(1), Normalize(2), target="grad"), Chain(Normalize(2), ClipNorm(1), target="grad")),
        (
            [ClipNorm(1, name="clip_norm_1"), Adam(), ClipNorm(9, name="clip_norm_2")],
            [ClipNorm(9, name="clip_norm_2"), Adam(), ClipNorm(1, name="clip_norm_1")],
        ),
        (ClipValueByEMA(ema_tfm=Mul(2.0)), ClipValueByEMA()),
        (Muon(ns_steps=5), Muon(ns_steps=6)),
        (Wrap(torch.optim.NAdam), Wrap(torch.optim.RAdam)),
        (Wrap(torch.optim.NAdam), Wrap(torch.optim.NAdam, decoupled_weight_decay=True)),
        ([Adam(), LR(0.1)], [LR(0.1), Adam()]),
    ],
)
def test_another_chain_is_refused_and_nothing_is_changed(saver, loader):
    def params():
        return [nn.Parameter(torch.ones(2, 2))]

    saved = Modular(params(), saver).state_dict()
    optimizer = Modular(params(), loader)
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match=r"belongs to another chain\. .* pass (new|dropped)=.* to load_state_dict"):
        optimizer.load_state_dict(saved)
    assert_same_checkpoint(optimizer.state_dict(), before)


@pytest.mark.filterwarnings("ignore:.* in the checkpoint and .* in the constructor")
@pytest.mark.parametrize(
    ("saver", "loader"),
    [
        (Adam(), Adam(fused=True)),
        (ClipNorm(1), ClipNorm(2)),
        (ClipNorm(1), ClipNorm(1).only(lambda p: p.ndim == 2)),
        (ClipNorm(1), ClipNorm(lambda step: 1.0)),
        (ClipNorm(1, 2), ClipNorm(1, 2.0)),
        (ClipNorm(1, 1), ClipNorm(1, 1.0)),
        (Wrap(torch.optim.NAdam), Wrap(torch.optim.NAdam, decoupled_weight_decay=False)),
        (AdamW(0.1), [Chain(Adam(0.5)), [WeightDecay(0.3)]]),
        (Adam(0.5), [Adam(), LR(0.5)]),
    ],
)
def test_what_is_no_structure_makes_no_other_chain(saver, loader):
    old, new = Modular(parameters(), saver), Modular(parameters(), loader)
    new.load_state_dict(old.state_dict())
    same = {key: old.param_groups[0][key] for key in old.defaults if key not in new.runner.schedules}
    assert {key: new.param_groups[0][key] for key in same} == same


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: None, "does not say which chain wrote it"),
        (lambda text: "garbage", "does not describe a chain"),
        (lambda text: "{}", "does not describe a chain"),
        (lambda text: json.dumps({**json.loads(text), "format": 99}), "has format 99"),
        (lambda text: 3, "does not describe a chain"),
        (lambda text: ["x"], "does not describe a chain"),
        (lambda text: text.replace('"structure": {}', '"structure": []'), "does not describe a chain"),
        (lambda text: "[" * 100_000, "does not describe a chain"),
        (lambda text: text.replace('"structure": {', '"structure": null, "other": {'), "does not describe a chain"),
        (lambda text: text.replace('"name": "adam"', '"name": 1'), "does not describe a chain"),
        (lambda text: json.dumps({"format": 2, "chain": [{"more": 1}]}), "has format 2"),
    ],
)
def test_a_checkpoint_that_does_not_say_its_chain(change, message):
    optimizer = trained(ClipNorm(1.0), Adam())
    saved = optimizer.state_dict()
    for group in saved["param_groups"]:
        group["chain"] = change(group["chain"])
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(saved)


def test_groups_of_different_chains_are_refused():
    params = parameters()
    groups = [{"params": params[:2]}, {"params": params[2:]}]
    first, second = Modular(groups, ClipNorm(1.0)).state_dict(), Modular(groups, ClipValue(1.0)).state_dict()
    merged = {**first, "param_groups": [first["param_groups"][0], second["param_groups"][1]]}
    with pytest.raises(ValueError, match="come from different chains"):
        Modular(groups, ClipNorm(1.0)).load_state_dict(merged)


@pytest.mark.parametrize("entry", ENTRIES, ids=str)
def test_what_groups_say_is_made_anew_and_is_the_same_in_every_process(entry):
    optimizer = Modular(parameters(), entry.make())
    text = optimizer.state_dict()["param_groups"][0]["chain"]
    optimizer.param_groups[0]["chain"] = "garbage"
    assert optimizer.state_dict()["param_groups"][0]["chain"] == text
    assert Modular(parameters(), entry.make()).state_dict()["param_groups"][0]["chain"] == text
    assert " at 0x" not in text


class Odd(Mul):
    """Has an argument of any type."""

    def __init__(self, weights=1.0):
        super().__init__(1.0)
        self.weights = weights


@pytest.mark.parametrize("weights", [np.array([1.0, 2.0]), torch.tensor([1.0, 2.0]), {"a", "b", "cc", "ddd"}])
def test_arguments_may_be_of_any_type(weights):
    optimizer = Modular(parameters(), Odd(weights))
    optimizer.load_state_dict(Modular(parameters(), Odd(copy.deepcopy(weights))).state_dict())
    with pytest.raises(ValueError, match="belongs to another chain"):
        optimizer.load_state_dict(Modular(parameters(), Odd()).state_dict())


def test_a_set_is_the_same_text_in_every_process():
    assert Odd({"ddd", "b", "cc", "a"}).structure() == {"weights": "{'a', 'b', 'cc', 'ddd'}"}
