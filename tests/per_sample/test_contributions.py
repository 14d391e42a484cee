"""Gradients of samples are kept as long as they take no more memory than what they are made of."""

import pytest
import torch
from per_sample.harness import Net, clip, losses_of
from torch import nn

from torchzero_clip.per_sample.gradients.captured_gradients import CapturedGradients


def test_what_one_layer_saves_another_may_spend():
    gradients = CapturedGradients("auto")
    assert not gradients.reserve(formed=11, made_of=10)
    assert gradients.reserve(formed=4, made_of=10)
    assert not gradients.reserve(formed=17, made_of=10)
    assert gradients.reserve(formed=16, made_of=10)
    assert not gradients.reserve(formed=11, made_of=10)


def test_low_memory_grants_none():
    assert not CapturedGradients("low").reserve(formed=1, made_of=100)


def test_every_backward_begins_anew():
    model = nn.Linear(4, 4)
    with clip(model) as clipper:
        for _ in range(2):
            clipper.backward(model(torch.randn(3, 100, 4)).sum((1, 2)))
            assert not clipper._engine.captured.reserve(formed=11, made_of=10)


def test_of_a_layer_in_a_loop_one_gradient_of_each_sample_is_kept():
    def forward(m, x):
        hidden = x.new_zeros(len(x), 4)
        for step in x.unbind(1):
            hidden = m.cell(step, hidden)
        return hidden

    model = Net(forward, cell=nn.GRUCell(3, 4)).double()
    with clip(model) as clipper:
        losses_of(model(torch.randn(5, 6, 3).double())).mean().backward()
        assert {len(group) for group in clipper._engine.captured.by_param.values()} == {1}


def test_an_input_changed_after_the_layer_used_it_raises():
    def forward(m, x):
        hidden = m.layer(x)
        y = m.next(hidden)
        hidden.mul_(2)
        return y

    model = Net(forward, layer=nn.Linear(3, 3), next=nn.Linear(3, 2))
    with clip(model) as clipper, pytest.raises(RuntimeError, match=r"input of 'next' \(Linear\) was changed in place"):
        clipper.backward(losses_of(model(torch.randn(5, 3))))
    assert all(param.grad is None for param in model.parameters())
