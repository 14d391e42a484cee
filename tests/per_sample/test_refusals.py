"""What cannot be right is refused, by name; limits and rules do not depend on what came before."""

import warnings

import pytest
import torch
from per_sample.harness import assert_close, assert_matches_loop, loop, losses_of, norms_of, total_of
from per_sample.zoo import ENTRIES
from torch import nn

from torchzero_clip import (
    ConstantFlatClipper,
    ConstantPerLayerClipper,
    NormClipper,
    PerSampleGradientClipper,
    check_per_sample,
)


def clipper_for(model, limit=1.0):
    return PerSampleGradientClipper(model, ConstantFlatClipper(limit))


def squares(output, batch_dim=0):
    return output.square().flatten(1).sum(1)


class Standardized(nn.Conv2d):
    """Standardizes its weight where torch lets subclasses do so."""

    def _conv_forward(self, input, weight, bias):
        return super()._conv_forward(input, weight - weight.mean((1, 2, 3), keepdim=True), bias)


def test_a_convolution_that_changes_its_weight_is_no_plain_convolution():
    torch.manual_seed(0)
    model, x = Standardized(2, 3, 3).double(), torch.randn(4, 2, 5, 5).double()
    expected = total_of(norms_of(loop(model, (x,), losses=squares)))
    with clipper_for(model) as clipper:
        assert_close(clipper.backward(squares(model(x))).norms, expected)


def test_a_single_limit_goes_on_to_another_model_and_to_frozen_layers():
    limits = ConstantPerLayerClipper([1.0])
    for model in (nn.Linear(3, 2), nn.Linear(3, 2, bias=False)):
        with PerSampleGradientClipper(model, limits) as clipper:
            clipper.backward(squares(model(torch.randn(4, 3))))
        count = len(list(model.parameters()))
        assert limits.thresholds.tolist() == [1.0] * count
        assert limits.flat_values == [1.0]


class ByTensor(NormClipper):
    is_per_layer = False
    thresholds = torch.ones(1)

    def __init__(self, count):
        self.count = count

    def calc_clipping_factors(self, norms):
        return [torch.full_like(norms[0], float(k)) for k in range(self.count)]


def test_factors_of_each_tensor_are_used_and_shown():
    model, x = nn.Linear(3, 1), torch.randn(4, 3)
    with PerSampleGradientClipper(model, ByTensor(2)) as clipper:
        result = clipper.backward(model(x).squeeze(1))
    assert model.weight.grad.tolist() == [[0, 0, 0]]
    assert model.bias.grad.tolist() == [1]
    assert [value.tolist() for value in result.factors] == [[0] * 4, [1] * 4]
    model.zero_grad()
    with (
        PerSampleGradientClipper(model, ByTensor(1)) as clipper,
        pytest.raises(
            ValueError, match=r"ByTensor\.calc_clipping_factors must return factors for 2 parameter tensors.*got 1"
        ),
    ):
        clipper.backward(model(x).squeeze(1))
    assert model.bias.grad is None


def test_a_layer_without_parameters_that_is_put_in_later_is_seen():
    model = nn.Sequential(nn.Linear(3, 3), nn.Identity(), nn.Linear(3, 1))
    clipper = clipper_for(model)
    model[1] = nn.BatchNorm1d(3, affine=False)
    with pytest.raises(ValueError, match=r"'1' \(BatchNorm1d\) .*mixes the samples"):
        model(torch.randn(4, 3))
    clipper.detach()


@pytest.mark.parametrize("affine", [True, False])
def test_running_statistics_are_refused_with_and_without_parameters(affine):
    model = nn.Sequential(nn.Conv1d(2, 2, 1), nn.InstanceNorm1d(2, affine=affine, track_running_stats=True))
    with pytest.raises(ValueError, match=r"'1' \(InstanceNorm1d\) .*track_running_stats=True mixes the samples"):
        clipper_for(model)


def test_losses_without_a_way_to_the_parameters_are_refused():
    model = nn.Linear(3, 1)
    with clipper_for(model) as clipper:
        with pytest.raises(RuntimeError, match="the losses do not depend on it"):
            clipper.backward(torch.ones(4, requires_grad=True))
        with torch.no_grad(), pytest.raises(RuntimeError, match="the forward ran under torch"):
            clipper.backward(model(torch.randn(4, 3)).squeeze(1))
        model.requires_grad_(False)
        with pytest.raises(RuntimeError, match="nothing in it trains"):
            clipper.backward(model(torch.randn(4, 3)).squeeze(1))
    with pytest.raises(RuntimeError, match="the clipper is detached"):
        clipper.backward(model(torch.randn(4, 3)).squeeze(1))


@pytest.mark.parametrize(
    ("model", "batch", "loss", "message"),
    [
        (nn.Linear(3, 1), torch.randn(0, 3), lambda m, x: m(x).squeeze(1), "batch must hold at least one sample"),
        (
            nn.Linear(3, 1).requires_grad_(False),
            torch.randn(2, 3),
            lambda m, x: m(x).squeeze(1),
            "no parameters that train",
        ),
        (nn.Linear(3, 1), torch.randn(2, 3), lambda m, x: m(x), r"one loss for each sample, \(B,\), .* got \(2, 1\)"),
    ],
)
def test_checks_of_nothing_are_refused(model, batch, loss, message):
    with pytest.raises(ValueError, match=message):
        check_per_sample(model, batch, loss)


@pytest.mark.parametrize("kind", [nn.TransformerEncoderLayer, nn.TransformerDecoderLayer])
def test_transformer_layers_with_another_order_of_dimensions_are_refused(kind):
    """Where a sequence is as long as the batch, positions would silently be taken for samples."""
    with pytest.raises(
        ValueError, match=r"'0' \(Transformer.*see batch_first=False, and batch_first=True was declared"
    ):
        clipper_for(nn.Sequential(kind(8, 2, 16)))
    clipper_for(nn.Sequential(kind(8, 2, 16, batch_first=True))).detach()
    PerSampleGradientClipper(nn.Sequential(kind(8, 2, 16)), ConstantFlatClipper(1.0), batch_first=False).detach()


class Distances(nn.Module):
    """Attention scores with a bias for each distance between two positions, as in T5."""

    def __init__(self):
        super().__init__()
        self.bias, self.head = nn.Embedding(9, 1), nn.Linear(3, 3)

    def forward(self, x):
        positions = torch.arange(x.shape[1])
        bias = self.bias((positions[:, None] - positions[None]).clamp(-4, 4) + 4)
        return (x @ self.head(x).transpose(1, 2) + bias.permute(2, 0, 1)).flatten(1).sum(1)


@pytest.mark.parametrize(("count", "length"), [(4, 4), (4, 6)])
def test_biases_of_distances_are_refused_whatever_the_size_of_the_batch(count, length):
    model = Distances()
    with clipper_for(model) as clipper, pytest.raises(ValueError, match=r"'bias' \(Embedding\)"):
        clipper.backward(model(torch.randn(count, length, 3)))


def test_tokens_that_are_all_the_same_are_tokens():
    model = nn.Embedding(5, 2)
    with clipper_for(model) as clipper:
        assert clipper.backward(model(torch.ones(3, 3, dtype=torch.int64)).sum((1, 2))).norms.shape == (3,)


def test_batch_norm_is_decided_in_each_forward():
    model, x = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double(), torch.randn(5, 3).double()
    model(torch.randn(20, 3).double())  # statistics
    with pytest.raises(ValueError, match=r"'1' \(BatchNorm1d\) .* in training mode: call its eval\(\)"):
        PerSampleGradientClipper(model, ConstantFlatClipper(1.0))
    model.eval()
    assert_matches_loop(model, x)
    with PerSampleGradientClipper(model, ConstantFlatClipper(1.0)) as clipper:
        clipper.backward(losses_of(model(x)))
        model.train()
        with pytest.raises(ValueError, match=r"'1' \(BatchNorm1d\)"):
            model(x)
        model[1].eval()
        clipper.backward(losses_of(model(x)))


def test_scripted_modules_are_refused_only_if_they_train():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plain, trains = torch.jit.script(nn.Tanh()), torch.jit.script(nn.Linear(3, 3))
    model, x = nn.Sequential(nn.Linear(3, 3), plain, nn.Linear(3, 2)), torch.randn(4, 3)
    with PerSampleGradientClipper(model, ConstantFlatClipper(1.0)) as clipper:
        assert clipper.backward(losses_of(model(x))).norms.shape == (4,)
    with pytest.raises(ValueError, match=r"'1' \(RecursiveScriptModule\) cannot be clipped .* it is scripted"):
        PerSampleGradientClipper(nn.Sequential(nn.Linear(3, 3), trains), ConstantFlatClipper(1.0))


def test_nested_tensors_are_refused_by_name():
    parts = [torch.randn(2, 3), torch.randn(4, 3)]
    for layer in (nn.Linear(3, 2), nn.LayerNorm(3)):
        x = torch.nested.nested_tensor(parts, layout=torch.jagged)
        refused = pytest.raises(ValueError, match=r"got a nested tensor: pad it, with x.to_padded_tensor")
        with PerSampleGradientClipper(layer, ConstantFlatClipper(1.0)), refused:
            layer(x)


@pytest.mark.parametrize("name", ["nanoGPT", "vit with bare tokens", "lstm", "resnet with group norm", "tied head"])
def test_batches_of_no_samples_give_gradients_of_zeros(name):
    entry = ENTRIES[name]
    model, batch = entry.model(), [x[:0] for x in entry.batch()]
    with PerSampleGradientClipper(model, ConstantFlatClipper(1.0), whole=entry.whole) as clipper:
        result = clipper.backward(model(*batch).flatten(1).sum(1))
    assert result.norms.shape == (0,)
    assert all(param.grad is None or not param.grad.any() for param in model.parameters())
