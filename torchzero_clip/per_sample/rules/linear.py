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
    def run(
        self,
        layer: CapturedLayer,
        input: Tensor,
        given: tuple[Tensor, Tensor | None] | None = None,
        params: Mapping[str, nn.Parameter] | None = None,
    ) -> Tensor:
        """Run the layer, or another module that uses a ``given`` weight and bias of its own as a linear layer does.

        ``params`` has those of them that train.
        """
        module: Any = layer.module
        weight, bias = (module.weight, module.bias) if given is None else given
        trained = layer.params if params is None else params
        found = layer.find_samples(input, input.ndim - 1, takes_positions=True)
        return layer.watch_params(
            F.linear(found.tensor, weight.detach(), None if bias is None else bias.detach()),
            found,
            trained,
            # with one dimension of positions, (B, T, width)
            weight=lambda x, grad: Products(
                trained["weight"], *(t.reshape(len(t), math.prod(t.shape[1:-1]), t.shape[-1]) for t in (x, grad))
            ),
            bias=lambda grad: grad if grad.ndim == 2 else grad.flatten(1, -2).sum(1),
        )


LINEAR = LinearRule()
