"""The two decisions about norms: in which way tensors are measured, and in which dtype their powers are added up."""

from collections.abc import Sequence
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from torchzero_clip.functional import foreach
from torchzero_clip.functional.reading import may_look

Way: TypeAlias = Literal["blocks", "lists", "slices"]  # the file of `functional` in which it stands

BLOCK = 1024
"""Neighbours whose powers are added up in float32. Sums of blocks are added up in float64, because a plain float32 sum
of 16M elements is off by 6e-4."""

SMALLEST, LARGEST = 1e-12, 1e30
"""Outside of these, squares in float32 may underflow or overflow: such norms are taken again, in the way of slices."""

SQUARABLE = 1e150  # the square of a larger norm, or a sum of such squares, may be infinite


def way_of(tensors: Sequence[Tensor], p: float, *, plain: bool) -> Way:
    """How the L2 norms or largest magnitudes of tensors are taken. ``plain``: they have a `foreach.kind`."""
    if not plain:
        return "slices"
    first = tensors[0]
    if may_look(first):
        return "blocks" if foreach.is_real_and_wide(first.dtype) else "slices"
    # the squares of float64 may leave its range
    return "slices" if first.dtype == torch.float64 and p == 2 else "lists"


def accumulation_dtype(x: Tensor) -> torch.dtype:
    """Float64 everywhere but in eager mode on CPU, where it costs ten times as much as float32."""
    return foreach.wide_dtype(x.dtype) if may_look(x) else torch.float64
