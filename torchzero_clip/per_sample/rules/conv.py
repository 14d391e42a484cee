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
    Runs,
    pieces,
    piecewise_squared_norms,
)
from torchzero_clip.per_sample.products import Products
from torchzero_clip.per_sample.site import Call, Rule, Site, watch
from torchzero_clip.per_sample.squares import squared_norms, wide

PATCHES = 2 << 20  # bytes of patches that are copied out at a time
GROUPED = 8  # samples that the kernel of grouped convolutions takes at a time; from as many channels on, it is faster


class ConvRule(Rule):
    """Weight: products of the patches of the input and the output gradients. Bias: the output gradients, added up."""

    @override
    def run(self, site: Site, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        return self._run(site, *args, **kwargs)

    def _run(self, site: Site, input: Tensor) -> Tensor:
        module: Any = site.module
        site.batch_dim(input.ndim - 1 - len(module.kernel_size))
        source, expanded = site.expanded(input, 0)

        def contribute(grad: Tensor, *sources: Tensor) -> list[Contribution]:
            grad, *inputs = wide(grad, *sources)
            result: list[Contribution] = []
            for x in inputs:
                result.append(Convolved(site.params["weight"], module, x, grad, keep=site.recorder.memory == "auto"))
            if "bias" in site.params:
                result.append(Dense(site.params["bias"], grad.flatten(2).sum(2)))
            return result

        bias = None if module.bias is None else module.bias.detach()
        output = module._conv_forward(source, module.weight.detach(), bias)
        return watch(
            output, Call(site, [source] if "weight" in site.params else [], contribute), row=0 if expanded else None
        )


class Convolved(Contribution):
    """The gradient of the weight of a convolution, from its input and its output gradient.

    Args:
        param: The weight.
        module: The convolution.
        input: (B, channels, *sizes).
        grad: (B, channels, *sizes), the gradient of the output.
        keep: Keep the gradients of the samples where they are not much larger than input and output gradient.

    Source: Rochette, Manoel, Tramel, [Efficient per-example gradient computations in convolutional neural
    networks](https://arxiv.org/abs/1912.06015), 2019, for the samples as groups of one convolution.
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
            return self, self._norms_by_gram_matrices() if self._few_positions else piecewise_squared_norms(self)
        runs: list[Tensor] = []
        norms: list[Tensor] = []
        for start, stop in pieces(self.batch_size, 1, limit=GROUPED):
            runs.append(self.dense(start, stop))
            norms.append(squared_norms(runs[-1]))  # while it is in cache
        return (Runs(self.param, runs), torch.cat(norms)) if runs else (self, piecewise_squared_norms(self))

    @override
    def weighted_sum(self, factors: Tensor) -> Tensor:
        scale = factors.to(self.grad.device, self.grad.dtype).view(-1, *[1] * (self.grad.ndim - 1))
        weight = self.grad.new_empty(self.param.shape)
        return self._weight_grad(self.input, self.grad * scale, weight, groups=self.module.groups)

    @override
    def dense(self, start: int, stop: int) -> Tensor:
        if self.input.shape[1] < GROUPED:
            return self._by_patches(start, stop)
        runs = [self._by_groups(start + a, start + b) for a, b in pieces(stop - start, 1, limit=GROUPED)]
        return runs[0] if len(runs) == 1 else torch.cat(runs)

    @override
    def zero_(self, samples: Tensor) -> None:
        chosen = samples.to(self.grad.device).view(-1, *[1] * (self.grad.ndim - 1))
        self.input, self.grad = self.input.masked_fill(chosen, 0), self.grad.masked_fill(chosen, 0)

    @property
    def _few_positions(self) -> bool:
        """Whether Gram matrices of the positions cost less than the gradients."""
        height, width = self.param.shape[0], self.param[:1].numel()
        return self.module.groups == 1 and self.grad.shape[2:].numel() * (height + width) < height * width

    def _norms_by_gram_matrices(self) -> Tensor:
        norms = self.grad.new_empty(self.batch_size, dtype=torch.float64)
        size = self.param[:1].numel() * self.grad.shape[2:].numel() * self.grad.element_size()
        for start, stop in pieces(self.batch_size, size, limit=PATCHES):
            patches = self._patches(_padded(self.module, self.input[start:stop])).transpose(1, 2)
            outputs = self.grad[start:stop].flatten(2).transpose(1, 2)
            norms[start:stop] = Products(self.param.flatten(1), patches, outputs, memory="low").measured()[1]
        return norms

    def _by_groups(self, start: int, stop: int) -> Tensor:
        """The gradients of a few samples, as those of one convolution in which every sample is a group."""
        count, shape = stop - start, self.param.shape
        weight = self.grad.new_empty(count * shape[0], *shape[1:])
        x, grad = (tensor[start:stop].reshape(1, -1, *tensor.shape[2:]) for tensor in (self.input, self.grad))
        return self._weight_grad(x, grad, weight, groups=count * self.module.groups).view(count, *shape)

    def _weight_grad(self, input: Tensor, grad: Tensor, weight: Tensor, *, groups: int) -> Tensor:
        """By the kernel of an ordinary backward, which looks at the shape of the weight only."""
        module, none = self.module, [0] * len(self.module.kernel_size)
        if module.padding_mode == "zeros" and not isinstance(module.padding, str):
            x, padding = input, module.padding
        else:
            x, padding = _padded(module, input), none
        return torch.ops.aten.convolution_backward(
            grad,
            x,
            weight,
            None,
            module.stride,
            padding,
            module.dilation,
            False,
            none,
            groups,
            [False, True, False],
        )[1]

    def _by_patches(self, start: int, stop: int) -> Tensor:
        """The gradients of samples as products of patches and output gradients."""
        groups, length = self.module.groups, math.prod(self.grad.shape[2:])
        outputs, patch = self.param.shape[0] // groups, self.param[:1].numel()
        result = self.grad.new_empty(stop - start, *self.param.shape)
        for first, last in pieces(stop - start, groups * patch * length * self.grad.element_size(), limit=PATCHES):
            patches = self._patches(_padded(self.module, self.input[start + first : start + last]))
            grad = self.grad[start + first : start + last].reshape((last - first) * groups, outputs, length)
            torch.bmm(grad, patches.transpose(1, 2), out=result[first:last].view(-1, outputs, patch))
        return result

    def _patches(self, input: Tensor) -> Tensor:
        """(samples * groups, patch, positions): a copy through a strided view, faster than unfold."""
        module, groups, positions = self.module, self.module.groups, self.grad.shape[2:]
        x = input.contiguous()
        steps, inner = x.stride()[2:], x.shape[1] // groups
        size = (len(x), groups, inner, *module.kernel_size, *positions)  # positions last: runs of memory
        outer = (x.stride(0), x.stride(1) * inner, x.stride(1))
        strides = (*outer, *_scaled(steps, module.dilation), *_scaled(steps, module.stride))
        return x.as_strided(size, strides).reshape(len(x) * groups, -1, positions.numel())


def _padded(module: Any, input: Tensor) -> Tensor:
    """The input as the convolution sees it, with the sides of "same" and the modes of padding."""
    sides, mode = module._reversed_padding_repeated_twice, module.padding_mode
    if not any(sides):
        return input
    return F.pad(input, sides) if mode == "zeros" else F.pad(input, sides, mode=mode)


def _scaled(steps: Sequence[int], by: Sequence[int]) -> tuple[int, ...]:
    return tuple(step * factor for step, factor in zip(steps, by, strict=True))
