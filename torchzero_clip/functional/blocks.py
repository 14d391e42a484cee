"""Norms and sums of many tensors at once, in few operations, with memory for copies of short ones.

They take plain tensors of one dtype, float32 or float64, on CPU. A slice, of which a whole tensor is one, is reduced in
blocks: each block in the dtype of the tensors, and the results are added up in float64.
"""

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import accumulate, chain, compress
from typing import NamedTuple

import torch
from torch import Tensor

from torchzero_clip.compat import flatten_dense, unflatten_dense
from torchzero_clip.functional import foreach, slices
from torchzero_clip.functional.scratch import Scratch
from torchzero_clip.functional.shards import Part, pack, part, wholes
from torchzero_clip.functional.ways import BLOCK, LARGEST, SMALLEST, extent

SHORT = 65536  # tensors of at most this many elements are copied to be measured together

SHORT_BLOCK = 512  # elements of a block in the memory for copies of whole tensors

COPIES = 2**18  # elements in the memory for copies: 1 MiB of float32, which stays in the cache

IN_CACHE = 512  # so many blocks of a long tensor stay in the cache from one operation to the next

_NORMS = partial(torch.linalg.vector_norm, dim=1)


class Chunk(NamedTuple):
    """Some tensors of a list, and memory in which each fills whole blocks. Chunks share their memory."""

    indices: list[int]
    views: list[Tensor]  # memory in the shape of each tensor
    blocks: Tensor  # the same memory as a matrix with one block in each row


class Lerp(NamedTuple):
    """The measured tensors are first set to ``lerp(starts, ends, weights)``, piece by piece, in the cache."""

    starts: Sequence[Tensor]  # these tensors themselves, or others that keep their values
    ends: Sequence[Tensor]
    weights: Sequence[float]


class Cut(NamedTuple):
    """How plain tensors are cut into slices, and these into blocks. It depends on their layouts alone."""

    is_whole: bool
    """Each tensor is one slice of several blocks; else each slice is reduced at once, as one block."""
    dims: list[tuple[int, ...]]  # the dimensions that a slice of each tensor spans
    counts: list[int]  # how many slices each tensor has
    owner: Tensor  # the tensor that each slice belongs to
    templates: list[Tensor]  # tensors of the shapes of one number per slice, unless tensors are whole
    chunks: list[Chunk]  # short tensors, copied to be reduced together
    others: list[int]  # the tensors that are reduced one by one
    slice_of: Tensor  # the slice that each block belongs to
    block_of: Tensor  # the block of each slice, if it is one

    def parts(self, tensors: Sequence[Tensor]) -> list[Part]:
        """The tensors, cut."""
        return list(map(part, tensors, self.dims))

    def scale_(self, tensors: Sequence[Tensor], factors: Tensor) -> None:
        """Multiply each slice by its factor, in place. Tensors without a factor other than 1 are not touched."""
        changes = (factors != 1).float()
        counts = changes.new_zeros(len(tensors)).index_add_(0, self.owner, changes)
        changed = (counts > 0).tolist()
        numbers = unflatten_dense(factors.to(tensors[0].dtype), self.templates)
        foreach.multiply_plain_(list(compress(tensors, changed)), list(compress(numbers, changed)))


def cut_into_blocks(tensors: Sequence[Tensor], parts: list[Part] | None, scratch: Scratch) -> Cut:
    """Plan how to measure the slices of tensors, which are ``parts``, or None if each is whole; none may be empty."""
    is_whole, parts = parts is None, wholes(tensors) if parts is None else parts
    like, counts, sizes = tensors[0], [p.slice_count for p in parts], list(map(Tensor.numel, tensors))
    alike: dict[int, list[int]] = {}
    others: list[int] = []
    for i, (size, p) in enumerate(zip(sizes, parts, strict=True)):
        block = SHORT_BLOCK if is_whole else p.size
        is_short = size <= SHORT and block <= BLOCK and _are_rows(p.tensor, p.dims)
        (alike.setdefault(block, []) if is_short else others).append(i)
    memory = "blocks" if is_whole else "slices"
    chunks = [
        chunk
        for block, indices in alike.items()
        for chunk in in_chunks(memory, tensors, indices, block, COPIES // block, like, scratch)
    ]
    for chunk in chunks:
        chunk.blocks.zero_()
    measured = [*chain.from_iterable(chunk.indices for chunk in chunks), *others]
    places = torch.arange(sum(counts), device="cpu").split(counts)
    slice_of, number = torch.cat([places[i] for i in measured]), like.new_zeros(())
    if is_whole:
        blocks = [-(-sizes[i] // (SHORT_BLOCK if sizes[i] <= SHORT else BLOCK)) for i in measured]
        slice_of = slice_of.repeat_interleave(torch.tensor(blocks, device="cpu"))
    owner = torch.repeat_interleave(torch.tensor(counts, device="cpu"))
    templates = [] if is_whole else [number.expand(p.slice_shape) for p in parts]
    dims = [p.dims for p in parts]
    return Cut(is_whole, dims, counts, owner, templates, chunks, others, slice_of, slice_of.argsort())


def _are_rows(tensor: Tensor, dims: tuple[int, ...]) -> bool:
    """True if slices span all dimensions from some one on, so that each is a row of a contiguous tensor."""
    ndim = max(tensor.ndim, 1)
    return dims == tuple(range(ndim - len(dims), ndim))


def norms_of_plain_slices(tensors: Sequence[Tensor], cut: Cut) -> Tensor:
    """The L2 norm of each slice: a float64 vector."""
    return mended(_joined(_reduced(tensors, cut, 2.0), cut, 2.0), tensors, cut)


def norms_of_each_with_scratch(tensors: Sequence[Tensor], scratch: Scratch, p: float = 2.0) -> Tensor:
    """The L2 norm of each tensor, or its largest magnitude for p=inf: a float64 vector; NaN for a tensor with a NaN."""
    cut = scratch.plan("blocks", tensors, lambda: cut_into_blocks(tensors, None, scratch))
    norms = _joined(_reduced(tensors, cut, p), cut, p)
    return norms if math.isinf(p) else mended(norms, tensors, cut)


def joint_norm_with_scratch(
    tensors: Sequence[Tensor], scratch: Scratch, *, beside: bool = False, lerp: Lerp | None = None
) -> tuple[Tensor, Tensor | None] | None:
    """The L2 norm of all tensors together, 0-d, and ``beside`` it that of each: one pass, in which they may move.

    None if it is extreme or not finite.
    """
    cut = scratch.plan("blocks", tensors, lambda: cut_into_blocks(tensors, None, scratch))
    values = _reduced(tensors, cut, 2.0, lerp)
    total = torch.linalg.vector_norm(values)
    if not SMALLEST < total.item() < LARGEST:
        return None
    return total, mended(_joined(values, cut, 2.0), tensors, cut) if beside else None


def sums_of_each(tensors: Sequence[Tensor], scratch: Scratch) -> Tensor:
    """The sum of each tensor: a float64 vector. A sum that is not finite may be wrong."""
    cut = scratch.plan("blocks", tensors, lambda: cut_into_blocks(tensors, None, scratch))
    return _joined(_reduced(tensors, cut, None), cut, None)


def _reduced(tensors: Sequence[Tensor], cut: Cut, p: float | None, lerp: Lerp | None = None) -> Tensor:
    """The p-norm of each block, or its sum if p is None: a float64 vector. For slices p is 2."""
    reduce = _REDUCE[p]
    results: list[Tensor] = []
    for chunk in cut.chunks:
        if lerp is not None:
            for i in chunk.indices:
                torch.lerp(lerp.starts[i], lerp.ends[i], lerp.weights[i], out=tensors[i])
        if cut.is_whole and len(cut.chunks) > 1:
            chunk.blocks.zero_()  # another chunk has written to the ends of blocks
        are_all = len(chunk.views) == len(tensors)
        foreach.copy_plain_(chunk.views, tensors if are_all else [tensors[i] for i in chunk.indices])
        results.append(reduce(chunk.blocks) if cut.is_whole else reduce(chunk.blocks).double())  # as those below
    for i in cut.others:
        if cut.is_whole:
            results += map(reduce, _blocks_of(tensors[i]) if lerp is None else _lerped(tensors[i], lerp, i))
        elif _are_rows(tensors[i], cut.dims[i]):
            results.append(slices.norm_along(tensors[i].reshape(cut.counts[i], -1), 2.0, 1).view(-1))
        else:
            results.append(slices.local_norm(part(tensors[i], cut.dims[i]), 2.0).view(-1))
    return (results[0] if len(results) == 1 else torch.cat(results)).double()


def _joined(values: Tensor, cut: Cut, p: float | None) -> Tensor:
    """The norm or the sum of each slice from those of its blocks, which may be overwritten."""
    if not cut.is_whole:
        return values.index_select(0, cut.block_of)
    joined = values.new_zeros(len(cut.counts))
    if p == math.inf:
        return joined.scatter_reduce_(0, cut.slice_of, values, "amax")
    if p is None:
        return joined.index_add_(0, cut.slice_of, values)
    return joined.index_add_(0, cut.slice_of, values.square_()).sqrt_()


def mended(norms: Tensor, tensors: Sequence[Tensor], cut: Cut | None = None) -> Tensor:
    """The norms of slices, or without ``cut`` of each tensor; those of a tensor with an extreme one are taken again."""
    smallest, largest = extent(norms)
    if smallest > SMALLEST and largest < LARGEST:  # not for NaN
        return norms
    parts = wholes(tensors) if cut is None else cut.parts(tensors)
    owner = torch.arange(len(tensors), device="cpu") if cut is None else cut.owner
    odd = ((norms > SMALLEST) & (norms < LARGEST)).logical_not_()
    again = odd.new_zeros(len(tensors)).index_fill_(0, owner[odd], True)
    norms[again[owner]] = pack(slices.norms_of_slices(list(compress(parts, again.tolist())), 2.0))
    return norms


def norms_of_each_once(tensors: Sequence[Tensor]) -> list[float]:
    """The L2 norm of each tensor, for a single call. Those outside of `SMALLEST` to `LARGEST` may be wrong."""
    short = [tensor for tensor in tensors if tensor.numel() <= BLOCK]
    norms = iter(torch.stack(foreach.norms_in_one_call(short, 2.0, short[0].dtype)).tolist() if short else [])
    # an operation on tensors takes longer than 64 numbers do here
    return [next(norms) if tensor.numel() <= BLOCK else _norm_once(tensor) for tensor in tensors]


def _norm_once(tensor: Tensor) -> float:
    return math.hypot(*(norm for blocks in _blocks_of(tensor) for norm in _NORMS(blocks).tolist()))


def joint_norm_once(tensors: Sequence[Tensor]) -> Tensor:
    """The L2 norm of all tensors together, for a single call. It may be wrong outside of `SMALLEST` to `LARGEST`."""
    sizes, short, norms = list(map(Tensor.numel, tensors)), tensors, list[Tensor]()
    if max(sizes) > SHORT:
        short = [tensor for tensor, size in zip(tensors, sizes, strict=True) if size <= SHORT]
        long = [tensor for tensor, size in zip(tensors, sizes, strict=True) if size > SHORT]
        norms += [_NORMS(blocks) for tensor in long for blocks in _blocks_of(tensor)]
        sizes = [size for size in sizes if size <= SHORT]
    for span in spans(sizes, COPIES):
        # the zeros fill the last block, because a block of another length would take more operations
        filling = tensors[0].new_zeros(-sum(sizes[span]) % BLOCK)
        norms.append(_NORMS(flatten_dense([*short[span], filling]).view(-1, BLOCK)))
    return torch.linalg.vector_norm((norms[0] if len(norms) == 1 else torch.cat(norms)).double())


def spans(sizes: Sequence[int], most: int) -> list[slice]:
    """Neighbours whose sizes add up to at most so much."""
    ends, begin = list(accumulate(sizes, initial=0)), 0
    ranges: list[slice] = []
    while begin < len(sizes):
        end = max(bisect_right(ends, ends[begin] + most) - 1, begin + 1)
        ranges.append(slice(begin, end))
        begin = end
    return ranges


def _largest(blocks: Tensor) -> Tensor:
    """The largest magnitude in each block, from two passes over what is then in the cache."""
    parts = blocks.split(IN_CACHE)
    return torch.cat([torch.maximum(part.amax(1), part.amin(1).neg_()) for part in parts])


_REDUCE = {2.0: _NORMS, math.inf: _largest, None: partial(torch.sum, dim=1)}


def _lerped(tensor: Tensor, lerp: Lerp, i: int) -> Iterator[Tensor]:
    """The blocks of a long tensor, some at a time, which are still in the cache after they have moved."""
    for matrices in zip(*map(_blocks_of, (tensor, lerp.starts[i], lerp.ends[i])), strict=True):
        for blocks, starts, ends in zip(*(matrix.split(IN_CACHE) for matrix in matrices), strict=True):
            yield torch.lerp(starts, ends, lerp.weights[i], out=blocks)


def in_chunks(
    name: str, tensors: Sequence[Tensor], indices: list[int], block: int, most: int, like: Tensor, scratch: Scratch
) -> list[Chunk]:
    """Chunks of those tensors, of at most ``most`` blocks of ``block`` elements, whose memory is as ``like``."""
    counts = [-(-tensors[i].numel() // block) for i in indices]
    cuts = spans(counts, most)
    memory = scratch.memory(name, max((sum(counts[cut]) for cut in cuts), default=0) * block, like)
    return [Chunk(indices[cut], *in_blocks(memory, [tensors[i] for i in indices[cut]], block)) for cut in cuts]


def in_blocks(memory: Tensor, tensors: Sequence[Tensor], block: int) -> tuple[list[Tensor], Tensor]:
    """Parts of a vector in the shape of each tensor, which fill whole blocks; and all blocks as a matrix."""
    counts = [-(-tensor.numel() // block) for tensor in tensors]
    used = memory.narrow(0, 0, sum(counts) * block)
    pairs = zip(used.split([count * block for count in counts]), tensors, strict=True)
    return [part.narrow(0, 0, tensor.numel()).view(tensor.shape) for part, tensor in pairs], used.view(-1, block)


def _blocks_of(tensor: Tensor) -> list[Tensor]:
    """The elements of one tensor as a matrix with one block in each row, and the remaining ones in a shorter row."""
    flat = foreach.flat(tensor)
    count = flat.numel()
    even = count - count % BLOCK
    if not even:
        return [flat.view(1, -1)]
    if even == count:
        return [flat.view(-1, BLOCK)]  # a slice of all would take twice as long
    return [flat[:even].view(-1, BLOCK), flat[even:].view(1, -1)]
