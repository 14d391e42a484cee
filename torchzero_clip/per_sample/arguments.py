"""The arguments of functions as lists, for code that sees every function that runs."""

from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from types import EllipsisType, NoneType
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

Rebuild: TypeAlias = Callable[[Sequence[Any]], tuple[Sequence[Any], Mapping[str, Any]]]
"""Returns arguments with other leaves in the places of those that were found."""

OF_TORCH = Tensor, torch.Size, torch.dtype, torch.device, torch.memory_format
LEAVES = *OF_TORCH, int, float, str, NoneType, EllipsisType, slice


def flattened(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[list[Any], Rebuild]:
    """The leaves of arguments, also of those in containers.

    It takes a few microseconds if there are no containers but lists and tuples of leaves, such as those of `torch.cat`.
    """
    given, count = [*args, *kwargs.values()], len(args)
    if all(isinstance(x, LEAVES) for x in given):
        return given, lambda new: (new[:count], dict(zip(kwargs, new[count:], strict=True)))
    pairs = [(x, type(x)) for x in given]
    leaves = [leaf for x, kind in pairs for leaf in (x if kind in (list, tuple) else (x,))]
    if all(isinstance(x, LEAVES) for x in leaves):

        def rebuilt(new: Sequence[Any]) -> tuple[Sequence[Any], Mapping[str, Any]]:
            rest = iter(new)
            again = [kind(islice(rest, len(x))) if kind in (list, tuple) else next(rest) for x, kind in pairs]
            return again[:count], dict(zip(kwargs, again[count:], strict=True))

        return leaves, rebuilt
    leaves, structure = pytree.tree_flatten((tuple(args), dict(kwargs)))
    return leaves, lambda new: pytree.tree_unflatten(list(new), structure)


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors in a value, which may be one or a container."""
    if isinstance(value, Tensor):
        return [value]
    return [x for x in pytree.tree_leaves(value) if isinstance(x, Tensor)]


def tensors_held(value: Any, depth: int = 3) -> list[Tensor]:
    """The tensors in the attributes of an object, such as a batch of a class of its own, and of objects in it."""
    if isinstance(value, Tensor):
        return [value]
    if not depth or isinstance(value, (*LEAVES, type, nn.Module)) or callable(value):
        return []
    slots = [name for kind in type(value).__mro__ for name in vars(kind).get("__slots__", ())]
    held = [*getattr(value, "__dict__", {}).values(), *(getattr(value, name, None) for name in slots)]
    return [x for leaf in pytree.tree_leaves(held) for x in tensors_held(leaf, depth - 1)]
