"""The arguments of functions as lists, for code that sees every function that runs."""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from types import EllipsisType, ModuleType, NoneType
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from torchzero_clip.compat import pytree

Rebuild: TypeAlias = Callable[[Sequence[Any]], tuple[Sequence[Any], Mapping[str, Any]]]
"""Returns arguments with other leaves in the places of those that were found."""

OBJECTS = 100  # after which a search ends, because a batch may refer to its dataset
OF_TORCH = Tensor, torch.Size, torch.dtype, torch.device, torch.memory_format
LEAVES = *OF_TORCH, int, float, str, NoneType, EllipsisType, slice
ATOMS = frozenset((*LEAVES, nn.Parameter, bool))


def flattened(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[list[Any], Rebuild]:
    """The leaves of arguments, including those in containers, and how to rebuild the arguments from other leaves."""
    given, count = [*args, *kwargs.values()], len(args)
    if ATOMS.issuperset(map(type, given)) or all(isinstance(x, LEAVES) for x in given):  # in a fifth of the time
        return given, lambda new: (new[:count], dict(zip(kwargs, new[count:], strict=True)))
    leaves, structure = pytree.tree_flatten((tuple(args), dict(kwargs)))
    return leaves, lambda new: pytree.tree_unflatten(list(new), structure)


def counts_up(tensor: Tensor) -> bool:
    """True for the integers 0, 1, 2, ... in one dimension: positions, which all samples share."""
    if tensor.ndim != 1 or len(tensor) < 2 or tensor.is_floating_point() or tensor.dtype == torch.bool:
        return False
    return torch.equal(tensor, torch.arange(len(tensor), device=tensor.device, dtype=tensor.dtype))


def tensors_in(value: object) -> list[Tensor]:
    """The tensors in a value, which may be one or a container."""
    if isinstance(value, Tensor):
        return [value]
    return [x for x in pytree.tree_leaves(value) if isinstance(x, Tensor)]


def plain_tensors(value: object) -> list[Tensor]:
    """The tensors in a value that are of no subclass.

    A subclass may run functions of its own when it is asked for something, and rows of all samples have no hooks: see
    `BroadcastRow`.
    """
    return [x for x in pytree.tree_leaves(value) if type(x) is Tensor]


def tensors_held(value: object) -> list[Tensor]:
    """The tensors in the attributes of an object, such as a batch of a class of its own, and of objects in it."""
    found: list[Tensor] = []
    seen: list[object] = []
    rest = deque([value])
    while rest and len(seen) < OBJECTS:
        item = rest.popleft()
        if isinstance(item, (*LEAVES, type, ModuleType, nn.Module)) or callable(item):
            continue
        if any(item is other for other in seen):
            continue
        seen.append(item)
        leaves = pytree.tree_leaves(_attributes(item))
        found += [x for x in leaves if isinstance(x, Tensor)]
        rest += [x for x in leaves if not isinstance(x, LEAVES)]
    return found


def _attributes(value: object) -> list[object]:
    slots = [name for kind in type(value).__mro__ for name in vars(kind).get("__slots__", ())]
    try:
        held = [*vars(value).values()] if hasattr(value, "__dict__") else []
        return [*held, *(getattr(value, name) for name in slots if hasattr(value, name))]
    except Exception:  # of an object that makes its own attributes
        return []
