"""Layers whose gradients are rounding only are never named, and jumps above the rounding always are."""

import contextlib
import json
import math

import pytest
import torch
from recorder.records import column, made
from torch import nn

from torchzero_clip import Recorder, read_record
from torchzero_clip.recorder import binning
from torchzero_clip.recorder.precision import FLOAT32_ROUNDING, LOW, precision_of, relative
from torchzero_clip.recorder.report import write_report

BATCH, STEPS = 16, 36
INF, NAN = math.inf, math.nan


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 32), nn.LayerNorm(32), nn.Linear(32, 4)
        self.query, self.key, self.value = (nn.Linear(32, 32) for _ in range(3))

    def forward(self, x):
        x = self.first(x.unflatten(1, (4, 4)))
        heads = (m(self.norm(x)).unflatten(2, (4, 8)).transpose(1, 2) for m in (self.query, self.key, self.value))
        mixed = nn.functional.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)
        return self.last((x + mixed).mean(1))


def weight_norm(*sizes):
    return nn.utils.parametrizations.weight_norm(nn.Linear(*sizes))


class Scaled(nn.Module):
    """A block behind a LayerScale that stays 1e-6."""

    def __init__(self, width):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))
        self.register_buffer("scale", torch.full((width,), 1e-6))

    def forward(self, x):
        return x + self.scale * self.inner(x)


class Lora(nn.Module):
    """A linear layer and a low-rank one, whose second matrix is 0."""

    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.a = nn.Parameter(torch.randn(4, width))
        self.register_buffer("b", torch.zeros(width, 4))

    def forward(self, x):
        return self.linear(x) + x @ self.a.T @ self.b.T


def batch_norm(*tail):
    return nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), *tail, nn.Linear(32, 4))


def convolution():
    middle = [nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()]
    return nn.Sequential(nn.Unflatten(1, (1, 4, 4)), *middle, nn.Flatten(), nn.Linear(128, 4))


MODELS = {
    "batch norm": (batch_norm, {"0.bias"}),
    "convolution": (convolution, {"1.bias"}),
    "attention": (Attention, {"key.bias"}),
    "weight norm": (lambda: nn.Sequential(weight_norm(16, 32), *batch_norm()[1:]), {"0.bias"}),
    "behind a LayerScale": (lambda: batch_norm(Scaled(32)), {"0.bias"}),
    "a LoRA": (lambda: batch_norm(Lora(32)), {"0.bias", "3.a"}),
}
SLOW = (pytest.param(mode, marks=pytest.mark.slow) for mode in ("accumulated and clipped", "bfloat16"))


def trained(model, mode="float32", steps=STEPS, jump=lambda step: None, seed=0, **given):
    """Train a classifier, and change its gradients by ``jump``."""
    torch.manual_seed(seed)
    dtype = torch.bfloat16 if mode == "bfloat16" else torch.float32
    net = model().to(dtype)
    optimizer = torch.optim.AdamW(net.named_parameters(), 1e-3)
    recorder = Recorder(optimizer, **given)
    teacher = torch.randn(16, 4)
    for step in range(steps):
        for _ in range(4 if mode == "accumulated and clipped" else 1):
            x = torch.randn(BATCH, 16) * (1 + torch.rand(BATCH, 1))
            is_cast = mode in ("autocast", "accumulated and clipped") or (mode == "autocast from 85" and step >= 85)
            with torch.autocast("cpu", torch.bfloat16) if is_cast else contextlib.nullcontext():
                found = net(x.to(dtype))
            nn.functional.cross_entropy(found.float(), (x @ teacher).argmax(1)).backward()
        if mode == "accumulated and clipped":
            nn.utils.clip_grad_norm_(net.parameters(), 0.3)
        with torch.no_grad():
            for name, (factor, more) in (jump(step) or {}).items():
                net.get_parameter(name).grad.mul_(factor).add_(more)
        optimizer.step()
        optimizer.zero_grad()
    return recorder


@pytest.mark.parametrize("mode", ["float32", "autocast", *SLOW])
@pytest.mark.parametrize("kind", MODELS)
def test_rounding_is_never_named(kind, mode, tmp_path):
    model, noise = MODELS[kind]
    points, path = {}, tmp_path / "run.jsonl"
    recorder = trained(model, mode, log=points.__setitem__, log_every=5, ratios_every=2, path=path, flush_every=20)
    recorder.close()
    kept, read = recorder.record(), read_record(path)
    assert kept.precision == read.precision == (FLOAT32_ROUNDING if mode == "float32" else LOW)
    for record in (kept, read):
        rows = [layer for step in record.steps[1:] for layer in record.worst(step, 99)]
        assert {layer.name for layer in rows if layer.ratio > 0}.isdisjoint(noise)
        assert {layer.name for layer in rows if math.isnan(layer.ratio)} >= noise
        assert {sign.layer for sign in record.early_signs()}.isdisjoint(noise)
        assert [sign for sign in record.early_signs() if sign.number == "norm"] == []
    named = {name.split("/")[1] for point in points.values() for name in point if name.endswith("/norm")} - {"norm"}
    assert named
    assert named.isdisjoint(noise)
    shown = binning.Tiles.of(kept, binning.Events.of(kept))
    assert shown.ratios[[shown.names.index(name) for name in noise]].isnan().all()


JUMPS = {
    "a bias before batch norm": ("batch norm", "0.bias", (1e6, 0.0)),
    "a key": ("attention", "key.bias", (1e6, 0.0)),
    "behind a LayerScale": ("behind a LayerScale", "3.inner.0.weight", (1000.0, 0.0)),
    "a LoRA": ("a LoRA", "3.a", (1.0, 1e-5)),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", JUMPS)
def test_a_jump_above_the_rounding_is_always_named(kind, tmp_path):
    model, name, change = JUMPS[kind]
    points, path, at = {}, tmp_path / "run.jsonl", 110
    options = {"log": points.__setitem__, "log_every": 5, "keep": 30, "path": path, "flush_every": 20}
    recorder = trained(MODELS[model][0], steps=125, jump=lambda step: {name: change} if step == at else None, **options)
    recorder.close()
    for record in (recorder.record(), read_record(path)):
        assert record.worst(at)[0].name == name
        assert record.worst(at)[0].ratio > 10
        assert record.spikes() == [at]
        assert record.norm_spikes() == set()
        assert [(sign.step, sign.layer, sign.number) for sign in record.early_signs()] == [(at, name, "norm")]
        write_report(record, tmp_path / "report.html")
        page = (tmp_path / "report.html").read_text()
        assert f'<th scope="row">{at}</th><td>{name}</td><td>norm</td>' in page
    assert f"layers/{name}/norm" in points[114]
    record = recorder.record()
    tiles = binning.Tiles.of(record, binning.Events.of(record))
    assert tiles.ratios[tiles.names.index(name), tiles.edges.index(at - 0.5)] > 10 or kind == "a LoRA"


def test_a_precision_that_rises_takes_back_jumps_that_rounding_explains(tmp_path):
    """The run finds it every hundred steps, and has written jumps before that."""
    path, change = tmp_path / "run.jsonl", lambda step: {"0.bias": (0.0, 0.05)} if step == 60 else None
    recorder = trained(batch_norm, "autocast from 85", 110, change, path=path, flush_every=20)
    recorder.close()
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(row["step"], row["jumps"]) for row in rows if "jumps" in row] == [(s, ["0.bias"]) for s in (60, 85, 86)]
    for record in (recorder.record(), read_record(path)):
        assert record.precision == LOW
        assert [sign[:2] for sign in record.early_signs()] == [(60, "0.bias")]


def test_a_jump_does_not_hide_the_next_and_unused_layers_do_not_jump():
    rows = [[1e-4, 1e-4 if step % 4 == 0 else 0.0, 1.0] for step in range(30)]
    for step in (12, 16, 25):
        rows[step][0] = 1e-2
    record = made([1.0] * 30, ["a", "b", "c"], layer_norms=column(rows))
    assert [sign[:3] for sign in record.early_signs()] == [(step, "a", "norm") for step in (12, 16)]


def test_a_gradient_of_zeros_does_not_jump_with_the_joint_norm():
    """The joint norm has two levels, so none of its steps is a spike."""
    joint = ([1.0] * 22 + [1000.0] * 30) * 4
    record = made(joint, ["a", "b"], layer_norms=column([[norm, 0.0] for norm in joint]))
    assert record.norm_spikes() == set()
    assert {sign.layer for sign in record.early_signs()} == {"a"}


def test_a_gradient_that_is_no_longer_zero_is_named():
    """The first matrix of a LoRA has no gradient while the second one is zero."""
    record = made([1.0] * 30, ["a", "b"], layer_norms=column([[0.0, 1.0]] * 20 + [[1e-3, 1.0]] * 10))
    assert record.worst(20)[0] == ("a", 1e-3, 0.0, pytest.approx(1e-3 / FLOAT32_ROUNDING))
    assert math.isnan(record.worst(19)[1].ratio)


def test_what_a_norm_is_judged_against():
    norms = column([[4.0, 1.0, -1.0, 0.0, 1e-9, 1e-9, 1e-3, 1e-3], [NAN, INF, 3.0, 4.0, 1e-9, 0.0, 0.0, -1.0]])
    usual = column([2.0, NAN, 1.0, 2.0, 1e-9, 1.0, 1e-9, 0.0])
    rounding = 1e-6 * math.sqrt(17 + 2e-6)
    expected = [[2, NAN, NAN, 0, NAN, 1e-9, 1e-3 / rounding, 1e-3 / rounding], [INF, INF, 3, 2, NAN, 0, NAN, NAN]]
    torch.testing.assert_close(relative(norms, usual, 1e-6), column(expected), equal_nan=True)


DIGITS = {
    "float32": (lambda: torch.randn(4000), FLOAT32_ROUNDING),
    "float64": (lambda: torch.randn(4000, dtype=torch.float64), 2.0**-48),
    "few": (lambda: torch.randn(10), FLOAT32_ROUNDING),
    "bfloat16": (lambda: torch.randn(4000).bfloat16(), LOW),
    "cast": (lambda: torch.randn(300).bfloat16().float(), LOW),
    "float16": (lambda: torch.randn(4000).half().float() / 3, LOW),
    "clipped": (lambda: torch.randn(4000).bfloat16().float() * 0.3, LOW),
    "the mean of six": (lambda: torch.randn(6, 4000).bfloat16().float().mean(0), LOW),
    "complex": (lambda: torch.randn(4000, dtype=torch.complex64), FLOAT32_ROUNDING),
    "sparse": (lambda: torch.randn(40, 40).to_sparse(), FLOAT32_ROUNDING),
    "equal": (lambda: torch.randn(200).repeat(20), FLOAT32_ROUNDING),
    "inf": (lambda: torch.cat([torch.randn(4000).bfloat16().float(), torch.tensor([INF, NAN])]), LOW),
    "zeros": (lambda: torch.zeros(4000), FLOAT32_ROUNDING),
    "none": (lambda: torch.zeros(0), FLOAT32_ROUNDING),
    "rounding": (lambda: torch.cat([torch.randn(100), torch.randint(1, 9, (900,)) * 2.0**-24]), FLOAT32_ROUNDING),
}


@pytest.mark.parametrize("kind", DIGITS)
def test_the_digits_of_gradients_tell_their_precision(kind):
    make, expected = DIGITS[kind]
    for seed in range(20):
        torch.manual_seed(seed)
        assert precision_of([make(), torch.zeros(3)] if expected == FLOAT32_ROUNDING else [make()]) == expected


@pytest.mark.parametrize(("setting", "expected"), [("highest", FLOAT32_ROUNDING), ("high", 2.0**-10), ("medium", LOW)])
def test_products_of_lower_precision_count(setting, expected):
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision(setting)
        assert precision_of([torch.randn(4000)]) == expected
    finally:
        torch.set_float32_matmul_precision(before)
