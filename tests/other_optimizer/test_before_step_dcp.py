"""The state of transforms before an optimizer of torch in torch.distributed.checkpoint, in one process."""

import copy

import pytest
import torch
import torch.distributed.checkpoint as dcp
from contract.training import Model, assert_equal, assert_same_checkpoint, gradients, parameters, train, values
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict

from torchzero_clip import AutoClip, ClipNorm, ClipNormByEMA, ClipValueByEMA, SkipStep, ZClip, before_step

WAYS = {
    "plain": StateDictOptions(),
    "flattened": StateDictOptions(flatten_optimizer_state_dict=True),
    "full": StateDictOptions(full_state_dict=True),
    "full on the cpu": StateDictOptions(full_state_dict=True, cpu_offload=True),
}
CHAINS = {
    "stateless": lambda: [ClipNorm(0.5, dim="global")],
    "joint": lambda: [ZClip(warmup_steps=2), AutoClip(50.0, window=3)],
    "schedule": lambda: [ClipNorm(lambda step: 1.0 / (1 + step), dim="global")],
    "each": lambda: [ClipNormByEMA(0.5), ClipValueByEMA(0.5).only(lambda param: param.ndim == 2)],
    "gate": lambda: [SkipStep(max_ratio=1e30), ClipNorm(1.0)],
}
OPTIMIZERS = {
    "AdamW": lambda params: torch.optim.AdamW(params, 0.01, fused=True),
    "SGD": lambda params: torch.optim.SGD(params, 0.01),
    "SGD with momentum": lambda params: torch.optim.SGD(params, 0.01, momentum=0.9),
}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.quick_cases(6)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("chain", CHAINS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_it_resumes_exactly(name, chain, way, tmp_path):
    options = WAYS[way]
    if name == "SGD" and options.full_state_dict:
        pytest.skip("torch cannot load an SGD without momentum in this way, with or without transforms")
    model = Model(values(parameters()))
    params = list(model.parameters())
    optimizer = OPTIMIZERS[name](params)
    handle = before_step(optimizer, *CHAINS[chain]())
    rows = gradients(params, 8)
    train(optimizer, params, rows[:5])
    optimizer.zero_grad()  # so that torch takes a step of zeros where the optimizer has no state
    halfway, before = values(params), copy.deepcopy(optimizer.state_dict())
    saved = copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=options))
    assert_equal(params, halfway)
    assert_same_checkpoint(optimizer.state_dict(), before)
    if not options.full_state_dict:
        dcp.save({"optimizer": saved}, checkpoint_id=tmp_path)
    train(optimizer, params, rows[5:])

    second_model = Model(halfway)
    resumed = list(second_model.parameters())
    second = OPTIMIZERS[name](resumed)
    other = before_step(second, *CHAINS[chain]())
    if not options.full_state_dict:
        saved = get_optimizer_state_dict(second_model, second, options=options)
        dcp.load({"optimizer": saved}, checkpoint_id=tmp_path)
    set_optimizer_state_dict(second_model, second, saved, options=options)
    assert_equal(resumed, halfway)
    train(second, resumed, rows[5:])
    assert_equal(resumed, params)
    assert handle.metrics() == other.metrics()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("way", ["plain", "flattened"])
def test_transforms_come_after_the_load_of_a_checkpoint_without_them(way, tmp_path):
    options = WAYS[way]
    model = Model(values(parameters()))
    params = list(model.parameters())
    optimizer = OPTIMIZERS["AdamW"](params)
    rows = gradients(params, 4)
    train(optimizer, params, rows[:3])
    dcp.save({"optimizer": get_optimizer_state_dict(model, optimizer, options=options)}, checkpoint_id=tmp_path)

    second_model = Model(values(params))
    resumed = list(second_model.parameters())
    second = OPTIMIZERS["AdamW"](resumed)
    saved = get_optimizer_state_dict(second_model, second, options=options)
    dcp.load({"optimizer": saved}, checkpoint_id=tmp_path)
    set_optimizer_state_dict(second_model, second, saved, options=options)
    handle = before_step(second, ZClip(max_norm=None))
    train(optimizer, params, rows[3:])
    train(second, resumed, rows[3:])
    assert_equal(resumed, params)
    assert handle.steps_taken == 1
