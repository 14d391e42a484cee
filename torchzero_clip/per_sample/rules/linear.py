"""Linear layers, for inputs of any number of dimensions."""

import math
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

from torchzero_clip.per_sample.contributions import Contribution, Dense
from torchzero_clip.per_sample.products import Products
from torchzero_clip.per_sample.site import Call, Rule, Site, watch
from torchzero_clip.per_sample.squares import squared_norms, wide


class LinearRule(Rule):
    """Weight: products of inputs and output gradients. Bias: the sum of output gradients over positions."""

    @override
    def run(self, site: Site, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        return self._run(site, *args, **kwargs)

    def _run(self, site: Site, input: Tensor) -> Tensor:
        module: Any = site.module
        weight, bias = module.weight, module.bias
        dim = site.batch_dim(input.ndim - 1)
        source, expanded = site.expanded(input, dim)

        def contribute(grad: Tensor, *sources: Tensor) -> list[Contribution]:
            return _contributions(site, grad.movedim(dim, 0), *(source.movedim(dim, 0) for source in sources))

        output = F.linear(source, weight.detach(), None if bias is None else bias.detach())
        return watch(
            output, Call(site, [source] if "weight" in site.params else [], contribute), row=dim if expanded else None
        )


def _contributions(site: Site, grad: Tensor, *sources: Tensor) -> list[Contribution]:
    count, length = grad.shape[0], math.prod(grad.shape[1:-1])
    outputs, *inputs = wide(grad, *sources)
    outputs = outputs.reshape(count, length, grad.shape[-1])
    squares = squared_norms(outputs) if length == 1 else None
    result: list[Contribution] = []
    for x in inputs:
        x = x.reshape(count, length, x.shape[-1])
        result.append(Products(site.params["weight"], x, outputs, squares, allowance=site.recorder.allowance))
    if "bias" in site.params:
        result.append(Dense(site.params["bias"], outputs.sum(1) if length != 1 else outputs[:, 0], squares))
    return result
