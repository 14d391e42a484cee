"""Ring buffers: the last values of a number, in a vector."""

import torch
from torch import Tensor


def written(ring: Tensor, count: Tensor, value: Tensor, where: Tensor) -> Tensor:
    """The last values, with one more in place of the oldest one if ``where`` is true; ``count`` were written before."""
    places = torch.arange(len(ring), device=ring.device)
    return torch.where((places == count % len(ring)) & where, value, ring)


def filled(ring: Tensor, count: Tensor) -> Tensor:
    """A ring buffer with NaN in places that were not written yet, which `Tensor.nanquantile` leaves out."""
    return torch.where(torch.arange(len(ring), device=ring.device) < count, ring, torch.nan)
