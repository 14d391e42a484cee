"""Convolutions of one, two and three dimensions."""

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from typing_extensions import override

from torchzero_clip.per_sample.captured_layer import CapturedLayer, Rule
from torchzero_clip.per_sample.gradients.contributions import Contribution, Reserve, pieces, total
from torchzero_clip.per_sample.gradients.products import Products, inner_products

PATCHES = 2 << 20  # bytes of patches that are copied out at a time
ADDITION = 4  # the cost of an addition in memory, in multiplications
_LANES = 16  # numbers in a vector register
TAPS = 9  # elements of a kernel up to which a grouped convolution of single channels is faster than patches
GROUPED = 8  # samples for one call of a grouped convolution, which is faster for at least as many channels


class ConvRule(Rule):
    """Weight: products of the patches of the input and the output gradients. Bias: the sum of output gradients."""

    @override
    def run(self, layer: CapturedLayer, input: Tensor) -> Tensor:
        module: Any = layer.module
        # without a batch there are 0 leading dimensions, which `find_samples` refuses
        found = layer.find_samples(input, min(1, input.ndim - module.weight.ndim + 1))
        options, bias = Options.of(module), None if module.bias is None else module.bias.detach()
        return layer.watch_params(
            # the forward with another weight, for which torch has only a private name
            module._conv_forward(found.tensor, module.weight.detach(), bias),
            found,
            layer.params,
            weight=lambda x, grad: Convolved(layer.params["weight"], x, grad, options),
            bias=lambda grad: grad.flatten(2).sum(2),
        )


@dataclass(frozen=True)
class Options:
    """The options of a convolution in one call. The attributes of the layer may change before the next."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    sides: tuple[tuple[int, int], ...]  # the padding before and after each dimension
    mode: str

    @classmethod
    def of(cls, module: Any) -> "Options":
        """The options of a module as it is now."""
        kernel, mode = tuple(module.weight.shape[2:]), module.padding_mode
        stride, dilation = (_each(value, len(kernel)) for value in (module.stride, module.dilation))
        if mode != "zeros":
            # what the forward pads, for which torch has only a private name; changing `padding` later has no effect
            flat = module._reversed_padding_repeated_twice[::-1]
            sides = tuple((flat[2 * i + 1], flat[2 * i]) for i in range(len(kernel)))
        elif module.padding == "same":
            totals = [gap * (size - 1) for gap, size in zip(dilation, kernel, strict=True)]
            sides = tuple((total // 2, total - total // 2) for total in totals)
        else:
            padding = 0 if module.padding == "valid" else module.padding
            sides = tuple((side, side) for side in _each(padding, len(kernel)))
        return cls(kernel, stride, dilation, module.groups, sides, mode)

    def padded(self, input: Tensor) -> Tensor:
        """The input with its padding."""
        flat = [side for pair in reversed(self.sides) for side in pair]
        return F.pad(input, flat, mode="constant" if self.mode == "zeros" else self.mode) if any(flat) else input


class Convolved(Products):
    """The per-sample gradients of the weight of a convolution: products of patches and output gradients.

    Inputs and outputs have shape (B, channels, *sizes).

    Source: Rochette, Manoel, Tramel, [Efficient per-example gradient computations in convolutional neural
    networks](https://arxiv.org/abs/1912.06015), 2019, for the samples as groups of one convolution.
    """

    def __init__(self, param: Tensor, inputs: Tensor, outputs: Tensor, options: Options) -> None:
        super().__init__(param, inputs, outputs)
        self._options = options

    @override
    def measured(self, reserve: Reserve) -> tuple[Contribution, Tensor]:
        formed, grams = self._costs()
        # stored gradients also save most of the work of the sum
        if formed < 3 * grams and self.may_form(reserve):
            return self.formed(pieces(self.batch_size, 1, limit=GROUPED), keep=True)
        if formed <= grams:
            return self.formed(keep=False)
        pixels = self._options.padded(self.inputs[:1]).shape[2:].numel()
        size = max(pixels**2, self.inputs[:1].numel())
        return self, self.norms_by(self._inner, size * self.inputs.element_size())

    @override
    def weighted_sum(self, factors: Tensor) -> Tensor:
        scale = factors.to(self.output_grads.device, self.output_grads.dtype).view(
            -1, *[1] * (self.output_grads.ndim - 1)
        )
        return self._weight_grad(self.inputs, self.output_grads * scale, 1)

    @override
    def dense(self, start: int, stop: int) -> Tensor:
        options, channels = self._options, self.inputs.shape[1]
        # single channels with large kernels make grouped convolutions slow
        if channels < GROUPED or (options.groups == channels and math.prod(options.kernel) > TAPS):
            return self._by_patches(start, stop)
        runs = [self._by_groups(start + a, start + b) for a, b in pieces(stop - start, 1, limit=GROUPED)]
        return runs[0] if len(runs) == 1 else torch.cat([self.output_grads.new_empty(0, *self.param.shape), *runs])

    def _costs(self) -> tuple[int, float]:
        """The numbers of multiplications for the gradient of a sample, and for its Gram matrices."""
        options, positions, outputs = self._options, self.output_grads.shape[2:], self.param.shape[0]
        formed = positions.numel() * self.param.numel()
        if options.groups != 1:
            return formed, math.inf
        sizes = [size + sum(pair) for size, pair in zip(self.inputs.shape[2:], options.sides, strict=True)]
        grams = positions.numel() ** 2 * outputs + math.prod(sizes) ** 2 * self.inputs.shape[1]
        for i, (kernel, count) in enumerate(zip(options.kernel, positions, strict=True)):
            sizes[i] = count
            grams += ADDITION * (kernel - 1) * math.prod(sizes) ** 2
        return formed, grams

    def _inner(self, inputs: Tensor, outputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Use the Gram matrix of patches, computed as sums of shifts of that of pixels, one dimension at a time."""
        options, x = self._options, self._options.padded(inputs)
        sizes, pixels, grads = x.shape[2:], x.flatten(2), outputs.flatten(2)
        gram = torch.bmm(pixels.transpose(1, 2), pixels).view(len(x), *sizes, *sizes)
        settings = zip(options.kernel, options.stride, options.dilation, outputs.shape[2:], strict=True)
        for i, (kernel, step, gap, count) in enumerate(settings):
            rows, columns = 1 + i, 1 + i + len(sizes)
            along = [_every(gram, rows, k * gap, step, count) for k in range(kernel)]
            gram = total([_every(x, columns, k * gap, step, count) for k, x in enumerate(along)])
        return inner_products(gram.reshape(len(x), grads.shape[2], -1), torch.bmm(grads.transpose(1, 2), grads))

    def _weight_grad(self, inputs: Tensor, outputs: Tensor, samples: int) -> Tensor:
        """Call the kernel of an ordinary backward, with samples as groups. It reads only the shape of the weight."""
        options, none = self._options, [0] * len(self._options.kernel)
        weight = outputs.new_empty(samples * self.param.shape[0], *self.param.shape[1:])
        if options.mode == "zeros" and all(before == behind for before, behind in options.sides):
            padding = [side for side, _ in options.sides]
        else:
            inputs, padding = options.padded(inputs), none
        place = options.stride, padding, options.dilation, False, none, samples * options.groups
        return torch.ops.aten.convolution_backward(outputs, inputs, weight, None, *place, [False, True, False])[1]

    def _by_groups(self, start: int, stop: int) -> Tensor:
        """The gradients of a few samples, from one convolution in which every sample is a group."""
        inputs, outputs = (x[start:stop].reshape(1, -1, *x.shape[2:]) for x in (self.inputs, self.output_grads))
        return self._weight_grad(inputs, outputs, stop - start).view(stop - start, *self.param.shape)

    def _by_patches(self, start: int, stop: int) -> Tensor:
        """The gradients of samples as products of patches and output gradients."""
        groups, length = self._options.groups, self.output_grads.shape[2:].numel()
        outputs, patch = self.param.shape[0] // groups, self.param.shape[1:].numel()
        # matmuls are faster if rows fill whole vector registers, which 3 x 3 x 3 does not
        turned = groups == 1 and patch % _LANES != 0
        shape = (patch, outputs) if turned else (outputs, patch)
        result = self.output_grads.new_empty(stop - start, groups, *shape)
        for first, last in pieces(
            stop - start, groups * patch * length * self.output_grads.element_size(), limit=PATCHES
        ):
            x = self._options.padded(self.inputs[start + first : start + last]).contiguous()
            patches = self._windows(x).reshape(-1, patch, length)
            grad = self.output_grads[start + first : start + last].reshape(-1, outputs, length)
            left, right = (patches, grad) if turned else (grad, patches)
            torch.bmm(left, right.transpose(1, 2), out=result[first:last].view(-1, *shape))
        result = result.transpose(2, 3) if turned else result
        return result.reshape(stop - start, *self.param.shape)

    def _windows(self, x: Tensor) -> Tensor:
        """A view of all patches of a padded input: (samples, channels, *kernel, *positions).

        Copying such a view is faster than unfold. Positions are last, so that runs of memory are copied.
        """
        options = self._options
        inside = [step * gap for step, gap in zip(x.stride()[2:], options.dilation, strict=True)]
        between = [step * stride for step, stride in zip(x.stride()[2:], options.stride, strict=True)]
        size = (*x.shape[:2], *options.kernel, *self.output_grads.shape[2:])
        return x.as_strided(size, (*x.stride()[:2], *inside, *between))


def _every(tensor: Tensor, dim: int, first: int, step: int, count: int) -> Tensor:
    """Every ``step``-th entry along a dimension, starting at ``first``: ``count`` entries."""
    return tensor.narrow(dim, first, step * (count - 1) + 1)[(slice(None),) * dim + (slice(None, None, step),)]


def _each(value: Any, count: int) -> tuple[int, ...]:
    values = (value,) if isinstance(value, int) else tuple(value)
    return values * count if len(values) == 1 else values
