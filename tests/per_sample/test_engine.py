"""From forward to backward: what is captured and what is not, calls that end early, and the batch that layers see."""

import gc
import sys
from pathlib import Path

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
    norms_of,
    reference,
    small,
    total_of,
    weight,
)
from torch import nn

import torchzero_clip

PACKAGE = str(Path(torchzero_clip.__file__).parent)


def every_kind():
    return nn.Sequential(
        nn.Linear(3, 4), nn.PReLU(), nn.Unflatten(1, (4, 1)), nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(4, 2)
    ).double()


def test_forwards_have_the_output_of_the_model_with_and_without_gradients():
    model, x = small(), batch()
    expected = model(x).detach()
    _clipper = clip(model)
    assert torch.equal(model(x), expected)
    with torch.no_grad():
        assert torch.equal(model(x), expected)
    with torch.inference_mode():
        assert torch.equal(model(x), expected)


def test_a_step_of_one_linear_layer_enters_few_functions_and_files():
    clipper, x, calls = clip(model := nn.Linear(4, 3)), torch.randn(5, 4), []
    for _ in range(4):
        clipper.backward(losses_of(model(x)))

    def record(frame, event, _):
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE) and not code.co_name.startswith("<"):
            calls.append((code.co_filename, code.co_qualname))

    gc.collect()  # what earlier tests have left
    sys.setprofile(record)
    try:
        clipper.backward(losses_of(model(x)))
    finally:
        sys.setprofile(None)
    assert len(calls) <= 98
    assert len({*calls}) <= 80
    assert len({file for file, _ in calls}) <= 18


def test_gradients_of_gradients_are_refused():
    model, x = every_kind(), batch().requires_grad_()
    clipper = clip(model)
    with pytest.raises(RuntimeError, match=r"\(Linear\) is in a backward with create_graph=True"):
        torch.autograd.grad(model(x).sum(), x, create_graph=True)
    clipper.backward(losses_of(model(x)))


def test_gradients_of_the_inputs_alone_are_no_gradients_of_samples():
    model, x = every_kind(), batch().requires_grad_()
    clipper = clip(model)
    output = model(x)
    torch.autograd.grad(output.sum(), x, retain_graph=True)
    assert_close(clipper.backward(losses_of(output)).norms, norms_by_loop(model, x.detach()))


def test_transforms_of_functions_and_functional_calls_are_as_before():
    model, x = every_kind(), batch()
    jacobian, outputs = torch.func.jacrev(model)(x), model(x)
    params = {name: p.detach() for name, p in model.named_parameters()}

    def loss(params, x):
        return losses_of(torch.func.functional_call(model, params, (x[None],))).sum()

    per_sample = torch.vmap(torch.func.grad(loss), in_dims=(None, 0))
    expected = per_sample(params, x)
    clipper = clip(model)
    assert_close(torch.func.jacrev(model)(x), jacobian)
    assert_close(torch.vmap(model)(x[:, None]).squeeze(1), outputs)
    for name, found in per_sample(params, x).items():
        assert_close(found, expected[name])
    own = {name: p.clone().requires_grad_() for name, p in params.items()}
    total = losses_of(torch.func.functional_call(model, own, (x,))).sum()
    for name, found in zip(own, torch.autograd.grad(total, list(own.values())), strict=True):
        assert_close(found, expected[name].sum(0))
    assert_close(clipper.backward(losses_of(model(x))).norms, total_of(norms_of(expected)))


# calls of parts of the model


def test_parts_of_the_model_called_by_themselves_are_captured_and_refuse_to_go_on_unclipped():
    model, x, clipper = attached()
    assert_close(clipper.backward(losses_of(model[2](model[1](model[0](x))))).norms, norms_by_loop(model, x))
    model[0](x).sum().backward()
    with pytest.raises(RuntimeError, match="wait to be clipped"):
        model[0](x)


def encoded(m, x, others=()):
    code = m.first(x)
    return m.second(code) * sum(other.sum() for other in others) if others else code


def encoder():
    return Net(encoded, first=nn.Linear(3, 2), second=nn.Linear(2, 1))


def test_calls_outside_a_forward_do_not_know_the_batch_of_the_last():
    model = encoder()
    clipper = clip(model)
    clipper.backward(model(torch.randn(8, 3)).sum(1))
    x = torch.randn(1, 3)
    output = model.first(x)
    assert output.shape == (1, 2)
    assert_close(clipper.backward(output.sum(1)).norms, (2 * (x.norm() ** 2 + 1)).sqrt()[None], rtol=1e-5)


def scaled():
    return Net(lambda m, x, others: x * m.scale + sum(other.sum() for other in others), scale=weight(3))


@pytest.mark.filterwarnings("ignore:the arguments of the forward have several sizes")
@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("make", [encoder, scaled])
def test_inputs_of_other_sizes_do_not_outvote_the_batch(make, count):
    model, x, others = make().double(), torch.randn(count, 3).double(), [torch.rand(7).double(), torch.rand(7, 2)]
    clipper = clip(model)
    losses_of(model(x, others)).mean().backward()
    assert_close(clipper.clip_and_accumulate().norms, norms_by_loop(model, x, others))


def test_batch_dimension_that_is_not_where_declared_raises():
    model = nn.Linear(3, 2)
    clipper = clip(model, batch_first=False)
    with pytest.raises(ValueError, match="Linear saw 6 samples, the batch has 5"):
        clipper.backward(model(torch.randn(5, 6, 3)).sum((1, 2)))
    assert model.weight.grad is None


# the order of calls, and calls that end early


def test_a_forward_before_attaching_is_refused():
    model = small()
    losses = losses_of(model(batch()))
    clipper = clip(model)
    with pytest.raises(RuntimeError, match="have run before the clipper was attached"):
        clipper.backward(losses)
    assert all(grad is None for grad in grads(model))


def test_a_backward_that_nobody_consumed_raises_at_the_next_forward():
    model, x, clipper = attached()
    losses_of(model(x)).sum().backward()
    with pytest.raises(RuntimeError, match="wait to be clipped"):
        model(x)
    clipper.discard()
    assert_close(clipper.backward(losses_of(model(x))).norms, norms_by_loop(model, x))


def test_a_graph_that_was_kept_can_be_clipped_again():
    model, x = small(), batch()
    norms, sums = reference(model, x)
    clipper = clip(model)
    losses = losses_of(model(x))
    for _ in range(2):
        losses.mean().backward(retain_graph=True)
        assert_close(clipper.clip_and_accumulate().norms, norms)
    clipper.pre_step()
    assert_grads(model, [total / 5 for total in sums])


def raising(grad):
    raise KeyError("out of memory")


def interrupted(model, x):
    """A backward that raises after the gradients of the last layer have arrived."""
    handle = model[1].register_forward_hook(lambda module, args, output: output.register_hook(raising) and None)
    with pytest.raises(KeyError):
        losses_of(model(x)).mean().backward()
    handle.remove()


def test_gradients_of_a_backward_that_raised_are_refused():
    model, _, clipper = attached()
    interrupted(model, batch())
    with pytest.raises(RuntimeError, match="raised before its end"):
        clipper.clip_and_accumulate()
    with pytest.raises(ValueError, match="nothing was accumulated"):
        clipper.pre_step()


@pytest.mark.parametrize("forget", [True, False], ids=["discard", "next forward"])
def test_a_backward_that_raised_is_forgotten(forget):
    model, x, clipper = attached()
    interrupted(model, x)
    if forget:
        clipper.discard()
    losses_of(model(x)).mean().backward()
    assert_close(clipper.clip_and_accumulate().norms, norms_by_loop(model, x))


# parameters that are used elsewhere


def test_a_penalty_on_parameters_is_refused():
    model = small()
    with clip(model) as clipper, pytest.raises(RuntimeError, match=r"'0.weight' got a gradient from outside"):
        clipper.backward(losses_of(model(batch())) + model[0].weight.square().sum())
    assert all(grad is None for grad in grads(model))


def test_a_second_backward_of_a_graph_gets_the_error_of_torch():
    model = nn.Linear(3, 3)
    with clip(model):
        loss = model(torch.randn(4, 3)).sum()
        loss.backward()
        with pytest.raises(RuntimeError, match="Trying to backward through the graph a second time"):
            loss.backward()
