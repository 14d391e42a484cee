"""Multiplies short tensors by one factor each, in few launches, with memory in which each tensor fills whole blocks.

On devices other than the CPU, torch's operations on lists of tensors take one launch for each tensor if the second
argument is a list of numbers. They take few launches if it is a list of tensors of the same shapes. So factors are
first spread over blocks. Tensors of half precision are copied to blocks instead, and multiplied there in float32.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from torchzero_clip.functional import foreach
from torchzero_clip.functional.blocks import SHORT, Chunk, in_chunks
from torchzero_clip.functional.scratch import Scratch

FACTOR_BLOCK = 256
"""Elements of a block. Shorter ones need more numbers, and longer ones leave more of their last block unused."""

_MOST = 2**24  # elements of all blocks together, 64 MiB of float32


def multiply_short_(
    tensors: Sequence[Tensor], factors: Tensor, scratch: Scratch, most: int, *, owner: int | str = 0
) -> list[int]:
    """Multiply each tensor of at most ``most`` elements by its factor, in place. Return the indices of the others.

    They are plain tensors of one dtype on one device. ``owner`` is the row of the first one, or another name of them:
    other tensors of the same step have another plan in ``scratch``.
    """
    tensors = [tensor if tensor.ndim else tensor.view(1) for tensor in tensors]
    wide = foreach.wide_dtype(tensors[0].dtype)
    factors = foreach.as_factors(factors, wide)
    plan = scratch.plan(f"short {wide} {owner}", tensors, lambda: _planned(tensors, factors, scratch, most), most)
    for chunk, places in plan:
        spread = factors.index_select(0, places).unsqueeze(1)
        short = [tensors[i] for i in chunk.indices]
        if tensors[0].dtype == wide:
            foreach.copy_plain_([chunk.blocks], [spread.expand_as(chunk.blocks)])
            foreach.multiply_plain_(short, chunk.views)
        else:  # multiplied in float32, so that only the product is rounded
            foreach.copy_plain_(chunk.views, short)
            chunk.blocks.mul_(spread)
            foreach.copy_plain_(short, chunk.views)
    return [i for i, tensor in enumerate(tensors) if tensor.numel() > most]


def multiply_any_length_(tensors: Sequence[Tensor], factors: Tensor, scratch: Scratch, *, owner: int | str = 0) -> None:
    """Multiply each tensor by its factor, in place, with the arguments of `multiply_short_`."""
    for i in multiply_short_(tensors, factors, scratch, SHORT, owner=owner):
        foreach.multiply_each_([tensors[i]], factors.narrow(0, i, 1))


def _planned(tensors: Sequence[Tensor], like: Tensor, scratch: Scratch, most: int) -> list[tuple[Chunk, Tensor]]:
    """Chunks of the short tensors, each with the index of the tensor that a block belongs to."""
    short = [i for i, tensor in enumerate(tensors) if 0 < tensor.numel() <= most]
    chunks = in_chunks("short", tensors, short, FACTOR_BLOCK, _MOST // FACTOR_BLOCK, like, scratch)
    owners = [[i for i in chunk.indices for _ in range(0, tensors[i].numel(), FACTOR_BLOCK)] for chunk in chunks]
    return [(chunk, torch.tensor(owner, device=like.device)) for chunk, owner in zip(chunks, owners, strict=True)]
