"""Measure and scale lists of tensors: what `ClipNorm` and `clip_grad_norm_` share."""

import math
import operator
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from torchzero_clip.functional import foreach
from torchzero_clip.functional.metric import Metric
from torchzero_clip.functional.norms import beyond_float32, joint_metric, means_over_ranks, slice_metrics, total_metric
from torchzero_clip.functional.shards import Part, all_reduce, memory, pack, part, summed, whole
from torchzero_clip.functional.stretches import stretches
from torchzero_clip.types import Dim


class Slicing(NamedTuple):
    """How a norm transform cuts each tensor: the arguments ``ord``, ``dim``, ``inverse_dims`` and ``min_size``."""

    metric: Metric
    dim: Dim = None
    inverse_dims: bool = False
    min_size: int = 1

    def reduced_dims(self, tensor: Tensor) -> tuple[int, ...]:
        """The dimensions that a slice of ``tensor`` spans; none if the tensor is to be left alone."""
        ndim = max(tensor.ndim, 1)
        if self.dim is None or isinstance(self.dim, str):
            named = set(range(ndim))
        else:
            listed = (self.dim,) if isinstance(self.dim, int) else self.dim
            named = {d + ndim if d < 0 else d for d in listed} & set(range(ndim))
        return tuple(d for d in range(ndim) if (d in named) != self.inverse_dims)


class Measured(NamedTuple):
    """The slices of a list of tensors and the root of the metric of each."""

    metric: Metric
    indices: list[int]
    """Which tensor each part comes from; tensors that are left alone have no part."""
    targets: list[Tensor]
    """The memory of each part's tensor."""
    parts: list[Part]
    """What was measured: the same memory, or a copy where a distributed tensor held pending sums."""
    roots: list[Tensor]
    total: Tensor
    """The metric of all tensors together, those left alone included; 0-d."""


class Scaled(NamedTuple):
    """What a scaling did, as 0-d tensors."""

    factor: Tensor
    """The mean factor over all slices, 1 if there were none."""
    changed: Tensor
    """The share of slices whose factor was not 1."""


def measure(tensors: Sequence[Tensor], slicing: Slicing) -> Measured:
    """Measure every slice; changes nothing."""
    metric = slicing.metric
    if slicing.dim == "global":
        parts = [whole(tensor) for tensor in tensors]
        root = joint_metric(parts, metric)
        indices = [i for i, p in enumerate(parts) if p.size]
        kept = [parts[i] for i in indices]
        roots = [root.to(p.tensor.device).expand(p.slice_shape) for p in kept]
        targets = [memory(tensors[i]) for i in indices]
        return Measured(metric, indices, targets, kept, roots, root**metric.degree)

    indices: list[int] = []
    targets: list[Tensor] = []
    parts: list[Part] = []
    for i, tensor in enumerate(tensors):
        dims = slicing.reduced_dims(tensor)
        p = part(summed(tensor), dims)
        if dims and p.size >= max(slicing.min_size, metric.min_size, 1):
            indices.append(i)
            targets.append(memory(tensor))
            parts.append(p)
    roots = slice_metrics(parts, metric)
    if metric.kind == "norm":
        kept = set(indices)
        total = total_metric(parts, roots, [t for i, t in enumerate(tensors) if i not in kept], metric.p)
    else:
        total = joint_metric([whole(tensor) for tensor in tensors], metric) ** metric.degree
    return Measured(metric, indices, targets, parts, roots, total)


def clip_(measured: Measured, limits: Sequence[float], floors: Sequence[float] | None = None) -> Scaled:
    """Scale every slice into the limits of its tensor, in place.

    Args:
        measured: The slices, as `measure` found them.
        limits: For each tensor (not part) the largest metric allowed.
        floors: For each tensor the smallest metric of a slice that is not zero; None for no floor.
    """
    if not measured.parts:
        return Scaled(torch.ones_like(measured.total), torch.zeros_like(measured.total))
    bounds = [(limits[i], 0.0 if floors is None else floors[i]) for i in measured.indices]
    runs: list[Tensor] = []
    for run in stretches(bounds, operator.eq):
        high, low = map(measured.metric.root, bounds[run.start])
        runs.append(_clip_factor(pack(measured.roots[run]), high, low))
    factors = torch.cat(runs)
    counts = [root.numel() for root in measured.roots]
    shaped = [f.view(root.shape) for f, root in zip(factors.split(counts), measured.roots, strict=True)]
    foreach.scale_(measured.targets, shaped, exact=beyond_float32(factors))

    # what was lost, so that no slices at all mean a factor of 1
    lost, changed = means_over_ranks(measured.parts, counts, [1 - factors, (factors != 1).double()])
    return Scaled(1 - lost, changed)


def share_above(tensors: Sequence[Tensor], limits: Sequence[float]) -> Tensor:
    """The share of elements whose magnitude exceeds the limit of their tensor: a 0-d tensor, equal on every rank."""
    parts = [whole(tensor) for tensor in tensors]
    pairs = [(p.tensor, limit) for p, limit in zip(parts, limits, strict=True)]
    counts = [(x > limit).count_nonzero() + (x < -limit).count_nonzero() for x, limit in pairs]
    return pack(all_reduce(parts, counts, ReduceOp.SUM)).sum() / max(sum(p.size for p in parts), 1)


def _clip_factor(roots: Tensor, high: float, low: float) -> Tensor:
    if high == math.inf and not low:
        return torch.ones_like(roots)
    factor = torch.where(roots <= high, 1.0, high / roots)
    return torch.where((roots > 0) & (roots < low), low / roots, factor) if low else factor
