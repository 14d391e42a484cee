"""Which sample each entry of a memory belongs to. The labels of all tensors in it follow from that."""

import functools
import math
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from torchzero_clip.per_sample.samples.labels import LOST, Known, Labels, place_of, simplest, wider


class Runs(NamedTuple):
    """The samples of the entries of an irregular memory: ``of`` has the sample of each run of ``step`` entries."""

    step: int
    of: Tensor


Owners: TypeAlias = int | Runs
"""The samples of the entries of a memory: a step, as in `labels`, if they are regular, else `Runs`."""


class Layout(NamedTuple):
    """How a tensor lies in its memory. ``offset`` counts from the first known entry."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: Tensor, first: int) -> "Layout":
        # half the time of cls()
        return tuple.__new__(cls, (tensor.shape, tensor.stride(), tensor.storage_offset() - first))


@functools.lru_cache(4096)
def end_of(layout: Layout) -> int:
    """The number of entries of a memory up to the last one of a tensor."""
    if 0 in layout.shape:
        return layout.offset
    return layout.offset + 1 + sum((n - 1) * along for n, along in zip(layout.shape, layout.strides, strict=True))


def seen(owners: Owners, layout: Layout, count: int) -> Labels:
    """The labels of a tensor in a memory."""
    step = _step_of(owners, layout, count) if isinstance(owners, int) else None
    return simplest(_spread(owners, layout, count), layout.shape, count) if step is None else step


@functools.lru_cache(4096)
def _step_of(step: int, layout: Layout, count: int) -> int | None:
    """The labels of a tensor in a regular memory; None if they are irregular."""
    # labels that are tensors could be long, and are not kept
    found = simplest(_spread(step, layout, count), layout.shape, count)
    return found if isinstance(found, int) else None


def _spread(owners: Owners, layout: Layout, count: int) -> Tensor:
    """The sample of each entry of a tensor in a memory, with size 1 where it does not vary."""
    step, of = (owners, None) if isinstance(owners, int) else owners
    device = torch.device("cpu") if of is None else of.device
    places = torch.full((1,) * len(layout.shape), layout.offset, device=device)
    for dim in _told_apart(step, layout):
        behind = [1] * (len(layout.shape) - dim - 1)
        places = places + torch.arange(layout.shape[dim], device=device).view(-1, *behind) * layout.strides[dim]
    places = places.div(step, rounding_mode="floor")
    return places % count if of is None else of[places]


def _told_apart(step: int, layout: Layout) -> list[int]:
    """The dimensions along which entries may belong to different samples."""
    if 0 in layout.shape:
        return [dim for dim, size in enumerate(layout.shape) if not size]
    dims = [dim for dim, size in enumerate(layout.shape) if size != 1 and layout.strides[dim]]
    inner, rest = layout.offset % step, []
    for dim in sorted(dims, key=lambda dim: layout.strides[dim]):
        reach = (layout.shape[dim] - 1) * layout.strides[dim]
        if not rest and inner + reach < step:
            inner += reach
        else:
            rest.append(dim)
    return dims if any(layout.strides[dim] % step for dim in rest) else rest


def owned(labels: Known, layout: Layout, count: int) -> Owners | None:
    """The owners of the memory of a tensor with these labels; None if different samples have one place in it."""
    if isinstance(labels, int) and (step := _regular(labels, layout, count)):
        return step
    if 0 in layout.shape:
        return Runs(1, torch.empty(0, dtype=torch.int64, device="cpu"))
    return written(None, labels, layout, end_of(layout), count)


@functools.lru_cache(4096)
def _regular(labels: int, layout: Layout, count: int) -> int:
    """The step of the memory of a regular tensor; 0 if the memory is irregular."""
    place = None if 0 in layout.shape else place_of(labels, layout.shape, count)
    step = 0 if place is None else place.run * layout.strides[place.dim]
    return step if step and _step_of(step, layout, count) == labels else 0


def written(
    before: tuple[Owners, int, int] | None, labels: Labels, layout: Layout, end: int, count: int
) -> Owners | None:
    """The owners of the first ``end`` entries of a memory after values were written.

    None if samples share a place, or if the tensor is empty. ``before`` has the owners of what stays,
    and where these entries start and stop.
    """
    values = wider(labels, layout.shape, count)
    # the last dimensions are one run if they are contiguous and the labels do not vary
    run, dims = 1, [dim for dim, size in enumerate(layout.shape) if size != 1]
    while dims and values.shape[dims[-1]] == 1 and layout.strides[dims[-1]] == run:
        run *= layout.shape[dims.pop()]
    dims = [dim for dim in dims if layout.strides[dim] or values.shape[dim] != 1]
    strides = [layout.strides[dim] for dim in dims]
    if 0 in layout.shape or 0 in strides:
        return None
    owners, start, stop = before or (0, 0, 0)
    # all borders of old and new runs are multiples of the unit
    unit = math.gcd(run, layout.offset, *strides, start, owners if isinstance(owners, int) else owners.step)
    of = torch.full((-(-end // unit),), LOST, device=values.device)
    if before is not None:
        size = -(-(stop - start) // unit)
        of.narrow(0, start // unit, size).copy_(_spread(owners, Layout((size,), (unit,), 0), count))
    sizes = [layout.shape[dim] for dim in dims]
    part = of.as_strided((*sizes, run // unit), (*(n // unit for n in strides), 1), layout.offset // unit)
    part.copy_(values.reshape([values.shape[dim] for dim in dims] + [1]))
    return Runs(unit, of)
