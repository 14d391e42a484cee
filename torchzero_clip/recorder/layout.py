"""The names of the parameters of a record, and the layers that they belong to."""

from collections.abc import Container, MutableMapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from torchzero_clip.core.scope import named_params
from torchzero_clip.recorder.numbers import joined_norms
from torchzero_clip.types import Group

By: TypeAlias = Literal["parameter", "module", "group"]


class Name(NamedTuple):
    """The name of a parameter."""

    begin: str  # the name of its group if another parameter has the same own name, else empty
    own: str

    def __str__(self) -> str:
        return self.begin + self.own


@dataclass(frozen=True)
class Layout:
    """The parameters of an optimizer, in the order of its param groups."""

    parts: tuple[Name, ...]
    groups: tuple[str, ...]  # the name of the param group of each parameter
    has_group_names: bool  # True if the user gave every group a name of its own
    frozen: frozenset[int] = field(default=frozenset(), compare=False)  # places of parameters that need no gradient

    @cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(map(str, self.parts))

    @classmethod
    def of(cls, groups: Sequence[Group], model: nn.Module | None, known: MutableMapping[Tensor, Name]) -> "Layout":
        """The layout of an optimizer. Parameters keep the names in ``known``, which gets those of new parameters."""
        in_model = {} if model is None else {id(param): name for name, param in model.named_parameters()}
        labels = _labels(groups)
        listed = [(param, g, i) for g, group in enumerate(groups) for i, param in enumerate(named_params(group))]
        taken = {str(known[named.param]) for named, *_ in listed if named.param in known}
        names: list[Name] = []
        used = set[Name]()
        for named, g, i in listed:
            name = known.get(named.param)
            if name is None or name in used:  # new, or listed twice
                own = named.name or in_model.get(id(named.param))
                own = own or f"group {g}, parameter {i}, of shape {tuple(named.param.shape)}"
                name = _free(own, labels[g], taken)
                known.setdefault(named.param, name)
                taken.add(str(name))
            used.add(name)
            names.append(name)
        given = [group.get("name") for group in groups]
        has_names = all(isinstance(name, str) and name for name in given) and len(set(given)) == len(given)
        frozen = frozenset(place for place, (named, *_) in enumerate(listed) if not named.param.requires_grad)
        return cls(tuple(names), tuple(labels[g] for _, g, _ in listed), has_names, frozen)

    def owners(self, by: By) -> list[str]:
        """The layer of each parameter."""
        if by != "module":
            return list(self.names if by == "parameter" else self.groups)
        owners: list[str] = []
        renamed: dict[tuple[str, str], str] = {}
        for (begin, own), group in zip(self.parts, self.groups, strict=True):
            module = own.rpartition(".")[0] or own
            if begin:  # the other parameters of this module follow, and need not have names that were taken
                renamed[group, module] = begin + module
            owners.append(renamed.get((group, module), module))
        return owners

    def joined(self, norms: Tensor, by: By, hidden: AbstractSet[int] = frozenset()) -> tuple[list[str], Tensor]:
        """The layers and their norms, without the parameters at ``hidden`` places; -1 without a gradient."""
        owners = self.owners(by)
        columns: dict[str, list[int]] = {}
        for place, owner in enumerate(owners):
            if place not in hidden:
                columns.setdefault(owner, []).append(place)
        if len(columns) == len(owners):
            return list(columns), norms
        parts = [norms[:, own] for own in columns.values()]
        joint = [torch.where((part < 0).all(dim=1), -1.0, joined_norms(part)) for part in parts]
        return list(columns), torch.stack(joint, dim=1) if joint else norms[:, :0]


def _labels(param_groups: Sequence[Group]) -> list[str]:
    """A name for each group. Of several groups with one name, the first one keeps it."""
    labels: list[str] = []
    for g, group in enumerate(param_groups):
        label = str(group.get("name") or f"group {g}")
        labels.append(str(_free(label, f"group {g}", labels)))
    return labels


def _free(own: str, group: str, taken: Container[str]) -> Name:
    """The name, or one that begins with the group if it is taken."""
    name, count = Name("", own), 1
    while str(name) in taken:
        name, count = Name(f"{group if count == 1 else f'{group} ({count})'}: ", own), count + 1
    return name
