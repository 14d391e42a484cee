"""Gradients that are products of a layer's inputs and its output gradients: the weights of linear layers."""

import torch
from torch import Tensor
from typing_extensions import override

from torchzero_clip.per_sample.contributions import (
    CANCELLED,
    Contribution,
    Dense,
    Memory,
    pieces,
    piecewise_squared_norms,
)
from torchzero_clip.per_sample.squares import odd, squared_norms

GRAM_BYTES = 2 << 20
HALVED = 64  # positions from which on leaving out a quarter pays for the smaller products


class Products(Contribution):
    """The gradient of sample i is Σ_t b_it a_itᵀ over its T positions.

    Args:
        param: The weight, (p, d).
        inputs: a, of shape (B, T, d).
        outputs: b, of shape (B, T, p), the gradients of the outputs.
        memory: "low" keeps no gradients of samples.

    Source: Goodfellow, [Efficient per-example gradient computations](https://arxiv.org/abs/1510.01799), 2015, for
    T = 1; Li et al., [Large language models can be strong differentially private
    learners](https://arxiv.org/abs/2110.05679), 2021, for the Gram matrices; Bu et al., [Differentially private
    optimization on large model at small cost](https://arxiv.org/abs/2210.00038), 2022, for the sum without a second
    backward.
    """

    def __init__(self, param: Tensor, inputs: Tensor, outputs: Tensor, *, memory: Memory) -> None:
        super().__init__(param, inputs.shape[0])
        self.inputs = inputs
        self.outputs = outputs
        self.memory: Memory = memory
        self._grads: Tensor | None = None

    @override
    def measured(self) -> tuple[Contribution, Tensor]:
        length, width, height = self.inputs.shape[1], self.inputs.shape[2], self.outputs.shape[2]
        if length == 1:
            return self, squared_norms(self.inputs) * squared_norms(self.outputs)
        sides, area = width + height, width * height
        # kept, the gradients take the place of inputs and outputs, and save a second matmul
        if self.memory == "auto" and 30 * area < length**2 * sides and area <= length * sides:
            return self._formed()
        if 2 * area < length * sides:
            return self, piecewise_squared_norms(self)
        return self, self._by_gram_matrices()

    @override
    def weighted_sum(self, factors: Tensor) -> Tensor:
        inputs, outputs = self.inputs, self.outputs
        scale = factors.to(inputs.device, inputs.dtype)[:, None, None]
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
        chosen = samples.to(self.inputs.device)[:, None, None]
        self.inputs = self.inputs.masked_fill(chosen, 0)
        self.outputs = self.outputs.masked_fill(chosen, 0)

    def joined(self, other: "Products") -> "Products":
        """Both uses as one, of more positions."""
        inputs = torch.cat([self.inputs, other.inputs], 1)
        outputs = torch.cat([self.outputs, other.outputs], 1)
        return Products(self.param, inputs, outputs, memory=self.memory)

    def _formed(self) -> tuple[Contribution, Tensor]:
        """The gradients in full; their norms are taken while they are in cache."""
        grads = self.inputs.new_empty(self.batch_size, self.outputs.shape[2], self.inputs.shape[2])
        norms = self.inputs.new_empty(self.batch_size, dtype=torch.float64)
        for start, stop in pieces(self.batch_size, grads[:1].nbytes):
            piece = grads[start:stop]
            torch.bmm(self.outputs[start:stop].transpose(1, 2), self.inputs[start:stop], out=piece)
            norms[start:stop] = squared_norms(piece)
        return Dense(self.param, grads), norms

    def _by_gram_matrices(self) -> Tensor:
        norms = self.inputs.new_empty(self.batch_size, dtype=torch.float64)
        length = self.inputs.shape[1]
        for start, stop in pieces(self.batch_size, 2 * length**2 * self.inputs.element_size(), limit=GRAM_BYTES):
            inputs, outputs = self.inputs[start:stop], self.outputs[start:stop]
            norms[start:stop], largest = gram_norms(inputs, outputs)
            if inputs.dtype != torch.float64:
                cancelled = (norms[start:stop] < CANCELLED * largest).nonzero()[:, 0].tolist()
                for i in {*cancelled, *odd(norms[start:stop]).tolist()}:
                    norms[start + i] = gram_norms(inputs[i : i + 1].double(), outputs[i : i + 1].double())[0][0]
        return norms


def gram_norms(inputs: Tensor, outputs: Tensor) -> tuple[Tensor, Tensor]:
    """The squared norms, as inner products of Gram matrices, and the products of the squared norms of the factors."""
    products, left, right = _halved(inputs, outputs)
    return products.clamp(min=0), left * right


def _halved(inputs: Tensor, outputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The inner products and both traces; the matrices are symmetric, so a quarter of a large one is left out."""
    length = inputs.shape[1]
    if length < HALVED:
        left, right = torch.bmm(inputs, inputs.transpose(1, 2)), torch.bmm(outputs, outputs.transpose(1, 2))
        one, two = (gram.diagonal(dim1=1, dim2=2).sum(1).double() for gram in (left, right))
        return _inner(left, right), one, two
    half = length // 2
    one, two = ((inputs[:, part], outputs[:, part]) for part in (slice(0, half), slice(half, length)))
    left, right = (torch.bmm(x, y.transpose(1, 2)) for x, y in zip(one, two, strict=True))
    sums = [a + b for a, b in zip(_halved(*one), _halved(*two), strict=True)]
    return sums[0] + 2 * _inner(left, right), sums[1], sums[2]


def _inner(left: Tensor, right: Tensor) -> Tensor:
    return left.mul_(right).flatten(1).sum(1).double()
