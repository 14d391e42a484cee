"""Fake CUDA parameters run a step: nothing in it waits for a value of the device. Real ones agree with the CPU."""

import pytest
import torch
from contract.entries import ENTRIES, TrackJointNorm
from contract.training import SHAPES, gradients, parameters, train
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from torchzero_clip import (
    Modular,
    Recorder,
    centralize_grads_,
    clip_grad_norm_,
    clip_grad_value_,
    clip_grads_with_norm_,
    get_total_norm,
    normalize_grads_,
)


@pytest.mark.parametrize(
    ("dtype", "records"),
    [(torch.float32, False), (torch.bfloat16, True)],
    ids=str,
)
@pytest.mark.parametrize("entry", [entry for entry in ENTRIES if not entry.looks], ids=str)
def test_a_step_never_reads_a_value_from_the_device(entry, dtype, records):
    with FakeTensorMode():
        params = [nn.Parameter(torch.empty(shape, dtype=dtype, device="cuda")) for shape in SHAPES]
        optimizer = Modular(params, entry.make())
        recorder = Recorder(optimizer, ratios_every=2) if records else None
        for _ in range(3):
            for param in params:
                param.grad = torch.empty_like(param)
            optimizer.step()
        assert recorder is None or recorder.step == 3
        assert all(value.device.type == "cuda" for value in optimizer.metrics().values())
        tensors = [v for state in optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor)]
        assert all(tensor.device.type == "cuda" for tensor in tensors)


@pytest.mark.parametrize("entry", [entry for entry in ENTRIES if not entry.looks], ids=str)
def test_parameters_on_two_devices(entry):
    with FakeTensorMode():
        params = [nn.Parameter(torch.empty(4, 3, device=device)) for device in ("cuda:0", "cuda:1")]
        optimizer = Modular(params, entry.make())
        for param in params:
            param.grad = torch.empty_like(param)
        if entry.name == "TrackJointNorm":
            pytest.skip("stacks norms of several devices itself")
        optimizer.step()
        assert [p.device.index for p in params] == [0, 1]


@pytest.mark.parametrize("devices", [["cuda:0"] * 4, ["cuda:0", "cuda:1"] * 2], ids=["one device", "two devices"])
@pytest.mark.parametrize("dim", [None, 0, "global"])
@pytest.mark.parametrize("order", [0, 1, 2, 9.5, -1, torch.inf, -torch.inf, "mad", "std", "var", "sum"])
def test_functions_never_read_a_value_from_a_device(order, dim, devices):
    with FakeTensorMode():
        params = [nn.Parameter(torch.empty(s, device=device)) for s, device in zip(SHAPES, devices, strict=True)]
        for param in params:
            param.grad = torch.empty_like(param)
        assert clip_grad_norm_(params, 1.0, order, dim, min_norm=0.1).device.type == "cuda"
        clip_grad_norm_(params, torch.tensor(1.0, device="cuda"), order, dim, min_norm=0.1)
        assert normalize_grads_(params, 1.0, order, dim).device.type == "cuda"
        centralize_grads_(params, dim)
        clip_grad_value_(params, 1.0)
        total = get_total_norm([param.grad for param in params], order)
        clip_grads_with_norm_(params, 1.0, total)
        clip_grads_with_norm_(params, torch.tensor(1.0, device="cuda"), total)
        assert [str(param.grad.device) for param in params] == devices


def test_state_of_the_chain_follows_the_parameters_to_another_device():
    with FakeTensorMode():
        optimizer = Modular(nn.Linear(2, 2).parameters(), TrackJointNorm())
        key = "track_joint_norm/average"
        assert optimizer.param_groups[0][key].device.type == "cpu"
        params = optimizer.param_groups[0]["params"]
        for i, param in enumerate(params):
            params[i] = nn.Parameter(torch.empty_like(param, device="cuda"))  # as Accelerate does
            params[i].grad = torch.empty_like(params[i])
        optimizer.step()
        assert optimizer.param_groups[0][key].device.type == "cuda"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.bfloat16, 4e-2)], ids=str)
@pytest.mark.parametrize("entry", ENTRIES, ids=str)
def test_cuda_agrees_with_cpu(entry, dtype, tolerance):
    params = parameters(dtype)
    on_device = [nn.Parameter(p.detach().cuda()) for p in params]
    grads = gradients(params, 3)
    train(Modular(params, entry.make()), params, grads)
    train(Modular(on_device, entry.make()), on_device, [[g.cuda() for g in row] for row in grads])
    for a, b in zip(on_device, params, strict=True):
        torch.testing.assert_close(a.cpu(), b, rtol=tolerance, atol=tolerance)


@pytest.mark.mps
@pytest.mark.skipif(not torch.backends.mps.is_available(), reason="needs a GPU of Apple")
@pytest.mark.parametrize("entry", [e for e in ENTRIES if "float64" not in e.name], ids=str)
def test_mps_agrees_with_cpu(entry):
    params = parameters(torch.float32)
    on_device = [nn.Parameter(p.detach().to("mps")) for p in params]
    grads = gradients(params, 3)
    train(Modular(params, entry.make()), params, grads)
    train(Modular(on_device, entry.make()), on_device, [[g.to("mps") for g in row] for row in grads])
    for a, b in zip(on_device, params, strict=True):
        torch.testing.assert_close(a.cpu(), b, rtol=2e-5, atol=2e-5)
