"""Arithmetic on the numbers of a record: vectors of float64 on the CPU."""

from collections.abc import Sequence

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
    return medians_before(norms, [len(norms)])[0]


def medians_before(norms: Tensor, rows: Sequence[int]) -> Tensor:
    """For each of these rows, the median of each column over the rows before it, as in `medians`."""
    found = norms.new_full((len(rows), norms.shape[1]), torch.nan)
    if not len(norms):
        return found
    usable = norms.isfinite() & (norms >= 0)
    ordered, places = torch.where(usable, norms, torch.inf).T.contiguous().sort(dim=1)
    places = torch.where(ordered.isfinite(), places, len(norms))
    for median, row in zip(found, rows, strict=True):
        counts = (places < row).cumsum(dim=1)  # the k-th number before the row is where the count becomes k
        count = counts[:, -1:]
        middle = torch.searchsorted(counts, torch.cat([(count + 1) // 2, count // 2 + 1], dim=1))
        low, high = ordered.gather(1, middle.clamp(max=len(norms) - 1)).unbind(dim=1)
        median.copy_(torch.where(count[:, 0] > 0, low + (high - low) / 2, torch.nan))
    return found
