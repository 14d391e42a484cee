"""Arithmetic on the numbers of a record: vectors of float64 on the CPU."""

import torch
from torch import Tensor


def quantile(values: Tensor, share: float) -> float:
    """The value that this share of at least one value does not exceed, linear between neighbors.

    Unlike `torch.quantile`, it has no upper limit for the number of values.
    """
    ordered = values.sort().values
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return float(torch.lerp(ordered[below], ordered[above], place - below))


def median_of(values: Tensor) -> float:
    """The median; the mean of the middle two for an even count."""
    return quantile(values, 0.5)


def joined_norms(norms: Tensor) -> Tensor:
    """The joint norm of each row of norms, where -1 means no gradient; NaN if a row has no gradient."""
    absent = norms < 0
    present = torch.where(absent, 0.0, norms)
    largest = present.amax(dim=-1, keepdim=True) if norms.shape[-1] else norms.new_zeros((*norms.shape[:-1], 1))
    scale = torch.where(largest.isfinite() & (largest > 0), largest, 1.0)
    joint = scale.squeeze(-1) * (present / scale).square().sum(dim=-1).sqrt()
    return torch.where(absent.all(dim=-1), torch.nan, joint)


def medians(norms: Tensor) -> Tensor:
    """The median of the finite numbers >= 0 in each column; NaN for a column without such numbers."""
    if not len(norms):
        return norms.new_full((norms.shape[1],), torch.nan)
    usable = norms.isfinite() & (norms >= 0)
    ordered = torch.where(usable, norms, torch.inf).sort(dim=0).values
    counts = usable.sum(dim=0)
    last = (counts - 1).clamp(min=0)
    pair = ordered.gather(0, torch.stack([last // 2, (last + 1) // 2]))
    return torch.where(counts > 0, pair[0] + (pair[1] - pair[0]) / 2, torch.nan)
