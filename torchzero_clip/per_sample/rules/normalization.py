"""Normalization within a sample: LayerNorm, RMSNorm, GroupNorm, InstanceNorm, and BatchNorm in eval mode."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

from torchzero_clip.per_sample.captured_gradients import Forward
from torchzero_clip.per_sample.captured_layer import CapturedLayer, Rule
from torchzero_clip.per_sample.contributions import Dense

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

    @override
    def run(self, layer: CapturedLayer, input: Tensor) -> Tensor:
        module: Any = layer.module
        normalize, weight, bias = self._function(module), module.weight.detach(), getattr(module, "bias", None)
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
    """GroupNorm, by one kernel for the gradients of the input and of the parameters where that is possible."""

    def __init__(self) -> None:
        super().__init__(group_norm, channels=True)

    @override
    def run(self, layer: CapturedLayer, input: Tensor) -> Tensor:
        module: Any = layer.module
        dtypes = {input.dtype, *(param.dtype for param in module.parameters())}
        plain = len(dtypes) == 1 and dtypes <= {torch.float32, torch.float64} and module.bias is not None
        if not plain or not input.numel() or torch.is_autocast_enabled(input.device.type):
            return super().run(layer, input)
        found = layer.samples(input, 1)
        if found.rows is not None or found.lost:
            return super().run(layer, input)
        output: Any = _GroupNorm.apply(layer.engine.anchor, input, layer, layer.engine.forward)
        layer.mark(output, 0)
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


class _GroupNorm(torch.autograd.Function):
    """GroupNorm at the cost of an ordinary backward: the kernel gets the batch as one sample with B times the channels.

    So the gradients of the parameters that the kernel returns are the per-sample gradients.
    """

    @staticmethod
    @override
    def forward(ctx: Any, anchor: Tensor, input: Tensor, layer: CapturedLayer, of: Forward) -> Tensor:
        module: Any = layer.module
        x = input.contiguous()
        count, channels, size = x.shape[0], x.shape[1], x.shape[2:].numel()
        output, mean, rstd = torch.native_group_norm(
            x, module.weight, module.bias, count, channels, size, module.num_groups, module.eps
        )
        ctx.save_for_backward(x, mean, rstd, module.weight.detach())
        ctx.layer, ctx.of, ctx.call = layer, of, None
        return output

    @staticmethod
    @override
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor | None, None, None]:
        x, mean, rstd, weight = ctx.saved_tensors
        layer: CapturedLayer = ctx.layer
        count, channels, size = x.shape[0], x.shape[1], x.shape[2:].numel()
        grad_input, *rows = torch.ops.aten.native_group_norm_backward(
            grads[0].contiguous().view(1, count * channels, size),
            x.view(1, count * channels, size),
            mean.view(1, -1),
            rstd.view(1, -1),
            weight.repeat(count),
            1,
            count * channels,
            size,
            mean.numel(),
            [ctx.needs_input_grad[1], True, True],
        )
        if layer.engine.wants(layer):
            if layer.engine.repeats:
                ctx.call = layer.engine.probe.known(layer, 0, grads[0].clone())
            of: dict[str, Tensor] = dict(zip(("weight", "bias"), rows, strict=True))
            parts = [Dense(param, of[name].view(count, channels)) for name, param in layer.params.items()]
            layer.engine.add(layer, ctx.of, parts)
        elif ctx.call is not None and layer.engine.probes:
            ctx.call.compare(grads[0])
        return None, None if grad_input is None else grad_input.view_as(x), None, None
