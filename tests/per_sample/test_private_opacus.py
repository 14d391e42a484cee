"""One private step equals one of Opacus with the same generator, and on shards without noise."""

import copy
import warnings

import pytest
import ranks
import torch
import torch.distributed as dist
from per_sample.harness import assert_close, losses_of
from per_sample.layers import LAYERS
from torch import nn
from torch.distributed.fsdp import fully_shard

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


def released_shards():
    """The gradients of two processes by the FSDP2 of Opacus, and by a clipper, without noise."""
    from opacus.grad_sample import GradSampleModuleFastGradientClippingFSDP
    from opacus.optimizers.fsdpoptimizer_fast_gradient_clipping import FSDPOptimizerFastGradientClipping
    from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping
    from opacus.utils.fsdp_utils import FSDP2Wrapper

    def model():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))

    x, y = torch.randn(4, 3, generator=torch.Generator().manual_seed(1)).chunk(2)[dist.get_rank()], torch.tensor([0, 1])
    theirs = GradSampleModuleFastGradientClippingFSDP(FSDP2Wrapper(model()), max_grad_norm=0.5, loss_reduction="mean")
    sgd = torch.optim.SGD(theirs.parameters(), 0.1)
    settings = {"noise_multiplier": 0.0, "max_grad_norm": 0.5}
    optimizer = FSDPOptimizerFastGradientClipping(sgd, expected_batch_size=2, **settings)  # of one process
    DPLossFastGradientClipping(theirs, optimizer, nn.CrossEntropyLoss(), loss_reduction="mean")(theirs(x), y).backward()
    optimizer.pre_step()
    ours = fully_shard(model())
    clipper = PrivateGradientClipper(ours, ConstantFlatClipper(0.5), noise_multiplier=0.0, expected_batch_size=4.0)
    clipper.backward(nn.functional.cross_entropy(ours(x), y, reduction="none"))
    clipper.pre_step()
    return [[param.grad.full_tensor() for param in module.parameters()] for module in (theirs, ours)]


@pytest.mark.slow
def test_sharded_models_get_the_gradients_of_opacus():
    for theirs, ours in ranks.run(released_shards, 2):
        assert_close(ours, theirs, rtol=1e-5, atol=1e-7)
        assert all(grad.any() for grad in theirs)
