"""Measure lists of tensors, slice by slice or joined, and scale what was measured."""

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
    """The norms of the slices of a list of tensors.

    Tensors that are left alone have no slices. ``indices``, ``norms`` and ``dims`` have one entry for each of the
    other tensors.
    """

    metric: Metric
    """The metric that ``ord`` names."""
    indices: list[int]
    """The index of each tensor that has slices."""
    norms: list[Tensor]
    """The norm of each slice (for 'var' the standard deviation): per tensor a float64 tensor in which the dimensions of
    a slice have size 1. Under FSDP2 they are the slices of which this process holds a part."""
    total: Tensor
    """The metric of all tensors together, those left alone included: 0-d."""
    parts: list[Part]
    """The tensors that were measured: the same memory, or a copy of distributed tensors with partial placements."""
    targets: list[Tensor]
    """The memory of the tensors, to be scaled."""
    tensor_norms: Tensor | None = None
    """The p-norm of each tensor if p > 0 and each is one slice, else None. It is inf or NaN for tensors that are not
    finite, and 0 for tensors of zeros."""

    @property
    def dims(self) -> list[tuple[int, ...]]:
        """The dimensions that one slice of each tensor spans."""
        return [p.dims for p in self.parts]

    def joined(self, values: Sequence[Tensor]) -> Tensor:
        """Concatenate ``values``, which are shaped like ``norms``, into one vector with a number per slice."""
        return pack(values)

    def by_setting(self, settings: Sequence[S], rule: Callable[[Tensor, S], Tensor]) -> Tensor:
        """Apply ``rule`` to the norms of each setting, and concatenate into one vector with a number per slice.

        Args:
            settings: The setting of every tensor, with slices or without; neighbours that share one object are taken
                together.
            rule: From a vector of norms and a setting to a vector of the same length.
        """
        own = [settings[i] for i in self.indices]
        vectors = [rule(pack(self.norms[part]), setting) for setting, part in by_setting(own)]
        return torch.cat(vectors) if vectors else pack([])


class Scaled(NamedTuple):
    """What a scaling did, as 0-d tensors."""

    factor: Tensor
    """The mean factor over all slices, 1 if there were none."""
    changed: Tensor
    """The share of slices whose factor was not 1."""


def by_setting(settings: Sequence[S]) -> list[tuple[S, slice]]:
    """Each setting with the slice of neighbours that share this one object, so that one operation serves them."""
    # a plain loop: `itertools.groupby` breaks the graphs of `torch.compile`
    starts = [i for i, setting in enumerate(settings) if i == 0 or setting is not settings[i - 1]]
    ends = [*starts[1:], len(settings)][: len(starts)]
    return [(settings[a], slice(a, b)) for a, b in zip(starts, ends, strict=True)]


def cut(
    tensors: Sequence[Tensor], slicing: Slicing, dims_of: Callable[[Tensor], tuple[int, ...]] | None = None
) -> tuple[list[int], list[Part]]:
    """The indices of the tensors that have slices, and their parts."""
    smallest = max(slicing.min_size, slicing.metric.min_size, 1)
    indices: list[int] = []
    parts: list[Part] = []
    for i, tensor in enumerate(tensors):
        dims = slicing.reduced_dims(tensor) if dims_of is None else _checked_dims(tensor, dims_of(tensor))
        p = part(summed(tensor), dims)
        if dims and p.size >= smallest:
            indices.append(i)
            parts.append(p)
    return indices, parts


def _checked_dims(tensor: Tensor, dims: Sequence[int]) -> tuple[int, ...]:
    """Dimensions in order, none of them negative."""
    ndim = max(tensor.ndim, 1)
    found = sorted({d + ndim if d < 0 else d for d in dims})
    if any(not 0 <= d < ndim for d in found):
        raise ValueError(f"slice_dims returned {tuple(dims)} for a tensor of shape {tuple(tensor.shape)}")
    return tuple(found)


def measure(
    tensors: Sequence[Tensor], slicing: Slicing, dims_of: Callable[[Tensor], tuple[int, ...]] | None = None
) -> Measured:
    """Measure every slice.

    Args:
        tensors: The tensors.
        slicing: The metric and the slices.
        dims_of: The dimensions that one slice of a tensor spans, if they are not those of ``slicing``.
    """
    metric = slicing.metric
    if slicing.dim == "global":
        return _measure_jointly(tensors, metric)
    indices, parts = cut(tensors, slicing, dims_of)
    targets = [memory(tensors[i]) for i in indices]
    if not metric.is_power:
        total = joint_metric([whole(tensor) for tensor in tensors], metric) ** metric.degree
        return Measured(metric, indices, slice_metrics(parts, metric), total, parts, targets)

    values = p_norms(parts, metric.p)
    kept = set(indices)
    rest = [whole(tensor) for i, tensor in enumerate(tensors) if i not in kept]
    left_alone = p_norms([p for p in rest if p.size], metric.p)
    total = metric.of_norm(total_norm(parts, values, left_alone, metric.p), sum(t.numel() for t in tensors))
    # by dimensions, not by what this process holds: all ranks have to agree
    whole_tensors = metric.p > 0 and not rest and all(len(p.dims) == p.tensor.ndim for p in parts)
    rows = zip(values, parts, strict=True)
    norms = [metric.of_norm(value, p.size) for value, p in rows] if metric.kind == "mad" else values
    return Measured(metric, indices, norms, total, parts, targets, pack(values) if whole_tensors else None)


def _measure_jointly(tensors: Sequence[Tensor], metric: Metric) -> Measured:
    parts = [whole(tensor) for tensor in tensors]
    indices = [i for i, p in enumerate(parts) if p.size]
    kept = [parts[i] for i in indices]
    norms = pack(p_norms(kept, metric.p)) if metric.is_power else None
    root = joint_metric(kept, metric, norms)
    shaped = [root.to(p.tensor.device).expand((1,) * p.tensor.ndim) for p in kept]
    targets = [memory(tensors[i]) for i in indices]
    whole_tensors = norms if metric.p > 0 and len(kept) == len(parts) else None
    return Measured(metric, indices, shaped, root**metric.degree, kept, targets, whole_tensors)


def scale_(measured: Measured, factors: Tensor) -> Scaled:
    """Multiply every slice by its factor, in place."""
    if not measured.parts:
        return Scaled(torch.ones_like(measured.total), torch.zeros_like(measured.total))
    counts = [norms.numel() for norms in measured.norms]
    if not all_ones(factors):
        rows = zip(factors.split(counts), measured.norms, strict=True)
        shaped = [factor.view(norms.shape) for factor, norms in rows]
        foreach.scale_(measured.targets, shaped, exact=beyond_float32(factors))

    # the mean of 1 - factor, so that a rank without slices reports a factor of 1
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
