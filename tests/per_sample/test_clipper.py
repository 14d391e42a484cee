"""PerSampleGradientClipper: the numbers of backward, of clip_and_accumulate and of pre_step, and its arguments."""

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
    loop,
    losses_of,
    norms_by_loop,
    reference,
    small,
)
from torch import nn
from torch.nn import functional as F

from torchzero_clip import (
    SGD,
    ClipNorm,
    ConstantFlatClipper,
    ConstantPerLayerClipper,
    Modular,
    PerSampleGradientClipper,
)


@pytest.mark.parametrize(("values", "expected"), [([1.0, 2.0, 3.0], 3.7417), ([1.0], 1.7321)])
def test_max_norm_is_the_norm_of_all_limits(values, expected):
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1, bias=False))
    clipper = PerSampleGradientClipper(net, ConstantPerLayerClipper(values))
    for share in (1, 0.5):  # the largest limits count
        clipper.norm_clipper = ConstantPerLayerClipper([share * value for value in values])
        net(torch.ones(2, 2)).mean().backward()
        clipper.clip_and_accumulate()
    assert clipper.pre_step()[0].tolist() == pytest.approx([expected] * 3, abs=1e-4)


def test_backward_adds_to_grad_as_a_backward_does():
    model, x, y = small(), batch(5), batch(3)
    first, second = reference(model, x)[1], reference(model, y)[1]
    clipper = clip(model, loss_reduction="sum")
    clipper.backward(losses_of(model(x)))
    clipper.backward(losses_of(model(y)))
    assert_grads(model, [a + b for a, b in zip(first, second, strict=True)])


def test_pre_step_begins_anew():
    model, x, y = small(), batch(4), batch(2)
    clipper = clip(model)
    for data in (x, y):
        losses_of(model(data)).mean().backward()
        clipper.clip_and_accumulate()
        assert clipper.pre_step()[1] == len(data)
    assert_grads(model, [total / 2 for total in reference(model, y)[1]])


def test_several_backwards_before_clipping_are_one_gradient():
    model, x, clipper = attached(loss_reduction="sum")
    losses = losses_of(model(x))
    (0.25 * losses).sum().backward(retain_graph=True)
    (0.75 * losses).sum().backward()
    result = clipper.clip_and_accumulate()
    clipper.pre_step()
    norms, expected = reference(model, x)
    assert_close(result.norms, norms)
    assert_grads(model, expected)


@pytest.mark.parametrize("keep", [True, False])
def test_parameters_have_grad_samples_from_backward_until_clipping_if_they_are_kept(keep):
    model, x = small(), batch()
    expected = loop(model, [x])
    clipper = clip(model, keep_grad_samples=keep)
    losses_of(model(x)).mean().backward()
    for name, param in model.named_parameters():
        assert set(vars(param)) == ({"grad_sample"} if keep else set())
        if keep:
            assert_close(param.grad_sample, expected[name])
    clipper.clip_and_accumulate()
    assert not any(vars(param) for param in model.parameters())


def test_grad_samples_of_a_parameter_that_was_frozen_are_forgotten():
    model, _, clipper = attached(keep_grad_samples=True)
    clipper.backward(losses_of(model(batch())))
    model[0].weight.requires_grad_(False)
    model(batch())
    assert not hasattr(model[0].weight, "grad_sample")


def choosing():
    return Net(lambda m, x: m.get_submodule(m.which)(x), first=nn.Linear(3, 2), second=nn.Linear(3, 2), which="second")


def test_a_layer_skipped_in_this_step_contributes_nothing():
    model, x = choosing().double(), batch()
    clipper = clip(model)
    for which, other in (("first", "second"), ("second", "first")):
        model.which = which
        model.zero_grad()
        result = clipper.backward(losses_of(model(x)))
        assert_close(result.norms, reference(model.get_submodule(which), x)[0])
        assert not result.param_norms[f"{other}.weight"].any()
        assert model.get_submodule(other).weight.grad is None


def test_pre_step_leaves_no_old_gradient_in_a_skipped_layer():
    model = choosing().double()
    model.first.weight.grad = torch.ones_like(model.first.weight)
    clipper = clip(model)
    losses_of(model(batch())).mean().backward()
    clipper.clip_and_accumulate()
    clipper.pre_step()
    assert not model.first.weight.grad.any()


def test_modular_clips_the_mean_after_the_samples():
    model, x = small(), batch()
    sums = reference(model, x)[1]
    start = [p.detach().clone() for p in model.parameters()]
    optimizer = Modular(model, ClipNorm(0.01, dim="global"), SGD(lr=1.0))
    clip(model).backward(losses_of(model(x)))
    optimizer.step()
    total = torch.cat([(s / 5).flatten() for s in sums]).norm()
    for p, s, value in zip(model.parameters(), start, sums, strict=True):
        assert_close(p.detach(), s - 0.01 / total * value / 5, rtol=1e-6)


def test_gradients_that_a_scaler_multiplied_take_a_limit_that_it_multiplied_too():
    model, x = small().float(), batch().float()
    twin, scaler = copy.deepcopy(model), torch.amp.GradScaler("cpu", init_scale=1024.0)
    clip(model, 0.3).backward(losses_of(model(x)))
    clip(twin, 0.3 * scaler.get_scale()).backward(scaler.scale(losses_of(twin(x))))
    scaler.unscale_(torch.optim.SGD(twin.parameters()))
    assert_grads(twin, grads(model), rtol=1e-5, atol=1e-7)


def test_the_limit_may_change_between_steps():
    model, x, clipper = attached(1e9)
    limit = clipper.backward(losses_of(model(x))).norms.quantile(0.5).item()
    clipper.norm_clipper = ConstantFlatClipper(limit)
    assert clipper.backward(losses_of(model(x))).factors.min() < 1
    assert repr(clipper) == f"PerSampleGradientClipper(ConstantFlatClipper({limit}), loss_reduction='mean')"
    with pytest.raises(TypeError, match="norm_clipper must be of class NormClipper, got 5"):
        clipper.norm_clipper = 5
    assert clipper.norm_clipper.flat_value == limit


def test_calls_out_of_order_raise():
    model, _, clipper = attached()
    with pytest.raises(ValueError, match="clip_and_accumulate"):
        clipper.pre_step()
    with pytest.raises(RuntimeError, match=r"call loss.backward\(\) first"):
        clipper.clip_and_accumulate()
    losses_of(model(batch())).sum().backward()
    with pytest.raises(RuntimeError, match="wait: call"):
        clipper.backward(torch.ones(5, requires_grad=True))


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"loss_reduction": "none"}, ValueError, "loss_reduction must be one of"),
        ({"memory": "high"}, ValueError, "memory must be one of"),
        ({"nonfinite": "skip"}, ValueError, "nonfinite must be one of"),
        ({"batch_first": 1}, TypeError, "batch_first must be True or False"),
        ({"keep_grad_samples": None}, TypeError, "keep_grad_samples must be True or False"),
        ({"norm_clipper": 1.0}, TypeError, "norm_clipper must be of class NormClipper"),
        ({"module": [torch.zeros(1)]}, TypeError, "module must be of class Module"),
        *(({"verify": v}, ValueError, "verify must be one of") for v in ("sometimes", 0, -1, True, 1.5, None)),
    ],
)
def test_arguments_that_cannot_be_are_refused(arguments, error, match):
    with pytest.raises(error, match=match):
        PerSampleGradientClipper(**{"module": small(), "norm_clipper": ConstantFlatClipper(1.0), **arguments})


@pytest.mark.parametrize(
    ("losses", "error", "match"),
    [
        (lambda output: [1.0], TypeError, "losses must be of class Tensor"),
        (lambda output: torch.zeros((), requires_grad=True), ValueError, 'reduction="none"'),
        (
            lambda output: F.mse_loss(output, torch.zeros(5, 2).double(), reduction="none").flatten(),
            ValueError,
            r"saw 5 samples, the batch has 10. One loss for each token\? .*: losses.view\(5, 2\).mean\(1\)$",
        ),
        (lambda output: torch.ones(5, requires_grad=True) * 2, RuntimeError, "the losses do not depend on it"),
        (lambda output: torch.ones(5, requires_grad=True), RuntimeError, "the losses do not depend on it"),
    ],
)
def test_losses_that_do_not_fit_are_refused_and_change_nothing(losses, error, match):
    model = small()
    with clip(model) as clipper, pytest.raises(error, match=match):
        clipper.backward(losses(model(batch())))
    assert all(grad is None for grad in grads(model))


def test_losses_without_a_way_to_the_parameters_are_refused():
    model, x = small(), batch()
    with clip(model) as clipper:
        with torch.no_grad(), pytest.raises(RuntimeError, match="the forward ran under torch"):
            clipper.backward(losses_of(model(x)))
        model.requires_grad_(False)
        with pytest.raises(RuntimeError, match="nothing in it trains"):
            clipper.backward(losses_of(model(x)))
    with pytest.raises(RuntimeError, match="the clipper is detached"):
        clipper.backward(losses_of(model(x)))


def test_two_forwards_into_one_loss():
    model, x, y = small(), batch(), batch().flip(0)
    product = Net(lambda m, x, y: losses_of(m.model(x)) * losses_of(m.model(y)), model=model)
    expected = norms_by_loop(product, x, y, losses=lambda losses, _: losses)
    assert_close(clip(model).backward(product(x, y)).norms, expected)
