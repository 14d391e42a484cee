"""Multiplies short tensors by one factor each, in few launches, with memory in rows of elements.

On devices other than the CPU, torch's operations on lists of tensors take one launch for each tensor if the second
argument is a list of numbers. They take few launches if it is a list of tensors of the same shapes. So factors
are first spread over rows. Tensors of half precision are copied to rows instead, and multiplied there in float32.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from torchzero_clip.functional import foreach
from torchzero_clip.functional.blocks import SHORT, Chunk, in_chunks
from torchzero_clip.functional.scratch import Scratch

ROW = 256
"""Elements of a row. Shorter rows need more numbers, and longer ones leave more of their last row unused."""

MOST = 2**24  # elements of all rows together, 64 MiB of float32


def multiply_short_(
    tensors: Sequence[Tensor], factors: Tensor, scratch: Scratch, most: int, *, name: str = ""
) -> list[int]:
    """Multiply each tensor of at most ``most`` elements by its factor, in place. Return the indices of the others."""
    # plain tensors of one dtype on one device; other tensors of the same step need another name for their plan
    tensors = [tensor if tensor.ndim else tensor.view(1) for tensor in tensors]
    wide = foreach.wide_dtype(tensors[0].dtype)
    own = foreach.as_factors(factors, wide)
    indices, chunks = scratch.plan(f"rows {wide} {name}", tensors, lambda: _planned(tensors, own, scratch, most), most)
    short = [tensors[i] for i in indices]
    for chunk, owner in chunks:
        spread = own.index_select(0, owner).unsqueeze(1)
        given = short[chunk.own]
        if tensors[0].dtype == wide:
            foreach.copy_plain_([chunk.rows], [spread.expand_as(chunk.rows)])
            foreach.multiply_plain_(given, chunk.views)
        else:  # multiplied in float32, so that only the product is rounded
            foreach.copy_plain_(chunk.views, given)
            chunk.rows.mul_(spread)
            foreach.copy_plain_(given, chunk.views)
    return [i for i, tensor in enumerate(tensors) if tensor.numel() > most]


def multiply_each_(tensors: Sequence[Tensor], factors: Tensor, scratch: Scratch, *, name: str = "") -> None:
    """Multiply each tensor by its factor, in place, with the arguments of `multiply_short_`."""
    for i in multiply_short_(tensors, factors, scratch, SHORT, name=name):
        foreach.multiply_each_([tensors[i]], factors.narrow(0, i, 1))


def _planned(
    tensors: Sequence[Tensor], like: Tensor, scratch: Scratch, most: int
) -> tuple[list[int], list[tuple[Chunk, Tensor]]]:
    """The indices of short tensors, and chunks of them, each with the index of the tensor that a row belongs to."""
    short = [i for i, tensor in enumerate(tensors) if 0 < tensor.numel() <= most]
    chunks = in_chunks("rows", [tensors[i] for i in short], ROW, MOST // ROW, like, scratch)
    return short, [(chunk, _owner(short[chunk.own], tensors).to(like.device)) for chunk in chunks]


def _owner(indices: list[int], tensors: Sequence[Tensor]) -> Tensor:
    counts = [-(-tensors[i].numel() // ROW) for i in indices]
    places, repeats = (torch.tensor(column, device="cpu") for column in (indices, counts))
    return torch.repeat_interleave(places, repeats, output_size=sum(counts))
