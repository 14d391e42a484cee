"""A block of paused(): the model runs in it as without a clipper, and what was captured before stays as it is."""

import copy

import pytest
import torch
from per_sample.harness import (
    Net,
    assert_close,
    assert_grads,
    attached,
    batch,
    clip,
    grads,
    losses_of,
    norms_by_loop,
    reference,
    small,
    weight,
)
from torch import nn
from torch.utils.checkpoint import checkpoint

from torchzero_clip import GradSampleModuleFastGradientClipping


def every_kind():
    """Layers with rules, a bare parameter, and a layer under the generic rule."""
    layers = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.PReLU(), nn.Linear(4, 2))
    return Net(lambda m, x: m.layers(x * m.scale), layers=layers, scale=weight(3)).double()


def ordinary(model, x):
    """The gradients of the mean loss of a copy without a clipper."""
    twin = copy.deepcopy(model)
    return torch.autograd.grad(losses_of(twin(x)).mean(), list(twin.parameters()))


@pytest.mark.parametrize("wrapper", [False, True])
def test_gradients_inside_are_bitwise_those_without_a_clipper(wrapper):
    model, x = every_kind(), batch()
    expected = ordinary(model, x)
    clipper = GradSampleModuleFastGradientClipping(model, strict=False) if wrapper else clip(model)
    with clipper.paused():
        losses_of(model(x)).mean().backward()
        found = torch.autograd.grad(losses_of(model(x)).mean(), list(model.parameters()))
    for param, a, b in zip(model.parameters(), found, expected, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(param.grad, b)
    assert_close(clipper.backward(losses_of(model(x))).norms, norms_by_loop(model, x))


def test_gradients_of_gradients_inside():
    model, x = small(), batch().requires_grad_()
    twin = copy.deepcopy(model)
    (slope,) = torch.autograd.grad(losses_of(twin(x)).sum(), x, create_graph=True)
    slope.square().sum().backward()
    clipper = clip(model)
    with clipper.paused():
        (slope,) = torch.autograd.grad(losses_of(model(x)).sum(), x, create_graph=True)
        slope.square().sum().backward()
    for a, b in zip(grads(model), grads(twin), strict=True):
        assert torch.equal(torch.zeros(()) if a is None else a, torch.zeros(()) if b is None else b)
    assert grads(model)[0].any()


def test_checkpoints_inside_run_again_as_without_a_clipper():
    model, x, y = small(), batch(), batch(3)
    expected = ordinary(model, y)
    clipper = clip(model)
    losses = losses_of(checkpoint(model, x, use_reentrant=False))
    with clipper.paused():
        losses_of(checkpoint(model, y, use_reentrant=False)).mean().backward()
    assert_grads(model, expected)
    assert_close(clipper.backward(losses).norms, norms_by_loop(model, x))


def test_batch_norm_may_train_inside():
    model, x = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).double().eval(), batch()
    clipper = clip(model)
    with clipper.paused():
        model.train()(x).sum().backward()
    model.eval()
    assert model[1].num_batches_tracked == 1
    assert_close(clipper.backward(losses_of(model(x))).norms, norms_by_loop(model, x))


def test_a_block_between_a_forward_and_its_backward_changes_nothing():
    model, x, y = small(), batch(), batch(3)
    norms, sums = reference(model, x)
    clipper = clip(model, loss_reduction="sum")
    losses = losses_of(model(x))
    with clipper.paused():
        model(y).sum().backward()
    model.zero_grad()
    assert_close(clipper.backward(losses).norms, norms)
    assert_grads(model, sums)


def test_gradients_that_wait_stay_and_can_be_clipped_inside_or_after():
    model, x = small(), batch()
    norms, sums = reference(model, x)
    clipper = clip(model, loss_reduction="sum")
    losses_of(model(x)).sum().backward()
    with clipper.paused():
        torch.autograd.grad(model(batch(2)).sum(), model[0].weight)
    assert_close(clipper.clip_and_accumulate().norms, norms)
    clipper.pre_step()
    assert_grads(model, sums)


def test_blocks_are_nested_and_end_with_an_exception():
    model, x, clipper = attached()
    expected = ordinary(model, x)

    def inner():
        with clipper.paused():
            raise ZeroDivisionError

    def outer():
        with clipper.paused():
            with pytest.raises(ZeroDivisionError):
                inner()
            losses_of(model(x)).mean().backward()  # this block goes on
            raise KeyError

    with pytest.raises(KeyError):
        outer()
    assert_grads(model, expected)
    assert_close(clipper.backward(losses_of(model(x))).norms, norms_by_loop(model, x))


def test_a_backward_inside_of_a_forward_outside_raises_and_may_follow_later():
    model, x, clipper = attached()
    losses = losses_of(model(x))
    with clipper.paused(), pytest.raises(RuntimeError, match=r"\(Linear\) ran outside of this paused\(\) block"):
        losses.mean().backward(retain_graph=True)
    assert all(grad is None for grad in grads(model))
    assert_close(clipper.backward(losses).norms, norms_by_loop(model, x))


def test_a_backward_outside_of_a_forward_inside_raises():
    model, x, clipper = attached()
    with clipper.paused():
        losses = losses_of(model(x))
    with pytest.raises(RuntimeError, match=r"got a gradient from outside.*in a paused\(\) block"):
        losses.mean().backward()
    assert_close(clipper.backward(losses_of(model(x))).norms, norms_by_loop(model, x))


def test_nothing_is_clipped_inside():
    model, x, clipper = attached()
    with clipper.paused():
        with pytest.raises(RuntimeError, match=r"the clipper is paused.*loss.backward\(\)"):
            clipper.backward(losses_of(model(x)))
        losses_of(model(x)).mean().backward()
        with pytest.raises(RuntimeError, match="no gradients have arrived"):
            clipper.clip_and_accumulate()


def test_a_block_inside_of_a_forward():
    def forward(m, x):
        with m.clipper.paused():
            (slope,) = torch.autograd.grad(m.net(x).square().sum(), m.net.weight)
        m.slope = slope
        return m.net(x)

    model, x = Net(forward, net=nn.Linear(3, 2)).double(), batch()
    model.clipper = clip(model)
    output = model(x)
    a = output.detach()
    assert_close(model.slope, 2 * a.t() @ x)
    norms = (a.square().sum(1) * (x.square().sum(1) + 1)).sqrt()
    assert_close(model.clipper.backward(output.square().sum(1) / 2).norms, norms)
    model.clipper.detach()
