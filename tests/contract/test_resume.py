"""A run that was saved and resumed ends bitwise where an uninterrupted run ends."""

import copy
import pickle

import pytest
import torch
from contract.entries import ENTRIES
from contract.training import (
    assert_equal,
    assert_same_checkpoint,
    assert_same_state,
    gradients,
    parameters,
    through_file,
    train,
    values,
)

from torchzero_clip import Modular


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("entry", ENTRIES, ids=str)
def test_resumes_exactly_from_a_file(entry, dtype):
    params = parameters(dtype)
    grads = gradients(params, 6)
    optimizer = Modular(params, entry.make())
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    train(optimizer, params, grads[:3])
    scheduler.step()
    saved = through_file(
        {"params": values(params), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
    )
    train(optimizer, params, grads[3:])
    scheduler.step()

    resumed = [torch.nn.Parameter(value) for value in saved["params"]]
    second = Modular(resumed, entry.make())
    second_scheduler = torch.optim.lr_scheduler.ExponentialLR(second, 0.5)
    second.load_state_dict(saved["optimizer"])
    second_scheduler.load_state_dict(saved["scheduler"])
    train(second, resumed, grads[3:])
    second_scheduler.step()

    assert_equal(resumed, params)
    assert_same_state(second, optimizer)
    assert second.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["deepcopy", "pickle"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("entry", ENTRIES, ids=str)
def test_copies_go_on_alike(entry, dtype, clone):
    params = parameters(dtype)
    grads = gradients(params, 6)
    optimizer = Modular(params, entry.make(), maximize=True)
    train(optimizer, params, grads[:3])
    copied_params, copied = clone((params, optimizer))
    train(optimizer, params, grads[3:])
    assert not all(torch.equal(a, b) for a, b in zip(copied_params, params, strict=True))  # they share no memory
    train(copied, copied_params, grads[3:])

    assert_equal(copied_params, params)
    assert_same_state(copied, optimizer)
    assert repr(copied) == repr(optimizer)
    assert list(copied.metrics()) == list(optimizer.metrics())


@pytest.mark.parametrize("entry", ENTRIES, ids=str)
def test_loading_copies_and_reloading_is_an_identity(entry):
    params = parameters(torch.bfloat16)
    grads = gradients(params, 6)
    optimizer = Modular(params, entry.make())
    train(optimizer, params, grads[:3])
    saved = optimizer.state_dict()
    twin = [torch.nn.Parameter(value) for value in values(params)]
    second = Modular(twin, entry.make())
    second.load_state_dict(saved)
    assert_same_state(second, optimizer)
    before = copy.deepcopy(saved)
    train(second, twin, grads[3:])
    assert_same_checkpoint(optimizer.state_dict(), before)  # untouched by the other's steps


def test_state_dtypes_and_large_counts_survive():
    params = parameters(torch.bfloat16)
    entry = next(e for e in ENTRIES if e.name == "Adam-float64-state")
    optimizer = Modular(params, entry.make())
    train(optimizer, params, gradients(params, 1))
    for state in optimizer.state.values():
        state["adam/step"].fill_(1001)  # bfloat16 would make it 1000
    saved = through_file(optimizer.state_dict())
    optimizer.load_state_dict(saved)
    for state in optimizer.state.values():
        assert state["adam/step"].item() == 1001
        assert state["adam/exp_avg"].dtype == torch.float64


CHANGES = [
    (torch.float32, torch.float64), (torch.float64, torch.float32), (torch.float32, torch.bfloat16),
    (torch.bfloat16, torch.float32), (torch.complex64, torch.complex128),
]  # fmt: skip


@pytest.mark.parametrize(("before", "after"), CHANGES, ids=str)
@pytest.mark.parametrize("entry", ENTRIES, ids=str)
def test_a_checkpoint_loads_after_the_dtype_of_the_model_has_changed(entry, before, after):
    if before.is_complex and entry.name == "Muon+Adam":
        pytest.skip("Muon takes no complex parameters")
    params = parameters(before)
    optimizer = Modular(params, entry.make())
    train(optimizer, params, gradients(params, 2))
    saved = through_file(optimizer.state_dict())
    for param in params:
        param.grad, param.data = None, param.data.to(after)
    twins = [torch.nn.Parameter(value) for value in values(params)]
    second = Modular(twins, entry.make())
    optimizer.load_state_dict(optimizer.state_dict())
    second.load_state_dict(saved)
    fresh_params = parameters(after)
    fresh = Modular(fresh_params, entry.make())
    train(fresh, fresh_params, gradients(fresh_params, 2))
    for i, (param, other) in enumerate(zip(params, fresh_params, strict=True)):
        for key, value in optimizer.state.get(param, {}).items():
            assert value.dtype == fresh.state[other][key].dtype
            torch.testing.assert_close(value, saved["state"][i][key].to(value.dtype), rtol=0, atol=0)
    grads = gradients(params, 2)
    train(optimizer, params, grads)
    train(second, twins, grads)
    assert_equal(twins, params)
    assert_same_state(second, optimizer)
