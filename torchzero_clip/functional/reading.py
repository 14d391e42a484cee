"""What may be read of values, because reading waits for a device and breaks a graph; and what is read of factors."""

import torch
from torch import Tensor

from torchzero_clip.functional.foreach import MAX32, TINY32


def may_look(*tensors: Tensor) -> bool:
    """True if values can be read at no cost. Otherwise reading would wait for the device, or break a graph."""
    return all(tensor.is_cpu for tensor in tensors) and not torch.compiler.is_compiling()


def extent(vector: Tensor) -> tuple[float, float]:
    """The smallest and the largest number: NaN if one is NaN, and 1 for an empty vector."""
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
    """True if all factors are 1. Always False on CUDA and under compile, where reading would wait for the device."""
    return may_look(factors) and extent(factors) == (1.0, 1.0)


def beyond_float32(factors: Tensor, known: tuple[float, float] | None = None) -> bool:
    """True if float32 cannot hold some factor. Always True on CUDA and under compile, where reading would wait."""
    if known is None and not may_look(factors):
        return True
    smallest, largest = extent(factors) if known is None else known
    # a factor of 0 is exact in float32, so the smallest positive one has to be found
    if smallest <= 0:
        return largest > MAX32 or bool(((factors > 0) & (factors < TINY32)).any())
    return smallest < TINY32 or largest > MAX32
