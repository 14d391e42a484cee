"""The parameters that take part in a step, and what belongs to each."""

import operator
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from torchzero_clip.core.nodes import Node
from torchzero_clip.core.scope import all_named_params, named_params
from torchzero_clip.functional.lists import params_of
from torchzero_clip.types import Group, State


@dataclass(eq=False)
class Table:
    """The parameters that take part in a step. Lists have one entry, a row, per parameter that has a gradient."""

    groups: list[Group]
    params: list[Tensor]
    grads: list[Tensor]
    states: list[State]  # by qualified keys
    group_of: list[int]
    new_states: dict[Tensor, State] = field(default_factory=dict)
    """The states of parameters that had none. They enter the optimizer once the step was allowed."""
    acting_paths: Set[str] | None = None
    """The paths of the transforms that act on the rows, instead of those whose scopes contain them."""
    _scopes: dict[str, set[int]] = field(default_factory=dict, init=False)

    @classmethod
    def of(cls, groups: list[Group], kept: Mapping[Tensor, State]) -> "Table":
        """Gather the parameters that have a gradient and are not frozen, with their state in an optimizer."""
        # a parameter that is listed twice has one state
        params, grads, group_of = taking_part(groups)
        new: dict[Tensor, State] = {}
        states: list[Any] = list(kept.values())  # usually in their order, which saves look-ups by hash
        if len(kept) != len(params) or not all(map(operator.is_, kept, params)):
            states = list(map(kept.get, params))
        if None in states:
            states = [new.setdefault(p, {}) if s is None else s for p, s in zip(params, states, strict=True)]
        return cls(groups, params, grads, states, group_of, new)

    @property
    def rows(self) -> list[int]:
        """All rows."""
        return list(range(len(self.params)))

    def all_params(self) -> list[Tensor]:
        """All parameters of the optimizer, with or without a gradient."""
        return params_of(self.groups)

    def picked(self, rows: list[int]) -> tuple[list[Tensor], list[Tensor], list[State], list[int]]:
        """Parameters, gradients, states and groups of some rows, in order, as new lists."""
        if len(rows) == len(self.params):
            return list(self.params), list(self.grads), list(self.states), list(self.group_of)
        params, grads = [self.params[i] for i in rows], [self.grads[i] for i in rows]
        return params, grads, [self.states[i] for i in rows], [self.group_of[i] for i in rows]

    def in_scope(self, node: Node, rows: list[int]) -> list[int]:
        """The rows that a transform acts on; the same list if these are all."""
        if self.acting_paths is not None:
            return rows if node.path in self.acting_paths else []
        scope = node.transform.scope
        if len(scope.conditions) == 0:  # `not` of a tuple breaks the graphs of `torch.compile`
            return rows
        if node.path not in self._scopes:
            # in the order of the rows, which `taking_part` has given
            of_rows = [n for n in all_named_params(self.groups) if n.param.grad is not None and n.param.requires_grad]
            self._scopes[node.path] = {i for i, n in enumerate(of_rows) if scope.has(n)}
        chosen = self._scopes[node.path]
        return [i for i in rows if i in chosen]


def taking_part(groups: Sequence[Group]) -> tuple[list[Tensor], list[Any], list[int]]:
    """The parameters that have a gradient and are not frozen, their gradients, and the index of the group of each."""
    params: list[Tensor] = []
    grads: list[Any] = []
    group_of: list[int] = []
    for g, group in enumerate(groups):
        params_of_group: list[Tensor] = group["params"]
        grads_of_group = [param.grad for param in params_of_group]
        # `None in grads` would call == of each tensor
        if type(None) in set(map(type, grads_of_group)) or False in [param.requires_grad for param in params_of_group]:
            if True in [param.is_meta for param in params_of_group]:
                _refuse_meta(group)
            params_of_group = [param for param in params_of_group if param.grad is not None and param.requires_grad]
            grads_of_group = [param.grad for param in params_of_group]
        params += params_of_group
        grads += grads_of_group
        group_of += [g] * len(params_of_group)
    return params, grads, group_of


def refuse_unusable(groups: Sequence[Group]) -> None:
    """Raise a RuntimeError if a gradient is sparse, or a parameter is on the meta device."""
    for group in groups:
        if True in [param.is_meta for param in group["params"]]:
            _refuse_meta(group)
        params = [param for param in group["params"] if param.grad is not None and param.requires_grad]
        if not {torch.strided}.issuperset([param.grad.layout for param in params]):
            sparse = next(param for param in params if param.grad.layout != torch.strided)
            raise RuntimeError(
                f"{_name(sparse, group)} has a sparse gradient, which transforms do not take: use clip_grad_norm_"
            )


def _refuse_meta(group: Group) -> None:
    for param in group["params"]:
        if param.is_meta and param.requires_grad:
            raise RuntimeError(
                f"{_name(param, group)} is on the meta device and has no values: calls that allocate them, such as "
                "to_empty, may replace the parameters of a module. Build Modular after such a call"
            )


def _name(param: Tensor, group: Group) -> str:
    number, named = next((i, n) for i, n in enumerate(named_params(group)) if n.param is param)
    return named.name or f"parameter {number} of its group, of shape {tuple(param.shape)},"
