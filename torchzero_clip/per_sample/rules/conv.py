"""Convolutions of one, two and three dimensions."""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from torchzero_clip.per_sample.contributions import (
    Contribution,
    Dense,
    pieces,
    piecewise_squared_norms,
    weighted_rows,
)
from torchzero_clip.per_sample.site import Call, Rule, Site, watch
from torchzero_clip.per_sample.squares import squared_norms, wide

PATCHES = 2 << 20  # bytes of patches that are copied out at a time


class ConvRule(Rule):
    """Weight: products of the patches of the input and the output gradients. Bias: the output gradients, added up."""

    @override
    def run(self, site: Site, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        return self._run(site, *args, **kwargs)

    def _run(self, site: Site, input: Tensor) -> Tensor:
        module: Any = site.module
        site.batch_dim(input.ndim - 1 - len(module.kernel_size))
        source, expanded = site.expanded(input, 0)

        def contribute(grad: Tensor, source: Tensor) -> list[Contribution]:
            x, grad = wide(source, grad)
            result: list[Contribution] = []
            if "weight" in site.params:
                result.append(Patches(site.params["weight"], module, x, grad, keep=site.recorder.memory == "auto"))
            if "bias" in site.params:
                result.append(Dense(site.params["bias"], grad.flatten(2).sum(2)))
            return result

        bias = None if module.bias is None else module.bias.detach()
        output = module._conv_forward(source, module.weight.detach(), bias)
        return watch(output, Call(site, [source], contribute, expanded=expanded))


class Patches(Contribution):
    """The gradient of the weight of a convolution, from its input and its output gradient.

    Args:
        param: The weight.
        module: The convolution.
        input: (B, channels, *sizes).
        grad: (B, channels, *sizes), the gradient of the output.
        keep: Keep the gradients of the samples where they are not much larger than input and output gradient.
    """

    def __init__(self, param: Tensor, module: nn.Module, input: Tensor, grad: Tensor, *, keep: bool) -> None:
        super().__init__(param, input.shape[0])
        self.module: Any = module
        self.input = input
        self.grad = grad
        self.keep = keep and param.numel() * self.batch_size <= 1.75 * (input.numel() + grad.numel())

    @override
    def measured(self) -> tuple[Contribution, Tensor]:
        if not self.keep:
            return self, piecewise_squared_norms(self)
        grads, norms = self._grads(0, self.batch_size)
        return _Kept(self.param, grads, channels_last=self._channels_last), norms

    @override
    def weighted_sum(self, factors: Tensor) -> Tensor:
        module = self.module
        scale = factors.to(self.grad.device, self.grad.dtype).view(-1, *[1] * (self.grad.ndim - 1))
        padding = [0] * len(module.kernel_size)
        return torch.ops.aten.convolution_backward(
            self.grad * scale,
            self._padded(self.input),
            self.param.to(self.grad.dtype),
            None,
            module.stride,
            padding,
            module.dilation,
            False,
            padding,
            module.groups,
            [False, True, False],
        )[1]

    @override
    def dense(self, start: int, stop: int) -> Tensor:
        grads, _ = self._grads(start, stop)
        return _Kept(self.param, grads, channels_last=self._channels_last).dense(0, stop - start)

    @override
    def zero_(self, samples: Tensor) -> None:
        chosen = samples.to(self.grad.device).view(-1, *[1] * (self.grad.ndim - 1))
        self.input, self.grad = self.input.masked_fill(chosen, 0), self.grad.masked_fill(chosen, 0)

    @property
    def _channels_last(self) -> bool:
        return self.module.groups == 1 and self.input.shape[1] >= 8

    def _padded(self, input: Tensor) -> Tensor:
        sides, mode = self.module._reversed_padding_repeated_twice, self.module.padding_mode
        if not any(sides):
            return input
        return F.pad(input, sides) if mode == "zeros" else F.pad(input, sides, mode=mode)

    def _padded_channels_last(self, input: Tensor) -> Tensor:
        sides, mode = self.module._reversed_padding_repeated_twice, self.module.padding_mode
        if mode != "zeros" or not any(sides):
            return self._padded(input).movedim(1, -1).contiguous()
        before, after = sides[-2::-2], sides[::-2]
        sizes = input.shape[2:]
        padded = [first + size + last for first, size, last in zip(before, sizes, after, strict=True)]
        result = input.new_zeros(len(input), *padded, input.shape[1])  # padding and turning in one copy
        inner = result
        for dim, (first, size) in enumerate(zip(before, sizes, strict=True), start=1):
            inner = inner.narrow(dim, first, size)
        inner.copy_(input.movedim(1, -1))
        return result

    def _grads(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """The gradients as (samples, groups, channels, patch), and their norms, taken while they are in cache."""
        groups = self.module.groups
        outputs, length = self.param.shape[0] // groups, math.prod(self.grad.shape[2:])
        patch = self.param[:1].numel()
        result = self.grad.new_empty(stop - start, groups, outputs, patch)
        norms = self.grad.new_empty(stop - start, dtype=torch.float64)
        for first, last in pieces(stop - start, groups * patch * length * self.grad.element_size(), limit=PATCHES):
            run = slice(start + first, start + last)
            patches = self._patches(self.input[run])
            grad = self.grad[run].reshape((last - first) * groups, outputs, length)
            torch.bmm(grad, patches, out=result[first:last].view(-1, outputs, patch))
            norms[first:last] = squared_norms(result[first:last])
        return result, norms

    def _patches(self, input: Tensor) -> Tensor:
        """(samples * groups, positions, patch): a copy through a strided view, faster than unfold."""
        module, count, channels = self.module, input.shape[0], input.shape[1]
        kernel, stride, dilation, groups = module.kernel_size, module.stride, module.dilation, module.groups
        positions: Sequence[int] = self.grad.shape[2:]
        length, patch = math.prod(positions), math.prod(kernel) * channels // groups
        if self._channels_last:
            dense = self._padded_channels_last(input)
            steps = dense.stride()[1:-1]
            strides = (dense.stride(0), *_scaled(steps, stride), *_scaled(steps, dilation), 1)
            return dense.as_strided((count, *positions, *kernel, channels), strides).reshape(count, length, patch)
        dense = self._padded(input).contiguous()
        steps = dense.stride()[2:]
        size = (count, groups, channels // groups, *kernel, *positions)  # positions last: they are runs of memory
        outer = (dense.stride(0), dense.stride(1) * (channels // groups), dense.stride(1))
        strides = (*outer, *_scaled(steps, dilation), *_scaled(steps, stride))
        return dense.as_strided(size, strides).reshape(count * groups, patch, length).transpose(1, 2)


class _Kept(Dense):
    """Gradients of a convolution, with their channels last where the patches had them so."""

    def __init__(self, param: Tensor, grads: Tensor, *, channels_last: bool) -> None:
        super().__init__(param, grads)
        self._channels_last = channels_last

    @override
    def weighted_sum(self, factors: Tensor) -> Tensor:
        return self._ordered(weighted_rows(factors, self.grads)[None])[0]

    @override
    def dense(self, start: int, stop: int) -> Tensor:
        return self._ordered(self.grads[start:stop])

    @override
    def joined(self, other: Dense) -> Dense:
        return Dense(self.param, self.dense(0, self.batch_size) + other.dense(0, self.batch_size))

    def _ordered(self, grads: Tensor) -> Tensor:
        outputs, inputs, *kernel = self.param.shape
        if not self._channels_last:
            return grads.reshape(len(grads), *self.param.shape)
        return grads.reshape(len(grads), outputs, *kernel, inputs).movedim(-1, 2).contiguous()


def _scaled(steps: Sequence[int], by: Sequence[int]) -> tuple[int, ...]:
    return tuple(step * factor for step, factor in zip(steps, by, strict=True))
