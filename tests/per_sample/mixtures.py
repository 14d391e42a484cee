"""Mixtures of experts, made as transformers makes them: a router, and stacks of linear layers for some tokens each."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

EXPERT_COUNT, WIDTH, INNER, TOP = 5, 4, 6, 2


class Router(nn.Module):
    """Computes the shares of the experts with parameters of its own, and returns integers beside them."""

    def __init__(self, bias):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(EXPERT_COUNT, WIDTH))
        self.bias = nn.Parameter(torch.randn(EXPERT_COUNT)) if bias else None

    def forward(self, tokens):
        logits = F.linear(tokens, self.weight, self.bias)
        shares, chosen = logits.softmax(-1).topk(TOP, -1)
        return logits, shares / shares.sum(-1, keepdim=True), chosen


class Experts(nn.Module):
    """Computes the experts one by one, in the way of the eager implementation."""

    has_post_expert_norm = False

    def __init__(self, *, gate, bias, turned):
        super().__init__()
        self.num_experts, self.has_gate, self.has_bias, self.is_transposed = EXPERT_COUNT, gate, bias, turned
        self.act_fn = nn.SiLU()
        up = "gate_up_proj" if gate else "up_proj"
        for name, width, height in ((up, WIDTH, INNER * (2 if gate else 1)), ("down_proj", INNER, WIDTH)):
            shape = (width, height) if turned else (height, width)
            setattr(self, name, nn.Parameter(torch.randn(EXPERT_COUNT, *shape)))
            if bias:
                setattr(self, f"{name}_bias", nn.Parameter(torch.randn(EXPERT_COUNT, height)))

    def _apply_gate(self, rows):
        gate, up = rows.chunk(2, -1)
        return self.act_fn(gate) * up

    def one(self, name, expert, rows):
        weight = getattr(self, name)[expert]
        rows = rows @ (weight if self.is_transposed else weight.T)
        return rows + getattr(self, f"{name}_bias")[expert] if self.has_bias else rows

    def forward(self, tokens, top_k_index, top_k_weights):
        output = torch.zeros_like(tokens)
        for expert in top_k_index.unique().tolist():
            token, place = torch.where(top_k_index == expert)
            if self.has_gate:
                rows = self._apply_gate(self.one("gate_up_proj", expert, tokens[token]))
            else:
                rows = self.act_fn(self.one("up_proj", expert, tokens[token]))
            rows = self.one("down_proj", expert, rows) * top_k_weights[token, place, None]
            output = output.index_add(0, token, rows.to(output.dtype))
        return output


class Mixture(nn.Module):
    def __init__(self, *, gate=True, bias=False, turned=False, reentrant=None, auxiliary=False):
        super().__init__()
        self.before, self.after = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)
        self.router, self.experts = Router(bias), Experts(gate=gate, bias=bias, turned=turned)
        self.reentrant, self.auxiliary = reentrant, auxiliary

    def mixed(self, x):
        tokens = x.reshape(-1, WIDTH)
        logits, shares, chosen = self.router(tokens)
        self.balance = logits.softmax(-1).mean(0).square().sum() if self.auxiliary else 0.0
        return x + self.experts(tokens, chosen, top_k_weights=shares).view(x.shape)

    def forward(self, x):
        x = self.before(x)
        x = self.mixed(x) if self.reentrant is None else checkpoint(self.mixed, x, use_reentrant=self.reentrant)
        return self.after(x) + self.balance if self.auxiliary else self.after(x)
