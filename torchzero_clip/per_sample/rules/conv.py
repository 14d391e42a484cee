"""Convolutions of one, two and three dimensions."""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from torchzero_clip.per_sample.captured_layer import Call, CapturedLayer, Rule, watch
from torchzero_clip.per_sample.contributions import (
    Contribution,
    Dense,
    MemoryBudget,
    Runs,
    pieces,
    piecewise_squared_norms,
    total,
    zeroed,
)
from torchzero_clip.per_sample.products import gram_norms, inner_products, norms_of_products
from torchzero_clip.per_sample.rules.conv_options import Options
from torchzero_clip.per_sample.squared_norms import squared_norms, wide

PATCHES = 2 << 20  # bytes of patches that are copied out at a time
ADDITION = 4  # the cost of an addition in memory, in multiplications
LANES = 16  # numbers in a vector register
TAPS = 9  # elements of a kernel up to which a grouped convolution is faster than sums of shifts
GROUPED = 8  # samples for one call of a grouped convolution, which is faster for at least as many channels


class ConvRule(Rule):
    """Weight: products of the patches of the input and the output gradients. Bias: the sum of output gradients."""

    @override
    def run(self, layer: CapturedLayer, input: Tensor) -> Tensor:
        module: Any = layer.module
        found = layer.samples(input, min(1, input.ndim - module.weight.ndim + 1))
        source = found.tensor
        options = Options.of(module)

        def contribute(grad: Tensor, *sources: Tensor) -> list[Contribution]:
            grad, *inputs = wide(grad, *sources)
            result: list[Contribution] = []
            for x in inputs:
                result.append(Convolved(layer.params["weight"], options, x, grad, layer.recording.budget))
            if "bias" in layer.params:
                result.append(Dense(layer.params["bias"], grad.flatten(2).sum(2)))
            return result

        bias = None if module.bias is None else module.bias.detach()
        output = module._conv_forward(source, module.weight.detach(), bias)
        return watch(output, Call(layer, [source] if "weight" in layer.params else [], contribute), found)


class Convolved(Contribution):
    """The per-sample gradients of the weight of a convolution, from its input and its output gradient.

    Args:
        param: The weight.
        options: The options of the call.
        input: The input, (B, channels, *sizes).
        grad: The gradient of the output, (B, channels, *sizes).
        budget: Decides whether per-sample gradients are stored.

    Source: Rochette, Manoel, Tramel, [Efficient per-example gradient computations in convolutional neural
    networks](https://arxiv.org/abs/1912.06015), 2019, for the samples as groups of one convolution.
    """

    def __init__(self, param: Tensor, options: Options, input: Tensor, grad: Tensor, budget: MemoryBudget) -> None:
        super().__init__(param, input.shape[0])
        self.options = options
        self.input = input
        self.grad = grad
        self.budget = budget

    @override
    def measured(self) -> tuple[Contribution, Tensor]:
        size, made_of = self.param.numel() * self.grad.element_size(), self.input.nbytes + self.grad.nbytes
        if self._is_depthwise:
            grads = self.dense(0, self.batch_size)
            norms = squared_norms(grads)
            return Runs(self.param, [grads]) if self.budget.reserve(self.batch_size * size, made_of) else self, norms
        formed, grams = self._costs()
        # stored gradients also save most of the work of the sum
        if formed < 3 * grams and self.budget.reserve(self.batch_size * size, made_of):
            return self._formed()
        return self, self._norms_by_gram_matrices() if grams < formed else piecewise_squared_norms(self)

    @override
    def weighted_sum(self, factors: Tensor) -> Tensor:
        scale = factors.to(self.grad.device, self.grad.dtype).view(-1, *[1] * (self.grad.ndim - 1))
        weight = self.grad.new_empty(self.param.shape)
        return self._weight_grad(self.input, self.grad * scale, weight, groups=self.options.groups)

    @override
    def dense(self, start: int, stop: int) -> Tensor:
        if self._is_depthwise:
            return self._by_shifts(start, stop)
        if self.input.shape[1] < GROUPED:
            return self._by_patches(start, stop)
        runs = [self._by_groups(start + a, start + b) for a, b in pieces(stop - start, 1, limit=GROUPED)]
        if not runs:
            return self.grad.new_empty(0, *self.param.shape)
        return runs[0] if len(runs) == 1 else torch.cat(runs)

    @override
    def zero_(self, samples: Tensor) -> None:
        self.input, self.grad = zeroed(self.input, samples), zeroed(self.grad, samples)

    @property
    def _is_depthwise(self) -> bool:
        """True if each channel has a large kernel of its own, for which grouped convolutions are slow."""
        groups = self.options.groups
        return groups == self.param.shape[0] == self.input.shape[1] > 1 and math.prod(self.options.kernel) > TAPS

    def _by_shifts(self, start: int, stop: int) -> Tensor:
        """The gradients of samples, one tap of the kernel after the other, with the channels last."""
        options = self.options
        x = options.padded(self.input[start:stop]).movedim(1, -1).contiguous()
        grad = self.grad[start:stop].movedim(1, -1).contiguous()
        sizes, dims = grad.shape[1:-1], tuple(range(1, grad.ndim - 1))
        result = grad.new_empty(stop - start, *options.kernel, grad.shape[-1])
        for first, last in pieces(stop - start, grad[:1].nbytes):
            for tap in itertools.product(*map(range, options.kernel)):
                shifted = x[first:last]
                for dim, (i, gap, step, count) in enumerate(
                    zip(tap, options.dilation, options.stride, sizes, strict=True), 1
                ):
                    shifted = _every(shifted, dim, i * gap, step, count)
                torch.sum(shifted * grad[first:last], dims, out=result[(slice(first, last), *tap)])
        return result.movedim(-1, 1).unsqueeze(2)

    def _costs(self) -> tuple[int, float]:
        """The numbers of multiplications for the gradient of a sample, and for its Gram matrices."""
        positions, outputs, width = self.grad.shape[2:].numel(), self.param.shape[0], self.param[:1].numel()
        formed = positions * outputs * width
        if self.options.groups != 1:
            return formed, math.inf
        return formed, positions**2 * outputs + min(positions**2 * width, self._cost_of_pixels())

    def _cost_of_pixels(self) -> int:
        """The cost of the Gram matrix of patches, if it is computed from that of pixels."""
        options, sizes = self.options, self.options.padded_sizes(self.input)
        cost = math.prod(sizes) ** 2 * self.input.shape[1]
        for i, (kernel, count) in enumerate(zip(options.kernel, self.grad.shape[2:], strict=True)):
            sizes[i] = count
            cost += ADDITION * (kernel - 1) * math.prod(sizes) ** 2
        return cost

    def _formed(self) -> tuple[Contribution, Tensor]:
        runs: list[Tensor] = []
        norms: list[Tensor] = []
        for start, stop in pieces(self.batch_size, 1, limit=GROUPED):
            runs.append(self.dense(start, stop))
            norms.append(squared_norms(runs[-1]))  # while the run is in the cache
        return Runs(self.param, runs), torch.cat(norms)

    def _norms_by_gram_matrices(self) -> Tensor:
        norms = self.grad.new_empty(self.batch_size, dtype=torch.float64)
        positions = self.grad.shape[2:].numel()
        by_pixels = self._cost_of_pixels() <= positions**2 * self.param[:1].numel()
        pixels = math.prod(self.options.padded_sizes(self.input))
        size = max(pixels**2, self.input[:1].numel()) if by_pixels else self.param[:1].numel() * positions
        inner = self._inner_by_pixels if by_pixels else self._inner_by_patches
        for start, stop in pieces(self.batch_size, size * self.grad.element_size(), limit=PATCHES):
            norms[start:stop] = norms_of_products(inner, self.input[start:stop], self.grad[start:stop])
        return norms

    def _inner_by_patches(self, input: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        patches = self._patches(self.options.padded(input)).transpose(1, 2)
        return gram_norms(patches, grad.flatten(2).transpose(1, 2))

    def _inner_by_pixels(self, input: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Use the Gram matrix of patches, computed as sums of shifts of that of pixels, one dimension at a time."""
        options, x = self.options, self.options.padded(input)
        sizes, pixels, outputs = x.shape[2:], x.flatten(2), grad.flatten(2)
        gram = torch.bmm(pixels.transpose(1, 2), pixels).view(len(x), *sizes, *sizes)
        settings = zip(options.kernel, options.stride, options.dilation, grad.shape[2:], strict=True)
        for i, (kernel, step, gap, count) in enumerate(settings):
            rows, columns = 1 + i, 1 + i + len(sizes)
            along = [_every(gram, rows, k * gap, step, count) for k in range(kernel)]
            gram = total([_every(x, columns, k * gap, step, count) for k, x in enumerate(along)])
        return inner_products(gram.reshape(len(x), outputs.shape[2], -1), torch.bmm(outputs.transpose(1, 2), outputs))

    def _by_groups(self, start: int, stop: int) -> Tensor:
        """The gradients of a few samples, from one convolution in which every sample is a group."""
        count, shape = stop - start, self.param.shape
        weight = self.grad.new_empty(count * shape[0], *shape[1:])
        x, grad = (tensor[start:stop].reshape(1, -1, *tensor.shape[2:]) for tensor in (self.input, self.grad))
        return self._weight_grad(x, grad, weight, groups=count * self.options.groups).view(count, *shape)

    def _weight_grad(self, input: Tensor, grad: Tensor, weight: Tensor, *, groups: int) -> Tensor:
        """Call the kernel of an ordinary backward, which reads only the shape of the weight."""
        options, none = self.options, [0] * len(self.options.kernel)
        if options.mode == "zeros" and all(before == behind for before, behind in options.sides):
            x, padding = input, [side for side, _ in options.sides]
        else:
            x, padding = options.padded(input), none
        return torch.ops.aten.convolution_backward(
            grad,
            x,
            weight,
            None,
            options.stride,
            padding,
            options.dilation,
            False,
            none,
            groups,
            [False, True, False],
        )[1]

    def _by_patches(self, start: int, stop: int) -> Tensor:
        """The gradients of samples as products of patches and output gradients."""
        groups, length = self.options.groups, math.prod(self.grad.shape[2:])
        outputs, patch = self.param.shape[0] // groups, self.param[:1].numel()
        turned = (
            groups == 1 and patch % LANES != 0
        )  # matmuls are faster if rows fill whole vector registers, which 3 x 3 x 3 does not
        shape = (patch, outputs) if turned else (outputs, patch)
        result = self.grad.new_empty(stop - start, groups, *shape)
        for first, last in pieces(stop - start, groups * patch * length * self.grad.element_size(), limit=PATCHES):
            patches = self._patches(self.options.padded(self.input[start + first : start + last]))
            grad = self.grad[start + first : start + last].reshape((last - first) * groups, outputs, length)
            left, right = (patches, grad) if turned else (grad, patches)
            torch.bmm(left, right.transpose(1, 2), out=result[first:last].view(-1, *shape))
        result = result.transpose(2, 3) if turned else result
        return result.reshape(stop - start, *self.param.shape)

    def _patches(self, input: Tensor) -> Tensor:
        """The patches, (samples * groups, patch, positions). Copying a strided view is faster than unfold."""
        options, groups, positions = self.options, self.options.groups, self.grad.shape[2:]
        x = input.contiguous()
        steps, inner = x.stride()[2:], x.shape[1] // groups
        size = (len(x), groups, inner, *options.kernel, *positions)  # positions are last, to copy runs of memory
        outer = (x.stride(0), x.stride(1) * inner, x.stride(1))
        strides = (*outer, *_scaled(steps, options.dilation), *_scaled(steps, options.stride))
        return x.as_strided(size, strides).reshape(len(x) * groups, -1, positions.numel())


def _every(tensor: Tensor, dim: int, first: int, step: int, count: int) -> Tensor:
    """Every ``step``-th entry along a dimension, starting at ``first``: ``count`` entries."""
    return tensor.narrow(dim, first, step * (count - 1) + 1)[(slice(None),) * dim + (slice(None, None, step),)]


def _scaled(steps: Sequence[int], by: Sequence[int]) -> tuple[int, ...]:
    return tuple(step * factor for step, factor in zip(steps, by, strict=True))
