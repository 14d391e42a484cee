"""Norms of slices of many plain tensors at once, in few operations."""

import math
from collections.abc import Sequence
from itertools import accumulate, compress
from typing import NamedTuple

import torch
from torch import Tensor

from torchzero_clip.compat import unflatten
from torchzero_clip.functional import foreach
from torchzero_clip.functional.blocks import BLOCK, LARGEST, ROW, ROWS, SHORT, SMALLEST, Chunk, in_chunks
from torchzero_clip.functional.norms import extent, norm_along, p_norms
from torchzero_clip.functional.scratch import Scratch
from torchzero_clip.functional.shards import Part, pack, part


class Slices(NamedTuple):
    """How plain tensors are cut, each of them into slices. It depends on their layouts alone."""

    dims: list[tuple[int, ...]]  # the dimensions that a slice of each tensor spans
    counts: list[int]  # how many slices each tensor has
    owner: Tensor  # the tensor that each slice belongs to
    templates: list[Tensor]  # tensors of the shapes of one number per slice
    chunks: list[tuple[list[int], Chunk]]  # short tensors whose slices have one length, each a row
    others: list[int]  # the tensors that are measured one by one
    order: Tensor  # where each slice stands in the order in which they are measured

    def scale_(self, tensors: Sequence[Tensor], factors: Tensor) -> None:
        """Multiply each slice by its factor, in place. Tensors without a factor other than 1 are not touched."""
        changes = (factors != 1).float()
        counts = changes.new_zeros(len(tensors)).index_add_(0, self.owner, changes)
        changed = (counts > 0).tolist()
        numbers = unflatten(factors.to(tensors[0].dtype), self.templates)
        foreach.multiply_plain_(list(compress(tensors, changed)), list(compress(numbers, changed)))

    def parts(self, tensors: Sequence[Tensor]) -> list[Part]:
        """The tensors, cut."""
        return list(map(part, tensors, self.dims))


def plan(tensors: Sequence[Tensor], dims: Sequence[tuple[int, ...]], scratch: Scratch) -> Slices:
    """Plan how to measure contiguous tensors of one dtype on CPU, all with elements, and each with slices."""
    like = tensors[0]
    pairs = zip(tensors, dims, strict=True)
    shapes = [[1 if d in own else n for d, n in enumerate(tensor.shape)] for tensor, own in pairs]
    counts = list(map(math.prod, shapes))
    alike: dict[int, list[int]] = {}
    others: list[int] = []
    for i, (tensor, count) in enumerate(zip(tensors, counts, strict=True)):
        length = tensor.numel() // count
        is_short = tensor.numel() <= SHORT and length <= BLOCK and _are_rows(tensor, dims[i])
        (alike.setdefault(length, []) if is_short else others).append(i)
    chunks = [
        (together[chunk.own], chunk)
        for length, together in alike.items()
        for chunk in in_chunks("slices", [tensors[i] for i in together], length, ROWS * ROW // length, like, scratch)
    ]
    measured = [i for own, _ in chunks for i in own] + others
    starts = list(accumulate(counts, initial=0))
    places = torch.cat([torch.arange(starts[i], starts[i] + counts[i], device="cpu") for i in measured])
    templates = [like.new_zeros(()).expand(shape) for shape in shapes]
    owner = torch.repeat_interleave(torch.tensor(counts, device="cpu"))
    return Slices(list(dims), counts, owner, templates, chunks, others, places.argsort())


def sliced_norms(tensors: Sequence[Tensor], slices: Slices) -> Tensor:
    """The L2 norm of each slice of tensors of the shapes for which ``slices`` was planned: a float64 vector."""
    found: list[Tensor] = []
    for own, chunk in slices.chunks:
        foreach.copy_plain_(chunk.views, [tensors[i] for i in own])
        found.append(torch.linalg.vector_norm(chunk.rows, dim=1).double())
    for i in slices.others:
        tensor, dims = tensors[i], slices.dims[i]
        if _are_rows(tensor, dims):
            found.append(norm_along(tensor.reshape(slices.counts[i], -1), 2.0, 1).view(-1))
        else:
            found.append(pack(p_norms([part(tensor, dims)], 2.0)))
    norms = torch.cat(found).index_select(0, slices.order)
    smallest, largest = extent(norms)
    if not (smallest > SMALLEST and largest < LARGEST):  # also NaN
        _measure_again_(norms, tensors, slices)
    return norms


def _measure_again_(norms: Tensor, tensors: Sequence[Tensor], slices: Slices) -> None:
    """Measure tensors again with slices whose squares may overflow or underflow, such as those of zeros."""
    odd = ((norms > SMALLEST) & (norms < LARGEST)).logical_not_()
    again = set(slices.owner[odd].tolist())
    parts = slices.parts(tensors)
    for i, own in enumerate(norms.split(slices.counts)):
        if i in again:
            own.copy_(pack(p_norms([parts[i]], 2.0)))


def _are_rows(tensor: Tensor, dims: tuple[int, ...]) -> bool:
    """True if slices span all dimensions from some one on, so that each is a row of a contiguous tensor."""
    ndim = max(tensor.ndim, 1)
    return dims == tuple(range(ndim - len(dims), ndim))
