"""Norms and sums of many tensors at once, in few operations, with memory for copies of short ones.

They take plain tensors of one dtype, float32 or float64, on CPU. Norms outside of `SMALLEST` to `LARGEST` may be wrong.
"""

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from torchzero_clip.compat import flatten
from torchzero_clip.functional import foreach
from torchzero_clip.functional.scratch import Scratch

SHORT = 65536  # tensors of at most this many elements are copied to be measured together

BLOCK = 1024
"""Elements of a block of a long tensor. Blocks are reduced in the dtype of the tensor, and added up in float64. A plain
float32 sum of 16M elements is off by 6e-4."""

ROW = 512  # elements of a row in the memory for copies of short tensors

ROWS = 512  # rows in the memory for copies: 1 MiB of float32, which stays in the cache

SMALLEST, LARGEST = 1e-12, 1e30
"""Outside of these, squares in float32 may underflow or overflow."""

_NORMS = partial(torch.linalg.vector_norm, dim=1)


class Chunk(NamedTuple):
    """Some neighbours of a list of tensors, and memory in which each fills whole rows. Chunks share their memory."""

    own: slice
    views: list[Tensor]  # memory in the shape of each tensor
    rows: Tensor  # the same memory as a matrix


class Moves(NamedTuple):
    """Right before they are measured, tensors become ``starts``, moved towards ``ends`` by weights."""

    starts: Sequence[Tensor]  # these tensors themselves, or others that keep their values
    ends: Sequence[Tensor]
    weights: Sequence[float]


class _Plan(NamedTuple):
    short: list[int]
    long: list[int]
    chunks: list[Chunk]
    owner: Tensor  # the tensor that each measured block belongs to


def block_norms(tensors: Sequence[Tensor], scratch: Scratch) -> Tensor:
    """The L2 norm of each tensor: a float64 vector."""
    return _norms_of(*_reduced(tensors, scratch, _NORMS), len(tensors))


def joint_norm(
    tensors: Sequence[Tensor], scratch: Scratch, *, beside: bool = False, moves: Moves | None = None
) -> tuple[Tensor, Tensor | None]:
    """The L2 norm of all tensors together, 0-d, and ``beside`` it `block_norms`: one pass, in which they may move."""
    values, owner = _reduced(tensors, scratch, _NORMS, moves)
    total = torch.linalg.vector_norm(values)
    return total, _norms_of(values, owner, len(tensors)) if beside else None


def _norms_of(values: Tensor, owner: Tensor, count: int) -> Tensor:
    """The norm of each tensor from those of its blocks, which are overwritten."""
    return values.new_zeros(count).index_add_(0, owner, values.square_()).sqrt_()


def block_maxima(tensors: Sequence[Tensor], scratch: Scratch) -> Tensor:
    """The largest magnitude in each tensor: a float64 vector; NaN for a tensor with a NaN."""
    values, owner = _reduced(tensors, scratch, _largest)
    return values.new_zeros(len(tensors)).scatter_reduce_(0, owner, values, "amax")


def direct_norms(tensors: Sequence[Tensor]) -> list[float]:
    """The norms of `block_norms` as numbers, for a single call."""
    short = [tensor for tensor in tensors if tensor.numel() <= BLOCK]
    known = iter(torch.stack(foreach.norms(short, 2.0, short[0].dtype)).tolist() if short else [])
    # an operation on tensors takes longer than 64 numbers do here
    return [next(known) if tensor.numel() <= BLOCK else _direct_norm(tensor) for tensor in tensors]


def _direct_norm(tensor: Tensor) -> float:
    return math.hypot(*(norm for rows in _rows_of(tensor) for norm in _NORMS(rows).tolist()))


def direct_joint_norm(tensors: Sequence[Tensor]) -> Tensor:
    """The result of `joint_norm`, up to rounding, for a single call."""
    sizes, short, found = list(map(Tensor.numel, tensors)), tensors, list[Tensor]()
    if max(sizes) > SHORT:
        short = [tensor for tensor, size in zip(tensors, sizes, strict=True) if size <= SHORT]
        long = [tensor for tensor, size in zip(tensors, sizes, strict=True) if size > SHORT]
        found += [_NORMS(rows) for tensor in long for rows in _rows_of(tensor)]
        sizes = [size for size in sizes if size <= SHORT]
    for own in spans(sizes, ROWS * ROW):
        # the zeros fill the last row, because a row of another length would take more operations
        filling = tensors[0].new_zeros(-sum(sizes[own]) % BLOCK)
        found.append(_NORMS(flatten([*short[own], filling]).view(-1, BLOCK)))
    norms = found[0] if len(found) == 1 else torch.cat(found)
    return torch.linalg.vector_norm(norms.double())


def spans(sizes: Sequence[int], most: int) -> list[slice]:
    """Neighbours whose sizes add up to at most so much."""
    ends, begin = list(accumulate(sizes, initial=0)), 0
    found: list[slice] = []
    while begin < len(sizes):
        end = max(bisect_right(ends, ends[begin] + most) - 1, begin + 1)
        found.append(slice(begin, end))
        begin = end
    return found


def block_sums(tensors: Sequence[Tensor], scratch: Scratch) -> Tensor:
    """The sum of each tensor: a float64 vector. A sum that is not finite may be wrong."""
    values, owner = _reduced(tensors, scratch, partial(torch.sum, dim=1))
    return values.new_zeros(len(tensors)).index_add_(0, owner, values)


def _largest(rows: Tensor) -> Tensor:
    """The largest magnitude in each row, from two passes over what is then in the cache."""
    parts = rows.split(ROWS)
    return torch.cat([torch.maximum(part.amax(1), part.amin(1).neg_()) for part in parts])


def _reduced(
    tensors: Sequence[Tensor], scratch: Scratch, reduce: Callable[[Tensor], Tensor], moves: Moves | None = None
) -> tuple[Tensor, Tensor]:
    """Reduce each row in the dtype of the tensors. Return the results in float64, and the tensor of each row."""
    plan = scratch.plan("blocks", tensors, lambda: _planned(tensors, scratch))
    short = tensors if not plan.long else [tensors[i] for i in plan.short]
    found: list[Tensor] = []
    if moves is not None:
        for i in plan.short:
            torch.lerp(moves.starts[i], moves.ends[i], moves.weights[i], out=tensors[i])
    for chunk in plan.chunks:
        if len(plan.chunks) > 1:
            chunk.rows.zero_()  # another chunk has written to this memory
        foreach.copy_plain_(chunk.views, short[chunk.own])
        found.append(reduce(chunk.rows))
    for i in plan.long:
        found += [reduce(rows) for rows in (_rows_of(tensors[i]) if moves is None else _moved(tensors[i], moves, i))]
    return (found[0] if len(found) == 1 else torch.cat(found)).double(), plan.owner


def _moved(tensor: Tensor, moves: Moves, i: int) -> Iterator[Tensor]:
    """The rows of a long tensor in parts that are still in the cache after they have moved."""
    for rows, starts, ends in zip(*map(_rows_of, (tensor, moves.starts[i], moves.ends[i])), strict=True):
        for own, start, end in zip(rows.split(ROWS), starts.split(ROWS), ends.split(ROWS), strict=True):
            yield torch.lerp(start, end, moves.weights[i], out=own)


def _planned(tensors: Sequence[Tensor], scratch: Scratch) -> _Plan:
    sizes = [tensor.numel() for tensor in tensors]
    short = [i for i, size in enumerate(sizes) if size <= SHORT]
    long = [i for i, size in enumerate(sizes) if size > SHORT]
    chunks = in_chunks("blocks", [tensors[i] for i in short], ROW, ROWS, tensors[0], scratch)
    for chunk in chunks:
        chunk.rows.zero_()
    blocks = [*(-(-sizes[i] // ROW) for i in short), *(-(-sizes[i] // BLOCK) for i in long)]
    places, counts = (torch.tensor(column, device=tensors[0].device) for column in ([*short, *long], blocks))
    owner = torch.repeat_interleave(places, counts)
    return _Plan(short, long, chunks, owner)


def in_chunks(name: str, tensors: list[Tensor], row: int, most: int, like: Tensor, scratch: Scratch) -> list[Chunk]:
    """Chunks of at most ``most`` rows of ``row`` elements, whose memory is as ``like``."""
    counts = [-(-tensor.numel() // row) for tensor in tensors]
    cuts = spans(counts, most)
    memory = scratch.memory(name, max((sum(counts[own]) for own in cuts), default=0) * row, like)
    return [Chunk(own, *in_rows(memory, tensors[own], row)) for own in cuts]


def in_rows(memory: Tensor, tensors: Sequence[Tensor], row: int) -> tuple[list[Tensor], Tensor]:
    """Parts of a vector in the shape of each tensor, which fill rows of ``row`` elements; and all rows as a matrix."""
    counts = [-(-tensor.numel() // row) for tensor in tensors]
    used = memory.narrow(0, 0, sum(counts) * row)
    pairs = zip(used.split([count * row for count in counts]), tensors, strict=True)
    return [part.narrow(0, 0, tensor.numel()).view(tensor.shape) for part, tensor in pairs], used.view(-1, row)


def _rows_of(tensor: Tensor) -> list[Tensor]:
    """The elements of one tensor in rows of one block each, and the remaining ones in a shorter row."""
    flat = foreach.flat(tensor)
    count = flat.numel()
    even = count - count % BLOCK
    if not even:
        return [flat.view(1, -1)]
    if even == count:
        return [flat.view(-1, BLOCK)]  # a slice of all would take twice as long
    return [flat[:even].view(-1, BLOCK), flat[even:].view(1, -1)]
