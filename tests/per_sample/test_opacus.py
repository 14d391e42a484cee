"""Opacus as a second oracle, where it is right: norms of samples by its hooks and by its ghost clipping."""

import copy
import warnings

import pytest
import torch
from per_sample.harness import assert_close, losses_of
from torch import nn

from torchzero_clip import ConstantFlatClipper, GradSampleModuleFastGradientClipping, PerSampleGradientClipper

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    opacus = pytest.importorskip("opacus.grad_sample")

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]

MODELS = {
    "linear": (lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), lambda: torch.randn(5, 6, 3)),
    "conv": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.GroupNorm(2, 8), nn.Flatten(), nn.Linear(32, 2)
        ),
        lambda: torch.randn(5, 3, 4, 4),
    ),
    "tokens": (
        lambda: nn.Sequential(nn.Embedding(6, 4), nn.LayerNorm(4), nn.Linear(4, 3)),
        lambda: torch.randint(0, 6, (5, 7)),
    ),
}
models = pytest.mark.parametrize("name", MODELS)


def made(name):
    make_model, make_input = MODELS[name]
    model, x = make_model().double(), make_input()
    return model, x.double() if x.is_floating_point() else x


@models
def test_gradients_of_samples_are_those_of_its_hooks(name):
    model, x = made(name)
    theirs = opacus.GradSampleModule(copy.deepcopy(model))
    losses_of(theirs(x)).mean().backward()
    clipper = PerSampleGradientClipper(model, ConstantFlatClipper(1.0), keep_grad_samples=True)
    losses_of(model(x)).mean().backward()
    for param, other in zip(model.parameters(), theirs.parameters(), strict=True):
        assert_close(param.grad_sample, other.grad_sample)
    clipper.discard()


@models
@pytest.mark.parametrize("ghost", [True, False])
def test_two_passes_are_those_of_its_wrapper(name, ghost):
    model, x = made(name)
    twin = copy.deepcopy(model)
    theirs = opacus.GradSampleModuleFastGradientClipping(twin, max_grad_norm=0.5, use_ghost_clipping=ghost)
    ours = GradSampleModuleFastGradientClipping(model, max_grad_norm=0.5, use_ghost_clipping=ghost)
    for module in (theirs, ours):
        losses = losses_of(module(x))
        losses.mean().backward(retain_graph=True)
        module.zero_grad()
        coef = module.get_clipping_coef()
        module.disable_hooks()
        (coef * losses).mean().backward()
        module.enable_hooks()
    for param, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert_close(param.norm_sample, other._norm_sample.reshape(-1))
        assert_close(param.grad, other.grad)
