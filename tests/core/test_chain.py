"""Chains that are spliced into others, and chains that stay units."""

import pickle

import pytest
import torch
from contract.entries import Mul, TrackJointNorm
from contract.training import stepped
from torch import nn

from torchzero_clip import SGD, Adam, AdamW, Chain, ClipNorm, ClipNormByEMA, ClipValue, ClipValueByEMA, Modular


def test_the_first_owner_of_a_key_has_it_bare():
    weight = nn.Parameter(torch.zeros(1))
    optimizer = Modular([weight], ClipNorm(1), Adam(), ClipNorm(2), ClipNorm(3))
    assert list(optimizer.transforms) == ["clip_norm", "adam", "clip_norm_2", "clip_norm_3", "lr"]
    group = optimizer.param_groups[0]
    assert (group["max_norm"], group["clip_norm_2/max_norm"], group["clip_norm_3/max_norm"]) == (1, 2, 3)
    optimizer.add_param_group(
        {"params": nn.Parameter(torch.zeros(1)), "clip_norm/max_norm": 7, "clip_norm_2/max_norm": 8}
    )
    group = optimizer.param_groups[1]
    assert (group["max_norm"], group["clip_norm_2/max_norm"], group["clip_norm_3/max_norm"]) == (7, 8, 3)
    assert "clip_norm/max_norm" not in group


def test_plain_chains_and_lists_are_spliced_and_units_are_not():
    weight = nn.Parameter(torch.zeros(1))
    optimizer = Modular([weight], [Chain(ClipNorm(1), [AdamW()])], Chain(ClipNorm(2), target="update_difference"))
    assert list(optimizer.transforms) == ["clip_norm", "adam", "weight_decay", "chain", "lr"]
    assert optimizer.param_groups[0]["chain/clip_norm/max_norm"] == 2


def test_a_unit_passes_on_what_its_transforms_removed():
    unit = Chain(Mul(2.0), ClipValue(5.0), target="update_difference")
    assert stepped(unit, [3.0, 1.0])[0].tolist() == [-(3 - 5), -(1 - 2)]


def test_a_unit_keeps_its_state_under_its_name():
    param, optimizer = stepped(Chain(SGD(momentum=0.5), TrackJointNorm(), target="update_difference"), [3.0, 4.0])
    assert list(optimizer.state[param]) == ["chain/sgd/momentum_buffer"]
    assert optimizer.param_groups[0]["chain/track_joint_norm/average"].item() == pytest.approx(2.5)


def test_overrides_inside_a_unit_reach_its_groups():
    first, second = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    override = [{"params": [("second", second)], "max_norm": 0.1}]
    for unit in (
        Chain(ClipNorm(1.0), target="update_difference").set_param_groups(override),
        Chain(ClipNorm(1.0).set_param_groups(override), target="grad"),
    ):
        assert [g["max_norm"] for g in Modular([first, second], unit).param_groups] == [1.0, 0.1]


def test_overrides_of_a_chain_add_to_those_of_its_transforms_or_change_nothing():
    first, second = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    clip = ClipNorm(1.0).set_param_groups([{"params": [second], "max_norm": 0.1}])
    chain = Chain(clip, Adam()).set_param_groups([{"params": [first], "eps": 1e-3}])
    assert [(g["max_norm"], g["eps"]) for g in Modular([first, second], chain).param_groups] == [(1, 1e-3), (0.1, 1e-8)]
    with pytest.raises(ValueError, match="eps must be >= 0"):
        chain.set_param_groups([{"params": [first], "max_norm": 7.0, "eps": -1.0}])
    assert [g["max_norm"] for g in Modular([first, second], chain).param_groups] == [1, 0.1]


def test_overrides_of_a_chain_leave_the_chain_and_its_transforms_as_they_were():
    first, second = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    clip, value = ClipNorm(1.0), ClipValue(0.1)
    unit = Chain(value, target="update_difference")
    chain = Chain(clip, unit)
    halved = chain.set_param_groups([{"params": [second], "max_norm": 0.5}])
    both = halved.set_param_groups([{"params": [second], "value": 0.2}])
    for part, expected in (
        (clip, [(1.0, None)]),
        (Chain(clip, Chain(value)), [(1.0, 0.1)]),
        (unit, [(None, 0.1)]),
        (chain, [(1.0, 0.1)]),
        (halved, [(1.0, 0.1), (0.5, 0.1)]),
        (both, [(1.0, 0.1), (0.5, 0.2)]),
    ):
        groups = Modular([first, second], part).param_groups
        assert [(g.get("max_norm"), g.get("value", g.get("chain/value/value"))) for g in groups] == expected


def test_a_second_call_on_a_transform_replaces_the_overrides_of_the_first():
    first, second = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    clip = ClipNorm(1.0).set_param_groups([{"params": first, "max_norm": 0.5}])
    other = clip.set_param_groups([{"params": second, "max_norm": 0.25}])
    assert [g["max_norm"] for g in Modular([first, second], other).param_groups] == [1.0, 0.25]
    assert [g["max_norm"] for g in Modular([first, second], clip).param_groups] == [0.5, 1.0]


def test_an_override_reaches_one_place_of_a_transform_that_stands_twice():
    param = nn.Parameter(torch.zeros(1))
    clip = ClipNorm(1.0)
    chain = Chain(clip, Mul(3.0), clip).set_param_groups([{"params": param, "max_norm": 0.5}])
    group = Modular([param], chain).param_groups[0]
    assert (group["max_norm"], group["clip_norm_2/max_norm"]) == (0.5, 1.0)


def test_overrides_inside_a_composite_reach_its_groups_and_its_repr():
    param = nn.Parameter(torch.zeros(2))
    by_ema = ClipValueByEMA(ema_tfm=ClipNorm(1.0))
    chain = Chain(by_ema).set_param_groups([{"params": param, "clip_value_by_ema/ema_tfm/clip_norm/max_norm": 0.5}])
    assert "ema_tfm=ClipNorm(0.5)" in repr(Modular([param], chain))
    assert "ema_tfm=ClipNorm(1.0)" in repr(Modular([param], by_ema))


def test_one_transform_may_serve_twice_and_in_several_optimizers():
    clip = ClipNorm(1.0)
    param, _ = stepped([clip, Mul(3.0), clip], [3.0, 4.0])
    assert param.tolist() == pytest.approx([-0.6, -0.8])
    assert stepped(clip, [0.0, 2.0])[0].tolist() == [0, -1]
    assert pickle.loads(pickle.dumps(clip)).defaults == clip.defaults


@pytest.mark.parametrize(("target", "expected"), [("grad", [-4.5, -6.0]), ("update_difference", [0.0, 0.0])])
def test_statistics_may_follow_a_unit_without_transforms(target, expected):
    param = nn.Parameter(torch.zeros(2))
    optimizer = Modular([param], Chain(target=target), ClipNormByEMA(beta=0.5, ema_init="update"))
    for grad in ([3.0, 4.0], [30.0, 40.0]):
        param.data.zero_()
        param.grad = torch.tensor(grad)
        optimizer.step()
    # the second average, (3 + 30) / 2, would be 16.5, but may grow to 1.5 times the first only
    torch.testing.assert_close(param.data, torch.tensor(expected))
