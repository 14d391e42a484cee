"""Clipped sums from norms: samples that are not finite, zeros, empty batches, and factors that users compute."""

import pytest
import torch
from per_sample.harness import Net, assert_grads, batch, clip, grads, losses_of, reference, small
from per_sample.table import TABLE
from torch import nn

from torchzero_clip import NormClipper, PerSampleGradientClipper


def test_zero_gradients_get_factor_1():
    model = small()
    result = clip(model).backward(model(batch()).sum(1) * 0)
    assert result.norms.tolist() == [0.0] * 5
    assert result.factors.tolist() == [1.0] * 5
    assert all(not grad.any() for grad in grads(model))


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
    model = Net(
        lambda m, index: m.head(torch.tanh(m.middle(m.embedding(index)))),
        embedding=nn.Embedding(7, 4),
        middle=nn.Linear(4, 4),
        head=nn.Linear(4, 7, bias=False),
    ).double()
    model.head.weight = model.embedding.weight
    index = torch.randint(0, 6, (5, 4))
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


@pytest.mark.parametrize("memory", ["auto", "low"])
def test_no_samples_at_all_give_gradients_of_zeros(memory):
    model = nn.Sequential(
        *(nn.Embedding(6, 3), nn.Linear(3, 4), nn.LayerNorm(4), nn.RMSNorm(4), nn.Conv1d(5, 4, 3)),
        *(nn.GroupNorm(2, 4), nn.InstanceNorm1d(4, affine=True), nn.PReLU(), nn.Linear(2, 2)),
    ).double()
    for form in ("backward", "classic"):
        model.zero_grad()
        with clip(model, memory=memory) as clipper:
            losses = model(torch.zeros(0, 5, dtype=torch.int64)).sum((1, 2))
            if form == "backward":
                assert clipper.backward(losses).norms.shape == (0,)
            else:
                losses.sum().backward()
                clipper.clip_and_accumulate()
                assert clipper.pre_step()[1] == 0
        for grad, param in zip(grads(model), model.parameters(), strict=True):
            assert grad.shape == param.shape
            assert not grad.any()


@pytest.mark.parametrize("name", ["nanoGPT", "vit with bare tokens", "lstm", "resnet with group norm", "tied head"])
def test_batches_of_no_samples_give_gradients_of_zeros(name):
    entry = TABLE[name]
    model, data = entry.model(), [x[:0] for x in entry.batch()]
    with clip(model, whole=entry.whole) as clipper:
        result = clipper.backward(model(*data).flatten(1).sum(1))
    assert result.norms.shape == (0,)
    assert all(param.grad is None or not param.grad.any() for param in model.parameters())


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
