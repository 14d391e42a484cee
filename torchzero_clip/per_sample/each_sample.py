"""Runs a function for each sample, and compares its outputs with those of the batch."""

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from torchzero_clip.functional.dtypes import widened


def by_vmap(function: Callable[..., Any], *tensors: Any, attends: bool = True, randomness: str = "different") -> Any:
    """The output of a function, which may have attention, for all samples. Each draws its own random numbers."""
    # vmap runs the other backends in a loop; to choose one takes 11 microseconds
    with warnings.catch_warnings(), sdpa_kernel(SDPBackend.MATH) if attends else nullcontext():
        warnings.filterwarnings("ignore", "There is a performance drop")
        return torch.vmap(function, randomness=randomness)(*tensors)


def are_equal(together: Tensor, alone: Tensor) -> bool:
    """True if outputs of the batch and of its samples are equal up to rounding."""
    tolerance = torch.finfo(together.dtype).eps ** 0.5 if together.is_floating_point() else 0
    return not differ(widened(together), widened(alone.detach()), tolerance)


def differ(together: Tensor, alone: Tensor, tolerance: float) -> bool:
    """True if two tensors of one shape differ by more than a tolerance, relative to the largest magnitude.

    Equal values at the ends of the range, such as -1e9 in masks, do not count as magnitudes.
    """
    apart = ~together.isclose(alone, rtol=0, atol=1e-12, equal_nan=True)
    if not apart.any():
        return False
    apart |= (together > together.min()) & (together < together.max())
    scale = together[apart].nan_to_num(0, 0, 0).abs().max()
    return not bool(((together - alone)[apart].abs() <= tolerance * scale).all())
