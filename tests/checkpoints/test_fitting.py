"""What of a checkpoint fits, key by key."""

import copy
import math

import pytest
import torch
from contract.training import parameters, stepped, trained
from torch import distributed as dist
from torch import nn
from torch.distributed.tensor import distribute_tensor
from versions import needs_grad_dtype

from torchzero_clip import SGD, Adam, Chain, ClipNorm, ClipValue, Modular, WeightDecay, Wrap


def test_a_number_that_a_matched_transform_lacks_is_an_error():
    saved = trained(ClipNorm(1.0), Adam()).state_dict()
    del saved["param_groups"][0]["max_norm"]
    with pytest.raises(ValueError, match="lacks the setting 'max_norm'"):
        Modular(parameters(), ClipNorm(2.0), Adam()).load_state_dict(saved)
    with pytest.raises(ValueError, match="lacks the setting 'max_norm'"):
        Modular(parameters(), ClipValue(1.0), ClipNorm(2.0), Adam()).load_state_dict(saved, new="clip_value")


def test_a_name_that_only_the_checkpoint_has_enters_no_group():
    optimizer = Modular(parameters(), ClipNorm(0.1).without(lambda p: p.ndim == 1), Adam())
    saved = optimizer.state_dict()
    saved["param_groups"][0]["name"] = 5
    optimizer.load_state_dict(saved)
    assert "name" not in optimizer.param_groups[0]


@pytest.mark.parametrize(
    "value", [2**70, 2**63, torch.ones((), device="meta")], ids=["larger int", "2**63", "meta tensor"]
)
def test_a_rate_that_no_step_can_use_is_refused(value):
    optimizer = trained(Adam())
    saved = optimizer.state_dict()
    saved["param_groups"][0]["lr"] = value
    with pytest.raises(ValueError, match="lr must"):
        optimizer.load_state_dict(saved)


def test_wrapped_optimizers_refuse_tensors_and_what_they_cannot_compute_with():
    optimizer = trained(Wrap(torch.optim.ASGD))
    for key, value in (("t0", torch.ones(1)), ("alpha", -math.inf)):
        saved = optimizer.state_dict()
        saved["param_groups"][0][key] = value
        with pytest.raises(ValueError, match=r"t0 must be a number|does not fit|Invalid alpha value"):
            optimizer.load_state_dict(saved)


def test_missing_state_inside_a_unit_is_found():
    param, optimizer = stepped(Chain(Adam(), target="update_difference"), [3.0, 4.0])
    saved = copy.deepcopy(optimizer.state_dict())
    del saved["state"][0]["chain/adam/exp_avg"]
    with pytest.raises(ValueError, match="missing: 'chain/adam/exp_avg'"):
        Modular([param], Chain(Adam(), target="update_difference")).load_state_dict(saved)


def test_a_parameter_without_state_loads():
    _, optimizer = stepped(Adam(), [3.0, 4.0])
    saved = optimizer.state_dict()
    saved["state"] = {0: {}}
    optimizer.load_state_dict(saved)
    assert not any(optimizer.state.values())


@needs_grad_dtype
def test_gradients_wider_than_their_parameter_resume():
    param = nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))
    param.grad_dtype = torch.float32
    param.grad = torch.ones(2)
    optimizer = Modular([param], ClipNorm(1.0), SGD(0.1, 0.9), WeightDecay(0.1))
    optimizer.step()
    resumed = Modular([param], ClipNorm(1.0), SGD(0.1, 0.9), WeightDecay(0.1))
    resumed.load_state_dict(optimizer.state_dict())
    assert resumed.state[param]["sgd/momentum_buffer"].dtype == torch.bfloat16


@pytest.mark.slow
def test_sharded_and_whole_state_do_not_mix(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        sharded = distribute_tensor(torch.ones(2, 3), dist.init_device_mesh("cpu", (1,)))
        optimizers = []
        for value in (torch.ones(2, 3), sharded):
            param = nn.Parameter(value)
            optimizers.append(Modular([param], Adam()))
            param.grad = torch.ones_like(param)
            optimizers[-1].step()
        for optimizer, other in (optimizers, optimizers[::-1]):
            with pytest.raises(
                ValueError, match=r"'adam/exp_avg' .* sharded and whole tensors do not mix; load through"
            ):
                optimizer.load_state_dict(other.state_dict())
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    finally:
        dist.destroy_process_group()
