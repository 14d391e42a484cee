"""Linear layers, for inputs of any number of dimensions."""

import math
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

from torchzero_clip.per_sample.contributions import Contribution, Dense
from torchzero_clip.per_sample.products import Products
from torchzero_clip.per_sample.site import Call, Rule, Site, watch
from torchzero_clip.per_sample.squares import wide


class LinearRule(Rule):
    """Weight: products of inputs and output gradients. Bias: the output gradients, added up over positions."""

    @override
    def run(self, site: Site, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        return self._run(site, *args, **kwargs)

    def _run(self, site: Site, input: Tensor) -> Tensor:
        module: Any = site.module
        weight, bias = module.weight, module.bias
        dim = site.batch_dim(input.ndim - 1)
        source, expanded = site.expanded(input, dim)

        def contribute(grad: Tensor, source: Tensor) -> list[Contribution]:
            return _contributions(site, grad.movedim(dim, 0), source.movedim(dim, 0))

        output = F.linear(source, weight.detach(), None if bias is None else bias.detach())
        return watch(output, Call(site, [source], contribute, expanded=expanded))


def _contributions(site: Site, grad: Tensor, input: Tensor) -> list[Contribution]:
    count, length = input.shape[0], math.prod(input.shape[1:-1])
    inputs, outputs = wide(input, grad)
    outputs = outputs.reshape(count, length, grad.shape[-1])
    result: list[Contribution] = []
    if "weight" in site.params:
        inputs = inputs.reshape(count, length, input.shape[-1])
        result.append(Products(site.params["weight"], inputs, outputs, memory=site.recorder.memory))
    if "bias" in site.params:
        result.append(Dense(site.params["bias"], outputs.sum(1) if length != 1 else outputs[:, 0]))
    return result
