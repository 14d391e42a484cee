"""Sums, means and standard deviations of slices and of tensors joined, in float64, alike on all ranks.

Each metric is computed as its *root*, which scales with the tensor (for ``'var'`` the standard deviation), so that one
rule serves all metrics: the factor is ``limit_root / root``.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp

from torchzero_clip.functional import blocks, foreach
from torchzero_clip.functional.dtypes import is_narrow, moved, widened
from torchzero_clip.functional.metric import Metric
from torchzero_clip.functional.processes import device_of, gathered
from torchzero_clip.functional.scratch import Scratch
from torchzero_clip.functional.shards import Part, all_reduce, pack, wholes
from torchzero_clip.functional.slices import enlarged, joint_of_norms, norms_of_slices
from torchzero_clip.functional.ways import sum_dtype, way_of


class Moments(NamedTuple):
    """The variance and the mean of every slice, one tensor per part; the variance of a single element is 0."""

    variances: list[Tensor]
    means: list[Tensor]


def moments_of_slices(parts: Sequence[Part], metric: Metric) -> Moments | None:
    """The moments of slices; None if ``metric`` does not need them, or if they cannot be taken directly in float64."""
    here = all(p.tensor.numel() and not (p.groups or p.spread) for p in parts)
    # the squares of float64 may overflow; those of float32, at most 1e77, do not
    have_room = all(
        not (p.tensor.is_complex() or p.tensor.dtype == torch.float64 or is_narrow(p.tensor)) for p in parts
    )
    if not parts or metric.kind not in ("std", "var") or not (here and have_room):
        return None
    pairs = [torch.var_mean(widened(p.tensor), p.dims, correction=min(p.size - 1, 1), keepdim=True) for p in parts]
    return Moments([variance for variance, _ in pairs], [mean for _, mean in pairs])


def metrics_of_slices(parts: Sequence[Part], metric: Metric, moments: Moments | None = None) -> list[Tensor]:
    """The root of the metric of every slice: one tensor per part, of the part's ``slice_shape``."""
    if metric.is_power:
        return [metric.of_norm(value, p.size) for value, p in zip(norms_of_slices(parts, metric.p), parts, strict=True)]
    moments = moments or moments_of_slices(parts, metric)
    if moments is not None:
        return foreach.square_roots(moments.variances)
    if any(is_narrow(p.tensor) for p in parts):
        rooms = [_room(p.size) if is_narrow(p.tensor) else 1.0 for p in parts]
        return list(map(enlarged, _sums_or_deviations(_divided(parts, rooms), metric), rooms))
    return _sums_or_deviations(parts, metric)


def _sums_or_deviations(parts: Sequence[Part], metric: Metric) -> list[Tensor]:
    """The magnitude of the sum, or the standard deviation, of every slice; their values have room for a sum."""
    sums = sums_of_slices(parts)
    if metric.kind == "sum":
        return [value.abs() for value in sums]
    means = [value / p.size for value, p in zip(sums, parts, strict=True)]
    spreads = norms_of_slices(_deviations(parts, means), 2.0)
    columns = zip(spreads, means, parts, strict=True)
    return [_deviation(spread, mean, p.size) for spread, mean, p in columns]


def joint_moments(parts: Sequence[Part], metric: Metric, moments: Moments | None = None) -> Tensor:
    """The numbers from which `root_of_moments` finds the metric, no power, of whole tensors as one vector.

    For 'sum' they are the real and the imaginary part of the sum. For 'std' and 'var' they are the number of elements,
    the real and the imaginary part of the mean, and the root of the mean square of the deviations from it, which is
    finite for finite elements.
    """
    moments = moments or moments_of_slices(parts, metric)
    if moments is not None:
        count, mean, spread = _joined_moments(parts, moments)
        return torch.cat([torch.full_like(spread, count).view(1), _as_reals(mean), spread.view(1) / math.sqrt(count)])
    count, room = sum(p.size for p in parts), _joint_room(parts)
    parts = _divided(parts, [room] * len(parts))
    total = joint_sum(parts)
    if metric.kind == "sum":
        return _as_reals(enlarged(total, room))
    mean = total / max(count, 1)
    spreads = norms_of_slices(_deviations(parts, [moved(mean, p.tensor.device) for p in parts]), 2.0)
    spread = moved(joint_of_norms(pack(spreads), 2.0), mean.device).view(1) / math.sqrt(max(count, 1))
    return torch.cat([torch.full_like(spread, count), _as_reals(enlarged(mean, room)), enlarged(spread, room)])


def root_of_moments(metric: Metric, rows: Tensor) -> Tensor:
    """The root of a metric, 0-d, from a matrix with `joint_moments` of other tensors in each row."""
    if metric.kind == "sum":
        return torch.hypot(*rows.sum(dim=0).unbind())
    count, *mean, spread = rows.unbind(dim=1)
    if len(rows) > 1:
        # the spread of all is that of each and the distance of its mean from the joint mean, by the shares of elements
        total = count.sum().view(1)
        joint = [(count * x).sum().view(1) / total.clamp(min=1) for x in mean]
        apart = torch.hypot(*(x - y for x, y in zip(mean, joint, strict=True)))
        shares = (count / total.clamp(min=1)).sqrt()
        count, mean = total, joint
        spread = joint_of_norms(torch.cat([spread * shares, apart * shares]), 2.0).view(1)
    least = torch.hypot(*mean) * _rounding(spread)
    return (torch.where(spread <= least, 0.0, spread) * (count / (count - 1).clamp(min=1)).sqrt()).squeeze(0)


def _as_reals(value: Tensor) -> Tensor:
    """A 0-d number as a vector of its real and its imaginary part."""
    return torch.view_as_real(value) if value.is_complex() else torch.stack([value, torch.zeros_like(value)])


def sums_of_slices(parts: Sequence[Part]) -> list[Tensor]:
    """The signed sum of every slice, float64 or complex128."""
    sums = [part.tensor.sum(part.dims, keepdim=True, dtype=sum_dtype(part.tensor)) for part in parts]
    return all_reduce(parts, sums, ReduceOp.SUM)


def joint_sum(parts: Sequence[Part]) -> Tensor:
    """The signed sum of all elements of whole tensors: a 0-d tensor on the device of the first."""
    sums = sums_of_slices(parts)
    if not sums:
        return torch.zeros((), dtype=torch.float64, device="cpu")
    return torch.cat([moved(value.view(1), sums[0].device) for value in sums]).sum()


def means_of_slices(parts: Sequence[Part]) -> list[Tensor]:
    """The mean of every slice, finite for finite values, also of float32 ones whose sum is not."""
    rooms = [_room(p.size) if is_narrow(p.tensor) else 1.0 for p in parts]
    sums = sums_of_slices(_divided(parts, rooms))
    return [enlarged(total / p.size, room) for total, p, room in zip(sums, parts, rooms, strict=True)]


def joint_mean(parts: Sequence[Part], group: ProcessGroup | None = None) -> Tensor:
    """The mean of all elements of whole tensors, also of those that the other processes of a group hold: 0-d."""
    count, room = sum(p.size for p in parts), _joint_room(parts)
    mean = joint_sum(_divided(parts, [room] * len(parts))) / max(count, 1)
    if group is not None:
        here = moved(mean, device_of([p.tensor for p in parts], group))
        numbers = _as_reals(here)
        *columns, counts = gathered(torch.cat([numbers, torch.full_like(numbers[:1], count)]), group).unbind(dim=1)
        shares = counts / counts.sum().clamp(min=1)
        real, imaginary = ((column * shares).sum() for column in columns)
        mean = torch.complex(real, imaginary) if mean.is_complex() else real
    return enlarged(mean, room)


def means_of_each(tensors: Sequence[Tensor], counts: Tensor, scratch: Scratch) -> Tensor:
    """The mean of each of some plain real tensors of one dtype on one device: a vector. ``counts`` are their sizes."""
    # as by sums_of_slices up to the rounding of sums of up to 1024 elements to the dtype
    if way_of(tensors, 2.0) != "blocks":
        parts = wholes(tensors)
        return pack(means_of_slices(parts)) if is_narrow(tensors[0]) else pack(sums_of_slices(parts)) / counts
    sums = blocks.sums_of_each(tensors, scratch)
    odd = sums.isfinite().logical_not_()
    if bool(odd.any()):
        indices = odd.nonzero().flatten()
        sums[indices] = pack(sums_of_slices(wholes([tensors[i] for i in indices.tolist()])))
    return sums / counts


def _room(count: int) -> float:
    """The smallest power of two of at least ``count``. So many numbers, divided by it, have a finite sum."""
    return 2.0 ** max(count - 1, 0).bit_length()


def _joint_room(parts: Sequence[Part]) -> float:
    """A power of two. Divided by it, all values together have a finite sum in float32. It is 1 if they have float64."""
    return _room(sum(p.size for p in parts)) if any(is_narrow(p.tensor) for p in parts) else 1.0


def _divided(parts: Sequence[Part], rooms: Sequence[float]) -> list[Part]:
    """The values of parts divided by powers of two, which is exact but below 2**-126."""
    pairs = zip(parts, rooms, strict=True)
    return [p._replace(tensor=p.tensor.to(sum_dtype(p.tensor)) / room) if room > 1 else p for p, room in pairs]


def _joined_moments(parts: Sequence[Part], moments: Moments) -> tuple[int, Tensor, Tensor]:
    """The count, the mean, and the norm of the deviations of all slices together, from the moments of each."""
    sizes = [p.size for p in parts]
    count = sum(p.size * p.slice_count for p in parts)
    mean = pack(foreach.times(moments.means, sizes)).sum() / count
    between = (pack(moments.means) - mean).square_().split([p.slice_count for p in parts])
    squares = [*foreach.times(moments.variances, [size - 1 for size in sizes]), *foreach.times(between, sizes)]
    return count, mean, pack(squares).sum().sqrt()


def _deviations(parts: Sequence[Part], means: Sequence[Tensor]) -> list[Part]:
    pairs = zip(parts, means, strict=True)
    return [part._replace(tensor=part.tensor.to(sum_dtype(part.tensor)) - mean) for part, mean in pairs]


def _deviation(spread: Tensor, mean: Tensor, count: int) -> Tensor:
    """The standard deviation from the norm of the deviations; 0 where they are only the rounding of the mean."""
    least = mean.abs() * (math.sqrt(count) * _rounding(spread))
    return torch.where(spread <= least, 0.0, spread) / math.sqrt(max(count - 1, 1))


def _rounding(spread: Tensor) -> float:
    """The error of a mean over itself, which is all that the elements of a constant tensor differ by."""
    return 1e-15 if spread.dtype == torch.float64 else 4 * torch.finfo(spread.dtype).eps
