"""The chains that stand for published methods, as their page and examples show them, against other implementations."""

import importlib.util
import math
import re
from pathlib import Path

import pytest
import torch
from table import SHAPES
from torch import nn
from versions import needs_muon

from torchzero_clip import LR, SGD, AdaGC, Adam, ClipByMaxEMA, GradientStabilizer, Modular, Muon, WeightDecay, ZClip

ROOT = Path(__file__).parents[1]
peer = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]


def shown(name):
    """What the page defines under a name."""
    names = {"torch": torch, "model": nn.Linear(2, 2)}
    text = (ROOT / "docs" / "from_papers.md").read_text()
    for block in re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        exec(compile(block, "from_papers.md", "exec"), names)
    return names[name]


def parameters(shapes=SHAPES):
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


def gradients(count, shapes=SHAPES, spike=None):
    """Random gradients; one step of them is a hundred times as large."""
    generator = torch.Generator().manual_seed(1)
    scales = [100.0 if k == spike else 1.0 for k in range(count)]
    return [[torch.randn(shape, generator=generator) * scale for shape in shapes] for scale in scales]


def train(optimizer, params, rows):
    for row in rows:
        for param, grad in zip(params, row, strict=True):
            param.grad = grad.clone()
        optimizer.step()


@pytest.mark.parametrize("fast", [True, False])
def test_stable_adamw_by_hand(fast):
    """Two steps of one number: the first has a ratio of 1, the second one of g / sqrt(v)."""
    param = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimizer = Modular([param], shown("StableAdam")(lr=0.5, betas=(0.5, 0.75)), fast=fast)
    train(optimizer, [param], [[torch.tensor([2.0], dtype=torch.float64)]])
    assert param.item() == pytest.approx(-0.5, rel=1e-6)
    train(optimizer, [param], [[torch.tensor([10.0], dtype=torch.float64)]])
    square = (0.75 * 0.25 * 4 + 0.25 * 100) / (1 - 0.75**2)
    average = (0.5 * 0.5 * 2 + 0.5 * 10) / (1 - 0.5**2)
    ratio = 10 / math.sqrt(square)
    assert ratio > 1
    assert param.item() == pytest.approx(-0.5 - 0.5 * average / math.sqrt(square) / ratio, rel=1e-6)


class TestPytorchOptimizer:
    pytestmark = peer

    @pytest.fixture
    def peers(self):
        return pytest.importorskip("pytorch_optimizer", reason="pytorch_optimizer is not installed")

    @pytest.mark.parametrize("foreach", [False, True])
    def test_stable_adamw(self, peers, foreach):
        params, other = parameters(), parameters()
        optimizer = Modular(params, shown("StableAdam")(lr=0.1, betas=(0.9, 0.99)))
        reference = peers.StableAdamW(other, lr=0.1, betas=(0.9, 0.99), weight_decay=0.0, foreach=foreach)
        rows = gradients(20, spike=12)
        train(optimizer, params, rows)
        train(reference, other, rows)
        torch.testing.assert_close(params, other, rtol=1e-5, atol=1e-6)

    def test_stable_spam(self, peers):
        params, other = parameters(), parameters()
        optimizer = Modular(params, ClipByMaxEMA(), GradientStabilizer(), Adam(lr=0.1))
        reference = peers.StableSPAM(other, lr=0.1)
        rows = gradients(20, spike=12)
        train(optimizer, params, rows)
        train(reference, other, rows)
        torch.testing.assert_close(params, other, rtol=1e-4, atol=1e-5)

    def test_qk_clip(self, peers):
        pytest.importorskip("sklearn", reason="scikit-learn is not installed")
        attention, clip = attention_and_clip(10.0, bias=False)
        largest = torch.tensor([5.0, 20.0, 40.0, 11.0])
        query, key = (nn.Parameter(layer.weight.detach().clone()) for layer in (attention.query, attention.key))
        named = {"use_muon": True, "attention_name": "one"}
        groups = [{"params": [p], "qk_clip": role, **named} for p, role in ((query, "query"), (key, "key"))]
        reference = peers.MuonClip(groups, lr=0.0, qk_clip_threshold=10.0)
        for param in (query, key):
            param.grad = torch.zeros_like(param)
        reference.step(attention_max_logits={"one": largest})
        attention.largest.copy_(largest)
        clip()
        torch.testing.assert_close(attention.query.weight.detach(), query.detach())
        torch.testing.assert_close(attention.key.weight.detach(), key.detach())


def test_moments_are_reset_and_only_then():
    params = parameters()
    optimizer = Modular(params, ClipByMaxEMA(), GradientStabilizer(), Adam(lr=0.1))
    reset = shown("reset_moments")
    optimizer.register_step_post_hook(lambda *args: reset(*args, every=3))
    for count in (1, 2, 0, 1):
        train(optimizer, params, gradients(1))
        state = optimizer.state[params[0]]
        assert state["adam/step"] == count
        assert bool(state["adam/exp_avg"].any()) == (count > 0)
    assert any(value.any() for key, value in state.items() if key.startswith("clip_by_max_ema/"))


@needs_muon
def test_adagc_before_muon_is_muon_on_clipped_gradients():
    shapes = [(4, 3), (3, 5)]
    params, other = parameters(shapes), parameters(shapes)
    optimizer = Modular(params, AdaGC(1.05, 0.9, warmup_steps=0), Muon(lr=0.02))
    reference = torch.optim.Muon(other, lr=0.02, weight_decay=0.0)
    usual = [math.nan] * len(shapes)
    for row in gradients(10, shapes, spike=6):
        train(optimizer, params, [row])
        for i, (param, grad) in enumerate(zip(other, row, strict=True)):
            norm = grad.double().norm().item()
            factor = 1.0 if math.isnan(usual[i]) else min(1.0, 1.05 * usual[i] / norm)
            param.grad = grad * factor
            usual[i] = norm if math.isnan(usual[i]) else 0.9 * usual[i] + 0.1 * factor * norm
        reference.step()
    torch.testing.assert_close(params, other, rtol=1e-3, atol=1e-4)  # the iteration of Muon is bfloat16


def test_zclip_on_the_update_is_zclip_on_what_adam_returns():
    params, other = parameters(), parameters()
    zclip = {"max_norm": None, "warmup_steps": 5, "beta": 0.8}
    optimizer = Modular(params, Adam(lr=0.1), ZClip(**zclip), WeightDecay(0.1))
    moments = Modular(other, Adam(), LR(1.0))
    clipped = [nn.Parameter(torch.zeros(shape)) for shape in SHAPES]
    limit = Modular(clipped, ZClip(**zclip), SGD(1.0))
    factors = []
    for row in gradients(40, spike=30):
        train(optimizer, params, [row])
        before = [p.detach().clone() for p in other]
        train(moments, other, [row])
        for param in clipped:
            param.data.zero_()
        train(limit, clipped, [[b - p.detach() for b, p in zip(before, other, strict=True)]])
        for param, old, minus in zip(other, before, clipped, strict=True):
            param.data = old + 0.1 * (minus.detach() - 0.1 * old)
        factors.append(optimizer.metrics()["z_clip/factor"].item())
    assert min(factors) < 0.8
    torch.testing.assert_close(params, other, rtol=1e-3, atol=1e-4)


def muon_clip():
    pytest.importorskip("sklearn", reason="scikit-learn is not installed")
    spec = importlib.util.spec_from_file_location("muon_clip", ROOT / "examples" / "muon_clip.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def attention_and_clip(tau, keys=4, *, bias=True):
    module = muon_clip()
    torch.manual_seed(0)
    attention = module.Attention(keys)
    with torch.no_grad():
        for param in attention.parameters():
            param.mul_(5)
        for layer in (attention.query, attention.key):
            layer.bias.normal_() if bias else layer.bias.zero_()
    return attention, module.QKClip([attention], tau)


def logits_of(attention, x):
    """The largest logit of each head, in loops."""
    found = []
    heads, width = 4, attention.query.out_features // 4
    keys = attention.key.out_features // width
    query, key = attention.query(x).double(), attention.key(x).double()
    for head in range(heads):
        q = query[..., head * width : (head + 1) * width]
        shared = head * keys // heads
        k = key[..., shared * width : (shared + 1) * width]
        found.append(max((q[s] @ k[s].T).max().item() for s in range(len(x))) / math.sqrt(width))
    return found


@pytest.mark.parametrize("keys", [4, 2, 1])
def test_qk_clip_brings_the_largest_logit_of_each_head_to_tau(keys):
    attention, clip = attention_and_clip(100.0, keys)
    x = torch.randn(6, 8, attention.query.in_features)
    optimizer = Modular(attention, SGD(0.0))
    optimizer.register_step_post_hook(clip)
    for part in x.chunk(3):  # micro-batches
        attention(part).square().mean().backward()
    before = logits_of(attention, x)
    assert attention.largest.tolist() == pytest.approx(before, rel=1e-4)
    clip.tau = tau = sorted(before)[2] * 0.99  # two heads are over it
    queries, keys_before = attention.query.weight.detach().clone(), attention.key.weight.detach().clone()
    optimizer.step()
    assert logits_of(attention, x) == pytest.approx([min(logit, tau) for logit in before], rel=1e-4)
    width = attention.query.out_features // 4
    for head, logit in enumerate(before):
        rows = slice(head * width, (head + 1) * width)
        share = math.sqrt(min(1, tau / logit)) if keys == 4 else min(1, tau / logit)
        torch.testing.assert_close(attention.query.weight[rows].detach(), queries[rows] * share)
        if logit <= tau:
            assert torch.equal(attention.query.weight[rows].detach(), queries[rows])
    if keys < 4:
        assert torch.equal(attention.key.weight.detach(), keys_before)
    assert attention.largest.max() == -torch.inf


@pytest.mark.parametrize("largest", [math.nan, math.inf, -math.inf, 3.0])
def test_qk_clip_leaves_heads_alone_that_are_not_over_tau_by_a_number(largest):
    attention, clip = attention_and_clip(10.0)
    before = [p.detach().clone() for p in attention.parameters()]
    attention.largest.fill_(largest)
    clip()
    assert all(torch.equal(p, b) for p, b in zip(attention.parameters(), before, strict=True))


@pytest.mark.slow
def test_qk_clip_holds_the_logits_of_a_run():
    module = muon_clip()
    free, _ = module.train(None, 120)
    held, right = module.train(10.0, 120)
    assert free[-1] > 25
    assert max(held[29::30]) < 14  # each quarter of the run
    assert right > 0.8
