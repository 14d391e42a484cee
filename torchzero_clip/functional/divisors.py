"""Factors as the kernels of torch take them: as numbers to divide gradients by."""

import torch
from torch import Tensor

_LARGEST = torch.finfo(torch.float32).max


def inverse(factors: Tensor | float) -> Tensor:
    """The inverse factors, in float32. For a factor of 0 it is inf, so that the quotient is 0."""
    if not isinstance(factors, Tensor) or (factors.is_cpu and not factors.ndim):
        factor = float(factors)
        exact = min(max(1 / factor, -_LARGEST), _LARGEST) if factor else torch.inf
        return torch.tensor(exact, dtype=torch.float32, device="cpu")
    exact = factors.reciprocal()
    return torch.where(factors == 0, exact, exact.clamp(min=-_LARGEST, max=_LARGEST)).float()
