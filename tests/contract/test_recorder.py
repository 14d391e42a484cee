"""A recorder beside every transform: it changes no bit, and sees the gradients before the chain."""

import pytest
import torch
from contract.entries import ENTRIES
from contract.training import SHAPES, assert_equal, gradients, parameters, train
from torch import nn

from torchzero_clip import Modular, Recorder


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("entry", ENTRIES, ids=str)
def test_it_changes_no_bit(entry, fast):
    results = []
    for records in (False, True):
        params = parameters(torch.float32)
        grads = gradients(params, 4)
        grads[2][1] = torch.zeros_like(grads[2][1])
        optimizer = Modular(params, entry.make(), fast=fast)
        recorder = Recorder(optimizer, ratios_every=2) if records else None
        train(optimizer, params, grads)
        state = [v for values in optimizer.state.values() for v in values.values() if isinstance(v, torch.Tensor)]
        results.append([*params, *(p.grad for p in params), *state, *optimizer.metrics().values()])
    assert_equal(*results)
    expected = torch.stack([torch.stack([g.double().norm() for g in row]) for row in grads])
    torch.testing.assert_close(recorder.record().layer_norms, expected, rtol=1e-6, atol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("entry", [entry for entry in ENTRIES if not entry.looks], ids=str)
def test_it_never_waits_for_a_gpu(entry):
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    params = [nn.Parameter(torch.randn(shape, device="cuda")) for shape in SHAPES]
    grads = [torch.randn_like(param) for param in params]
    optimizer = Modular(params, entry.make())
    recorder = Recorder(optimizer, ratios_every=2)
    for step in range(4):
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad.clone()
        torch.cuda.set_sync_debug_mode("error" if step else "default")
        try:
            optimizer.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    expected = torch.stack([grad.double().norm() for grad in grads]).cpu().expand(4, -1)
    torch.testing.assert_close(recorder.record().layer_norms, expected, rtol=1e-6, atol=0)
