"""Statistics start with the first gradient that is not all zero, and skip those that are not finite."""

import copy

import pytest
import torch
from contract.entries import ENTRIES
from contract.training import assert_equal, assert_same_checkpoint, gradients, parameters, set_grads, train

from torchzero_clip import ClipNormByEMA, ClipNormGrowth, ClipValue, Modular, WeightDecay

without_ema_tfm = [e for e in ENTRIES if e.only_statistics and e.name != "ClipValueByEMA-tfm"]  # its EMA goes on alone
BAD = {"nan": torch.nan, "inf": torch.inf, "-inf": -torch.inf}


def state_of(optimizer):
    return copy.deepcopy(optimizer.state_dict())


def updates_of(optimizer, params, row):
    """What a step subtracts."""
    for param in params:
        param.data.zero_()
    train(optimizer, params, [row])
    return [-param.detach() for param in params]


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
@pytest.mark.parametrize("entry", without_ema_tfm, ids=str)
def test_a_non_finite_gradient_leaves_no_trace(entry, bad):
    params, twins = parameters(torch.float64), parameters(torch.float64)
    grads = gradients(params, 4)
    optimizer, twin = Modular(params, entry.make()), Modular(twins, entry.make())
    for k, row in enumerate(grads):
        poisoned = [g.clone() for g in row]
        for grad in poisoned:
            grad.view(-1)[-1] = bad
        if k != 2:  # also before there is any statistic
            before = state_of(optimizer)
            updates = updates_of(optimizer, params, poisoned)
            if k:
                assert_same_checkpoint(state_of(optimizer), before)
            if "update_difference" not in repr(entry.make()):
                assert_equal(updates, poisoned)
        assert_equal(updates_of(optimizer, params, row), updates_of(twin, twins, row))


@pytest.mark.parametrize("entry", [e for e in without_ema_tfm if e.joint], ids=str)
def test_joint_statistics_ask_it_of_all_tensors(entry):
    params = parameters(torch.float64)
    optimizer = Modular(params, entry.make())
    grads = gradients(params, 3)
    train(optimizer, params, grads[:2])
    before = state_of(optimizer)
    grads[2][0][0, 0] = torch.nan
    assert_equal(updates_of(optimizer, params, grads[2]), grads[2])
    assert_same_checkpoint(state_of(optimizer), before)


@pytest.mark.parametrize("entry", [e for e in ENTRIES if e.only_statistics], ids=str)
def test_zero_gradients_before_the_first_leave_no_trace(entry):
    params, twins = parameters(torch.float64), parameters(torch.float64)
    grads = gradients(params, 3)
    zeros = [torch.zeros_like(g) for g in grads[0]]
    optimizer, twin = Modular(params, entry.make()), Modular(twins, entry.make())
    for _ in range(3):
        assert_equal(updates_of(optimizer, params, zeros), zeros)
    keys = [set(optimizer.state.get(p, {})) for p in params]
    for row in grads:
        assert_equal(updates_of(optimizer, params, row), updates_of(twin, twins, row))
    assert_same_checkpoint(state_of(optimizer), state_of(twin))
    assert keys == [set(optimizer.state.get(p, {})) for p in params]


@pytest.mark.parametrize("clip", [ClipNormByEMA, ClipNormGrowth])
def test_the_gradients_that_enter_the_chain_are_asked_not_the_updates(clip):
    """Weight decay makes an update of a zero gradient: it passes, and it is no statistic."""
    (param,) = parameters(torch.float64, [(3,)])
    before = param.detach().clone()
    optimizer = Modular([param], WeightDecay(0.5), clip())
    set_grads([param], [torch.zeros(3, dtype=torch.float64)])
    optimizer.step()
    torch.testing.assert_close(param.detach(), 0.5 * before)
    name = next(reversed(list(optimizer.transforms)[:-1]))
    assert optimizer.state[param][f"{name}/started"] == 0


def test_a_closure_transform_changes_what_enters_the_chain():
    """An inf that a transform of the closure clamps is no inf in the chain."""
    (param,) = parameters(torch.float64, [(2,)])
    optimizer = Modular([param], ClipNormGrowth(), ClipValue(1.0, target="closure"))

    def closure():
        param.grad = torch.tensor([torch.inf, 0.5], dtype=torch.float64)

    optimizer.step(closure)
    assert optimizer.state[param]["clip_norm_growth/started"] == 1
    assert optimizer.state[param]["clip_norm_growth/prev"].item() == pytest.approx(1.25**0.5)


@pytest.mark.parametrize("entry", ENTRIES, ids=str)
def test_transforms_hold_no_tensors_after_a_step(entry):
    params = parameters()
    optimizer = Modular(params, entry.make())
    before = {name: set(vars(t)) for name, t in optimizer.transforms.items()}
    train(optimizer, params, gradients(params, 2))
    assert {name: set(vars(t)) for name, t in optimizer.transforms.items()} == before
