"""Labels: the sample that each entry of a tensor belongs to, as a step, as a tensor, None or `LOST`.

A *step* describes a regular tensor: entry k of the flattened tensor belongs to sample (k // step) % count. A batch of
shape (2, 3, 4) with the samples in dimension 0 has the step 12, and one with the samples in dimension 1 the step 4. A
`Place` says the same for one shape. A step also describes a memory, where k counts entries from the first known
one: see `memory`.
"""

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

Known: TypeAlias = int | Tensor
"""A step; or the sample of each entry, in a tensor with size 1 where it does not vary.

`LOST` in place of a step means that the samples are not known. An entry of -1 in a tensor belongs to no sample.
"""

Labels: TypeAlias = Known | None
"""Labels, or None for values that depend on no sample."""

LOST = -1


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


def wider(labels: Labels, shape: Sequence[int], count: int) -> Tensor:
    """The labels of ``count`` samples as a tensor."""
    if isinstance(labels, Tensor):
        return labels
    if labels is None:
        return torch.full((1,) * len(shape), -1, device="cpu")
    place = place_of(labels, tuple(shape), count)
    if place is None:
        return narrowed((torch.arange(math.prod(shape), device="cpu") // labels % count).view(tuple(shape)))
    dim, run = place
    return (torch.arange(shape[dim], device="cpu") // run % count).view(-1, *[1] * (len(shape) - dim - 1))[
        (None,) * dim
    ]


def simplest(labels: Tensor, shape: Sequence[int], count: int, *, of_batch: bool = False) -> Labels:
    """The labels as a step if they are regular, else with size 1 where they do not vary.

    Entries of no sample, such as zeros that other rows were written beside, are in the batch too if all other entries
    belong to the sample at their place along a dimension, and only one dimension fits. Without
    ``of_batch``, these must be of two or more samples, because the whole tensor may belong to one.
    """
    if not labels.numel() or 0 in shape:
        return labels
    lowest, highest = (int(bound) for bound in labels.aminmax())
    if highest < 0:
        return None
    if lowest == highest:
        return labels[(slice(0, 1),) * labels.ndim]
    if sum(size > 1 for size in labels.shape) > 1:
        labels = narrowed(labels)
    if lowest < 0 and not of_batch and bool(((labels < 0) | (labels == highest)).all()):
        return labels
    if lowest < 0:
        steps = [step_at(Place(dim), tuple(shape)) for dim, size in enumerate(shape) if size == count]
        found = [step for step in steps if agree(labels, step, shape, count)]
        return found[0] if len(found) == 1 else labels
    depth = depth_of(labels)
    length = math.prod(shape[:depth])
    flat = labels.expand(*shape[:depth], *labels.shape[depth:]).reshape(-1)
    run = int((flat > 0).byte().argmax())  # where the second sample begins
    regular = run and torch.equal(flat, (torch.arange(length, device=flat.device) // run % count).to(flat.dtype))
    step = run * strides_of(tuple(shape))[depth - 1]
    return step if regular and place_of(step, tuple(shape), count) is not None else labels


def narrowed(labels: Tensor) -> Tensor:
    """The labels with size 1 where they do not vary."""
    for dim, size in enumerate(labels.shape):
        if size > 1 and torch.equal(labels, first := labels.narrow(dim, 0, 1).expand_as(labels)):
            labels = first.narrow(dim, 0, 1)
    return labels


def depth_of(labels: Tensor) -> int:
    """The number of first dimensions outside of which the labels do not vary."""
    return max((dim + 1 for dim, size in enumerate(labels.shape) if size != 1), default=0)


def same(labels: Labels, other: Labels) -> bool:
    """True if two labels are equal."""
    if isinstance(labels, Tensor) and isinstance(other, Tensor):
        return labels.shape == other.shape and torch.equal(labels, other)
    return not (isinstance(labels, Tensor) or isinstance(other, Tensor)) and labels == other


def agree(labels: Known, other: Known, shape: Sequence[int], count: int) -> bool:
    """True if no entry has one sample by some labels, and another sample by others."""
    if isinstance(labels, int) and isinstance(other, int) and labels == other:
        return True
    one, two = (wider(x, shape, count) for x in (labels, other))
    one, two = (one.to(two.device), two) if one.is_cpu else (one, two.to(one.device))
    return not bool(((one != two) & (one >= 0) & (two >= 0)).any())
