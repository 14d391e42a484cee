"""The norms and clipped gradients of published models equal those of one backward per sample, in four ways to clip."""

import copy
import functools
import warnings
from typing import Any, NamedTuple

import pytest
import torch
from per_sample.harness import total_of
from per_sample.zoo import ENTRIES, SAMPLES
from torch import Tensor, nn

from torchzero_clip import ConstantFlatClipper, GradSampleModuleFastGradientClipping, PerSampleGradientClipper

UNUSED = {"masked_spec_embed", "mask_token", "logit_scale"}  # parameters of pretraining
PEER = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]


class Truth(NamedTuple):
    """The model before the step, its batch, and what one backward for each sample gives.

    ``grads`` has the gradients of each parameter, with the samples first. ``limit`` is the median of the norms.
    ``buffers`` has the buffers of the model after one forward of the batch.
    """

    model: nn.Module
    batch: Any
    grads: dict[str, Tensor]
    limit: float
    buffers: dict[str, Tensor]


@functools.cache
def truth(name):
    entry = ENTRIES[name]
    if entry.published:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            pytest.importorskip("transformers")
    torch.manual_seed(0)
    model, batch = entry.model(), entry.batch()
    rows = [grads_of_one(copy.deepcopy(model), entry, batch, i) for i in range(SAMPLES)]
    grads = {key: torch.stack([row[key] for row in rows]) for key in rows[0]}
    limit = total_of(norms_of(grads)).median().item()
    twin = copy.deepcopy(model)
    entry.losses(twin, batch)
    return Truth(model, batch, grads, limit, dict(twin.named_buffers()))


def grads_of_one(model, entry, batch, index):
    entry.losses(model, entry.sample(batch, index)).sum().backward()
    params = {name: p for name, p in model.named_parameters() if p.requires_grad}
    return {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in params.items()}


def norms_of(grads):
    return {name: g.view(SAMPLES, -1).norm(dim=1) for name, g in grads.items()}


def by_backward(model, entry, batch, limit, **settings):
    clipper = PerSampleGradientClipper(model, ConstantFlatClipper(limit), **settings)
    result = clipper.backward(entry.losses(model, batch))
    return result.norms, result.param_norms


def by_classic_form(model, entry, batch, limit, **settings):
    clipper = PerSampleGradientClipper(model, ConstantFlatClipper(limit), **settings)
    entry.losses(model, batch).mean().backward()
    result = clipper.clip_and_accumulate()
    assert clipper.pre_step()[1] == SAMPLES
    return result.norms, result.param_norms


def with_low_memory(model, entry, batch, limit, **settings):
    return by_backward(model, entry, batch, limit, memory="low", **settings)


def by_two_passes(model, entry, batch, limit, **settings):
    module = GradSampleModuleFastGradientClipping(model, strict=False, max_grad_norm=limit, **settings)
    losses = entry.losses(module, batch)
    losses.mean().backward(retain_graph=True)
    norms, coef = module.get_norm_sample(), module.get_clipping_coef()
    shown = {name: p.norm_sample for name, p in model.named_parameters() if hasattr(p, "norm_sample")}
    module.disable_hooks()
    (coef * losses).mean().backward()
    module.enable_hooks()
    return norms, shown


entries = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=PEER if entry.published else ()) for name, entry in ENTRIES.items()]
)


@entries
@pytest.mark.parametrize(
    "form",
    [
        by_backward,
        *(pytest.param(f, marks=pytest.mark.slow) for f in (by_classic_form, with_low_memory)),
        by_two_passes,
    ],
)
def test_norms_and_clipped_gradients_are_those_of_one_backward_per_sample(name, form):
    entry, (model, batch, expected, limit, buffers) = ENTRIES[name], truth(name)
    model = copy.deepcopy(model)
    total, param_norms = form(model, entry, batch, limit, **({"whole": entry.whole} if entry.whole else {}))

    assert_close = functools.partial(
        torch.testing.assert_close, rtol=entry.tolerance, atol=entry.tolerance / 10 * limit, check_dtype=False
    )
    norms = norms_of(expected)
    assert_close(total, total_of(norms))
    factors = (limit / (total_of(norms) + 1e-6)).clamp(max=1)
    for key, param in model.named_parameters():
        if key not in expected:
            assert param.grad is None
            continue
        assert_close(param_norms.get(key, torch.zeros(SAMPLES)), norms[key])
        grad = torch.zeros_like(param) if param.grad is None else param.grad
        assert_close(grad, torch.tensordot(factors, expected[key], 1) / SAMPLES)
    for key, buffer in model.named_buffers():
        assert_close(buffer, buffers[key])


@entries
def test_every_parameter_of_the_model_gets_a_gradient(name):
    without = {key.rpartition(".")[2] for key, grads in truth(name).grads.items() if not grads.any()}
    assert without <= UNUSED
