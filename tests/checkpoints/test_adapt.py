"""Checkpoints of another chain, with transforms that are new, dropped or renamed."""

import copy
import math
import pickle
from functools import partial

import pytest
import torch
from contract.training import assert_equal, assert_same_checkpoint, gradients, parameters, through_file, train, trained
from hypothesis import given
from hypothesis import strategies as st

from torchzero_clip import (
    Adam,
    AdamW,
    ClipNorm,
    ClipNormByEMA,
    ClipNormGrowth,
    ClipValue,
    Modular,
    Transform,
    adapt_state_dict,
    as_lr,
)

pytestmark = pytest.mark.filterwarnings("ignore:.* in the checkpoint and .* in the constructor")


def moments(optimizer, name="adam"):
    states = [optimizer.state[p] for group in optimizer.param_groups for p in group["params"]]
    return [state[f"{name}/{key}"] for state in states for key in ("exp_avg", "exp_avg_sq", "step")]


def test_a_watcher_in_front_does_not_take_the_limit_of_the_clip_behind_it():
    saved = through_file(trained(ClipNorm(1.0), Adam()).state_dict())
    optimizer = Modular(parameters(), ClipNorm(math.inf), ClipNorm(1.0), Adam())
    with pytest.raises(
        ValueError, match="But clip_norm and clip_norm_2 have the same structure: name the one that is new"
    ):
        optimizer.load_state_dict(saved)
    optimizer.load_state_dict(saved, new=["clip_norm"])
    group = optimizer.param_groups[0]
    assert (group["max_norm"], group["clip_norm_2/max_norm"]) == (math.inf, 1.0)


@pytest.mark.parametrize("stateful", [ClipNormByEMA, ClipNormGrowth, lambda: ClipNormByEMA(tensorwise=False)])
def test_a_stateful_clip_is_added_to_and_taken_from_a_running_job(stateful):
    old = trained(ClipNorm(0.5), Adam(0.1))
    new = Modular(parameters(), stateful(), ClipNorm(0.25), Adam(0.9))
    name = next(iter(new.transforms))
    new.load_state_dict(through_file(old.state_dict()), new=[name])
    assert_equal(moments(new), moments(old))
    assert (new.param_groups[0]["max_norm"], new.param_groups[0]["lr"]) == (0.5, 0.1)
    params = new.param_groups[0]["params"]
    train(new, params, gradients(params, 2))
    new.load_state_dict(through_file(new.state_dict()))
    back = Modular(parameters(), ClipNorm(0.1), Adam())
    back.load_state_dict(through_file(new.state_dict()), dropped=[name])
    assert_equal(moments(back), moments(new))
    assert not any(key.startswith(name) for state in back.state.values() for key in state)
    assert not any(str(key).startswith(name) for key in back.param_groups[0])


def test_a_transform_alone_may_be_renamed():
    old = trained(ClipNormGrowth(mul=1.25), Adam())
    renamed = Modular(parameters(), ClipNormGrowth(name="slow"), Adam())
    renamed.load_state_dict(old.state_dict())
    assert renamed.param_groups[0]["mul"] == 1.25
    for a, b in zip(old.state.values(), renamed.state.values(), strict=True):
        assert a["clip_norm_growth/prev"] == b["slow/prev"]
    again = Modular(parameters(), ClipNormGrowth(name="slower"), Adam())
    again.load_state_dict(renamed.state_dict())
    assert all("slower/prev" in state for state in again.state.values())


def test_what_schedulers_keep_moves_with_its_setting():
    optimizer = Modular(parameters(), ClipNorm(1.0), Adam(0.5))
    torch.optim.lr_scheduler.LinearLR(as_lr(optimizer, "max_norm"), 0.5, total_iters=4)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    saved = optimizer.state_dict()
    assert saved["param_groups"][0]["max_norm:initial_lr"] == 1.0
    other = Modular(parameters(), ClipNorm(9.0), ClipNorm(7.0), Adam())
    other.load_state_dict(saved, new="clip_norm")
    group = other.param_groups[0]
    assert (group["max_norm"], group["clip_norm_2/max_norm"]) == (9.0, 0.5)
    assert (group["clip_norm_2/max_norm:initial_lr"], group["initial_lr"]) == (1.0, 0.5)
    assert "max_norm:initial_lr" not in group


def test_groups_keep_their_own_numbers():
    params = parameters()
    old = Modular([{"params": params[:2], "max_norm": 3.0}, {"params": params[2:], "eps": 0.5}], ClipNorm(1.0), Adam())
    groups = [{"params": params[:2]}, {"params": params[2:], "value": 0.25}]
    new = Modular(groups, ClipValue(5.0), ClipNorm(2.0), Adam())
    new.load_state_dict(old.state_dict(), new=["clip_value"])
    assert [(g["max_norm"], g["eps"], g["value"]) for g in new.param_groups] == [(3.0, 1e-8, 5.0), (1.0, 0.5, 0.25)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"new": ["clip_nrom"]},
            r"new must name transforms of this chain, got 'clip_nrom'; they are clip_value, adam, lr",
        ),
        (
            {"dropped": "clip_value"},
            r"dropped must name transforms of the saved chain, got 'clip_value'; they are clip_n",
        ),
        ({"new": 3}, r"new must name transforms of this chain, got 3; they are clip_value, adam, lr"),
        ({"new": ["clip_value"]}, r"belongs to another chain"),
    ],
)
def test_wrong_names(arguments, message):
    saved = trained(ClipNorm(1.0), Adam()).state_dict()
    with pytest.raises(ValueError, match=message):
        Modular(parameters(), ClipValue(1.0), Adam()).load_state_dict(saved, **arguments)


def test_the_arguments_may_stay_in_the_script():
    optimizer = trained(ClipValue(1.0), Adam())
    other = Modular(parameters(), ClipValue(2.0), Adam())
    other.load_state_dict(optimizer.state_dict(), new=["clip_value"], dropped=["clip_norm"])
    assert other.param_groups[0]["value"] == 1.0


@pytest.mark.parametrize("clone", [copy.copy, copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))])
def test_the_same_as_a_hook(clone):
    old = trained(ClipNorm(0.5), Adam(0.1))
    new = clone(Modular(parameters(), ClipValue(2.0), ClipNorm(0.25), Adam(0.9)))
    new.register_load_state_dict_pre_hook(partial(adapt_state_dict, new="clip_value"))
    new.load_state_dict(new.state_dict())  # as Accelerate does at once
    assert new.param_groups[0]["max_norm"] == 0.25
    new.load_state_dict(old.state_dict())
    assert (new.param_groups[0]["max_norm"], new.param_groups[0]["value"]) == (0.5, 2.0)
    assert_equal(moments(new), moments(old))


KINDS = [
    lambda n, name: ClipNorm(n, name=name),
    lambda n, name: ClipNorm(n, dim="global", name=name),
    lambda n, name: ClipValue(n, name=name),
    lambda n, name: ClipNormGrowth(mul=n, name=name),
    lambda n, name: ClipNormByEMA(max_ema_growth=n, tensorwise=False, name=name),
]


@st.composite
def chains(draw):
    """A chain and another one made by taking some transforms out and putting others in: kind, number, name."""
    numbers = iter(range(2, 100))

    def transform():
        kind, number = draw(st.integers(0, len(KINDS) - 1)), next(numbers)
        return kind, number, f"named_{number}" if draw(st.booleans()) else None

    old = [transform() for _ in range(draw(st.integers(0, 4)))]
    new = [item for item in old if draw(st.booleans())]
    for _ in range(draw(st.integers(0, 3))):
        new.insert(draw(st.integers(0, len(new))), transform())
    return old, new


def built(rows):
    optimizer = Modular(parameters(), *[KINDS[kind](float(n), name) for kind, n, name in rows], Adam())
    return optimizer, dict(zip(optimizer.transforms, rows, strict=False))


def number_key(optimizer, name):
    (key,) = {"max_norm", "value", "mul", "max_ema_growth"}.intersection(optimizer.transforms[name].defaults)
    return optimizer.runner.nodes.storage_keys[f"{name}/{key}"]


def number_of(optimizer, name):
    return optimizer.param_groups[0][number_key(optimizer, name)]


@pytest.mark.slow
@given(chains())
def test_no_change_of_a_chain_gives_a_transform_a_number_that_is_not_its_own(pair):
    old_rows, new_rows = pair
    old, old_names = built(old_rows)
    for name in old_names:  # the saved numbers are not those of any constructor
        old.param_groups[0][number_key(old, name)] += 0.5
    params = old.param_groups[0]["params"]
    train(old, params, gradients(params, 2))
    saved = old.state_dict()

    new, new_names = built(new_rows)
    added = [name for name, row in new_names.items() if row not in old_rows]
    gone = [name for name, row in old_names.items() if row not in new_rows]
    before = new.state_dict()
    kinds, old_kinds = [row[0] for row in new_rows], [row[0] for row in old_rows]
    if kinds == old_kinds and list(new_names) == list(old_names):
        # nothing tells the two chains apart: the numbers are those of the checkpoint, whatever the arguments say
        new.load_state_dict(saved, new=added, dropped=gone)
        assert [number_of(new, name) for name in new_names] == [row[1] + 0.5 for row in old_rows]
        return
    if kinds != old_kinds:
        with pytest.raises(ValueError, match="belongs to another chain"):
            new.load_state_dict(saved)
        assert_same_checkpoint(new.state_dict(), before)
    new.load_state_dict(saved, new=added, dropped=gone)
    assert [number_of(new, name) for name in new_names] == [row[1] + 0.5 * (row in old_rows) for row in new_rows]
    assert_equal(moments(new), moments(old))
    new.load_state_dict(new.state_dict())


def test_names_made_unique_by_a_number_follow_the_names_as_written():
    old = Modular(parameters(), ClipNorm(1.0, name="w"), ClipNorm(2.0, name="w"))
    new = Modular(parameters(), ClipNorm(9.0, name="w"), ClipNorm(1.5, name="w"), ClipNorm(2.5, name="w"))
    new.load_state_dict(old.state_dict(), new=["w"])
    assert [number_of(new, name) for name in ("w", "w_2", "w_3")] == [9.0, 1.0, 2.0]


def test_all_parts_of_what_was_written_as_one_may_be_renamed():
    old = trained(ClipNorm(0.5), AdamW(0.1))
    for saved, name in ((old, "main"), (trained(ClipNorm(0.5), AdamW(0.1, name="a")), "b")):
        renamed = Modular(parameters(), ClipNorm(1.0), AdamW(name=name))
        renamed.load_state_dict(saved.state_dict())
        assert_equal(moments(renamed, name), moments(old))


def test_arguments_that_are_not_needed_are_named():
    saved = Modular(parameters(), ClipNorm(1, name="first")).state_dict()
    with pytest.raises(ValueError, match="They match without new and dropped"):
        Modular(parameters(), ClipNorm(1)).load_state_dict(saved, new=["clip_norm"])


def test_a_key_that_a_matched_transform_would_take_over_is_refused():
    old = trained(Adam())
    old.param_groups[0]["adam/eps"] = 123.0
    with pytest.raises(ValueError, match="the checkpoint has 'adam/eps' twice"):
        Modular(parameters(), ClipNormByEMA(), Adam()).load_state_dict(old.state_dict(), new="clip_norm_by_ema")


def test_a_class_that_has_got_another_setting_since_the_checkpoint_is_named():
    def optimizer(*settings):
        class Own(Transform):
            def __init__(self):
                super().__init__(dict.fromkeys(settings, 1.0))

            def apply_tensors(self, updates, step):
                return updates

        return Modular(parameters(), Own(), Adam())

    with pytest.raises(ValueError, match="'own' has other settings in the checkpoint: slope"):
        optimizer("limit", "slope").load_state_dict(optimizer("limit").state_dict())
