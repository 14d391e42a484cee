"""Normalization within a sample: LayerNorm, RMSNorm, GroupNorm and InstanceNorm."""

from abc import abstractmethod
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from torchzero_clip.per_sample.captured_layer import Call, CapturedLayer, Rule, watch
from torchzero_clip.per_sample.contributions import Contribution, Dense
from torchzero_clip.per_sample.recording import Forward
from torchzero_clip.per_sample.squared_norms import wide


class NormalizationRule(Rule):
    """Weight: output gradient times normalized input. Bias: output gradient. Both are summed over other dimensions."""

    settings: tuple[str, ...]  # attributes that the forward uses; they may change before the next call

    @override
    def run(self, layer: CapturedLayer, input: Tensor) -> Tensor:
        module: Any = layer.module
        found = layer.samples(input, self.leading(module, input))
        source, dim, _ = found
        weight, bias = (None if p is None else p.detach() for p in (module.weight, getattr(module, "bias", None)))

        then: Any = SimpleNamespace(**{name: getattr(module, name) for name in self.settings})

        def contribute(grad: Tensor, *sources: Tensor) -> list[Contribution]:
            grad, *inputs = (tensor.movedim(dim, 0) for tensor in wide(grad, *sources))
            result: list[Contribution] = []
            for x in inputs:
                normalized = self.normalize(then, x, None, None)
                result.append(Dense(layer.params["weight"], self.summed(then, grad * normalized)))
            if "bias" in layer.params:
                result.append(Dense(layer.params["bias"], self.summed(then, grad)))
            return result

        output = self.normalize(module, source, weight, bias)
        return watch(output, Call(layer, [source] if "weight" in layer.params else [], contribute), found)

    @abstractmethod
    def leading(self, module: Any, input: Tensor) -> int:
        """The number of dimensions before those of a single position."""

    @abstractmethod
    def normalize(self, module: Any, input: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        """The output of the layer with these parameters."""

    @abstractmethod
    def summed(self, module: Any, grads: Tensor) -> Tensor:
        """The sum over all dimensions that the parameters do not have, except that of the samples."""


class LayerNormRule(NormalizationRule):
    """LayerNorm: the parameters have the last dimensions."""

    settings = ("normalized_shape", "eps")

    @override
    def leading(self, module: Any, input: Tensor) -> int:
        return input.ndim - len(module.normalized_shape)

    @override
    def normalize(self, module: Any, input: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        return F.layer_norm(input, module.normalized_shape, weight, bias, module.eps)

    @override
    def summed(self, module: Any, grads: Tensor) -> Tensor:
        between = tuple(range(1, grads.ndim - len(module.normalized_shape)))
        return grads.sum(between) if between else grads


class RMSNormRule(LayerNormRule):
    """RMSNorm: like LayerNorm, without a mean and a bias."""

    @override
    def normalize(self, module: Any, input: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        return F.rms_norm(input, module.normalized_shape, weight, module.eps)


class GroupNormRule(NormalizationRule):
    """GroupNorm: the parameters have the channels, the second dimension."""

    settings = ("num_groups", "eps")

    @override
    def run(self, layer: CapturedLayer, /, *args: Any, **kwargs: Any) -> Tensor:
        module: Any = layer.module
        x: Tensor = args[0] if args else kwargs["input"]
        dtypes = {x.dtype, *(param.dtype for param in module.parameters())}
        plain = len(dtypes) == 1 and dtypes <= {torch.float32, torch.float64} and x.numel() and module.bias is not None
        if type(self) is not GroupNormRule or not plain or torch.is_autocast_enabled(x.device.type):
            return super().run(layer, x)
        return _GroupNorm.apply(layer.recording.anchor, x, layer, layer.recording.forward)  # pyright: ignore[reportReturnType]

    @override
    def leading(self, module: Any, input: Tensor) -> int:
        return 1

    @override
    def normalize(self, module: Any, input: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        return F.group_norm(input, module.num_groups, weight, bias, module.eps)

    @override
    def summed(self, module: Any, grads: Tensor) -> Tensor:
        return grads.flatten(2).sum(2) if grads.ndim > 2 else grads


class BatchNormRule(GroupNormRule):
    """BatchNorm in eval mode: every channel by its running statistics."""

    settings = ("running_mean", "running_var", "eps")

    @override
    def leading(self, module: Any, input: Tensor) -> int:
        return 1

    @override
    def normalize(self, module: Any, input: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        return F.batch_norm(input, module.running_mean, module.running_var, weight, bias, False, 0.0, module.eps)


class InstanceNormRule(GroupNormRule):
    """InstanceNorm: each channel of a sample by itself."""

    settings = ("eps",)

    @override
    def refusal(self, module: nn.Module) -> str | None:
        if module.track_running_stats:
            return "track_running_stats=True mixes the samples: use track_running_stats=False"
        return None

    @override
    def leading(self, module: Any, input: Tensor) -> int:
        spatial = module._get_no_batch_dim()
        return 0 if input.ndim == spatial else 1

    @override
    def normalize(self, module: Any, input: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        if not len(input):  # torch raises for an instance norm of an empty batch
            return F.group_norm(input, input.shape[1], weight, bias, module.eps)
        return F.instance_norm(input, weight=weight, bias=bias, use_input_stats=True, eps=module.eps)


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
        ctx.layer, ctx.of = layer, of
        return output

    @staticmethod
    @override
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor | None, None, None]:
        x, mean, rstd, weight = ctx.saved_tensors
        layer: CapturedLayer = ctx.layer
        count, channels, size = x.shape[0], x.shape[1], x.shape[2:].numel()
        grad_input, *parameters = torch.ops.aten.native_group_norm_backward(
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
        rows = {name: value.view(count, channels) for name, value in zip(("weight", "bias"), parameters, strict=True)}
        if layer.recording.wants(layer):
            parts = [Dense(param, rows[name]) for name, param in layer.params.items()]
            layer.recording.add(layer, ctx.of, parts)
        return None, None if grad_input is None else grad_input.view_as(x), None, None
