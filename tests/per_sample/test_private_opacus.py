"""One private step equals one of Opacus with the same generator."""

import copy
import warnings

import pytest
import torch
from per_sample.harness import losses_of
from per_sample.layers import LAYERS

from torchzero_clip import ConstantFlatClipper, ConstantPerLayerClipper, PrivateGradientClipper

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    opacus = pytest.importorskip("opacus")
    optimizers = pytest.importorskip("opacus.optimizers")

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]


@pytest.mark.parametrize("per_layer", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ["linear twice", "conv2d, uneven", "group norm behind conv", "embedding and linear"])
def test_a_step_is_that_of_its_optimizers(name, dtype, per_layer):
    model, x = (make() for make in LAYERS[name])
    model, x = model.to(dtype), x.to(dtype) if x.is_floating_point() else x
    twin = copy.deepcopy(model)
    limits = [0.1 * (i + 1) for i in range(len(list(model.parameters())))]
    theirs = opacus.GradSampleModule(twin)
    kind = optimizers.DPPerLayerOptimizer if per_layer else optimizers.DPOptimizer
    optimizer = kind(
        torch.optim.SGD(theirs.parameters(), lr=1.0),
        noise_multiplier=1.3,
        max_grad_norm=limits if per_layer else 0.3,
        expected_batch_size=7,
        generator=torch.Generator().manual_seed(3),
    )
    losses_of(theirs(x)).mean().backward()
    optimizer.pre_step()
    clipper = PrivateGradientClipper(
        model,
        ConstantPerLayerClipper(limits) if per_layer else ConstantFlatClipper(0.3),
        noise_multiplier=1.3,
        expected_batch_size=7,
        generator=torch.Generator().manual_seed(3),
    )
    clipper.backward(losses_of(model(x)))
    clipper.pre_step()
    # Opacus computes the joint norm of several limits in float32
    tolerance = 1e-12 if dtype == torch.float64 and not per_layer else 3e-7
    for param, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(param.grad, other.grad, rtol=tolerance, atol=tolerance)
