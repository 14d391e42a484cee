"""Per-sample gradients that are products of inputs and output gradients: those of the weights of linear layers."""

import math
from collections.abc import Callable

import torch
from torch import Tensor
from typing_extensions import override

from torchzero_clip.per_sample.contributions import (
    CANCELLED,
    Contribution,
    MemoryBudget,
    Runs,
    pieces,
    piecewise_squared_norms,
    zeroed,
)
from torchzero_clip.per_sample.squared_norms import odd, squared_norms

GRAM_BYTES = 2 << 20
RUN = 4 << 20  # bytes of gradients in one tensor: allocators reuse memory of this size that the backward has freed
STRIP = 128  # the most rows of a Gram matrix that are computed at a time; in small ones a quarter of the rows


class Products(Contribution):
    """The gradient of sample i is Σ_t b_it a_itᵀ over its T positions.

    Args:
        param: The weight, (p, d).
        inputs: a, of shape (B, T, d).
        outputs: b, of shape (B, T, p), the gradients of the outputs.
        squares: The squared norms of b, if known: (B,), float64.
        budget: Decides whether per-sample gradients are stored.

    Source: Goodfellow, [Efficient per-example gradient computations](https://arxiv.org/abs/1510.01799), 2015, for
    T = 1; Li et al., [Large language models can be strong differentially private
    learners](https://arxiv.org/abs/2110.05679), 2021, for the Gram matrices; Bu et al., [Differentially private
    optimization on large model at small cost](https://arxiv.org/abs/2210.00038), 2022, for the sum without a second
    backward.
    """

    def __init__(
        self, param: Tensor, inputs: Tensor, outputs: Tensor, squares: Tensor | None = None, *, budget: MemoryBudget
    ) -> None:
        super().__init__(param, inputs.shape[0])
        self.inputs = inputs
        self.outputs = outputs
        self.squares = squares
        self.budget = budget

    @override
    def measured(self) -> tuple[Contribution, Tensor]:
        length, width, height = self.inputs.shape[1], self.inputs.shape[2], self.outputs.shape[2]
        if length == 1:
            squares = squared_norms(self.outputs) if self.squares is None else self.squares
            return self, squared_norms(self.inputs) * squares
        sides, area = width + height, width * height
        formed, made_of = self.batch_size * area * self.inputs.element_size(), self.inputs.nbytes + self.outputs.nbytes
        # stored gradients replace inputs and outputs, and save a second matmul
        if 30 * area < length**2 * sides and self.budget.reserve(formed, made_of):
            return self._formed()
        if 2 * area < length * sides:
            return self, piecewise_squared_norms(self)
        return self, self._by_gram_matrices()

    @override
    def weighted_sum(self, factors: Tensor) -> Tensor:
        inputs, outputs = self.inputs, self.outputs
        scale = factors.to(inputs.device, inputs.dtype).view(-1, 1, 1)
        if inputs.shape[2] < outputs.shape[2]:
            inputs = inputs * scale
        else:
            outputs = outputs * scale
        return outputs.flatten(0, 1).t() @ inputs.flatten(0, 1)

    @override
    def dense(self, start: int, stop: int) -> Tensor:
        return torch.bmm(self.outputs[start:stop].transpose(1, 2), self.inputs[start:stop])

    @override
    def zero_(self, samples: Tensor) -> None:
        self.inputs, self.outputs = zeroed(self.inputs, samples), zeroed(self.outputs, samples)

    def joined(self, other: "Products") -> "Products":
        """Both uses as one with the positions of both."""
        inputs = torch.cat([self.inputs, other.inputs], 1)
        outputs = torch.cat([self.outputs, other.outputs], 1)
        return Products(self.param, inputs, outputs, budget=self.budget)

    def _formed(self) -> tuple[Contribution, Tensor]:
        """The gradients in full, with their norms, which are taken while the gradients are in the cache."""
        runs: list[Tensor] = []
        norms: list[Tensor] = []
        shape = self.outputs.shape[2], self.inputs.shape[2]
        each = math.prod(shape) * self.inputs.element_size()
        for start, stop in pieces(self.batch_size, each, limit=RUN):
            run = self.inputs.new_empty(stop - start, *shape)
            for first, last in pieces(stop - start, each):
                chosen = slice(start + first, start + last)
                torch.bmm(self.outputs[chosen].transpose(1, 2), self.inputs[chosen], out=run[first:last])
                norms.append(squared_norms(run[first:last]))
            runs.append(run)
        return Runs(self.param, runs), torch.cat(norms)

    def _by_gram_matrices(self) -> Tensor:
        norms = self.inputs.new_empty(self.batch_size, dtype=torch.float64)
        length = self.inputs.shape[1]
        for start, stop in pieces(self.batch_size, 2 * length**2 * self.inputs.element_size(), limit=GRAM_BYTES):
            norms[start:stop] = norms_of_products(gram_norms, self.inputs[start:stop], self.outputs[start:stop])
        return norms


def norms_of_products(
    inner: Callable[[Tensor, Tensor], tuple[Tensor, Tensor, Tensor]], inputs: Tensor, outputs: Tensor
) -> Tensor:
    """The squared norms of products by Gram matrices, in float64 for samples that lose digits in float32.

    Args:
        inner: Returns the squared norms of the products, of the inputs and of the output gradients.
        inputs: (B, ...).
        outputs: (B, ...).
    """
    norms, *traces = inner(inputs, outputs)
    if inputs.dtype != torch.float64:
        cancelled = (norms < CANCELLED * traces[0] * traces[1]).nonzero()[:, 0].tolist()
        for i in {*cancelled, *odd(norms), *odd(traces[0]), *odd(traces[1])}:
            norms[i] = inner(inputs[i : i + 1].double(), outputs[i : i + 1].double())[0][0]
    return norms


def gram_norms(inputs: Tensor, outputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The squared norms of the products, as inner products of Gram matrices, and those of inputs and output gradients.

    The matrices are symmetric: a strip of rows starts at the diagonal, and its part right of the square counts twice.
    """
    length = inputs.shape[1]
    if length < STRIP // 2:
        return inner_products(*(torch.bmm(x, x.transpose(1, 2)) for x in (inputs, outputs)))
    products, *traces = (torch.zeros(len(inputs), dtype=torch.float64, device=inputs.device) for _ in range(3))
    height = min(STRIP, length // 4)
    for start in range(0, length, height):
        rows = slice(start, start + height)
        left, right = (torch.bmm(x[:, rows], x[:, start:].transpose(1, 2)) for x in (inputs, outputs))
        for trace, strip in zip(traces, (left, right), strict=True):
            trace += strip.diagonal(dim1=1, dim2=2).sum(1)
        strip = left.mul_(right)
        products += 2 * strip.sum((1, 2)) - strip[:, :, :height].sum((1, 2))
    return products.clamp(min=0), traces[0], traces[1]


def inner_products(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The results of `gram_norms` from full Gram matrices. The left one is overwritten."""
    traces = [gram.diagonal(dim1=1, dim2=2).sum(1).double() for gram in (left, right)]
    return left.mul_(right).sum((1, 2)).double().clamp(min=0), traces[0], traces[1]
