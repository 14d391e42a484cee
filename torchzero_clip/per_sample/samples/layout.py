"""Where the samples are in regular tensors, as one integer, the step.

Entry k of the flattened tensor belongs to sample (k // step) % count. A batch of shape (2, 3, 4) with the samples in
dimension 0 has the step 12, and one with the samples in dimension 1 the step 4. A `Place` says the same for one shape.

A step also describes a memory, where k is the place of an entry in it: see `memory`.
"""

import functools
import math
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
