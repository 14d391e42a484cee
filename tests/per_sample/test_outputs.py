"""What the model does with the output of a layer is in the gradients of its samples."""

import copy
import gc
import weakref

import pytest
import torch
from per_sample.harness import (
    Net,
    assert_close,
    assert_grads,
    assert_matches_loop,
    by_two_passes,
    clip,
    losses_of,
    norms_by_loop,
    reference,
)
from torch import nn
from torch.utils.checkpoint import checkpoint

from torchzero_clip import GradSampleModuleFastGradientClipping
from torchzero_clip.per_sample.gradients.contributions import Contribution

FAST = ("auto", "low", "kept")


def after(layer, change, before=None):
    """A function of the output of the last layer."""
    before = nn.Identity() if before is None else nn.Sequential(before, nn.Tanh())
    return Net(lambda m, x: change(m.layer(m.before(x)), x), layer=layer, before=before)


def residual(h, x):
    h += x
    return h


def assigned(h, x):
    h[..., 0] = 0
    h[..., 1:2].mul_(3)
    return h.sigmoid_()


def flattened(h, x):
    h.view(-1).mul_(3.0)
    return h


def hooked(h, x):
    h.register_hook(lambda grad: grad * 3)
    return h


@pytest.mark.parametrize("change", [residual, assigned, flattened, hooked])
@pytest.mark.parametrize("before", [None, nn.Linear(6, 6)], ids=["first", "behind"])
@pytest.mark.parametrize(
    "layer",
    [
        nn.Linear(6, 6),
        nn.Linear(6, 6, bias=False),
        nn.LayerNorm(6),
        nn.RMSNorm(6),
        nn.GroupNorm(1, 3),
        nn.InstanceNorm1d(3, affine=True),
        nn.Conv1d(3, 3, 1),
        nn.PReLU(),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_changes_in_place_and_hooks_of_outputs_count(layer, before, change):
    model = after(copy.deepcopy(layer), change, copy.deepcopy(before))
    assert_matches_loop(model, torch.randn(4, 3, 6), modes=FAST)


@pytest.mark.parametrize("shape", [(4, 1, 6), (1, 3, 6), (4, 2, 3, 6)])
def test_changes_in_place_of_outputs_of_any_shape_count(shape):
    assert_matches_loop(after(nn.Linear(6, 6), residual, nn.Linear(6, 6)), torch.randn(shape), modes=FAST)


def test_hooks_set_on_outputs_in_forward_hooks_count():
    model = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 1))
    model[0].register_forward_hook(lambda module, args, output: output.register_hook(lambda grad: grad * 7) and None)
    assert_matches_loop(model, torch.randn(4, 5), modes=FAST)


def test_the_second_pass_of_the_wrapper_reaches_layers_whose_output_was_changed():
    model, x = nn.Sequential(nn.Linear(6, 6), nn.ReLU(inplace=True)).double(), torch.randn(4, 3, 6).double()
    sums = reference(model, x)[1]
    by_two_passes(model)(lambda model: losses_of(model(x)))
    assert_grads(model, [total / len(x) for total in sums])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_rms_norm_without_eps_is_the_same_when_attached(dtype):
    model, x = nn.Sequential(nn.RMSNorm(16), nn.Linear(16, 2)).to(dtype), torch.full((3, 16), 1e-3, dtype=dtype)
    model[0].weight.data *= torch.arange(16, dtype=dtype)
    expected = model(x)
    normalized = torch.rms_norm(x.float(), (16,))
    clipper = clip(model)
    output = model(x)
    assert torch.equal(output, expected)
    norms = clipper.backward(output.float().sum(1)).param_norms["0.weight"]
    assert_close(norms, (normalized * model[1].weight.float().sum(0)).norm(dim=1), rtol=0.02, atol=0)


@pytest.mark.filterwarnings("ignore:Mismatch dtype")
def test_rms_norm_under_autocast_is_the_same_when_attached():
    model, x = nn.Sequential(nn.Linear(16, 16, bias=False), nn.RMSNorm(16)), torch.full((3, 16), 1e-3)
    with torch.autocast("cpu", torch.bfloat16):
        expected = model(x)
        clip(model)
        assert torch.equal(model(x), expected)


# what is kept for the backward


def test_checkpointed_layers_keep_no_activations():
    class Checkpointed(nn.Sequential):
        def forward(self, x):
            return checkpoint(super().forward, x, use_reentrant=False)

    model, x = Checkpointed(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)).double(), torch.randn(4, 6).double()
    seen = []
    model[0].register_forward_hook(lambda module, args, output: seen.append(weakref.ref(output)))
    expected = norms_by_loop(model, x)
    clipper = clip(model)
    seen.clear()
    losses = losses_of(model(x))
    assert [ref() for ref in seen] == [None]
    assert_close(clipper.backward(losses).norms, expected)


def test_the_graph_keeps_inputs_where_hooks_of_saved_tensors_see_them():
    model, x, kept = nn.Linear(6, 6), torch.randn(4, 6), []
    clipper = clip(model)
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: kept.append(tensor.numel()) or tensor, lambda tensor: tensor
    ):
        losses = model(x).sum(1)
    assert sum(kept) == x.numel()
    clipper.backward(losses)


def test_a_step_leaves_no_activations_for_the_garbage_collector():
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Conv1d(3, 3, 1), nn.LayerNorm(6))
    clipper = clip(model, verify="never")
    gc.collect()
    gc.disable()
    try:
        clipper.backward(model(torch.randn(4, 3, 6)).flatten(1).sum(1))
        assert not [x for x in gc.get_objects() if issubclass(type(x), Contribution)]
    finally:
        gc.enable()


def test_the_second_pass_of_the_wrapper_lets_go_of_the_activations():
    wrapper, refs = GradSampleModuleFastGradientClipping(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))), []
    wrapper.get_submodule("0").register_forward_hook(lambda module, args, output: refs.append(weakref.ref(output)))
    loss = wrapper(torch.randn(4, 6)).sum()
    loss.backward(retain_graph=True)
    wrapper.get_clipping_coef()
    wrapper.disable_hooks()
    loss.backward()
    wrapper.enable_hooks()
    del loss
    assert refs[0]() is None
