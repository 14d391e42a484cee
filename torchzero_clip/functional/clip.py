"""Clip, normalize and centralize lists of tensors: what the transforms and the in-place functions share."""

import math
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from torchzero_clip.functional import foreach
from torchzero_clip.functional.foreach import reals_of
from torchzero_clip.functional.measure import Measured, Scaled, Slicing, cut, factors, scale_, share
from torchzero_clip.functional.metric import Metric
from torchzero_clip.functional.norms import all_ones, beyond_float32, joint_sum, slice_sums
from torchzero_clip.functional.shards import whole

TINY = 1e-12  # normalizing leaves slices of this size and less alone: what remains of them is noise


def clip_(measured: Measured, limits: Sequence[float], floors: Sequence[float] | None = None) -> Scaled:
    """Scale every slice into the limits of its tensor, in place.

    Args:
        measured: The slices, as `measure` found them.
        limits: For each tensor (not part) the largest metric allowed.
        floors: For each tensor the smallest metric of a slice that is not zero; None for no floor.
    """
    bounds = list(zip(limits, floors or [0.0] * len(limits), strict=True))
    return scale_(measured, factors(measured, bounds, partial(_clip_rule, measured.metric)))


def clip_by_(tensors: Sequence[Tensor], limit: float, norm: Tensor) -> None:
    """Scale all tensors by the factor that brings ``norm``, a 0-d tensor, to at most ``limit``, in place."""
    factor = _clip_rule(Metric("norm"), norm.double(), (limit, 0.0))
    if not all_ones(factor):
        foreach.scale_(tensors, [factor] * len(tensors), exact=beyond_float32(factor))


def normalize_(measured: Measured, values: Sequence[float]) -> Scaled:
    """Scale every slice to the metric that its tensor is to have, in place; those of (almost) 0 stay as they are."""
    return scale_(measured, factors(measured, values, partial(_normalize_rule, measured.metric)))


def centralize_(tensors: Sequence[Tensor], slicing: Slicing) -> None:
    """Subtract from every slice its mean, in place; a scalar has no slices.

    None of the tensors may hold pending sums, from each of which the mean would be subtracted.
    """
    if slicing.dim == "global":
        parts = [p for p in map(whole, tensors) if p.size]
        mean = joint_sum(parts) / max(sum(p.size for p in parts), 1)
        foreach.subtract_slices_([p.tensor for p in parts], [mean] * len(parts))
        return
    _, parts = cut([tensor for tensor in tensors if tensor.ndim], slicing)
    means = [total / p.size for total, p in zip(slice_sums(parts), parts, strict=True)]
    foreach.subtract_slices_([p.tensor for p in parts], means)


def share_above(tensors: Sequence[Tensor], limits: Sequence[float]) -> Tensor:
    """The share of elements whose magnitude exceeds the limit of their tensor: a 0-d tensor, equal on every rank."""
    pairs = zip(reals_of(tensors), limits, strict=True)
    return share(tensors, [(x > limit).count_nonzero() + (x < -limit).count_nonzero() for x, limit in pairs])


def _clip_rule(metric: Metric, roots: Tensor, bounds: tuple[float, float]) -> Tensor:
    high, low = map(metric.root, bounds)
    if high == math.inf and not low:
        return torch.ones_like(roots)
    factor = torch.where(roots <= high, 1.0, high / roots)
    return torch.where((roots > 0) & (roots < low), low / roots, factor) if low else factor


def _normalize_rule(metric: Metric, roots: Tensor, value: float) -> Tensor:
    return torch.where(roots <= TINY, 1.0, metric.root(value) / roots)
