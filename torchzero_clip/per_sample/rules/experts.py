"""Experts of transformers: stacks of linear layers, each for the tokens that a router sends to it."""

import inspect
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from torchzero_clip.per_sample.broadcast_row import BroadcastRow
from torchzero_clip.per_sample.captured_layer import CapturedLayer, Rule
from torchzero_clip.per_sample.gradients.contributions import Contribution
from torchzero_clip.per_sample.gradients.row_norms import wide
from torchzero_clip.per_sample.gradients.rows import RowProducts, SparseRows
from torchzero_clip.per_sample.rules.copies import EMPTY
from torchzero_clip.per_sample.samples.pattern import Place, samples_of_items

SETTINGS = ("num_experts", "has_gate", "has_bias", "is_transposed", "has_post_expert_norm", "_apply_gate")
STACKS = ("gate_up_proj", "up_proj", "down_proj")


def is_experts(module: nn.Module) -> bool:
    """True for modules of classes that `use_experts_implementation` of transformers has made.

    The decorator leaves no mark, so they are known by the attributes that it sets.
    """
    own = {name.removesuffix("_bias") for name, _ in module.named_parameters()}
    return all(hasattr(module, name) for name in SETTINGS) and own <= {*STACKS}


class ExpertsRule(Rule):
    """Weights: products of the rows that were sent to each. Biases: sums of these rows."""

    runs_empty = True

    @override
    def refusal(self, module: nn.Module) -> str | None:
        settings: Any = module
        if settings.has_post_expert_norm or getattr(module, "_is_expert_parallel", False):
            return "its experts have a norm behind them or are spread over processes, which has no per-sample rule"
        return None

    @override
    def run(self, layer: CapturedLayer, /, *args: Any, **kwargs: Any) -> Tensor:
        module: Any = layer.module
        # transformers passes tokens, chosen experts and shares, in this order
        tokens, chosen, shares = inspect.signature(type(module).forward).bind(module, *args, **kwargs).args[1:]
        if not len(tokens):
            return EMPTY.run(layer, *args, **kwargs)
        if isinstance(tokens, BroadcastRow):
            raise layer.unknown_rows("all samples share them")
        top, count = chosen.shape[-1], len(tokens)
        order = torch.argsort(chosen.reshape(-1), stable=True)
        lengths = torch.bincount(chosen.reshape(-1), minlength=module.num_experts).tolist()
        sent = partial(_sent, layer, order // top, count, lengths)
        rows: Any = Taken.apply(tokens, order // top)
        if module.has_gate:
            rows = module._apply_gate(sent("gate_up_proj", rows))
        else:
            rows = module.act_fn(sent("up_proj", rows))
        rows = sent("down_proj", rows) * Taken.apply(shares.reshape(-1), order)[:, None]
        back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        return Taken.apply(rows, back).view(*chosen.shape, rows.shape[-1]).sum(-2).to(tokens.dtype)


class Taken(torch.autograd.Function):
    """Takes rows by an index. The rule knows the sample of each, so that it does not count as moving rows by values."""

    keeps_rows = True

    @staticmethod
    @override
    def forward(ctx: Any, x: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.length = len(x)
        return x.index_select(0, index)

    @staticmethod
    @override
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (grad,), (index,) = grads, ctx.saved_tensors
        return grad.new_zeros(ctx.length, *grad.shape[1:]).index_add_(0, index, grad), None


class ByExperts(torch.autograd.Function):
    """Multiplies rows, sorted by expert, by the weight (d, p) of their expert.

    Autograd would save the numbers of rows. They change in each step, so each step would have to be proved.
    """

    keeps_rows = True

    @staticmethod
    @override
    def forward(ctx: Any, rows: Tensor, lengths: list[int], weights: Tensor, biases: Tensor | None) -> Tensor:
        ctx.save_for_backward(weights)
        ctx.lengths, ctx.dtype = lengths, rows.dtype
        pairs = zip(rows.split(lengths), weights, strict=True)
        return torch.cat([x @ w if biases is None else torch.addmm(biases[i], x, w) for i, (x, w) in enumerate(pairs)])

    @staticmethod
    @override
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,), (weights,) = grads, ctx.saved_tensors
        pairs = zip(grad.split(ctx.lengths), weights, strict=True)
        return torch.cat([x @ w.mT.to(x.dtype) for x, w in pairs]).to(ctx.dtype), None, None, None


def _sent(layer: CapturedLayer, tokens: Tensor, length: int, lengths: list[int], name: str, rows: Tensor) -> Tensor:
    """The outputs of one linear layer of each expert, for rows that are sorted by expert.

    ``tokens`` has the token of each row, of ``length`` tokens, and ``lengths`` the number of rows of each expert.
    """
    module, params = layer.module, layer.params
    weights: Tensor = getattr(module, name).detach()
    biases: Tensor | None = getattr(module, f"{name}_bias").detach() if module.has_bias else None
    turned = bool(module.is_transposed)
    outputs: Any = ByExperts.apply(rows, lengths, weights if turned else weights.mT, biases)
    experts = torch.repeat_interleave(torch.tensor(lengths, device=tokens.device))

    def contribute(where: Place | Tensor, grad: Tensor, *inputs: Tensor, count: int) -> Iterator[Contribution]:
        samples = where.rows((length,), count) if isinstance(where, Place) else where
        sample = samples.to(tokens.device)[tokens]
        grad, *wider = wide(grad, *inputs)
        for x in wider:
            cells = experts * count + sample
            order = torch.argsort(cells, stable=True)
            yield RowProducts(params[name], count, x[order], grad[order], cells[order], turned=turned)
        if (bias := f"{name}_bias") in params:
            yield SparseRows(params[bias], count, sample, experts, grad)

    watched = [rows] if name in params else []
    reduce = partial(samples_of_items, tokens, length)
    return layer.watch(outputs, watched, contribute, shape=(length,), kind=name, reduce=reduce)
