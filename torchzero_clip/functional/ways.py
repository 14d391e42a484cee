"""The decisions about norms: what may be read, in which way tensors are measured, and in which dtype sums are added up.

Reading a number of a GPU synchronizes with it, and breaks a graph of `torch.compile`.
"""

from collections.abc import Sequence
from operator import attrgetter
from typing import Literal

import torch
from torch import Tensor

from torchzero_clip.functional.dtypes import is_narrow, widest_of
from torchzero_clip.functional.foreach import MAX32, TINY32, WIDE, wide_dtype

BLOCK = 1024
"""Neighbours whose powers are added up in float32. Sums of blocks are added up in float64, because a plain float32 sum
of 16M elements is off by 6e-4."""

SMALLEST, LARGEST = 1e-12, 1e30
"""Outside of these, squares in float32 may underflow or overflow: such norms are taken again, in the way of slices."""

_IS_CPU = attrgetter("is_cpu")


def way_of(tensors: Sequence[Tensor], p: float) -> Literal["blocks", "lists", "slices"]:
    """How the L2 norms or largest magnitudes of tensors with a `foreach.kind` are taken, see `norms.py`."""
    dtype = tensors[0].dtype
    if tensors[0].is_cpu and may_look(tensors[0]):
        return "blocks" if dtype in WIDE else "slices"
    # squares may leave the range of the widest dtype
    return "slices" if p == 2 and (dtype == torch.float64 or is_narrow(tensors[0])) else "lists"


def power_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which powers are added up: float64, but on CPU in eager mode it takes ten times as long."""
    return wide_dtype(x.dtype) if x.is_cpu and may_look(x) else widest_of(x)


def sum_dtype(x: Tensor) -> torch.dtype:
    """The dtype of sums of elements."""
    return widest_of(x).to_complex() if x.is_complex() else widest_of(x)


def may_look(*tensors: Tensor) -> bool:
    """True if values can be read at no cost. Otherwise reading would synchronize with the GPU, or break a graph."""
    return not torch.compiler.is_compiling() and all(map(_IS_CPU, tensors))


def extent(vector: Tensor) -> tuple[float, float]:
    """The extremes, the smallest and the largest number: NaN if one is NaN, and 1 for an empty vector."""
    count = vector.numel()
    if count > 1 and vector.stride(0):
        smallest, largest = vector.aminmax()
        return smallest.item(), largest.item()
    if not count:
        return 1.0, 1.0
    # an expanded number is read once, without a pass over its copies
    number = (vector if count == 1 else vector.select(0, 0)).item()
    return number, number


def all_ones(factors: Tensor) -> bool:
    """True if all factors are 1. Always False on a GPU, where reading would synchronize, and under compile."""
    return may_look(factors) and extent(factors) == (1.0, 1.0)


def beyond_float32(factors: Tensor, extremes: tuple[float, float] | None = None) -> bool:
    """True if float32 cannot hold some factor. Always True on CUDA and under compile, where reading would wait."""
    if extremes is None and not may_look(factors):
        return True
    smallest, largest = extent(factors) if extremes is None else extremes
    # a factor of 0 is exact in float32, so the smallest positive one has to be found
    if smallest <= 0:
        return largest > MAX32 or bool(((factors > 0) & (factors < TINY32)).any())
    return smallest < TINY32 or largest > MAX32
