"""The arguments of functions as lists, for code that sees every function that runs."""

from collections.abc import Callable, Mapping, Sequence
from types import EllipsisType, NoneType
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

Rebuild: TypeAlias = Callable[[Sequence[Any]], tuple[Sequence[Any], Mapping[str, Any]]]
"""Returns arguments with other leaves in the places of those that were found."""

LEAVES = Tensor, int, float, str, NoneType, EllipsisType, slice, torch.dtype, torch.device, torch.memory_format


def flattened(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[list[Any], Rebuild]:
    """The leaves of arguments, also of those in containers. Without containers it takes a few microseconds."""
    leaves = [*args, *kwargs.values()]
    if all(isinstance(x, LEAVES) for x in leaves):
        count = len(args)
        return leaves, lambda new: (new[:count], dict(zip(kwargs, new[count:], strict=True)))
    leaves, structure = pytree.tree_flatten((tuple(args), dict(kwargs)))
    return leaves, lambda new: pytree.tree_unflatten(list(new), structure)


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors in a value, which may be one or a container."""
    if isinstance(value, Tensor):
        return [value]
    return [x for x in pytree.tree_leaves(value) if isinstance(x, Tensor)]
