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
    def run(self, layer: CapturedLayer, input: Tensor) -> Tensor:
        module: Any = layer.module
        weight, bias = module.weight, module.bias
        found = layer.samples(input, input.ndim - 1)
        source, dim, _ = found

        def contribute(grad: Tensor, *sources: Tensor) -> list[Contribution]:
            outputs, *inputs = (x.movedim(dim, 0) for x in wide(grad, *sources))
            count, length = outputs.shape[0], math.prod(outputs.shape[1:-1])
            outputs = outputs.reshape(count, length, outputs.shape[-1])
            squares = squared_norms(outputs) if length == 1 else None
            result: list[Contribution] = []
            for x in inputs:
                x = x.reshape(count, length, x.shape[-1])
                result.append(Products(layer.params["weight"], x, outputs, squares, budget=layer.recording.budget))
            if "bias" in layer.params:
                result.append(Dense(layer.params["bias"], outputs.sum(1) if length != 1 else outputs[:, 0], squares))
            return result

        output = F.linear(source, weight.detach(), None if bias is None else bias.detach())
        return watch(output, Call(layer, [source] if "weight" in layer.params else [], contribute), found)
