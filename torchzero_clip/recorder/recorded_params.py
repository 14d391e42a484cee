"""The names of the parameters of a record, and the layers that they belong to."""

from collections.abc import Container, MutableMapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from torchzero_clip.core.scope import named_params
from torchzero_clip.recorder.arithmetic import joined_norms
from torchzero_clip.types import Group

By: TypeAlias = Literal["parameter", "module", "group"]


class Name(NamedTuple):
    """The name of a parameter."""

    prefix: str  # the name of its group if another parameter has the same name, else empty
    in_group: str

    def __str__(self) -> str:
        return self.prefix + self.in_group


@dataclass(frozen=True)
class RecordedParams:
    """The parameters of an optimizer, in the order of its param groups."""

    named: tuple[Name, ...]
    groups: tuple[str, ...]  # the name of the param group of each parameter
    has_group_names: bool  # True if the user gave each group another name
    frozen: frozenset[int] = field(default=frozenset(), compare=False)  # places of parameters that need no gradient

    @cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(map(str, self.named))

    @classmethod
    def of(
        cls, groups: Sequence[Group], model: nn.Module | None, names: MutableMapping[Tensor, Name]
    ) -> "RecordedParams":
        """The parameters of these groups. They keep the names in ``names``. The names of new ones are added to it."""
        in_model = {} if model is None else {id(param): name for name, param in model.named_parameters()}
        labels = _labels(groups)
        listed = [(param, g, i) for g, group in enumerate(groups) for i, param in enumerate(named_params(group))]
        used = {str(names[named.param]) for named, *_ in listed if named.param in names}
        result: dict[Name, None] = {}  # in order
        for named, g, i in listed:
            name = names.get(named.param)
            if name is None or name in result:  # new, or listed twice
                in_group = named.name or in_model.get(id(named.param))
                in_group = in_group or f"group {g}, parameter {i}, of shape {tuple(named.param.shape)}"
                name = _free(in_group, labels[g], used)
                names.setdefault(named.param, name)
                used.add(str(name))
            result[name] = None
        of_groups = [group.get("name") for group in groups]
        has_names = all(isinstance(name, str) and name for name in of_groups) and len(set(of_groups)) == len(of_groups)
        frozen = frozenset(place for place, (named, *_) in enumerate(listed) if not named.param.requires_grad)
        return cls(tuple(result), tuple(labels[g] for _, g, _ in listed), has_names, frozen)

    def layers(self, by: By) -> list[str]:
        if by != "module":
            return list(self.names if by == "parameter" else self.groups)
        layers: list[str] = []
        renamed: dict[tuple[str, str], str] = {}
        for (prefix, in_group), group in zip(self.named, self.groups, strict=True):
            module = in_group.rpartition(".")[0] or in_group
            if prefix:  # later parameters of this module belong to the same layer, also if their names are free
                renamed[group, module] = prefix + module
            layers.append(renamed.get((group, module), module))
        return layers

    def joined(self, norms: Tensor, by: By, hidden: AbstractSet[int] = frozenset()) -> tuple[list[str], Tensor]:
        """The layers and their norms, without the parameters at ``hidden`` places; -1 without a gradient."""
        layers = self.layers(by)
        columns: dict[str, list[int]] = {}
        for place, layer in enumerate(layers):
            if place not in hidden:
                columns.setdefault(layer, []).append(place)
        if len(columns) == len(layers):
            return list(columns), norms
        of_layers = [norms[:, places] for places in columns.values()]
        joint = [torch.where((part < 0).all(dim=1), -1.0, joined_norms(part)) for part in of_layers]
        return list(columns), torch.stack(joint, dim=1) if joint else norms[:, :0]


def _labels(param_groups: Sequence[Group]) -> list[str]:
    """A name for each group. Of several groups with one name, the first one keeps it."""
    labels: list[str] = []
    for g, group in enumerate(param_groups):
        label = str(group.get("name") or f"group {g}")
        labels.append(str(_free(label, f"group {g}", labels)))
    return labels


def _free(in_group: str, group: str, used: Container[str]) -> Name:
    """The name, with the group before it if another parameter has this name."""
    name, count = Name("", in_group), 1
    while str(name) in used:
        name, count = Name(f"{group if count == 1 else f'{group} ({count})'}: ", in_group), count + 1
    return name
