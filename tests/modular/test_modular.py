"""The chain as an optimizer: settings between steps, state of the chain, metrics."""

import pytest
import torch
from contract.entries import TrackJointNorm
from contract.training import gradients, parameters, stepped, train

from torchzero_clip import ClipNorm, Modular


def test_settings_can_be_changed_between_steps():
    param, optimizer = stepped(ClipNorm(1.0), [3.0, 4.0])
    optimizer.param_groups[0]["max_norm"] = 2.0
    param.data.zero_()
    param.grad = torch.tensor([3.0, 4.0])
    optimizer.step()
    assert param.tolist() == pytest.approx([-1.2, -1.6])


def test_state_of_the_chain_is_shown_by_every_group_as_plain_scalars():
    params = parameters()
    optimizer = Modular([{"params": params[:1]}, {"params": params[1:]}], TrackJointNorm())
    train(optimizer, params, gradients(params, 1))
    average = optimizer.param_groups[0]["track_joint_norm/average"]
    joint = torch.cat([g.flatten() for g in gradients(params, 1)[0]]).norm().item()
    assert average.item() == pytest.approx(joint / 2, rel=1e-6)
    assert optimizer.param_groups[1]["track_joint_norm/average"] is average
    assert not any(optimizer.state.values())
    twin = Modular([{"params": params[:1]}, {"params": params[1:]}], TrackJointNorm())
    twin.load_state_dict(optimizer.state_dict())
    loaded = twin.param_groups[0]["track_joint_norm/average"]
    assert loaded.item() == average.item()
    assert loaded.dtype == torch.float64
    assert loaded.data_ptr() != average.data_ptr()


@pytest.mark.parametrize("reason", ["grad is None", "frozen"])
def test_metrics_are_of_the_last_step_that_did_something(reason):
    param, optimizer = stepped(ClipNorm(1.0), [3.0, 4.0])
    if reason == "frozen":
        param.requires_grad_(False)
    else:
        param.grad = None
    optimizer.step()
    assert optimizer.metrics()["clip_norm/norm"].item() == 5
