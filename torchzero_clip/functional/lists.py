"""Lists of tensors and param groups as collections of objects. Where every step does it, callers write it out."""

import operator
from collections.abc import Collection, Iterable, Sequence

from torch import Tensor

from torchzero_clip.types import Group


def params_of(groups: Iterable[Group]) -> list[Tensor]:
    """The parameters of all param groups, in order."""
    return [param for group in groups for param in group["params"]]


def same_objects(one: Collection[object], other: Collection[object]) -> bool:
    """True if both have the same objects in the same order. It reads no tensor."""
    return len(one) == len(other) and all(map(operator.is_, one, other))


def has_repeats(objects: Sequence[object]) -> bool:
    """True if an object is listed twice."""
    return len(set(map(id, objects))) < len(objects)
