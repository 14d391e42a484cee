"""Measure lists of tensors, slice by slice or joined, and scale what was measured."""

import operator
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from torchzero_clip.checks import boolean, count, dims
from torchzero_clip.functional import foreach
from torchzero_clip.functional.metric import Metric, parse_ord
from torchzero_clip.functional.norms import (
    all_ones,
    beyond_float32,
    joint_metric,
    means_over_ranks,
    p_norms,
    slice_metrics,
    total_norm,
)
from torchzero_clip.functional.shards import Part, all_reduce, memory, pack, part, summed, whole
from torchzero_clip.functional.stretches import stretches
from torchzero_clip.types import Dim, Ord

S = TypeVar("S")


class Slicing(NamedTuple):
    """How a transform cuts each tensor: the arguments ``ord``, ``dim``, ``inverse_dims`` and ``min_size``."""

    metric: Metric
    dim: Dim = None
    inverse_dims: bool = False
    min_size: int = 1

    @classmethod
    def checked(cls, ord: Ord, dim: Dim, inverse_dims: bool, min_size: int) -> "Slicing":
        """From arguments of a user, which may be wrong."""
        dims("dim", dim)
        boolean("inverse_dims", inverse_dims)
        count("min_size", min_size)
        return cls(parse_ord(ord), dim, inverse_dims, min_size)

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
    norms: Tensor | None = None
    """A p-norm (p > 0) of every whole tensor, where measuring took one: inf, NaN and 0 tell what the tensor holds."""


class Scaled(NamedTuple):
    """What a scaling did, as 0-d tensors."""

    factor: Tensor
    """The mean factor over all slices, 1 if there were none."""
    changed: Tensor
    """The share of slices whose factor was not 1."""


def cut(tensors: Sequence[Tensor], slicing: Slicing) -> tuple[list[int], list[Part]]:
    """The slices of those tensors that are not to be left alone, and which tensors these are."""
    smallest = max(slicing.min_size, slicing.metric.min_size, 1)
    indices: list[int] = []
    parts: list[Part] = []
    for i, tensor in enumerate(tensors):
        dims = slicing.reduced_dims(tensor)
        p = part(summed(tensor), dims)
        if dims and p.size >= smallest:
            indices.append(i)
            parts.append(p)
    return indices, parts


def measure(tensors: Sequence[Tensor], slicing: Slicing) -> Measured:
    """Measure every slice; changes nothing."""
    metric = slicing.metric
    if slicing.dim == "global":
        return _measure_jointly(tensors, metric)
    indices, parts = cut(tensors, slicing)
    targets = [memory(tensors[i]) for i in indices]
    if not metric.is_power:
        total = joint_metric([whole(tensor) for tensor in tensors], metric) ** metric.degree
        return Measured(metric, indices, targets, parts, slice_metrics(parts, metric), total)

    values = p_norms(parts, metric.p)
    kept = set(indices)
    rest = [whole(tensor) for i, tensor in enumerate(tensors) if i not in kept]
    left_alone = p_norms([p for p in rest if p.size], metric.p)
    total = metric.of_norm(total_norm(parts, values, left_alone, metric.p), sum(t.numel() for t in tensors))
    tells = metric.p > 0 and not rest and all(value.numel() == 1 for value in values)
    roots = [metric.of_norm(value, p.size) for value, p in zip(values, parts, strict=True)]
    return Measured(metric, indices, targets, parts, roots, total, pack(values) if tells else None)


def _measure_jointly(tensors: Sequence[Tensor], metric: Metric) -> Measured:
    parts = [whole(tensor) for tensor in tensors]
    indices = [i for i, p in enumerate(parts) if p.size]
    kept = [parts[i] for i in indices]
    norms = pack(p_norms(kept, metric.p)) if metric.is_power else None
    root = joint_metric(kept, metric, norms)
    roots = [root.to(p.tensor.device).expand(p.slice_shape) for p in kept]
    targets = [memory(tensors[i]) for i in indices]
    tells = metric.p > 0 and len(kept) == len(parts)
    return Measured(metric, indices, targets, kept, roots, root**metric.degree, norms if tells else None)


def factors(measured: Measured, settings: Sequence[S], rule: Callable[[Tensor, S], Tensor]) -> Tensor:
    """One factor per slice: the rule's, from the roots of the slices and the setting of their tensor.

    Args:
        measured: The slices, as `measure` found them.
        settings: For each tensor (not part) what the rule needs to know; neighbours that are equal are taken together.
        rule: From a vector of roots and a setting to a vector of factors.
    """
    own = [settings[i] for i in measured.indices]
    runs = [rule(pack(measured.roots[run]), own[run.start]) for run in stretches(own, operator.eq)]
    return torch.cat(runs) if runs else pack([])


def scale_(measured: Measured, factors: Tensor) -> Scaled:
    """Multiply every slice by its factor, in place."""
    if not measured.parts:
        return Scaled(torch.ones_like(measured.total), torch.zeros_like(measured.total))
    counts = [root.numel() for root in measured.roots]
    if not all_ones(factors):
        rows = zip(factors.split(counts), measured.roots, strict=True)
        shaped = [factor.view(root.shape) for factor, root in rows]
        foreach.scale_(measured.targets, shaped, exact=beyond_float32(factors))

    # what was lost, so that no slices at all mean a factor of 1
    lost, changed = means_over_ranks(measured.parts, counts, [1 - factors, (factors != 1).double()])
    return Scaled(1 - lost, changed)


def summary(measured: Measured, scaled: Scaled) -> dict[str, Tensor]:
    """What a transform reports: the joint metric before, the mean factor, and the share of slices that changed."""
    return {"norm": measured.total, "factor": scaled.factor, "clipped": scaled.changed}


def share(tensors: Sequence[Tensor], counts: Sequence[Tensor]) -> Tensor:
    """The share of elements that were counted, over all tensors: a 0-d tensor, equal on every rank.

    Args:
        tensors: The tensors; a complex number has two elements.
        counts: How many elements of the local part of each were counted.
    """
    parts = [whole(tensor) for tensor in tensors]
    elements = sum(p.size * (2 if p.tensor.is_complex() else 1) for p in parts)
    return pack(all_reduce(parts, list(counts), ReduceOp.SUM)).sum() / max(elements, 1)
