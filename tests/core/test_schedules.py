"""Settings that are functions of the step, and torch's schedulers on settings other than the learning rate."""

import copy

import pytest
import torch
from contract.entries import warm_up
from contract.training import assert_equal, assert_same_checkpoint, gradients, parameters, train, values
from torch import nn

from torchzero_clip import LR, SGD, Adam, Chain, ClipNorm, ClipNormByEMA, ClipValueByEMA, Modular, WeightDecay, Wrap


def test_every_step_uses_the_value_for_the_number_of_steps_before_it():
    params, other = parameters(), parameters()
    optimizer = Modular(params, ClipNorm(warm_up, dim="global"), Adam(0.1), WeightDecay(lambda step: step / 4))
    by_hand = Modular(other, ClipNorm(0.1, dim="global"), Adam(0.1), WeightDecay(0.0))
    for k, row in enumerate(gradients(params, 6)):
        by_hand.param_groups[0].update(max_norm=warm_up(k), weight_decay=k / 4)
        assert optimizer.param_groups[0]["max_norm"] == warm_up(k)  # what the next step will use
        train(optimizer, params, [row])
        train(by_hand, other, [row])
        assert_equal(params, other)


def test_groups_may_have_schedules_or_numbers_of_their_own():
    params = parameters()
    clip = ClipNorm(warm_up).set_param_groups([{"params": params[3], "max_norm": lambda step: 5.0 - step}])
    groups = [{"params": params[:1]}, {"params": params[1:2], "max_norm": 7.0}, {"params": params[3:]}]
    optimizer = Modular(groups, clip, SGD())
    rows = gradients(params, 2)
    train(optimizer, params, rows)
    assert [group["max_norm"] for group in optimizer.param_groups] == [pytest.approx(0.3), 7.0, 3.0]
    optimizer.add_param_group({"params": params[2:3]})  # joins where the others are
    assert optimizer.param_groups[3]["max_norm"] == pytest.approx(0.3)
    train(optimizer, params, rows)
    assert [g["max_norm"] for g in optimizer.param_groups] == [pytest.approx(0.5), 7.0, 1.0, pytest.approx(0.5)]


def test_a_group_that_is_added_later_may_bring_the_first_schedule():
    params = parameters()
    optimizer = Modular(params[:2], ClipNorm(1.0), SGD())
    train(optimizer, params, gradients(params, 2))
    optimizer.add_param_group({"params": params[2:], "max_norm": warm_up})
    train(optimizer, params, gradients(params, 2))
    assert [group["max_norm"] for group in optimizer.param_groups] == [1.0, pytest.approx(0.3)]


def test_a_refused_group_leaves_no_schedule():
    params = parameters()
    optimizer = Modular(params[:2], ClipNorm(warm_up), SGD())
    with pytest.raises(ValueError, match="max_norm must be >= 0, got -1"):
        optimizer.add_param_group({"params": params[2:3], "max_norm": lambda step: -1.0})
    optimizer.add_param_group({"params": params[2:], "max_norm": 3.0})
    train(optimizer, params, gradients(params, 1))
    assert [group["max_norm"] for group in optimizer.param_groups] == [0.2, 3.0]


@pytest.mark.parametrize(
    "chain",
    [
        lambda f: [ClipNorm(1.0), ClipNorm(f), SGD()],
        lambda f: [Chain(ClipNorm(f), SGD(momentum=f), target="update_difference")],
        lambda f: [ClipNormByEMA(f, eps=f), Adam(eps=f), LR(f)],
        lambda f: [ClipValueByEMA(f, ema_tfm=ClipNorm(f)), Adam(f, lambda step: (f(step), 0.9))],
        lambda f: [Wrap(torch.optim.AdamW, lr=f, weight_decay=f, betas=lambda step: (f(step), 0.9))],
    ],
)
def test_all_settings_can_be_scheduled(chain):
    def schedule(step):
        return 0.1 + step / 100

    params = parameters()
    optimizer = Modular(params, chain(schedule))
    scheduled = [key for key, value in optimizer.param_groups[0].items() if value in (0.1, (0.1, 0.9))]
    assert scheduled
    train(optimizer, params, gradients(params, 3))
    for key in scheduled:
        value = optimizer.param_groups[0][key]
        assert (value[0] if isinstance(value, tuple) else value) == pytest.approx(0.13)


@pytest.mark.filterwarnings("ignore:max_norm is 0.1 in the checkpoint and 1.0 in the constructor")
def test_a_schedule_that_a_checkpoint_does_not_know_begins_at_its_start():
    params = parameters()
    old = Modular(params, ClipNorm(1.0), Adam(0.1))
    train(old, params, gradients(params, 3))
    optimizer = Modular(params, ClipNorm(warm_up), Adam(0.1))
    train(optimizer, params, gradients(params, 2))
    optimizer.load_state_dict(old.state_dict())
    assert optimizer.param_groups[0]["max_norm"] == 0.1
    saved = optimizer.state_dict()
    saved["param_groups"][0]["schedule_step"] = -1
    with pytest.raises(ValueError, match="schedule_step must be >= 0, got -1"):
        optimizer.load_state_dict(saved)
    old.load_state_dict(optimizer.state_dict())  # and it can be taken out again
    assert old.param_groups[0]["max_norm"] == 0.1


def test_only_steps_that_are_taken_count():
    params = parameters()
    optimizer = Modular(params, ClipNorm(warm_up), SGD(), nonfinite="skip")
    optimizer.step()  # no gradients
    train(optimizer, params, [[torch.full_like(p, torch.inf) for p in params]])
    assert optimizer.param_groups[0]["max_norm"] == 0.1
    train(optimizer, params, gradients(params, 1))
    assert optimizer.param_groups[0]["max_norm"] == 0.2


def test_a_schedule_that_fails_stops_the_step_before_anything_changes():
    def fails(step):
        if step == 2:
            raise RuntimeError("no such step")
        return -1.0 if step == 1 else 1.0

    params = parameters()
    optimizer = Modular(params, ClipNorm(fails), Adam())
    rows = gradients(params, 1)
    train(optimizer, params, rows)
    for message in ("max_norm must be >= 0, got -1.0", "no such step"):
        if message == "no such step":
            train(optimizer, params, rows)
        before, state = values(params), copy.deepcopy(optimizer.state_dict())
        with pytest.raises((ValueError, RuntimeError), match=message):
            train(optimizer, params, rows)
        assert_equal(params, before)
        assert_same_checkpoint(optimizer.state_dict(), state)
        optimizer.param_groups[0]["max_norm"] = 1.0  # a value set by hand holds until the next step is taken


def test_a_table_of_values_needs_none_for_the_step_after_the_last():
    table = [1.0, 0.9, 0.8]
    params, other = parameters(), parameters()
    optimizer = Modular(params, ClipNorm(lambda step: table[step]), SGD())
    rows = gradients(params, 3)
    train(optimizer, params, rows)
    again = Modular(other, ClipNorm(lambda step: table[step]), SGD())
    again.load_state_dict(optimizer.state_dict())  # of a run that has ended
    before = values(other)
    for each, its_params in ((optimizer, params), (again, other)):
        with pytest.raises(IndexError) as caught:
            train(each, its_params, rows[:1])
        assert "of step 3" in caught.value.__notes__[0]
    assert_equal(other, before)
    table.append(0.7)
    train(optimizer, params, rows[:1])


def test_a_checkpoint_of_a_wrong_value_loads_with_a_corrected_function():
    params = parameters()
    optimizer = Modular(params, ClipNorm(lambda step: 1.0 - 2 * step), SGD())
    train(optimizer, params, gradients(params, 1))
    saved = optimizer.state_dict()
    assert saved["param_groups"][0]["max_norm"] == -1.0
    corrected = Modular(params, ClipNorm(lambda step: 1.0), SGD())
    corrected.load_state_dict(saved)
    assert corrected.param_groups[0]["max_norm"] == 1.0
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match=r"max_norm must be >= 0, got -1.0"):
        optimizer.load_state_dict(saved)
    assert_same_checkpoint(optimizer.state_dict(), before)


def test_groups_may_be_taken_out_by_hand():
    params = parameters()
    groups = [{"params": params[:2]}, {"params": params[2:], "max_norm": lambda step: 10.0 - step}]
    for chain in ([ClipNorm(1.0), SGD()], [ClipNorm(warm_up), SGD()]):
        optimizer = Modular(groups, *chain)
        optimizer.param_groups.pop(0)
        train(optimizer, params, gradients(params, 1))
        assert [group["max_norm"] for group in optimizer.param_groups] == [9.0]


def test_groups_that_were_put_in_by_hand_have_no_known_functions():
    params = parameters()
    optimizer = Modular(params[:2], ClipNorm(warm_up), SGD())
    settings = {key: value for key, value in optimizer.param_groups[0].items() if key != "schedule_step"}
    optimizer.param_groups.append({**settings, "params": params[2:]})
    before = values(params)
    with pytest.raises(ValueError, match=r"a param group was added by hand, .*: use add_param_group"):
        train(optimizer, params, gradients(params, 1))
    assert_equal(params, before)


@pytest.mark.parametrize(
    ("setting", "chain"),
    [
        ("lr", (ClipNorm(1.0), SGD(lambda step: 1 / (1 + step)))),
        ("max_norm", (ClipNorm(lambda step: 1.0 + step), SGD(1.0))),
    ],
)
def test_groups_of_another_optimizer_bring_no_frozen_schedule(setting, chain):
    params = [nn.Parameter(torch.ones(2))]
    old = Modular(params, *chain)
    train(old, params, [[torch.ones(2)]] * 3)
    new = Modular(old.param_groups, *chain)
    assert setting in new.runner.schedules
    assert new.param_groups[0][setting] == 1.0
    new.load_state_dict(old.state_dict())
    assert new.param_groups[0][setting] == old.param_groups[0][setting]


@pytest.mark.parametrize(
    ("change", "limits"),
    [
        (lambda group: {**group, "max_norm": lambda step: 100.0 + step}, [101.0, 102.0]),
        (lambda group: {"params": group["params"], "max_norm": 0.5}, [0.5, 0.5]),
        (lambda group: {**group, "max_norm": 0.5}, [0.5, 0.5]),
        (lambda group: {**group, "params": iter(group["params"])}, [2.0, 3.0]),
        (lambda group: {**group, "params": group["params"][0]}, [2.0, 3.0]),
        (lambda group: group, [2.0, 3.0]),
    ],
)
def test_a_group_that_comes_back_may_have_another_function_or_number(change, limits):
    params = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    optimizer = Modular([{"params": [param]} for param in params], ClipNorm(lambda step: 1.0 + step), SGD(1.0))
    train(optimizer, params, [[torch.ones(2)] * 2])
    optimizer.add_param_group(change(optimizer.param_groups.pop()))
    for first, limit in zip([2.0, 3.0], limits, strict=True):
        assert [g["max_norm"] for g in optimizer.param_groups] == [first, limit]
        optimizer.step()


def test_groups_of_a_saved_optimizer_that_are_put_in_by_hand_go_on():
    params = [nn.Parameter(torch.ones(2)) for _ in range(3)]

    def chain():
        return ClipNorm(lambda step: 1.0 + step), SGD(1.0)

    def made():
        optimizer = Modular([params[0]], *chain())
        for param in params:
            param.grad = torch.ones(2)
        optimizer.step()
        return optimizer

    optimizer = made()
    optimizer.add_param_group({"params": params[1]})
    optimizer.add_param_group({"params": params[2], "max_norm": 0.5})
    optimizer.step()
    metadata = [{**group, "params": list(group["params"])} for group in optimizer.param_groups]
    resumed = made()
    resumed.param_groups = metadata  # as Lightning's BaseFinetuning does, before it loads the checkpoint
    resumed.load_state_dict(optimizer.state_dict())
    assert [g["max_norm"] for g in resumed.param_groups] == [3.0, 3.0, 0.5]
    resumed.step()
    assert [g["max_norm"] for g in resumed.param_groups] == [4.0, 4.0, 0.5]
    assert [g["max_norm"] for g in Modular(metadata, *chain()).param_groups] == [1.0, 1.0, 0.5]


def test_counts_that_a_chain_does_not_keep_do_not_pass_through_it():
    def growing(step):
        return 1.0 + step

    params = [nn.Parameter(torch.ones(2))]
    scheduled, constant, again = (Modular(params, ClipNorm(limit), SGD(1.0)) for limit in (growing, 4.0, growing))
    train(scheduled, params, [[torch.ones(2)]] * 3)
    constant.load_state_dict(scheduled.state_dict())
    assert "schedule_step" not in constant.state_dict()["param_groups"][0]
    again.load_state_dict(constant.state_dict())
    assert (again.param_groups[0]["schedule_step"], again.param_groups[0]["max_norm"]) == (0, 1.0)
