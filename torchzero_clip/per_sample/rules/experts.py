"""Experts of transformers: stacks of linear layers, each for the tokens that a router sends to it."""

import inspect
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from torchzero_clip.per_sample.captured_layer import CapturedLayer, Rule
from torchzero_clip.per_sample.gradients.contributions import Contribution
from torchzero_clip.per_sample.gradients.rows import RowProducts, SparseRows
from torchzero_clip.per_sample.gradients.squared_norms import wide
from torchzero_clip.per_sample.samples.labels import Place

SETTINGS = ("num_experts", "has_gate", "has_bias", "is_transposed", "has_post_expert_norm", "_apply_gate")
STACKS = ("gate_up_proj", "up_proj", "down_proj")


def is_experts(module: nn.Module) -> bool:
    """True for modules of classes that `use_experts_implementation` of transformers has made."""
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
        tokens, chosen, shares = inspect.signature(type(module).forward).bind(module, *args, **kwargs).args[1:]
        found, count, top = layer.samples(tokens, 1), layer.engine.forward.batch_size, chosen.shape[-1]
        if count is None or found.had_dim is not None or found.lost:
            raise layer.unknown_rows()
        sample = found.where
        if isinstance(sample, Place):
            sample = torch.arange(len(tokens), device=tokens.device) // sample.run
        cells = chosen.reshape(-1) * count + sample.to(tokens.device).repeat_interleave(top)
        order = torch.argsort(cells)
        lengths = torch.bincount(cells // max(count, 1), minlength=module.num_experts).tolist()
        sent = partial(_sent, layer, cells[order], count, lengths)
        rows = tokens.index_select(0, order // top)
        if module.has_gate:
            rows = module._apply_gate(sent("gate_up_proj", rows))
        else:
            rows = module.act_fn(sent("up_proj", rows))
        rows = sent("down_proj", rows) * shares.reshape(-1).index_select(0, order)[:, None]
        back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        output = rows.index_select(0, back).view(*chosen.shape, rows.shape[-1]).sum(-2).to(tokens.dtype)
        layer.mark(output, found.where)
        return output


def _sent(layer: CapturedLayer, cells: Tensor, count: int, lengths: list[int], name: str, rows: Tensor) -> Tensor:
    """The outputs of one linear layer of each expert, for rows that are sorted by expert and then by sample.

    ``cells`` has the expert times B plus the sample of each row, and ``lengths`` the number of rows of each expert.
    """
    module, params = layer.module, layer.params
    weights: Tensor = getattr(module, name).detach()
    biases: Tensor | None = getattr(module, f"{name}_bias").detach() if module.has_bias else None
    turned = bool(module.is_transposed)
    pairs = zip(rows.split(lengths), weights if turned else weights.mT, strict=True)
    outputs = [x @ w if biases is None else torch.addmm(biases[i], x, w) for i, (x, w) in enumerate(pairs)]

    def contribute(grad: Tensor, *inputs: Tensor) -> Iterator[Contribution]:
        grad, *wider = wide(grad, *inputs)
        for x in wider:
            yield RowProducts(params[name], count, x, grad, cells, turned=turned)
        if (bias := f"{name}_bias") in params:
            yield SparseRows(params[bias], count, cells % max(count, 1), cells // max(count, 1), grad)

    return layer.watch(torch.cat(outputs), [rows] if name in params else [], contribute)
