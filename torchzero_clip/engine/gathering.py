"""Gathers the parameters that take part in a step."""

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from torchzero_clip.core.scope import named_params

Group: TypeAlias = dict[str, Any]


def taking_part(groups: Sequence[Group]) -> tuple[list[Tensor], list[Any], list[int]]:
    """The parameters that have a gradient and are not frozen, their gradients, and the index of the group of each."""
    params: list[Tensor] = []
    grads: list[Any] = []
    group_of: list[int] = []
    for g, group in enumerate(groups):
        own: list[Tensor] = group["params"]
        found = [param.grad for param in own]
        if type(None) in set(map(type, found)) or False in [param.requires_grad for param in own]:
            if True in [param.is_meta for param in own]:
                _refuse_meta(group)
            own = [param for param in own if param.grad is not None and param.requires_grad]
            found = [param.grad for param in own]
        params += own
        grads += found
        group_of += [g] * len(own)
    return params, grads, group_of


def refuse_unusable(groups: Sequence[Group]) -> None:
    """Raise a RuntimeError if a gradient is sparse, or a parameter is on the meta device."""
    for group in groups:
        if True in [param.is_meta for param in group["params"]]:
            _refuse_meta(group)
        own = [param for param in group["params"] if param.grad is not None and param.requires_grad]
        if not {torch.strided}.issuperset([param.grad.layout for param in own]):
            _refuse_sparse(own, group)


def _refuse_meta(group: Group) -> None:
    for param in group["params"]:
        if param.is_meta and param.requires_grad:
            raise RuntimeError(
                f"{_name(param, group)} is on the meta device and has no values: calls that allocate them, such as "
                "to_empty, may replace the parameters of a module. Build Modular after such a call"
            )


def _refuse_sparse(own: Sequence[Tensor], group: Group) -> None:
    sparse = next(param for param in own if param.grad is not None and param.grad.layout != torch.strided)
    raise RuntimeError(f"{_name(sparse, group)} has a sparse gradient, which Modular does not take")


def _name(param: Tensor, group: Group) -> str:
    number, named = next((i, n) for i, n in enumerate(named_params(group)) if n.param is param)
    return named.name or f"parameter {number} of its group, of shape {tuple(param.shape)},"
