"""Labels: the sample that each entry of a tensor belongs to."""

import functools
import math
from collections.abc import Sequence
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

Known: TypeAlias = int | Tensor
"""The dimension that has the samples 0, 1, 2, ..., or the sample of each entry, in a tensor that can be broadcast.

`LOST` stands for values of unknown samples. Entries of -1 belong to none.
"""

Labels: TypeAlias = Known | None
"""Labels, or None for values that depend on no sample."""

LOST = -1
SIMPLEST = "_is_simplest"  # an attribute of labels that need not be simplified again: labels never change


def wider(labels: Labels, ndim: int, count: int) -> Tensor:
    """The labels of ``count`` samples as a tensor."""
    if isinstance(labels, Tensor):
        return labels
    if labels is None:
        return torch.full((1,) * ndim, -1, device="cpu")
    return torch.arange(count, device="cpu").view(-1, *[1] * (ndim - labels - 1))[(None,) * labels]


def simplest(labels: Tensor, count: int) -> Labels:
    """The labels with size 1 where they do not vary, as a dimension if they are 0, 1, 2, ... along it.

    Entries of -1 belong to the sample at their place if all others do, and if only one dimension can have the samples.
    """
    if hasattr(labels, SIMPLEST):
        return labels
    for dim, size in enumerate(labels.shape):
        if size > 1 and torch.equal(labels, first := labels.narrow(dim, 0, 1).expand_as(labels)):
            labels = first.narrow(dim, 0, 1)
    if not labels.numel():
        return labels
    lowest, highest = (bound.item() for bound in labels.aminmax())
    if highest < 0:
        return None
    if count == 1:
        return labels.clamp(min=0)
    found: list[int] = []
    for dim in (dim for dim, size in enumerate(labels.shape) if size == count):
        samples = torch.arange(count, device=labels.device).view(-1, *[1] * (labels.ndim - dim - 1))
        if bool(((labels < 0) | (labels == samples)).all()):
            found.append(dim)
    varies = sum(size != 1 for size in labels.shape)
    if len(found) == 1 and (varies == 1 or lowest < 0):
        return found[0]
    setattr(labels, SIMPLEST, True)
    return labels


def aligned(labels: Known, before: int, after: int) -> Known:
    """The labels of values that are broadcast from ``before`` to ``after`` dimensions."""
    if before == after:
        return labels
    return labels[(None,) * (after - before)] if isinstance(labels, Tensor) else labels + after - before


def agree(labels: Known, other: Known, ndim: int, count: int) -> bool:
    """True if no entry has one sample by some labels, and another sample by others."""
    if isinstance(labels, int) and isinstance(other, int) and labels == other:
        return True
    one, two = (wider(x, ndim, count) for x in (labels, other))
    one, two = (one.to(two.device), two) if one.is_cpu else (one, two.to(one.device))
    return not bool(((one != two) & (one >= 0) & (two >= 0)).any())


def viewed(labels: Known, before: Sequence[int], after: Sequence[int], count: int) -> Known:
    """The labels after a view."""
    if isinstance(labels, int):
        return _of_view(labels, tuple(before), tuple(after), count)
    return _viewed(labels, before, after)


@functools.lru_cache(512)
def _of_view(dim: int, before: tuple[int, ...], after: tuple[int, ...], count: int) -> Known:
    """The labels after a view of samples in order along a dimension."""
    if count > 1:
        front = math.prod(before[:dim])
        for place, size in enumerate(after):
            if size == count and math.prod(after[:place]) == front:
                return place
    labels = _viewed(wider(dim, len(before), count), before, after)
    found = simplest(labels, count) if isinstance(labels, Tensor) else labels
    return LOST if found is None else found


def _viewed(labels: Tensor, before: Sequence[int], after: Sequence[int]) -> Known:
    first = max((dim + 1 for dim, size in enumerate(labels.shape) if size != 1), default=0)
    for kept in range(first, len(before) + 1):  # dimensions behind it, which labels do not need
        behind = math.prod(before[kept:])
        for dim in range(len(after), -1, -1):
            if math.prod(after[dim:]) == behind and math.prod(after[:dim]) == math.prod(before[:kept]):
                part = labels.reshape(labels.shape[:kept]).expand(tuple(before[:kept]))
                return part.reshape(*after[:dim], *[1] * (len(after) - dim))
    return LOST


def padded(labels: Known, before: Sequence[int], pads: Sequence[int], count: int) -> Known:
    """The labels after `F.pad`, whose values belong to no sample."""
    if isinstance(labels, int) and not any(pads[2 * (len(before) - labels) - 2 :][:2]):
        return labels
    first = len(before) - len(pads) // 2
    labels = wider(labels, len(before), count)
    return F.pad(labels.expand(*labels.shape[:first], *before[first:]), list(pads), value=-1)


def placed(labels: Tensor, dim: int, index: Tensor, shape: Sequence[int]) -> Tensor | None:
    """The labels of values that are put to places along a dimension; None if a place gets several samples.

    ``index`` has one dimension, or the places of all values.
    """
    labels = labels.to(index.device)
    if index.ndim == 1:
        index = index.view(-1, *[1] * (labels.ndim - dim - 1)).expand_as(labels)
    labels = labels[tuple(slice(size) for size in index.shape)]
    result = labels.new_full(tuple(shape), -1).scatter_reduce(dim, index, labels, "amax")
    return result if torch.equal(result.gather(dim, index), labels) else None
