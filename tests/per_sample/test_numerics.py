"""Norms in float32 and below: never too small, and right where gradients cancel."""

import copy
import math

import pytest
import torch
from defaults import DEFAULTS
from per_sample.harness import Net, assert_close, by_backward, by_two_passes, clip, grads, losses_of, norms_by_loop
from torch import nn
from versions import needs_grad_dtype

from torchzero_clip import ConstantFlatClipper, ConstantPerLayerClipper, PerSampleGradientClipper, check_per_sample
from torchzero_clip.per_sample.gradients.row_norms import norms_of_rows, norms_of_samples


@pytest.mark.slow
def test_norm_of_a_large_gradient_is_not_too_small():
    values = torch.full((1, 38_600_000), 0.1) + torch.linspace(0, 1e-3, 38_600_000)
    truth = math.sqrt(values.double().square().sum().item())
    assert norms_of_rows(values).item() == pytest.approx(truth, rel=1e-6)


@pytest.mark.parametrize("size", [1, 4096, 4097, 8192, 20_001])
def test_rows_of_any_length(size):
    rows = torch.randn(3, size)
    assert_close(norms_of_rows(rows), rows.double().square().sum(1).sqrt(), rtol=1e-6)


@pytest.mark.parametrize("size", [2.0**-140, 2.0**-100, 1.0, 2.0**120])
def test_norms_of_samples_in_float32_are_exact_where_squares_are(size):
    norms, samples = torch.tensor([2.0, 3.0, 1.0, 6.0, 4.0, 8.0]) * size, torch.tensor([0, 0, 1, 0, 1, 1])
    assert norms_of_samples(norms, samples, 3).tolist() == [7 * size, 9 * size, 0]
    norms[:2] = torch.tensor([math.inf, math.nan])
    first, second, _ = norms_of_samples(norms, samples, 3).tolist()
    assert math.isnan(first)
    assert second == 9 * size


def assert_norms(layer, x, weights, rtol=1e-3, memory="low"):
    """The norms are right if the loss of a sample is the sum of its outputs, each times its weight."""
    model = Net(lambda m, x, weights: (m.layer(x) * weights).flatten(1).sum(1), layer=layer)
    wide = [data.double() if data.is_floating_point() else data for data in (x, weights)]
    expected = norms_by_loop(copy.deepcopy(model).double(), *wide, losses=lambda losses, _: losses)
    with clip(model, memory=memory) as clipper:
        result = clipper.backward(model(x, weights))
    assert_close(result.norms.double(), expected, rtol=rtol, atol=0)


@pytest.mark.parametrize("memory", ["auto", "low"])  # "low" takes Gram matrices at this size
def test_gradients_of_one_token_that_cancel(memory):
    # 256 equal inputs whose output gradients alternate in sign: the sum is a thousandth of its parts
    torch.manual_seed(1)
    x = torch.randn(320) + 1e-3 * torch.randn(2, 256, 320)
    signs = torch.tensor([1.0, -1.0]).repeat(128)[:, None] * torch.randn(300) + 1e-4 * torch.randn(256, 300)
    assert_norms(nn.Linear(320, 300), x, torch.stack([signs, 14 * signs]), memory=memory)


@pytest.mark.parametrize("channels", [2, 80])  # by gradients that are formed, and by Gram matrices of pixels
def test_gradients_of_one_pixel_that_cancel(channels):
    torch.manual_seed(1)
    x = torch.randn(2, channels, 1, 1) + 1e-3 * torch.randn(2, channels, 6, 6)
    signs = torch.tensor([1.0, -1.0]).repeat(8).view(4, 4) * torch.randn(60, 1, 1) + 1e-4 * torch.randn(60, 4, 4)
    assert_norms(nn.Conv2d(channels, 60, 3, bias=False), x, torch.stack([signs, 14 * signs]))


@pytest.mark.parametrize("memory", ["auto", "low"])
def test_rows_of_one_token_that_cancel(memory):
    weights = torch.tensor([1.0, -1.0]).repeat(128)[:, None] * torch.randn(64) + 1e-3 * torch.randn(2, 256, 64)
    assert_norms(nn.Embedding(3, 64), torch.ones(2, 256, dtype=torch.int64), weights, memory=memory)


def test_a_tied_weight_whose_uses_cancel():
    table, head = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
    head.weight = table.weight

    def forward(m, index, x, g):
        return (m.table(index) * g).sum((1, 2)) + m.head(x)[:, :, 2].sum(1)

    x = torch.randn(2, 3, 4)
    g = -x + 1e-5 * torch.randn(2, 3, 4)
    model = Net(forward, table=table, head=head)
    with clip(model) as clipper:
        result = clipper.backward(model(torch.full((2, 3), 2), x, g))
    assert_close(result.norms.double(), (x.double() + g.double()).sum(1).norm(dim=1), rtol=2e-2)


@pytest.mark.parametrize("limit", [1e-3, 1.0, 30.0])
def test_what_a_sample_adds_never_exceeds_the_limit(limit):
    model = nn.Sequential(nn.Linear(30, 200), nn.Tanh(), nn.Linear(200, 100))
    x = torch.randn(1, 30) * 100
    result = clip(model, limit, loss_reduction="sum").backward(losses_of(model(x)))
    assert result.norms.item() > limit
    total = torch.cat([p.grad.double().flatten() for p in model.parameters()]).norm().item()
    assert total <= limit * (1 + 1e-6)
    assert total == pytest.approx(limit, rel=2e-3)


@pytest.mark.parametrize("memory", ["auto", "low"])
def test_bfloat16_autocast_keeps_norms_in_float32(memory):
    model = nn.Sequential(
        nn.Conv1d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU(), nn.Linear(6, 5), nn.LayerNorm(5)
    )
    x = torch.randn(5, 3, 6) * torch.arange(1, 6)[:, None, None]
    norms = norms_by_loop(model, x)
    limit = norms.median().item()
    model.zero_grad()
    with clip(model, limit, memory=memory) as clipper:
        with torch.autocast("cpu", torch.bfloat16):
            losses = losses_of(model(x).float())
        result = clipper.backward(losses)
    assert result.norms.dtype == result.factors.dtype == torch.float32
    assert_close(result.norms, norms, rtol=2e-2)
    assert_close(result.factors, (limit / (norms + 1e-6)).clamp(max=1), rtol=1e-2)
    assert all(p.grad.dtype == torch.float32 for p in model.parameters())


def test_models_in_bfloat16_have_norms_in_float32():
    model = nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5), nn.Linear(5, 3)).bfloat16()
    x = torch.randn(5, 4, 6).bfloat16()
    result = clip(model, 1e6).backward(losses_of(model(x)))
    norms = norms_by_loop(model.double(), x.double())
    assert result.norms.dtype == torch.float32
    assert_close(result.norms.double(), norms, rtol=3e-2)


def test_backward_under_autocast_is_not_rounded():
    model, x = nn.Linear(6, 5), torch.randn(5, 4, 6)
    norms = norms_by_loop(model, x)
    with clip(model) as clipper:
        losses = losses_of(model(x))
        with torch.autocast("cpu", torch.bfloat16):
            result = clipper.backward(losses)
    assert_close(result.norms, norms, rtol=1e-5)


RANGE = {
    "linear": (lambda: nn.Linear(3, 4), (2, 3)),
    "few positions": (lambda: nn.Linear(40, 50), (2, 4, 40)),
    "many positions": (lambda: nn.Linear(3, 4), (2, 200, 3)),
    "convolution": (lambda: nn.Conv1d(2, 3, 2), (2, 2, 9)),
    "convolution of few positions": (lambda: nn.Conv1d(40, 80, 3, padding=1), (2, 40, 6)),
    "normalization": (lambda: nn.LayerNorm(6), (2, 5, 6)),
    "generic": (lambda: nn.PReLU(3), (2, 3, 4)),
}


@pytest.mark.parametrize("memory", ["auto", "low"])
@pytest.mark.parametrize("scale", [1e25, 1e15, 1e-18, 1e-28])
@pytest.mark.parametrize("name", RANGE)
def test_norms_of_finite_gradients_are_finite_and_of_none_but_zeros_zero(name, scale, memory):
    torch.manual_seed(2)
    make, shape = RANGE[name]
    model, x = make(), torch.randn(shape)
    with clip(model, memory=memory) as clipper:
        plain = clipper.backward(model(x).square().flatten(1).sum(1)).norms.double()
        model.zero_grad()
        result = clipper.backward(model(x).square().flatten(1).sum(1) * scale)
    assert_close(result.norms.double() / scale, plain, rtol=1e-5)
    assert not result.nonfinite.any()
    summed = torch.cat([p.grad.flatten() for p in model.parameters()])
    assert summed.isfinite().all()
    assert summed.double().norm() <= 1 + 1e-6


@pytest.mark.parametrize("scales", [(1e15, 1e-23), (1e12, 3e-23), (3e-23, 1e12), (1e10, 1e-22)])
@pytest.mark.parametrize("layer", ["linear", "convolution"])
def test_norms_do_not_lose_what_one_factor_is_too_small_for(layer, scales):
    torch.manual_seed(2)
    module = nn.Linear(16, 16, bias=False) if layer == "linear" else nn.Conv2d(40, 80, 3, padding=1, bias=False)
    x = torch.randn((3, 8, 16) if layer == "linear" else (3, 40, 3, 3)) * scales[0]
    weights = torch.randn(module(x).shape) * scales[1]
    assert_norms(module, x, weights, rtol=1e-5)


def test_samples_without_gradient_have_norm_zero():
    model = nn.Linear(3, 4)
    with clip(model) as clipper:
        result = clipper.backward(model(torch.randn(4, 3)).sum(1) * torch.tensor([0.0, 1.0, 0.0, 1.0]))
    assert result.norms[[0, 2]].tolist() == [0, 0]
    assert result.factors[[0, 2]].tolist() == [1, 1]


class Mixed(nn.Module):
    """Layers of several rules, with a parameter of their own and positions without samples."""

    def __init__(self):
        super().__init__()
        self.words, self.positions = nn.Embedding(9, 6, padding_idx=0), nn.Embedding(5, 6)
        self.linear, self.norm, self.scale = nn.Linear(6, 4), nn.LayerNorm(4), nn.Parameter(torch.ones(4))
        self.conv, self.recurrent = nn.Conv1d(4, 3, 2), nn.GRU(4, 4, batch_first=True)

    def forward(self, words):
        words = self.words(words) + self.positions(torch.arange(5, device=words.device))
        x = self.norm(self.linear(words)) * self.scale
        return losses_of(self.conv(x.transpose(1, 2))) + losses_of(self.recurrent(x)[0])


@pytest.mark.slow
@pytest.mark.parametrize("default", DEFAULTS)
def test_defaults_of_the_process_do_not_matter(default):
    model, words = Mixed(), torch.randint(0, 9, (6, 5))

    def at_once(twin, form, **settings):
        norms, _ = form(twin, 0.5, **settings)(lambda twin: twin(words))
        return [norms, *grads(twin)]

    def in_parts(twin, limit):
        factors = []
        with PerSampleGradientClipper(twin, limit) as clipper:
            for part in (words, words[:3]):
                twin(part).mean().backward()
                factors.append(clipper.clip_and_accumulate().factors)
            return [*factors, clipper.pre_step()[0], *grads(twin)]

    def results():
        check_per_sample(copy.deepcopy(model), words, lambda twin, batch: twin(batch))
        limits = ConstantFlatClipper(0.5), ConstantPerLayerClipper([0.5])
        found = [in_parts(copy.deepcopy(model), limit) for limit in limits]
        found += [at_once(copy.deepcopy(model), by_backward, memory=memory) for memory in ("auto", "low")]
        return [*found, at_once(copy.deepcopy(model), by_two_passes)]

    expected = results()
    with DEFAULTS[default]():
        torch.testing.assert_close(results(), expected, rtol=0, atol=0)


HALF = [(torch.bfloat16, 2**-8), (torch.float16, 2**-11)]  # with the largest relative error of rounding once
FORMS = {"backward": 1, "backward of parts": 16, "classic": 16}


def sum_of_clipped(x, weights, dtype, form, *, wide=False):
    """The gradient of a layer in a low precision: the sum of the gradients, each clipped to 1."""
    layer = nn.Linear(8, 4).to(dtype)
    for param in layer.parameters():
        if wide:
            param.grad_dtype = torch.float32
    with clip(layer, loss_reduction="sum", verify="never") as clipper:
        for part in x.to(dtype).split(4096 // FORMS[form]):
            losses = (layer(part) * weights.to(dtype)).sum(1)
            if form == "classic":
                losses.sum().backward()
                clipper.clip_and_accumulate()
            else:
                clipper.backward(losses)
        if form == "classic":
            clipper.pre_step()
    assert all(grad.dtype == (torch.float32 if wide else dtype) for grad in grads(layer))
    return torch.cat([layer.weight.grad, layer.bias.grad[:, None]], 1).double()


def samples_of_one_kind():
    """4096 samples whose gradients point in about one direction, so that their sum is large."""
    generator = torch.Generator().manual_seed(0)
    return 1 + 0.3 * torch.randn(4096, 8, generator=generator), 100 * torch.randn(4, generator=generator)


def exact_sum(x, weights, dtype):
    """The same in float64, by the formula: the gradient of a sample is b aᵀ, and b."""
    a, b = nn.functional.pad(x.to(dtype).double(), (0, 1), value=1.0), weights.to(dtype).double()
    return torch.outer(b, (a / (b.norm() * a.norm(dim=1, keepdim=True) + 1e-6)).sum(0))


@pytest.mark.parametrize(("dtype", "unit"), HALF)
@pytest.mark.parametrize("form", ["backward", "classic"])
def test_sums_of_half_precision_are_rounded_once(form, dtype, unit):
    x, weights = samples_of_one_kind()
    exact = exact_sum(x, weights, dtype)
    error = (sum_of_clipped(x, weights, dtype, form) - exact).abs() / exact.abs()
    assert 0.1 * unit < error.max() <= unit * (1 + 1e-3)


@needs_grad_dtype
@pytest.mark.parametrize("dtype", [dtype for dtype, _ in HALF])
@pytest.mark.parametrize("form", FORMS)
def test_one_sample_moves_a_float32_gradient_by_its_limit_alone(form, dtype):
    x, weights = samples_of_one_kind()
    found = sum_of_clipped(x, weights, dtype, form, wide=True)
    assert_close(found, exact_sum(x, weights, dtype), rtol=1e-5, atol=0)  # 4096 float32 numbers, in any order
    for sample in (0, 2000, 4095):
        others = torch.cat([x[:sample], x[sample + 1 :]])
        moved = (found - sum_of_clipped(others, weights, dtype, form, wide=True)).norm().item()
        assert moved == pytest.approx(1.0, abs=0.01)  # in bfloat16 it is up to 16


@needs_grad_dtype
def test_float32_gradients_of_half_parameters_have_hooks_and_add_up():
    model, seen = nn.Linear(3, 1, bias=False).bfloat16(), []
    model.weight.grad_dtype = torch.float32
    model.weight.grad = torch.full((1, 3), 1 / 3)
    model.weight.register_hook(lambda grad: seen.append(grad.dtype))
    clip(model, 1e9, loss_reduction="sum").backward(model(torch.ones(2, 3).bfloat16()).squeeze(1))
    assert_close(model.weight.grad, torch.full((1, 3), 2 + 1 / 3), rtol=1e-6)
    assert seen == [torch.float32]
