"""Opacus as a second oracle, where it is right: norms of samples by its hooks and by its ghost clipping."""

import copy
import warnings

import pytest
from per_sample.harness import assert_close, clip, losses_of
from per_sample.layers import LAYERS

from torchzero_clip import GradSampleModuleFastGradientClipping

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    opacus = pytest.importorskip("opacus.grad_sample")

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]

NAMES = "linear twice", "conv2d, uneven", "group norm behind conv", "embedding and linear", "layer norm behind linear"
models = pytest.mark.parametrize("name", NAMES)


def made(name):
    model, x = (make() for make in LAYERS[name])
    return model.double(), x.double() if x.is_floating_point() else x


@models
def test_gradients_of_samples_are_those_of_its_hooks(name):
    model, x = made(name)
    theirs = opacus.GradSampleModule(copy.deepcopy(model))
    losses_of(theirs(x)).mean().backward()
    clipper = clip(model, keep_grad_samples=True)
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
