"""Which sample each entry of a memory belongs to. The labels of all tensors in it follow from that."""

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from torchzero_clip.per_sample.samples.labels import LOST, Known, Labels, simplest, wider
from torchzero_clip.per_sample.samples.layout import place_of


class Owners(NamedTuple):
    """The samples of the entries of a memory, in runs of ``step`` entries from ``start`` on.

    ``of`` has the sample of each run. If it is None, these are 0, 1, ... up to the last sample, then 0 again.
    """

    step: int
    start: int = 0
    of: Tensor | None = None


class Layout(NamedTuple):
    """How a tensor lies in its memory."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: Tensor) -> "Layout":
        return tuple.__new__(cls, (tensor.shape, tensor.stride(), tensor.storage_offset()))  # half the time of cls()


@functools.lru_cache(4096)
def end_of(layout: Layout) -> int:
    """The number of entries of a memory up to the last one of a tensor."""
    if 0 in layout.shape:
        return layout.offset
    return layout.offset + 1 + sum((n - 1) * along for n, along in zip(layout.shape, layout.strides, strict=True))


def seen(owners: Owners, layout: Layout, count: int) -> Labels:
    """The labels of a tensor in a memory."""
    step = _step_of(owners, layout, count) if owners.of is None else None
    labels = _spread(owners, layout, count) if step is None else step
    return simplest(labels, layout.shape, count, of_batch=False) if isinstance(labels, Tensor) else labels


@functools.lru_cache(4096)
def _step_of(owners: Owners, layout: Layout, count: int) -> int | None:
    """The labels of a tensor in a regular memory; None if they are irregular."""
    # labels that are tensors could be long, and are not kept
    found = 1 if count == 1 else simplest(_spread(owners, layout, count), layout.shape, count)
    return found if isinstance(found, int) else None


def _spread(owners: Owners, layout: Layout, count: int) -> Tensor:
    """The sample of each entry of a tensor in a memory, with size 1 where it does not vary."""
    device = torch.device("cpu") if owners.of is None else owners.of.device
    places = torch.full((1,) * len(layout.shape), layout.offset - owners.start, device=device)
    for dim in _told_apart(owners, layout):
        behind = [1] * (len(layout.shape) - dim - 1)
        places = places + torch.arange(layout.shape[dim], device=device).view(-1, *behind) * layout.strides[dim]
    places = places.div(owners.step, rounding_mode="floor")
    return places % count if owners.of is None else owners.of[places]


def _told_apart(owners: Owners, layout: Layout) -> list[int]:
    """The dimensions along which entries may belong to different samples."""
    if 0 in layout.shape:
        return [dim for dim, size in enumerate(layout.shape) if not size]
    dims = [dim for dim, size in enumerate(layout.shape) if size != 1 and layout.strides[dim]]
    inner, rest = (layout.offset - owners.start) % owners.step, []
    for dim in sorted(dims, key=lambda dim: layout.strides[dim]):
        reach = (layout.shape[dim] - 1) * layout.strides[dim]
        if not rest and inner + reach < owners.step:
            inner += reach
        else:
            rest.append(dim)
    return dims if any(layout.strides[dim] % owners.step for dim in rest) else rest


def owned(labels: Known, layout: Layout, count: int) -> Owners | None:
    """The owners of the memory of a tensor with these labels; None if different samples have one place in it."""
    if isinstance(labels, int) and (owners := _regular(labels, layout, count)) is not None:
        return owners
    if 0 in layout.shape:
        return Owners(1, layout.offset, torch.empty(0, dtype=torch.int64, device="cpu"))
    return written(None, labels, layout, end_of(layout), count)


@functools.lru_cache(4096)
def _regular(labels: int, layout: Layout, count: int) -> Owners | None:
    """The owners of the memory of a regular tensor; None if that is not regular."""
    if 0 in layout.shape:
        return None
    place = place_of(labels, layout.shape, count)
    owners = Owners(0 if place is None else place.run * layout.strides[place.dim], layout.offset)
    return owners if owners.step and _step_of(owners, layout, count) == labels else None


def written(owners: Owners | None, labels: Labels, layout: Layout, end: int, count: int) -> Owners | None:
    """The owners of the first ``end`` entries of a memory after values were written; None if samples share a place."""
    values = wider(labels, layout.shape, count)
    # the last dimensions are one run if they are contiguous and the labels do not vary
    run, dims = 1, [dim for dim, size in enumerate(layout.shape) if size != 1]
    while dims and values.shape[dims[-1]] == 1 and layout.strides[dims[-1]] == run:
        run *= layout.shape[dims.pop()]
    dims = [dim for dim in dims if layout.strides[dim] or values.shape[dim] != 1]
    strides = [layout.strides[dim] for dim in dims]
    if 0 in layout.shape or 0 in strides:
        return owners if 0 in layout.shape else None
    before = () if owners is None else (owners.step, owners.start)
    unit = math.gcd(run, layout.offset, *strides, *before)  # all borders of old and new runs are multiples of it
    of = _in_units(owners, unit, -(-end // unit), count).to(values.device)
    sizes = [layout.shape[dim] for dim in dims]
    part = of.as_strided((*sizes, run // unit), (*(n // unit for n in strides), 1), layout.offset // unit)
    part.copy_(values.reshape([values.shape[dim] for dim in dims] + [1]))
    return Owners(unit, 0, of)


def _in_units(owners: Owners | None, unit: int, size: int, count: int) -> Tensor:
    """The sample of each run of ``unit`` entries."""
    if owners is None:
        return torch.full((size,), LOST, device="cpu")
    device = torch.device("cpu") if owners.of is None else owners.of.device
    places = (torch.arange(size, device=device) * unit - owners.start).div(owners.step, rounding_mode="floor")
    if owners.of is None:
        return places % count
    inside = (places >= 0) & (places < len(owners.of))
    return torch.where(inside, owners.of[places.clamp(0, max(len(owners.of) - 1, 0))], LOST)
