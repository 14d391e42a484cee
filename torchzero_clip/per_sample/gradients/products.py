"""Per-sample gradients that are products of inputs and output gradients: those of the weights of linear layers."""

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor
from typing_extensions import override

from torchzero_clip.functional.dtypes import moved, widened, widest_of
from torchzero_clip.per_sample.gradients.contributions import CANCELLED, Contribution, Reserve, pieces
from torchzero_clip.per_sample.gradients.row_norms import in_float64, norms_of_rows, odd

GRAM_BYTES = 2 << 20  # bytes of Gram matrices that are computed at a time, however large the batch is
RUN = 4 << 20  # bytes of gradients in one tensor: allocators reuse memory of this size that the backward has freed
STRIP = 64, 128  # the fewest and the most rows of a strip of a Gram matrix, which is computed strip by strip

Inner: TypeAlias = Callable[[Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
"""The norms of products, inputs and output gradients, from the inputs and output gradients of some samples."""


class Products(Contribution):
    """The gradient of the weight (p, d) from sample i is Σ_t b_it a_itᵀ over its T positions.

    The inputs a have shape (B, T, d), the gradients of the outputs b have shape (B, T, p).

    Source: Goodfellow, [Efficient per-example gradient computations](https://arxiv.org/abs/1510.01799), 2015, for
    T = 1; Li et al., [Large language models can be strong differentially private
    learners](https://arxiv.org/abs/2110.05679), 2021, for the Gram matrices; Bu et al., [Differentially private
    optimization on large model at small cost](https://arxiv.org/abs/2210.00038), 2022, for the sum without a second
    backward.
    """

    def __init__(self, param: Tensor, inputs: Tensor, outputs: Tensor) -> None:
        self.param, self.batch_size = param, inputs.shape[0]
        self.inputs, self.output_grads = inputs, outputs

    @override
    def measured(self, reserve: Reserve) -> tuple[Contribution, Tensor]:
        length, width, height = self.inputs.shape[1], self.inputs.shape[2], self.output_grads.shape[2]
        if length == 1:
            return self, norms_of_rows(self.inputs) * norms_of_rows(self.output_grads)
        sides, area = width + height, width * height
        # stored gradients replace inputs and outputs, and save a second matmul
        if 30 * area < length**2 * sides and self.may_form(reserve):
            return self.formed(pieces(self.batch_size, area * self.inputs.element_size(), limit=RUN), keep=True)
        if 2 * area < length * sides:  # T p d multiplications for a gradient, T² (p + d) / 2 for Gram matrices
            return self.formed(keep=False)
        return self, self.norms_by(gram_norms, 2 * length**2 * self.inputs.element_size())

    @override
    def weighted_sum(self, factors: Tensor) -> Tensor:
        factors = factors.to(self.inputs.device, self.inputs.dtype)
        inputs, outputs = scaled(self.inputs, self.output_grads, factors.view(-1, 1, 1))
        if inputs.stride(0) < inputs.stride(1):  # positions first in memory, as in recurrent layers: no copies
            inputs, outputs = inputs.transpose(0, 1), outputs.transpose(0, 1)
        return outputs.flatten(0, 1).t() @ inputs.flatten(0, 1)

    @override
    def dense(self, start: int, stop: int) -> Tensor:
        return torch.bmm(self.output_grads[start:stop].transpose(1, 2), self.inputs[start:stop])

    @override
    def make_finite(self) -> None:
        self.inputs, self.output_grads = self.inputs.nan_to_num(0, 0, 0), self.output_grads.nan_to_num(0, 0, 0)

    def joined(self, other: "Products") -> "Products":
        """Both uses as one with the positions of both."""
        inputs = torch.cat([self.inputs, other.inputs], 1)
        outputs = torch.cat([self.output_grads, other.output_grads], 1)
        return Products(self.param, inputs, outputs)

    def may_form(self, reserve: Reserve) -> bool:
        """Reserve memory for all gradients in place of inputs and outputs."""
        formed = self.batch_size * self.param.numel() * self.inputs.element_size()
        return reserve(formed, self.inputs.nbytes + self.output_grads.nbytes)

    def norms_by(self, inner: Inner, bytes_each: int) -> Tensor:
        """The norms by Gram matrices."""
        bounds = pieces(self.batch_size, bytes_each, limit=GRAM_BYTES)
        found = [inner(self.inputs[start:stop], self.output_grads[start:stop]) for start, stop in bounds]
        if not found:
            return self.inputs.new_zeros(0, dtype=widest_of(self.inputs))
        return exact(found, inner, lambda i: (self.inputs[i : i + 1], self.output_grads[i : i + 1]))


def scaled(inputs: Tensor, outputs: Tensor, factors: Tensor) -> tuple[Tensor, Tensor]:
    """Inputs and output gradients of products, of which the smaller ones, which are copied, are multiplied."""
    if inputs.shape[-1] < outputs.shape[-1]:
        return inputs * factors, outputs
    return inputs, outputs * factors


def exact(
    found: Sequence[tuple[Tensor, Tensor, Tensor]], inner: Inner, rows: Callable[[int], tuple[Tensor, Tensor]]
) -> Tensor:
    """Join the results of a function for pieces, computed again in float64 where digits were lost in float32.

    ``rows`` returns the inputs and output gradients behind one of the joined norms.
    """
    norms, *traces = (torch.cat(column) for column in zip(*found, strict=True))
    cancelled = (norms < CANCELLED * traces[0] * traces[1]).nonzero()[:, 0].tolist()
    # three vectors are checked as one
    for i in {*cancelled, *(i % len(norms) for i in odd(torch.cat([norms, *traces])))}:
        inputs, outputs = rows(i)
        if inputs.dtype != torch.float64:
            norms[i] = moved(inner(in_float64(inputs), in_float64(outputs))[0][0], norms.device)
    return norms


def gram_norms(inputs: Tensor, outputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The norms of products as roots of inner products of Gram matrices: see `Inner`.

    The matrices are symmetric: a strip of rows starts at the diagonal, and its part right of the square counts twice.
    """
    length = inputs.shape[1]
    if length < 2 * STRIP[0]:
        return inner_products(*(torch.bmm(x, x.transpose(1, 2)) for x in (inputs, outputs)))
    products, *traces = (inputs.new_zeros(len(inputs), dtype=widest_of(inputs)) for _ in range(3))
    # four strips take 0.94 of the time of two, except if they have fewer than 64 rows
    height = min(max(length // 4, STRIP[0]), STRIP[1])
    for start in range(0, length, height):
        rows = slice(start, start + height)
        left, right = (torch.bmm(x[:, rows], x[:, start:].transpose(1, 2)) for x in (inputs, outputs))
        for trace, strip in zip(traces, (left, right), strict=True):
            trace += strip.diagonal(dim1=1, dim2=2).sum(1)
        strip = left.mul_(right)
        products += 2 * strip.sum((1, 2)) - strip[:, :, :height].sum((1, 2))
    return products.clamp(min=0).sqrt(), traces[0].sqrt(), traces[1].sqrt()


def inner_products(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The results of `gram_norms` from full Gram matrices. The left one is overwritten."""
    traces = [widened(gram.diagonal(dim1=1, dim2=2).sum(1)).sqrt() for gram in (left, right)]
    return widened(left.mul_(right).sum((1, 2))).clamp(min=0).sqrt(), traces[0], traces[1]
