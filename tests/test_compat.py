"""Both checks of layouts, the one in C++ and the one that takes its place, tell the same apart."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from torchzero_clip import AdamW, ClipNorm, Modular, before_step, compat


@pytest.fixture(params=["torch's", "in Python"])
def same_layout(request, monkeypatch):
    if request.param == "in Python":
        monkeypatch.delattr(torch._C._dynamo.guards, "TensorGuards")
    return compat.same_layout


def tensors():
    return [torch.zeros(2, 3, 4, 5), torch.zeros(3), torch.zeros(())]


CHANGES = {
    "dtype": lambda t: t.double(),
    "device": lambda t: t.to("meta"),
    "shape": lambda t: t.reshape(-1, 2, 5, 2) if t.ndim else t.view(1),
    "strides": lambda t: t.to(memory_format=torch.channels_last) if t.ndim == 4 else t.expand(2),
    "layout": lambda t: t.to_sparse(),
    "negation": torch._neg_view,
    "type": nn.Parameter,
    "no tensor": lambda t: None,
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("place", [0, 2])
def test_other_layouts_are_noticed(same_layout, change, place):
    fits = same_layout(tensors())
    assert fits(tensors())
    others = tensors()
    others[place] = change(others[place])
    assert not fits(others)
    assert fits(tensors())


def test_other_numbers_of_tensors_and_repeated_ones_are_noticed(same_layout):
    fits = same_layout([torch.zeros(3), torch.zeros(3)])
    one = torch.zeros(3)
    assert not fits([one])
    assert not fits([one, one])
    assert not fits([one, torch.zeros(3), torch.zeros(3)])


def test_memory_that_is_replaced_under_a_tensor_is_noticed(same_layout):
    given = [torch.zeros(2, 3)]
    fits = same_layout(given)
    given[0].data = torch.zeros(3, 2).t()
    assert not fits(given)


def test_a_step_is_the_same_with_both(same_layout):
    param = nn.Parameter(torch.ones(4))
    optimizer = Modular([param], ClipNorm(1), AdamW(0.1))
    for _ in range(3):
        param.grad = torch.full((4,), 2.0)
        optimizer.step()
    assert optimizer.state[param]["adam/step"] == 3
    torch.testing.assert_close(param.detach(), torch.full((4,), 0.6973), rtol=0, atol=1e-4)


def test_steps_on_the_cpu_do_not_ask_a_driver_that_is_missing(monkeypatch):
    def raises():
        raise RuntimeError("CUDA driver version is insufficient for CUDA runtime version")

    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)  # as the build that most users have
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", raises)  # torch 2.15 without a driver
    weight = nn.Parameter(torch.tensor([1.0]))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    before_step(optimizer, ClipNorm(0.5))
    weight.grad = torch.tensor([2.0])
    optimizer.step()
    assert weight.item() == pytest.approx(0.5, abs=1e-6)


def test_only_hooks_of_torch_are_those_of_a_checkpoint():
    def checkpoint_to_disk(x):
        return x

    for pack in (checkpoint_to_disk, partial(checkpoint_to_disk)):
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            assert compat.checkpoint_around() is None
            assert not compat.is_restored_by_checkpoint()
    seen = []

    def shown(x):
        seen.append((compat.checkpoint_around() is not None, compat.is_restored_by_checkpoint()))
        return x.sin()

    checkpoint(shown, torch.ones(2, requires_grad=True), use_reentrant=False).sum().backward()
    assert seen == [(True, False), (False, True)]
