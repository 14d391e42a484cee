"""Gradients of samples are kept as long as they take no more memory than what they are made of."""

import torch
from torch import nn

from torchzero_clip import ConstantFlatClipper, PerSampleGradientClipper
from torchzero_clip.per_sample.captured_gradients import CapturedGradients


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
    with PerSampleGradientClipper(model, ConstantFlatClipper(1.0)) as clipper:
        for _ in range(2):
            clipper.backward(model(torch.randn(3, 100, 4)).sum((1, 2)))
            assert not clipper._engine.captured.reserve(formed=11, made_of=10)
