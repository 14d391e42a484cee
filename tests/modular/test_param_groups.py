"""Param groups: overrides, names, and what checkpoints can hold."""

import copy
import sys
import weakref

import pytest
import torch
from contract.entries import is_matrix
from contract.training import parameters, train
from torch import nn

from torchzero_clip import (
    SGD,
    AdaGC,
    Adam,
    AdamW,
    ClipNorm,
    ClipValue,
    Modular,
    Muon,
    WeightDecay,
    clip_grad_norm_,
    clip_grad_value_,
    from_torch_optim,
)


def test_overrides_split_a_group_in_the_order_of_first_parameters():
    params = parameters()
    clip = ClipNorm(1.0).set_param_groups(
        [{"params": params[1], "max_norm": 0.1}, {"params": params[3:], "max_norm": 0.3}]
    )
    value = ClipValue(1.0).set_param_groups([{"params": params[1:3], "value": 0.5}])
    optimizer = Modular([{"params": params, "max_norm": 9.0}], clip, value)
    assert [[id(p) for p in g["params"]] for g in optimizer.param_groups] == [[id(p)] for p in params]
    rows = [(group["max_norm"], group["value"]) for group in optimizer.param_groups]
    assert rows == [(9.0, 1.0), (0.1, 0.5), (9.0, 0.5), (0.3, 1.0)]


def test_overrides_keep_names_and_reach_later_groups():
    model, head = nn.Linear(2, 2), nn.Linear(2, 1)
    chain = AdamW().set_param_groups([{"params": [model.bias, head.bias], "weight_decay": 0.0, "betas": (0.5, 0.5)}])
    optimizer = Modular(model, ClipNorm(1), chain)
    optimizer.add_param_group({"params": [(f"head.{name}", p) for name, p in head.named_parameters()]})
    assert [g["param_names"] for g in optimizer.param_groups] == [["weight"], ["bias"], ["head.weight"], ["head.bias"]]
    assert [g["weight_decay"] for g in optimizer.param_groups] == [0.01, 0.0, 0.01, 0.0]
    assert [g["betas"] for g in optimizer.param_groups] == [(0.9, 0.999), (0.5, 0.5)] * 2


@pytest.mark.parametrize(
    "form", [list, tuple, iter, lambda params: params[0]], ids=["list", "tuple", "iterator", "one"]
)
def test_parameters_that_the_optimizer_has_are_refused_with_the_way_to_unfreeze(form):
    model = nn.Linear(2, 2)
    optimizer = Modular(model.parameters(), ClipNorm(1))
    with pytest.raises(ValueError, match="To unfreeze a parameter, set its requires_grad"):
        optimizer.add_param_group({"params": form([*model.parameters()])})
    assert len(optimizer.param_groups) == 1


def test_optimizers_of_one_chain_share_no_tensor_of_an_override():
    params, limit = parameters(), torch.tensor(0.5)
    clip = ClipNorm(1.0).set_param_groups([{"params": params[:2], "max_norm": limit}])
    first, second = Modular(params, clip), Modular(params, clip)
    first.param_groups[0]["max_norm"].fill_(9.0)
    assert (second.param_groups[0]["max_norm"], limit) == (0.5, 0.5)


def test_empty_groups_stay_where_they_are():
    weight = nn.Parameter(torch.zeros(1))
    clip = ClipNorm(1.0).set_param_groups([{"params": weight, "max_norm": 0.1}])
    optimizer = Modular([{"params": []}, {"params": [weight]}], clip)
    assert [len(group["params"]) for group in optimizer.param_groups] == [0, 1]
    with pytest.raises(TypeError, match="ordered collections"):
        Modular([{"params": {weight}}], clip)


@pytest.mark.parametrize("steps", [0, 3])
def test_a_group_without_a_setting_is_refused_with_a_way_out(steps):
    optimizer = Modular(weights := parameters(), ClipNorm(1.0), Adam(0.1))
    train(optimizer, weights, [list(map(torch.ones_like, weights))] * steps)
    before, state = [w.detach().clone() for w in weights], copy.deepcopy(optimizer.state_dict()["state"])
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    del optimizer.param_groups[0]["betas"]
    with pytest.raises(KeyError, match="no 'betas': add groups by add_param_group"):
        optimizer.step()
    assert all(map(torch.equal, before, weights))
    optimizer.param_groups[0]["betas"] = (0.9, 0.999)
    torch.testing.assert_close(optimizer.state_dict()["state"], state, rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["float64", "float32", "float16"])
def test_lists_and_numbers_of_numpy_become_what_checkpoints_can_hold(kind):
    numpy = pytest.importorskip("numpy")
    half, two = getattr(numpy, kind)(0.5), numpy.int64(2)
    weight = nn.Parameter(torch.zeros(2))
    groups = [{"params": [weight], "eps": half}]
    optimizer = Modular(groups, ClipNorm(two), Adam(half, betas=[0.75, half]))
    group = optimizer.param_groups[0]
    values = [group[key] for key in ("max_norm", "eps", "lr", "betas")]
    assert values == [2, 0.5, 0.5, (0.75, 0.5)]
    assert [*map(type, values), type(group["betas"][1])] == [int, float, float, tuple, float]
    for limit in (two, half):
        weight.grad = torch.tensor([3.0, 4.0])
        assert clip_grad_norm_([weight], limit).item() == 5
        assert weight.grad.norm().item() == pytest.approx(limit)
    clip_grad_value_([weight], half / 4)
    assert weight.grad.tolist() == [0.125, 0.125]
    group["max_norm"] = half
    if kind != "float64":  # a subclass of float
        with pytest.raises(TypeError, match=f"max_norm must be a number, got .*{kind}.*: write float"):
            optimizer.step()


def test_checkpoint_order_of_overrides_is_stable_under_deepcopy():
    params = parameters()
    clip = ClipNorm(1.0).set_param_groups([{"params": params[2], "max_norm": 0.1}])
    optimizer = Modular(params, clip, WeightDecay(0.1))
    twin = copy.deepcopy(optimizer)
    assert [len(g["params"]) for g in twin.param_groups] == [3, 1]
    twin.load_state_dict(optimizer.state_dict())
    added = nn.Parameter(torch.zeros(1))
    twin.add_param_group({"params": added})
    assert len(optimizer.param_groups) == 2


def test_names_beside_the_parameters_are_their_names():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    groups = [{key: g[key] for key in ("params", "param_names")} for g in Modular(model, Adam()).param_groups]
    optimizer = Modular(groups, Muon(lr=0.02).only("0.weight"), AdamW(lr=3e-4).without("0.weight"))
    assert [(g["param_names"], g["lr"]) for g in optimizer.param_groups] == [
        (["0.weight"], 0.02),
        (["0.bias", "1.weight", "1.bias"], 3e-4),
    ]
    with pytest.raises(ValueError, match="'param_names' has 1 names for 4 parameters"):
        Modular([{**groups[0], "param_names": ["0.weight"]}], Adam())


def test_parts_of_a_group_share_no_tensor():
    p, q = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2, 2))
    clip = ClipNorm(1.0).set_param_groups([{"params": [p], "max_norm": 0.5}])
    optimizer = Modular([{"params": [p, q], "lr": torch.tensor(0.5)}], clip, SGD(0.1))
    assert optimizer.param_groups[0]["lr"] is not optimizer.param_groups[1]["lr"]


def test_parts_of_a_named_group_have_names_of_their_own_and_are_still_in_it():
    module = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
    groups = [{"params": list(module.named_parameters()), "name": "all"}]
    clip = ClipNorm(0.1).only(groups="all").set_param_groups([{"params": module[2].bias, "max_norm": 9.0}])
    optimizer = Modular(groups, clip, SGD(0.5).only(is_matrix), Adam(0.25).without(is_matrix))
    assert [group["name"] for group in optimizer.param_groups] == ["all", "all (2)", "all (3)"]
    rows = [(group["lr"], group["max_norm"]) for group in optimizer.param_groups]
    assert rows == [(0.5, 0.1), (0.25, 0.1), (0.25, 9.0)]
    params = list(module.parameters())
    train(optimizer, params, [[torch.ones_like(p) for p in params]])
    assert all(param.grad.norm() < 0.2 for param in params[:3])


def test_groups_added_after_a_load_or_a_copy_have_the_keys_of_the_others():
    """torch adds "differentiable" to the defaults of an optimizer that was loaded or copied."""
    first, second, third = (nn.Parameter(torch.zeros(2)) for _ in range(3))
    optimizer = Modular([first], AdamW())
    torchs = torch.optim.AdamW([first])
    first.grad = torch.ones(2)
    torchs.step()
    optimizer.load_state_dict(from_torch_optim(torchs.state_dict(), optimizer))
    optimizer.add_param_group({"params": [second]})
    (twin,) = copy.deepcopy([optimizer])
    twin.add_param_group({"params": [third]})
    keys = {"params", "lr", "betas", "eps", "weight_decay", "chain"}
    assert [set(group) for group in twin.param_groups] == [keys] * 3
    assert set(twin.defaults) == set(optimizer.defaults) == keys - {"params", "chain"}


def calls_to_make(count, *, named):
    """How many functions are called, in Python and in C, to make an optimizer of so many groups."""
    params = [nn.Parameter(torch.zeros(2)) for _ in range(count)]
    groups = [{"params": [(str(i), param)] if named else [param], "lr": 0.1 + i} for i, param in enumerate(params)]
    calls = []
    sys.setprofile(lambda frame, event, _: calls.append(None) if event in ("call", "c_call") else None)
    try:
        Modular(groups, AdaGC(), AdamW())
    finally:
        sys.setprofile(None)
    return len(calls)


@pytest.mark.parametrize("named", [False, True])
def test_the_work_to_make_an_optimizer_grows_with_the_number_of_groups(named):
    assert calls_to_make(400, named=named) < 4.2 * calls_to_make(100, named=named)


def test_rules_between_many_groups_are_checked_once_they_are_there():
    first, second, third = (nn.Parameter(torch.zeros(2)) for _ in range(3))
    with pytest.raises(ValueError, match="max_norm"):
        Modular([{"params": [first]}, {"params": [second], "max_norm": 0.5}], AdaGC(), AdamW())
    with pytest.raises(ValueError, match="more than one parameter group"):
        Modular([{"params": [p]} for p in (first, second, first)], AdaGC(), AdamW())
    optimizer = Modular([first], AdaGC(), AdamW())
    with pytest.raises(ValueError, match="max_norm"):
        optimizer.add_param_group({"params": [second, third], "max_norm": 0.5})
    assert [group["params"] for group in optimizer.param_groups] == [[first]]


def test_the_parameters_of_a_removed_group_are_freed():
    first, second = (nn.Parameter(torch.zeros(2)) for _ in range(2))
    optimizer = Modular([first], ClipNorm(1.0), SGD(0.1))
    optimizer.add_param_group({"params": [second]})
    reference = weakref.ref(second)
    del optimizer.param_groups[1], second
    assert reference() is None


def test_functions_of_a_group_that_is_added_later_leave_the_others_alone():
    first, second = (nn.Parameter(torch.zeros(2)) for _ in range(2))
    optimizer = Modular([first], ClipNorm(1.0), SGD(0.1))
    optimizer.add_param_group({"params": [second], "max_norm": lambda step: 2.0 + step})
    del optimizer.param_groups[1]
    optimizer.add_param_group({"params": [second], "max_norm": 5.0})
    train(optimizer, [first, second], [[torch.ones(2)] * 2] * 2)
    assert [group["max_norm"] for group in optimizer.param_groups] == [1.0, 5.0]


def test_an_optimizer_without_names_takes_none_from_a_checkpoint():
    """They would change scopes, and refuse groups without names."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    saved = Modular(model, ClipNorm(1), Adam()).state_dict()
    assert "param_names" in saved["param_groups"][0]
    optimizer = Modular(list(model.parameters()), ClipNorm(1), Adam())
    optimizer.load_state_dict(saved)
    assert "param_names" not in optimizer.param_groups[0]
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
