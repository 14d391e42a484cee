"""Where the samples are in regular tensors, as one integer, the step.

Entry k of the flattened tensor belongs to sample (k // step) % count. A batch of shape (2, 3, 4) with the samples in
dimension 0 has the step 12, and one with the samples in dimension 1 the step 4. A `Place` says the same for one shape.

A step also describes a memory, where k is the place of an entry in it. `seen_from` finds the step of a tensor there.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple


class Place(NamedTuple):
    """The dimension along which the samples change, and how many neighboring entries of it each sample has."""

    dim: int
    run: int = 1


@functools.lru_cache(4096)
def strides_of(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a contiguous tensor. Dimensions of size 0 count as 1."""
    strides, along = [1] * len(shape), 1
    for dim in range(len(shape) - 1, -1, -1):
        strides[dim] = along
        along *= max(shape[dim], 1)
    return tuple(strides)


@functools.lru_cache(4096)
def place_of(step: int, shape: tuple[int, ...], count: int) -> Place | None:
    """Where the samples are; None if they change along several dimensions."""
    for dim, along in reversed([*enumerate(strides_of(shape))]):
        reach = along * shape[dim]
        alone = math.prod(shape[:dim]) == 1 and reach > step  # the first dimension may end before the last sample
        if step % along == 0 and (alone or reach % (step * count) == 0):
            return Place(dim, step // along)
    return None


@functools.lru_cache(4096)
def step_at(place: Place, shape: tuple[int, ...]) -> int:
    """The step of a tensor whose samples are at this place."""
    return place.run * strides_of(shape)[place.dim]


def moved(
    step: int, before: Sequence[int], after: Sequence[int], count: int, to: Callable[[int], int | None]
) -> int | None:
    """The step after an operation that takes each dimension to another place; None if the samples are lost."""
    place = place_of(step, tuple(before), count)
    dim = None if place is None else to(place.dim)
    if place is None or dim is None or not 0 <= dim < len(after) or after[dim] != before[place.dim]:
        return None
    now = step_at(new := Place(dim, place.run), tuple(after))
    return now if place_of(now, tuple(after), count) == new else None


@functools.lru_cache(4096)
def seen_from(
    step: int, start: int, shape: tuple[int, ...], strides: tuple[int, ...], offset: int, count: int
) -> int | None:
    """The step of a regular tensor in a memory whose entry a belongs to sample ((a - start) // step) % count."""
    if count == 1:
        return 1
    first, inner = divmod(offset - start, step)
    found = [dim for dim in merged(shape, strides) if dim[1] % (step * count)]  # along others, all samples repeat
    if not found or first % count:  # a regular tensor starts with sample 0
        return None
    carries = max(found, key=lambda dim: (dim[0] - 1) * dim[1])  # along it, the samples change
    size, stride, behind = carries
    inner += sum((dim[0] - 1) * dim[1] for dim in found if dim is not carries)  # others stay in the run of a sample
    unit = min(stride, step)  # no step along the others may leave so many entries
    whole = (size * stride) % (step * count) == 0 or math.prod(shape) <= size * behind
    if inner >= unit or step % unit or stride % unit or stride // unit % count != 1:
        return None
    return step // unit * behind if whole and (size - 1) * stride >= step else None


def merged(shape: Sequence[int], strides: Sequence[int]) -> list[tuple[int, int, int]]:
    """The size and the stride of dimensions with several entries, and the product of the sizes after each, last first.

    Neighboring dimensions that lie in memory like one dimension are merged.
    """
    found: list[tuple[int, int, int]] = []
    behind = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1 and found and stride == found[-1][0] * found[-1][1]:
            found[-1] = found[-1][0] * size, found[-1][1], found[-1][2]
        elif size != 1:
            found.append((size, stride, behind))
        behind *= size
    return found
