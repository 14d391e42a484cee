"""Normalization within a sample: LayerNorm, RMSNorm, GroupNorm, InstanceNorm, and BatchNorm in eval mode."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

from torchzero_clip.per_sample.captured_layer import CapturedLayer, Rule
from torchzero_clip.per_sample.gradients.contributions import Dense
from torchzero_clip.per_sample.rules.copies import copy_of
from torchzero_clip.per_sample.samples.layout import Place

Normalize = Callable[[Tensor, Tensor | None, Tensor | None], Tensor]
"""A function of an input, a weight and a bias."""


class NormalizationRule(Rule):
    """Weight: output gradient times normalized input. Bias: output gradient. Both are summed over other dimensions.

    Args:
        function: Returns the function of a layer with its present settings, which may change before the next call.
        channels: Whether the parameters have the second dimension, instead of the last ones.
    """

    def __init__(self, function: Callable[[Any], Normalize], *, channels: bool = False) -> None:
        self._function = function
        self._channels = channels
        self.runs_empty = channels  # instance_norm of torch raises for them if it has a weight

    @override
    def run(self, layer: CapturedLayer, input: Tensor) -> Tensor:
        module: Any = layer.module
        normalize, weight, bias = self._function(module), module.weight.detach(), getattr(module, "bias", None)
        # InstanceNorm takes inputs without a batch, which `samples` refuses
        unbatched = module._get_no_batch_dim() if hasattr(module, "_get_no_batch_dim") else 0
        leading = int(input.ndim != unbatched) if self._channels else input.ndim - weight.ndim
        found = layer.samples(input, leading)

        def summed(grads: Tensor) -> Tensor:
            others = range(2, grads.ndim) if self._channels else range(1, grads.ndim - weight.ndim)
            return grads.sum(tuple(others)) if others else grads

        return layer.watch_params(
            normalize(found.tensor, weight, None if bias is None else bias.detach()),
            found,
            weight=lambda x, grad: Dense(layer.params["weight"], summed(grad * normalize(x, None, None))),
            bias=summed,
        )


class GroupNormRule(NormalizationRule):
    """GroupNorm, where possible with a copy of the parameters for each sample, at the cost of an ordinary backward.

    The kernel gets the batch as one sample with B times the channels.
    """

    def __init__(self) -> None:
        super().__init__(group_norm, channels=True)

    @override
    def run(self, layer: CapturedLayer, input: Tensor) -> Tensor:
        module: Any = layer.module
        # copies in half precision would get rounded gradients
        plain = {x.dtype for x in (input, *module.parameters())} in ({torch.float32}, {torch.float64})
        found = layer.samples(input, 1) if plain and module.bias is not None and input.numel() else None
        if found is None or not found.is_plain or torch.is_autocast_enabled(input.device.type):
            return super().run(layer, input)
        x, own = found.tensor, {id(value): param for param, value in layer.values}
        weight, bias = (
            copy_of(layer, own[id(value)], value, len(x)) if id(value) in own else value.expand(len(x), -1)
            for value in list[Tensor](module.parameters())
        )
        one = x.reshape(1, weight.numel(), *x.shape[2:])
        output = F.group_norm(one, len(x) * module.num_groups, weight.flatten(), bias.flatten(), module.eps).view_as(x)
        layer.mark(output, Place(0))
        return output


def layer_norm(module: Any) -> Normalize:
    """LayerNorm as it is now."""
    shape, eps = module.normalized_shape, module.eps
    return lambda x, weight, bias: F.layer_norm(x, shape, weight, bias, eps)


def rms_norm(module: Any) -> Normalize:
    """RMSNorm as it is now."""
    shape, eps = module.normalized_shape, module.eps
    return lambda x, weight, bias: F.rms_norm(x, shape, weight, eps)


def group_norm(module: Any) -> Normalize:
    """GroupNorm as it is now."""
    groups, eps = module.num_groups, module.eps
    return lambda x, weight, bias: F.group_norm(x, groups, weight, bias, eps)


def instance_norm(module: Any) -> Normalize:
    """InstanceNorm as it is now: every channel is a group."""
    eps = module.eps
    return lambda x, weight, bias: F.group_norm(x, x.shape[1], weight, bias, eps)


def batch_norm(module: Any) -> Normalize:
    """BatchNorm in eval mode, as it is now."""
    mean, variance, eps = module.running_mean, module.running_var, module.eps
    return lambda x, weight, bias: F.batch_norm(x, mean, variance, weight, bias, False, 0.0, eps)
