"""The names of the parameters of a record, and the layers that they belong to."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from torchzero_clip.core.scope import NamedParam, named_params
from torchzero_clip.recorder.numbers import joined_norms

By: TypeAlias = Literal["parameter", "module", "group"]


@dataclass(frozen=True)
class Layout:
    """The parameters of an optimizer, in the order of its param groups.

    Args:
        names: The name of each parameter.
        groups: The name of the param group of each.
        has_group_names: True if the user gave a name to every group.
    """

    names: tuple[str, ...]
    groups: tuple[str, ...]
    has_group_names: bool

    @classmethod
    def of(cls, param_groups: Sequence[dict[str, Any]], model: nn.Module | None) -> "Layout":
        """The layout of an optimizer; ``model`` gives names to parameters that have none."""
        known = {} if model is None else {id(param): name for name, param in model.named_parameters()}
        names: list[str] = []
        groups: list[str] = []
        for g, group in enumerate(param_groups):
            for i, named in enumerate(named_params(group)):
                names.append(_name(named, known, g, i))
                groups.append(str(named.group or f"group {g}"))
        twice = {name for name, times in Counter(names).items() if times > 1}
        names = [f"{group}: {name}" if name in twice else name for name, group in zip(names, groups, strict=True)]
        has_names = all(isinstance(group.get("name"), str) and group["name"] for group in param_groups)
        return cls(tuple(names), tuple(groups), has_names)

    def owners(self, by: By) -> list[str]:
        """The layer of each parameter."""
        if by == "parameter":
            return list(self.names)
        return list(self.groups) if by == "group" else [name.rpartition(".")[0] or name for name in self.names]

    def joined(self, norms: Tensor, by: By) -> tuple[list[str], Tensor]:
        """The layers and their norms, from the norms of parameters in each row; -1 without a gradient."""
        owners = self.owners(by)
        layers = list(dict.fromkeys(owners))
        if len(layers) == len(owners):
            return layers, norms
        columns: dict[str, list[int]] = {layer: [] for layer in layers}
        for i, owner in enumerate(owners):
            columns[owner].append(i)
        joint = torch.stack([joined_norms(norms[:, own]) for own in columns.values()], dim=1)
        absent = torch.stack([(norms[:, own] < 0).all(dim=1) for own in columns.values()], dim=1)
        return layers, torch.where(absent, -1.0, joint)


def _name(named: NamedParam, known: dict[int, str], group: int, index: int) -> str:
    name = named.name or known.get(id(named.param))
    return name or f"group {group}, parameter {index}, of shape {tuple(named.param.shape)}"
