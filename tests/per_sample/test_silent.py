"""A layer that got zeros alone in all proofs does not make its model prove in every step."""

import pytest
import torch
from per_sample.harness import Net, assert_close, clip, losses_of, norms_in_batch
from torch import nn

from torchzero_clip import ConstantFlatClipper, PrivateGradientClipper
from torchzero_clip.per_sample.samples.proof import Proof

B = 6


def model_of(middle):
    """A layer behind a factor of 0, until the factor is another."""
    forward = lambda m, x: m.head(x) + m.factor * middle(m, m.branch(x))  # noqa: E731
    return Net(forward, head=nn.Linear(4, 4), branch=nn.Linear(4, 4), last=nn.Linear(4, 4), factor=0.0).double()


MIDDLES = {
    "a layer": lambda m, h: m.last(h.tanh()),
    "in another order": lambda m, h: m.last(h.flip(0).tanh()).flip(0),
    "at each time": lambda m, h: m.last(h[:, None].expand(-1, 3, -1).cumsum(1)).mean(1),
}


def proves(clipper, model, x):
    """True if the step had further backwards. Its norms are right."""
    calls, losses = [], losses_of(model(x))
    losses.register_hook(calls.append)
    assert_close(clipper.backward(losses).norms, norms_in_batch(model, x))
    return len(calls) > 1


@pytest.mark.parametrize("verify", ["first", "never"])
@pytest.mark.parametrize("name", MIDDLES)
def test_a_silent_layer_is_proved_in_the_step_in_which_it_gets_a_gradient(name, verify):
    model = model_of(MIDDLES[name])
    found = []
    with clip(model, verify=verify) as clipper:
        for step in range(1, 16):
            model.factor = float(step in (7, 11, 13, 14)) * step
            found += [step] * proves(clipper, model, torch.randn(B, 4).double())
    due = [1, 2, 4, 7, 8] if verify == "first" else [1, 7]
    assert found[: len(due)] == due
    if name != "in another order":  # which has no pattern that could be kept
        assert found == due


@pytest.mark.parametrize("private", [False, True])
def test_a_silent_layer_whose_samples_mix_raises_in_the_step_in_which_it_gets_a_gradient(private):
    model = model_of(lambda m, h: m.last(h - h.mean(0)))
    model.factor = torch.zeros(()).double()
    given = {"noise_multiplier": 0.0, "expected_batch_size": 1.0}
    limit = ConstantFlatClipper(1.0)
    with PrivateGradientClipper(model, limit, **given) if private else clip(model) as clipper:
        for _ in range(6):
            clipper.backward(losses_of(model(torch.randn(B, 4).double())))
        clipper.discard()
        model.factor += 1
        with pytest.raises(RuntimeError, match=r"change the gradient of one row of '(branch|last)'"):
            clipper.backward(losses_of(model(torch.randn(B, 4).double())))
        assert all(param.grad is None or private is False for param in model.parameters())
        assert not clipper._sums


def test_gradients_outside_are_added_once_where_a_silent_layer_wakes():
    model, outside = model_of(MIDDLES["a layer"]), torch.randn(4, dtype=torch.float64, requires_grad=True)
    with clip(model) as clipper:
        for step in range(1, 8):
            model.factor = float(step == 7)
            outside.grad, x = None, torch.randn(B, 4).double()
            output = model(x) * outside
            clipper.backward(losses_of(output))
            (expected,) = torch.autograd.grad(losses_of(output.detach() / outside.detach() * outside).sum(), outside)
            assert_close(outside.grad, expected)


@pytest.mark.parametrize("outputs", [1, 2])
def test_in_the_classic_form_a_silent_layer_costs_one_further_backward(outputs, monkeypatch):
    model, stages, run = model_of(MIDDLES["a layer"]), [], Proof._run
    monkeypatch.setattr(Proof, "_run", lambda proof, stage, *args: stages.append(stage) or run(proof, stage, *args))
    whole = Net(lambda m, x: [m.inner(x + i) for i in range(outputs)], inner=model).double()

    def losses(m, x):
        return sum(losses_of(output) for output in m(x))

    found = []
    with clip(whole) as clipper:
        for step in range(1, 12):
            model.factor, x = float(step in (7, 9)), torch.randn(B, 4).double()
            each = losses(whole, x)
            each.mean().backward()
            norms = clipper.clip_and_accumulate().norms
            clipper.pre_step()
            assert_close(norms, norms_in_batch(whole, x, losses=lambda found: sum(map(losses_of, found))))
            found.append(len(stages))
            stages.clear()
    proof, first = 4 * outputs, outputs
    assert found == [proof, proof, first, proof, first, first, proof + 1, proof, 0, 0, 0]


def test_in_the_classic_form_a_silent_layer_that_gets_a_gradient_another_way_raises():
    model = model_of(MIDDLES["a layer"])
    model.branch.register_forward_hook(lambda module, args, output: setattr(model, "seen", output))
    with clip(model) as clipper:
        for step in range(1, 4):
            loss = losses_of(model(torch.randn(B, 4).double())).mean()
            if step == 3:
                with pytest.raises(ValueError, match="did not come through the outputs"):
                    (loss + model.seen.square().mean()).backward()
            else:
                loss.backward()
                clipper.clip_and_accumulate()
                clipper.pre_step()
