"""Clipped sums from norms: samples that are not finite, zeros, empty batches, and factors that users compute."""

import pytest
import torch
from per_sample.harness import (
    Net,
    assert_grads,
    batch,
    by_backward,
    by_classic_form,
    clip,
    grads,
    losses_of,
    reference,
    small,
    weight,
)
from per_sample.layers import LAYERS, MODELS, tied
from torch import nn

from torchzero_clip import NormClipper, PerSampleGradientClipper


@pytest.mark.parametrize("memory", ["auto", "low"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_sample_that_is_not_finite_leaves_the_others_as_they_are(memory, bad):
    model = nn.Sequential(
        nn.Conv1d(3, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(inplace=True), nn.Linear(6, 5), nn.LayerNorm(5), nn.PReLU()
    ).double()
    x = torch.randn(6, 3, 8, dtype=torch.float64)
    expected = reference(model, x[[0, 1, 3, 4]], 0.5)[1]
    x[2, 1, 1], x[5] = bad, bad
    result = clip(model, 0.5, loss_reduction="sum", memory=memory).backward(losses_of(model(x)))
    assert result.nonfinite.tolist() == [False, False, True, False, False, True]
    assert result.factors[[2, 5]].tolist() == [0.0, 0.0]
    assert_grads(model, expected, rtol=1e-12, atol=1e-14)


def test_a_bad_loss_leaves_the_others_as_they_are():
    model, index = tied().double(), torch.randint(0, 6, (5, 4))
    expected = reference(model, index[:4], 0.5)[1]
    weights = torch.tensor([1.0, 1.0, 1.0, 1.0, float("nan")], dtype=torch.float64)
    result = clip(model, 0.5, loss_reduction="sum").backward(losses_of(model(index)) * weights)
    assert result.nonfinite.tolist() == [False] * 4 + [True]
    assert_grads(model, expected, rtol=1e-12, atol=1e-14)


def test_nonfinite_raise_names_the_samples_and_changes_nothing():
    model, x = small(), batch()
    x[3] = torch.nan
    clipper = clip(model, nonfinite="raise")
    with pytest.raises(RuntimeError, match=r"samples \[3\] are not finite"):
        clipper.backward(losses_of(model(x)))
    assert all(grad is None for grad in grads(model))
    clipper.backward(losses_of(model(batch())))


EMPTY = (
    *("linear 3-D", "linear, gradients formed in pieces", "linear, Gram matrices", "linear, Gram matrices in parts"),
    *("conv1d", "conv2d", "conv2d, few positions", "conv2d, depthwise", "embedding", "bag, mean", "layer norm"),
    *("rms norm", "group norm", "instance norm 1d", "prelu", "lstm, batch first", "gru", "linear layers of GPT-2"),
    *("padding in a module with bare parameters", "tied embedding and head, 6", "vision transformer"),
    *("conv transpose 2d", "conv2d, standardized", "weight norm", "GRU cells", "LSTM cells", "transformer layer"),
)


@pytest.mark.parametrize("settings", [{}, {"memory": "low"}, {"keep_grad_samples": True}], ids=str)
@pytest.mark.parametrize("form", [by_backward, by_classic_form])
@pytest.mark.parametrize("name", EMPTY)
def test_batches_of_no_samples_give_gradients_of_zeros(name, form, settings):
    model, x = (make() for make in {**LAYERS, **MODELS}[name])
    norms, _ = form(model, **settings)(lambda model: losses_of(model(x[:0])))
    assert norms.shape == (0,)
    assert_grads(model, [torch.zeros_like(param) for param in model.parameters()])


def test_an_empty_batch_may_be_in_any_dimension():
    def forward(m, x):
        positions = m.position(torch.linspace(0, 1, x.shape[1])[:, None])
        h = m.first(x.transpose(0, 1)) + positions[:, None] + m.shift.expand(3, len(x), 4)
        return m.last(h.flatten(0, 1)).view(3, len(x), 2).transpose(0, 1).masked_fill(x[..., :2] > 0, m.shift[0])

    held = {"position": nn.Linear(1, 4), "first": nn.Linear(4, 4), "last": nn.Linear(4, 2), "shift": weight(4)}
    model = Net(forward, **held)
    for form in (by_backward, by_classic_form):
        norms, _ = form(model)(lambda model: losses_of(model(torch.randn(0, 3, 4))))
        assert norms.shape == (0,)
        assert_grads(model, [torch.zeros_like(param) for param in model.parameters()])
        model.zero_grad()


class Giving(NormClipper):
    is_per_layer = False
    thresholds = torch.ones(1)

    def __init__(self, factors):
        self.factors = factors

    def calc_clipping_factors(self, norms):
        return self.factors(norms)


@pytest.mark.parametrize(
    ("factors", "error", "message"),
    [
        (lambda norms: norms[0], TypeError, "Giving.calc_clipping_factors must return factors for 4 parameter tensors"),
        (lambda norms: None, TypeError, "got NoneType"),
        (lambda norms: [norms[0]], ValueError, "must return factors for 4 parameter tensors.*got 1"),
        (lambda norms: [norms[0]] * 3, ValueError, "got 3"),
        (lambda norms: [norms[0]] * 5, ValueError, "got 5"),
        (lambda norms: [norms[0][1:]] * 4, ValueError, r"must return tensors of shape \(5,\), got \(4,\)"),
        (lambda norms: [1.0] * 4, ValueError, "got float"),
        (lambda norms: [norms[0][:, None]] * 4, ValueError, r"got \(5, 1\)"),
    ],
)
def test_factors_that_do_not_fit_are_refused_by_the_name_of_the_class(factors, error, message):
    model = small()
    with pytest.raises(error, match=message):
        PerSampleGradientClipper(model, Giving(factors)).backward(losses_of(model(batch())))
    assert all(param.grad is None for param in model.parameters())


def test_factors_of_each_tensor_are_used_and_shown():
    model = nn.Linear(3, 1)
    by_tensor = Giving(lambda norms: [torch.full_like(norms[0], float(k)) for k in range(2)])
    with PerSampleGradientClipper(model, by_tensor) as clipper:
        result = clipper.backward(model(torch.randn(4, 3)).squeeze(1))
    assert model.weight.grad.tolist() == [[0, 0, 0]]
    assert model.bias.grad.tolist() == [1]
    assert [value.tolist() for value in result.factors] == [[0] * 4, [1] * 4]
