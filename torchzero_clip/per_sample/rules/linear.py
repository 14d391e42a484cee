"""Linear layers, for inputs of any number of dimensions."""

import math
from collections.abc import Mapping
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from torchzero_clip.per_sample.captured_layer import CapturedLayer, Rule
from torchzero_clip.per_sample.gradients.products import Products


class LinearRule(Rule):
    """Weight: products of inputs and output gradients. Bias: the sum of output gradients over positions."""

    @override
    def run(self, layer: CapturedLayer, input: Tensor) -> Tensor:
        module: Any = layer.module
        return linear(layer, layer.params, input, module.weight, module.bias)


def linear(
    layer: CapturedLayer, params: Mapping[str, nn.Parameter], input: Tensor, weight: Tensor, bias: Tensor | None
) -> Tensor:
    """The output for a weight and a bias of a layer. ``params`` has those of them that train."""
    found = layer.samples(input, input.ndim - 1)
    return layer.watch_params(
        F.linear(found.tensor, weight.detach(), None if bias is None else bias.detach()),
        found,
        params,
        # with one dimension of positions, (B, T, width)
        weight=lambda x, grad: Products(
            params["weight"], *(t.reshape(len(t), math.prod(t.shape[1:-1]), t.shape[-1]) for t in (x, grad))
        ),
        bias=lambda grad: grad if grad.ndim == 2 else grad.flatten(1, -2).sum(1),
    )
