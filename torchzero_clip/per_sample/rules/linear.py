"""Linear layers, for inputs of any number of dimensions."""

import math
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

from torchzero_clip.per_sample.captured_layer import Call, CapturedLayer, Rule, watch
from torchzero_clip.per_sample.contributions import Contribution, Dense
from torchzero_clip.per_sample.products import Products
from torchzero_clip.per_sample.squared_norms import squared_norms, wide


class LinearRule(Rule):
    """Weight: products of inputs and output gradients. Bias: the sum of output gradients over positions."""

    @override
    def run(self, layer: CapturedLayer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        return self._run(layer, *args, **kwargs)

    def _run(self, layer: CapturedLayer, input: Tensor) -> Tensor:
        module: Any = layer.module
        weight, bias = module.weight, module.bias
        found = layer.samples(input, input.ndim - 1)
        source, dim, _ = found

        def contribute(grad: Tensor, *sources: Tensor) -> list[Contribution]:
            return _contributions(layer, grad.movedim(dim, 0), *(source.movedim(dim, 0) for source in sources))

        output = F.linear(source, weight.detach(), None if bias is None else bias.detach())
        return watch(output, Call(layer, [source] if "weight" in layer.params else [], contribute), found)


def _contributions(layer: CapturedLayer, grad: Tensor, *sources: Tensor) -> list[Contribution]:
    count, length = grad.shape[0], math.prod(grad.shape[1:-1])
    outputs, *inputs = wide(grad, *sources)
    outputs = outputs.reshape(count, length, grad.shape[-1])
    squares = squared_norms(outputs) if length == 1 else None
    result: list[Contribution] = []
    for x in inputs:
        x = x.reshape(count, length, x.shape[-1])
        result.append(Products(layer.params["weight"], x, outputs, squares, budget=layer.recording.budget))
    if "bias" in layer.params:
        result.append(Dense(layer.params["bias"], outputs.sum(1) if length != 1 else outputs[:, 0], squares))
    return result
