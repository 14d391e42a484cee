"""Mixtures of experts are clipped as one backward for each sample."""

import copy

import pytest
import torch
from per_sample.harness import (
    assert_close,
    by_backward,
    by_classic_form,
    by_two_passes,
    clip,
    losses_of,
    norms_by_loop,
    with_low_memory,
)
from per_sample.mixtures import WIDTH, Mixture

from torchzero_clip import ConstantFlatClipper, PerSampleGradientClipper, check_per_sample
from torchzero_clip.per_sample.rules.registry import EXPERTS, rule_for
from torchzero_clip.per_sample.samples.proof import Proof

FORMS = [by_backward, with_low_memory, by_classic_form, by_two_passes]


KINDS = {
    "gated": {},
    "gated with biases": {"bias": True},
    "turned": {"turned": True},
    "turned with biases": {"turned": True, "bias": True},
    "without gates": {"gate": False},
    "in checkpoints": {"reentrant": False},
}


def mixture(name, seed=0):
    torch.manual_seed(seed)
    return Mixture(**KINDS[name]).double()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", KINDS)
def test_equals_one_backward_per_sample(name, form):
    model, x = mixture(name), torch.randn(4, 3, WIDTH, dtype=torch.float64)
    assert rule_for(model.experts) is EXPERTS
    norms, _ = form(model)(lambda model: losses_of(model(x)))
    assert_close(norms, norms_by_loop(copy.deepcopy(model), x))


@pytest.mark.parametrize("form", [by_backward, by_classic_form])
def test_reentrant_checkpoints_are_refused_with_the_line_to_write(form):
    model, x = mixture("gated with biases"), torch.randn(4, 3, WIDTH, dtype=torch.float64)
    model.reentrant = True
    with pytest.raises(RuntimeError, match="with use_reentrant=False"):
        form(model, verify="never")(lambda model: losses_of(model(x)))
    assert all(param.grad is None for param in model.parameters())


@pytest.mark.parametrize("batch_size", range(1, 7))
@pytest.mark.parametrize("length", [1, 2, 5])
def test_sizes_that_agree_by_chance(batch_size, length):
    model, x = mixture("gated with biases"), torch.randn(batch_size, length, WIDTH, dtype=torch.float64)
    norms, _ = by_backward(model, verify="never")(lambda model: losses_of(model(x)))
    assert_close(norms, norms_by_loop(copy.deepcopy(model), x))


def test_tokens_of_some_samples_only():
    class Some(Mixture):
        def forward(self, x, mask):
            x = self.before(x)
            rows = x[mask]
            _, shares, chosen = self.router(rows)
            return self.after(x.index_put(mask.nonzero().unbind(1), rows + self.experts(rows, chosen, shares)))

    torch.manual_seed(0)
    model, x = Some(bias=True).double(), torch.randn(4, 3, WIDTH, dtype=torch.float64)
    mask = torch.tensor([[1, 0, 0], [1, 1, 1], [0, 0, 0], [0, 1, 0]]).bool()
    norms, _ = by_backward(model)(lambda model: losses_of(model(x, mask)))
    assert_close(norms, norms_by_loop(copy.deepcopy(model), x, mask))


@pytest.mark.parametrize("frozen", [["experts"], ["experts.down_proj"], ["experts.gate_up_proj_bias"], ["router"]])
def test_frozen_parts(frozen):
    model, x = mixture("gated with biases"), torch.randn(4, 3, WIDTH, dtype=torch.float64)
    for name, param in model.named_parameters():
        param.requires_grad_(not name.startswith(tuple(frozen)))
    norms, _ = by_backward(model)(lambda model: losses_of(model(x)))
    assert_close(norms, norms_by_loop(copy.deepcopy(model), x))
    assert all((param.grad is None) is not param.requires_grad for param in model.parameters())


def test_the_clipped_sum_is_that_of_clipped_samples():
    model, x = mixture("turned with biases"), torch.randn(4, 3, WIDTH, dtype=torch.float64)
    twin, limit = copy.deepcopy(model), 0.5
    expected = [torch.zeros_like(param) for param in twin.parameters()]
    for one in x.split(1):
        grads = torch.autograd.grad(losses_of(twin(one)).sum(), list(twin.parameters()))
        norm = torch.stack([grad.norm() for grad in grads]).norm()
        for total, grad in zip(expected, grads, strict=True):
            total += (limit / (norm + 1e-6)).clamp(max=1) * grad / len(x)
    with clip(model, limit) as clipper:
        clipper.backward(losses_of(model(x)))
    for param, total in zip(model.parameters(), expected, strict=True):
        assert_close(param.grad, total)


def test_autocast():
    model, x = mixture("gated").float(), torch.randn(4, 3, WIDTH)
    with torch.autocast("cpu", torch.bfloat16):
        expected = norms_by_loop(copy.deepcopy(model), x)
        with clip(model) as clipper:
            result = clipper.backward(losses_of(model(x)))
    torch.testing.assert_close(result.norms, expected, rtol=0.03, atol=0.0, check_dtype=False)


def test_an_empty_batch():
    model = mixture("gated with biases")
    with clip(model) as clipper:
        assert clipper.backward(losses_of(model(torch.zeros(0, 3, WIDTH, dtype=torch.float64)))).norms.shape == (0,)


def test_a_loss_of_the_router_over_all_tokens_raises():
    torch.manual_seed(0)
    model, x = Mixture(auxiliary=True).double(), torch.randn(4, 3, WIDTH, dtype=torch.float64)
    with clip(model) as clipper, pytest.raises(RuntimeError, match=r"mixes samples"):
        clipper.backward(losses_of(model(x)))
    assert all(param.grad is None for param in model.parameters())


def test_a_loss_of_the_router_for_each_sample():
    class Balanced(Mixture):
        def forward(self, x):
            x = self.before(x)
            logits, shares, chosen = self.router(x.reshape(-1, WIDTH))
            x = x + self.experts(x.reshape(-1, WIDTH), chosen, shares).view(x.shape)
            return torch.cat([self.after(x), logits.view(*x.shape[:2], -1).softmax(-1)], -1)

    torch.manual_seed(0)
    model, x = Balanced(bias=True).double(), torch.randn(4, 3, WIDTH, dtype=torch.float64)
    norms, _ = by_backward(model)(lambda model: losses_of(model(x)))
    assert_close(norms, norms_by_loop(copy.deepcopy(model), x))


@pytest.mark.parametrize(("name", "value"), [("has_post_expert_norm", True), ("_is_expert_parallel", True)])
def test_experts_without_a_rule_are_refused(name, value):
    model = mixture("gated")
    setattr(model.experts, name, value)
    with pytest.raises(ValueError, match=r"'experts'.*no per-sample rule"):
        clip(model)


@pytest.mark.slow
def test_a_cache_of_the_batch_changes_nothing():
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_experts": 2, "use_mamba_kernels": False}
    periods = {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1}
    config = transformers.JambaConfig(**sizes, **heads, **periods, mamba_d_state=2, mamba_d_conv=2, pad_token_id=0)
    model, tokens = transformers.JambaForCausalLM(config), torch.randint(1, 16, (3, 4))
    with PerSampleGradientClipper(model, ConstantFlatClipper(1.0)) as clipper:
        norms = [
            clipper.backward(model(tokens, use_cache=use_cache).logits.flatten(1).mean(1)).norms
            for use_cache in (True, False)
        ]
        assert_close(*norms, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_experts_are_checked_in_float64():
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    config = transformers.MixtralConfig(**sizes, num_attention_heads=2, num_key_value_heads=1, num_local_experts=2)
    model, tokens = transformers.MixtralForCausalLM(config), torch.randint(1, 16, (3, 4))
    check_per_sample(model, tokens, lambda model, tokens: model(tokens).logits.flatten(1).square().mean(1))


def test_steps_with_other_routes_need_no_proof(monkeypatch):
    ran, run = [], Proof.run
    monkeypatch.setattr(Proof, "run", lambda *args, **kwargs: (ran.append(1), run(*args, **kwargs)))
    model = mixture("gated with biases")
    with PerSampleGradientClipper(model, ConstantFlatClipper(1.0), verify="never") as clipper:
        for _ in range(5):
            clipper.backward(losses_of(model(torch.randn(4, 3, WIDTH, dtype=torch.float64))))
    assert len(ran) == 1
