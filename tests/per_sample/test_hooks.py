"""Hooks of users: those of parameters get clipped gradients, those of modules and tensors fire as before."""

import pytest
import torch
from per_sample.harness import assert_close, assert_grads, batch, clip, grads, losses_of, reference, small
from torch import nn


@pytest.mark.parametrize("classic", [True, False])
def test_hooks_of_parameters_get_the_clipped_gradient(classic):
    model, x, seen, stepped = small(), batch(), [], []
    expected = reference(model, x)[1][0]
    model[0].weight.register_hook(lambda grad: seen.append(grad) or grad * 2)
    model[0].weight.register_post_accumulate_grad_hook(lambda param: stepped.append(param.grad.clone()))
    clipper = clip(model, loss_reduction="sum")
    losses = losses_of(model(x))
    if classic:
        losses.sum().backward()
        clipper.clip_and_accumulate()
        clipper.pre_step()
    else:
        clipper.backward(losses)
    assert_close(torch.stack(seen), expected[None])
    assert_close(torch.stack(stepped), 2 * expected[None])
    assert_close(model[0].weight.grad, 2 * expected)


def test_what_hooks_have_seen_or_returned_stays_theirs():
    model, x, seen, constant = small(), batch(), [], torch.ones(2, 4, dtype=torch.float64)
    model[0].weight.register_hook(seen.append)
    model[2].weight.register_hook(lambda grad: constant)
    clipper = clip(model)
    clipper.backward(losses_of(model(x)))
    first = seen[0].clone()
    clipper.backward(losses_of(model(x)))
    assert torch.equal(seen[0], first)
    assert (constant == 1).all()
    assert (model[2].weight.grad == 2).all()


def raising(grad):
    raise KeyError


@pytest.mark.parametrize(
    ("name", "hook", "error", "match"),
    [
        ("2.bias", raising, KeyError, None),
        ("2.weight", lambda grad: grad.sum(), RuntimeError, r"of shape \(2, 4\) returned a gradient of shape \(\)"),
    ],
)
def test_a_hook_that_raises_or_returns_another_shape_in_backward_changes_no_gradient(name, hook, error, match):
    model = small()
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    model.get_parameter(name).register_hook(hook)
    with pytest.raises(error, match=match):
        clip(model).backward(losses_of(model(batch())))
    assert all((grad == 1).all() for grad in grads(model))


def test_a_hook_that_raises_in_pre_step_changes_nothing():
    model, x = small(), batch()
    expected = reference(model, x, 0.1)[1]
    clipper, active = clip(model, 0.1), [True]
    model[2].weight.register_hook(lambda grad: raising(grad) if active else None)
    losses_of(model(x)).mean().backward()
    clipper.clip_and_accumulate()
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    with pytest.raises(KeyError):
        clipper.pre_step()
    assert all((grad == 1).all() for grad in grads(model))
    active.clear()
    clipper.pre_step()
    assert_grads(model, [total / len(x) for total in expected])


def test_hooks_of_modules_fire_as_before():
    model, x, seen = small(), batch(), []
    model[0].register_forward_hook(lambda *_: seen.append("forward"))
    model[0].register_forward_pre_hook(lambda *_: seen.append("pre"))
    model[2].register_full_backward_hook(lambda m, gi, go: seen.append(tuple(go[0].shape)))
    clipper = clip(model, verify="never")
    clipper.backward(losses_of(model(x)))  # a new graph is proved, and backward hooks see the further backwards too
    seen.clear()
    result = clipper.backward(losses_of(model(x)))
    assert seen == ["pre", "forward", (5, 2)]
    clipper.detach()
    assert_close(result.norms, reference(nn.Sequential(*model), x)[0])


class Held(nn.Module):
    """Stores what its own functions return, and the states of a recurrent layer."""

    def __init__(self):
        super().__init__()
        self.rnn, self.head = nn.LSTM(3, 4, batch_first=True), nn.Linear(4, 2)

    def forward(self, x):
        output, (state, _) = self.rnn(x)
        self.hidden = torch.tanh(output + self.outside)
        self.state = state
        for kept in (output, self.hidden, state):
            kept.retain_grad()
        self.last_output = self.head(self.hidden.sum(1) + state[0])
        return self.last_output, output


@pytest.mark.parametrize("classic", [True, False])
def test_retained_gradients_and_those_outside_are_as_without_a_clipper(classic):
    model, plain = Held().double(), Held().double()
    plain.load_state_dict(model.state_dict())
    clipper = clip(model, loss_reduction="sum")
    for _ in range(3):  # two with a proof
        x, found = torch.randn(5, 4, 3).double(), []
        outsides = [torch.randn(4).double().requires_grad_() for _ in range(2)]
        for own, outside in zip((model, plain), outsides, strict=True):
            outside.data.copy_(outsides[0].data)
            own.outside = outside
            output, kept = own(x)
            losses = losses_of(output)
            if own is plain or classic:
                losses.sum().backward()
            else:
                clipper.backward(losses)
            found.append([kept.grad, own.hidden.grad, own.state.grad, outside.grad])
        if classic:
            clipper.clip_and_accumulate()
            clipper.pre_step()
        assert_close(found[0], found[1])
