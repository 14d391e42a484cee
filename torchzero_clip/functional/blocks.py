"""Norms and sums of many tensors at once, in few operations, with memory for copies of short ones.

They take plain tensors of one dtype, float32 or float64, on CPU. Each is cut into slices, of which a whole tensor is
one, and each slice into rows. Rows are reduced in the dtype of the tensors, and added up in float64.
"""

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import accumulate, compress
from typing import NamedTuple

import torch
from torch import Tensor

from torchzero_clip.compat import flatten, unflatten
from torchzero_clip.functional import foreach, slices
from torchzero_clip.functional.reading import extent
from torchzero_clip.functional.scratch import Scratch
from torchzero_clip.functional.shards import Part, pack, part, wholes
from torchzero_clip.functional.ways import BLOCK, LARGEST, SMALLEST

SHORT = 65536  # tensors of at most this many elements are copied to be measured together

ROW = 512  # elements of a row in the memory for copies of short tensors

ROWS = 512  # rows in the memory for copies: 1 MiB of float32, which stays in the cache

_NORMS = partial(torch.linalg.vector_norm, dim=1)

Dims = tuple[int, ...]  # the dimensions that a slice of one tensor spans


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


class Cut(NamedTuple):
    """How plain tensors are cut into slices, and these into rows. It depends on their layouts alone."""

    dims: list[Dims]  # the dimensions that a slice of each tensor spans
    counts: list[int]  # how many slices each tensor has
    owner: Tensor  # the tensor that each slice belongs to
    templates: list[Tensor]  # tensors of the shapes of one number per slice; none if all are whole
    chunks: list[tuple[list[int], Chunk]]  # short tensors, copied to be reduced together
    refills: bool  # the chunks of whole tensors are filled with zeros, because others have written to their memory
    others: list[int]  # the tensors that are reduced one by one
    slice_of: Tensor  # the slice that each row belongs to
    order: Tensor | None  # the row of each slice, if each is one row

    def parts(self, tensors: Sequence[Tensor]) -> list[Part]:
        """The tensors, cut."""
        return list(map(part, tensors, self.dims))

    def scale_(self, tensors: Sequence[Tensor], factors: Tensor) -> None:
        """Multiply each slice by its factor, in place. Tensors without a factor other than 1 are not touched."""
        changes = (factors != 1).float()
        counts = changes.new_zeros(len(tensors)).index_add_(0, self.owner, changes)
        changed = (counts > 0).tolist()
        numbers = unflatten(factors.to(tensors[0].dtype), self.templates)
        foreach.multiply_plain_(list(compress(tensors, changed)), list(compress(numbers, changed)))


def cut_into_rows(tensors: Sequence[Tensor], dims: Sequence[Dims] | None, scratch: Scratch) -> Cut:
    """Plan how to measure slices of tensors, which span ``dims`` of each (None: all), and none of which is empty."""
    parts, like = (wholes(tensors) if dims is None else list(map(part, tensors, dims))), tensors[0]
    counts, sizes = [p.slice_count for p in parts], list(map(Tensor.numel, tensors))
    alike: dict[tuple[int, bool], list[int]] = {}
    others: list[int] = []
    for i, (size, count, p) in enumerate(zip(sizes, counts, parts, strict=True)):
        length = ROW if count == 1 else size // count
        is_short = size <= SHORT and length <= BLOCK and _are_rows(p)
        (alike.setdefault((length, count == 1), []) if is_short else others).append(i)
    chunks: list[tuple[list[int], Chunk]] = []
    for (length, is_one), together in alike.items():
        own, memory = [tensors[i] for i in together], "blocks" if dims is None else "slices"
        found = in_chunks(memory, own, length, ROWS * ROW // length, like, scratch)
        chunks += [(together[chunk.own], chunk) for chunk in found]
        for chunk in found if is_one else ():  # the last row of a whole tensor ends in zeros
            chunk.rows.zero_()
    refills = dims is not None or len(chunks) > 1
    measured = [i for own, _ in chunks for i in own] + others
    rows = [-(-sizes[i] // (ROW if sizes[i] <= SHORT else BLOCK)) if counts[i] == 1 else 1 for i in measured]
    repeats = torch.tensor(rows, device="cpu").repeat_interleave(
        torch.tensor([counts[i] for i in measured], device="cpu")
    )
    places = torch.arange(sum(counts), device="cpu").split(counts)
    slice_of = torch.cat([places[i] for i in measured]).repeat_interleave(repeats)
    order = slice_of.argsort() if slice_of.numel() == sum(counts) else None
    owner = torch.repeat_interleave(torch.tensor(counts, device="cpu"))
    templates = [] if dims is None else [like.new_zeros(()).expand(p.slice_shape) for p in parts]
    return Cut([p.dims for p in parts], counts, owner, templates, chunks, refills, others, slice_of, order)


def _are_rows(cut: Part) -> bool:
    """True if slices span all dimensions from some one on, so that each is a row of a contiguous tensor."""
    return cut.dims == tuple(range(cut.tensor.ndim - len(cut.dims), cut.tensor.ndim))


def whole(tensors: Sequence[Tensor], scratch: Scratch) -> Cut:
    """The plan for tensors that are one slice each."""
    return scratch.plan("blocks", tensors, lambda: cut_into_rows(tensors, None, scratch))


def norms_of_slices(tensors: Sequence[Tensor], cut: Cut, p: float = 2.0) -> Tensor:
    """The L2 norm or the largest magnitude of each slice: a float64 vector. NaN for a slice with a NaN."""
    norms = _joined(_reduced(tensors, cut, p), cut, p)
    return norms if math.isinf(p) else mended(norms, tensors, cut)


def joint_norm(
    tensors: Sequence[Tensor], scratch: Scratch, *, beside: bool = False, moves: Moves | None = None
) -> tuple[Tensor, Tensor | None] | None:
    """The L2 norm of all tensors together, 0-d, and ``beside`` it that of each: one pass, in which they may move.

    None if it is extreme or not finite.
    """
    cut = whole(tensors, scratch)
    values = _reduced(tensors, cut, 2.0, moves)
    total = torch.linalg.vector_norm(values)
    if not SMALLEST < total.item() < LARGEST:
        return None
    return total, mended(_joined(values, cut, 2.0), tensors, cut) if beside else None


def sums_of_each(tensors: Sequence[Tensor], scratch: Scratch) -> Tensor:
    """The sum of each tensor: a float64 vector. A sum that is not finite may be wrong."""
    cut = whole(tensors, scratch)
    return _joined(_reduced(tensors, cut, None), cut, None)


def _reduced(tensors: Sequence[Tensor], cut: Cut, p: float | None, moves: Moves | None = None) -> Tensor:
    """The p-norm of each row, or its sum if p is None: a float64 vector."""
    reduce, found = _REDUCE[p], list[Tensor]()
    for own, chunk in cut.chunks:
        if moves is not None:
            for i in own:
                torch.lerp(moves.starts[i], moves.ends[i], moves.weights[i], out=tensors[i])
        if cut.refills and cut.counts[own[0]] == 1:
            chunk.rows.zero_()
        foreach.copy_plain_(chunk.views, tensors if len(own) == len(tensors) else [tensors[i] for i in own])
        found.append(reduce(chunk.rows))
    for i in cut.others:
        if cut.counts[i] == 1:
            rows = _rows_of(tensors[i]) if moves is None else _moved(tensors[i], moves, i)
            found += map(reduce, rows)
        elif p is not None:
            found.append(_norms_alone(part(tensors[i], cut.dims[i]), p))
    return (found[0] if len(found) == 1 else torch.cat(found)).double()


def _norms_alone(cut: Part, p: float) -> Tensor:
    """The norms of the slices of one tensor. Rows are measured along one dimension."""
    if _are_rows(cut):
        cut = Part(cut.tensor.reshape(cut.slice_count, -1), (1,), cut.size)
    return slices.local_norm(cut, p).view(-1)


def _joined(values: Tensor, cut: Cut, p: float | None) -> Tensor:
    """The norm or the sum of each slice from those of its rows, which may be overwritten."""
    if cut.order is not None:
        return values.index_select(0, cut.order)
    joined = values.new_zeros(cut.owner.numel())
    if p is None:
        return joined.index_add_(0, cut.slice_of, values)
    if math.isinf(p):
        return joined.scatter_reduce_(0, cut.slice_of, values, "amax")
    return joined.index_add_(0, cut.slice_of, values.square_()).sqrt_()


def mended(norms: Tensor, tensors: Sequence[Tensor], cut: Cut | None = None) -> Tensor:
    """The L2 norms, where those of tensors with one that is extreme or not finite are taken again."""
    smallest, largest = extent(norms)
    if smallest > SMALLEST and largest < LARGEST:  # not for NaN
        return norms
    odd = ((norms > SMALLEST) & (norms < LARGEST)).logical_not_()
    again = odd if cut is None else odd.new_zeros(len(tensors)).index_fill_(0, cut.owner[odd], True)
    chosen = again.nonzero().flatten().tolist()
    own = [tensors[i] for i in chosen]
    parts = wholes(own) if cut is None else list(map(part, own, [cut.dims[i] for i in chosen]))
    norms[again if cut is None else again[cut.owner]] = pack(slices.norms_of_slices(parts, 2.0))
    return norms


def norms_of_each_once(tensors: Sequence[Tensor]) -> list[float]:
    """The L2 norm of each tensor, for a single call. Those outside of `SMALLEST` to `LARGEST` may be wrong."""
    short = [tensor for tensor in tensors if tensor.numel() <= BLOCK]
    known = iter(torch.stack(foreach.norms_of_each(short, 2.0, short[0].dtype)).tolist() if short else [])
    # an operation on tensors takes longer than 64 numbers do here
    return [next(known) if tensor.numel() <= BLOCK else _norm_once(tensor) for tensor in tensors]


def _norm_once(tensor: Tensor) -> float:
    return math.hypot(*(norm for rows in _rows_of(tensor) for norm in _NORMS(rows).tolist()))


def joint_norm_once(tensors: Sequence[Tensor]) -> Tensor:
    """The L2 norm of all tensors together, for a single call. It may be wrong outside of `SMALLEST` to `LARGEST`."""
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


def _largest(rows: Tensor) -> Tensor:
    """The largest magnitude in each row, from two passes over what is then in the cache."""
    parts = rows.split(ROWS)
    return torch.cat([torch.maximum(part.amax(1), part.amin(1).neg_()) for part in parts])


_REDUCE = {2.0: _NORMS, math.inf: _largest, None: partial(torch.sum, dim=1)}


def _moved(tensor: Tensor, moves: Moves, i: int) -> Iterator[Tensor]:
    """The rows of a long tensor in parts that are still in the cache after they have moved."""
    for rows, starts, ends in zip(*map(_rows_of, (tensor, moves.starts[i], moves.ends[i])), strict=True):
        for own, start, end in zip(rows.split(ROWS), starts.split(ROWS), ends.split(ROWS), strict=True):
            yield torch.lerp(start, end, moves.weights[i], out=own)


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
