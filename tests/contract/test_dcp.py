"""torch.distributed.checkpoint in one process, without a process group; `test_sharded` does it in two."""

import copy

import pytest
import torch
import torch.distributed.checkpoint as dcp
from contract.entries import ENTRIES
from contract.training import Model, assert_equal, assert_same_checkpoint, gradients, parameters, train, values
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict

from torchzero_clip import SGD, ClipNormByEMA, ClipNormGrowth, Modular

MOVES_WHATEVER_LR_IS = "target params"


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("flatten", [False, True], ids=["plain", "flattened"])
@pytest.mark.parametrize("entry", ENTRIES, ids=str)
def test_resumes_exactly(entry, flatten, tmp_path):
    options = StateDictOptions(flatten_optimizer_state_dict=flatten)
    initial = values(parameters())
    model = Model(initial)
    params = list(model.parameters())
    grads = gradients(params, 4)
    optimizer = Modular(params, entry.make())
    train(optimizer, params, grads[:2])
    halfway = values(params)
    dcp.save({"optimizer": get_optimizer_state_dict(model, optimizer, options=options)}, checkpoint_id=tmp_path)
    train(optimizer, params, grads[2:])

    second_model = Model(halfway)
    resumed = list(second_model.parameters())
    second = Modular(resumed, entry.make())
    saved = get_optimizer_state_dict(second_model, second, options=options)
    if entry.name != MOVES_WHATEVER_LR_IS:
        assert_equal(resumed, halfway)  # preparing the optimizer has moved nothing
    dcp.load({"optimizer": saved}, checkpoint_id=tmp_path)
    set_optimizer_state_dict(second_model, second, saved, options=options)
    with torch.no_grad():
        for param, value in zip(resumed, halfway, strict=True):
            param.copy_(value)
    train(second, resumed, grads[2:])
    assert_equal(resumed, params)


@pytest.mark.parametrize("entry", ENTRIES, ids=str)
def test_saving_leaves_parameters_and_state_unchanged(entry):
    """Without gradients, torch takes a step on zero gradients if `optimizer.state` is empty."""
    model = Model(values(parameters()))
    params = list(model.parameters())
    optimizer = Modular(params, entry.make())
    train(optimizer, params, gradients(params, 3))
    optimizer.zero_grad()
    before, state = values(params), copy.deepcopy(optimizer.state_dict())
    get_optimizer_state_dict(model, optimizer)
    assert_equal(params, before)
    assert_same_checkpoint(optimizer.state_dict(), state)


OF_NUMBERS = [lambda: [ClipNormGrowth(), SGD()], lambda: [ClipNormByEMA(tensorwise=False), SGD()], lambda: [SGD()]]
WAYS = {
    "plain": StateDictOptions(),
    "full": StateDictOptions(full_state_dict=True),
    "full on the cpu": StateDictOptions(full_state_dict=True, cpu_offload=True),
}


@pytest.mark.parametrize("is_older", [False, True], ids=["", "older"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("make", OF_NUMBERS)
def test_a_state_dict_of_numbers_alone(make, way, is_older):
    """torch takes a device from a tensor that has a dimension, and raises without one. Older checkpoints lack ours."""
    options = WAYS[way]
    first, second = Model(values(parameters())), Model(values(parameters()))
    optimizer, resumed = (Modular(model.parameters(), make()) for model in (first, second))
    params = list(first.parameters())
    train(optimizer, params, gradients(params, 2))
    saved = copy.deepcopy(get_optimizer_state_dict(first, optimizer, options=options))
    if is_older:
        saved["state"] = {
            key: {k: v for k, v in state.items() if k != "device"} for key, state in saved["state"].items()
        }
    set_optimizer_state_dict(second, resumed, saved, options=options)
    assert_same_checkpoint(resumed.state_dict(), optimizer.state_dict())
    assert resumed.state.keys() == set(second.parameters())
    assert not any("device" in state for state in resumed.state.values())
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert not any("device" in state for state in resumed.state.values())


def test_only_a_checkpoint_of_numbers_alone_has_a_tensor_for_its_device():
    chains = [([SGD()], 1), ([ClipNormGrowth(), SGD()], 1), ([SGD(momentum=0.9)], 0), ([ClipNormByEMA(), SGD()], 0)]
    for chain, count in chains:
        params = parameters()
        optimizer = Modular(params, chain)
        assert optimizer.state_dict()["state"] == {}
        train(optimizer, params, gradients(params, 1))
        states = optimizer.state_dict()["state"]
        assert states.keys() == set(range(len(params)))
        assert all(
            [tensor.shape for key, tensor in s.items() if key == "device"] == [(1,)] * count for s in states.values()
        )


def test_parameters_without_state_load_nested_keys():
    """Where another transform has state for some parameters only."""
    first, second = Model(values(parameters())), Model(values(parameters()))
    optimizer, resumed = (
        Modular(model.parameters(), ClipNormByEMA().only(lambda p: p.ndim == 2), SGD()) for model in (first, second)
    )
    params = list(first.parameters())
    train(optimizer, params, gradients(params, 2))
    set_optimizer_state_dict(second, resumed, copy.deepcopy(get_optimizer_state_dict(first, optimizer)))
    assert_same_checkpoint(resumed.state_dict(), optimizer.state_dict())
