"""Which parameters a transform acts on."""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import NamedTuple, TypeAlias

from torch import Tensor, nn

from torchzero_clip.checks import takes_one
from torchzero_clip.types import Group

Where: TypeAlias = str | Callable[[Tensor], bool]
"""A pattern for names of parameters, or a function of a parameter that returns True for those in the scope."""


PART = re.compile(r"^ \(\d+\)$")  # the suffix in the names of the second and later parts of a group that was split


class NamedParam(NamedTuple):
    """A parameter, and the names by which a scope may select it."""

    param: Tensor
    name: str | None = None
    group: str | None = None  # the ``"name"`` of its param group

    def __str__(self) -> str:
        return self.name or f"a parameter of shape {tuple(self.param.shape)}"


def named_params(group: Group) -> list[NamedParam]:
    """The parameters of a param group, with their names."""
    names = group.get("param_names") or [None] * len(group["params"])
    return [NamedParam(p, name, group.get("name")) for p, name in zip(group["params"], names, strict=True)]


def all_named_params(groups: Iterable[Group]) -> list[NamedParam]:
    """The parameters of all param groups, with their names."""
    return [named for group in groups for named in named_params(group)]


@dataclass(frozen=True)
class Condition:
    """The arguments of one call of `only`, or with ``keep=False`` of `without`."""

    keep: bool
    where: tuple[Where, ...]
    groups: tuple[str, ...]

    def __str__(self) -> str:
        arguments = [repr(w) if isinstance(w, str) else getattr(w, "__name__", repr(w)) for w in self.where]
        arguments += [f"groups={self.groups!r}"] if self.groups else []
        return f".{'only' if self.keep else 'without'}({', '.join(arguments)})"

    def holds(self, named: NamedParam) -> bool:
        """True if the parameter passes."""
        is_selected = _in_group(named, self.groups) or any(_matches(where, named) for where in self.where)
        return is_selected == self.keep


@dataclass(frozen=True)
class Scope:
    """The parameters that pass all conditions; all parameters, if there are none."""

    conditions: tuple[Condition, ...] = ()

    @property
    def limited(self) -> bool:
        """True if some parameters may be out of it."""
        return len(self.conditions) > 0  # `not` of a tuple breaks the graphs of `torch.compile`

    def narrowed(self, keep: bool, where: Sequence[Where], groups: str | Iterable[str]) -> "Scope":
        """The scope with one more condition."""
        for item in where:
            if not isinstance(item, str) and (not callable(item) or isinstance(item, type | nn.Module)):
                kind = type(item).__name__
                hint = ": write them one after the other" if isinstance(item, list | tuple) else ""
                hint = ": write its name" if isinstance(item, nn.Module) else hint
                raise TypeError(
                    f"only and without take patterns for names and functions of a parameter, got {kind}{hint}"
                )
            if not isinstance(item, str) and not takes_one(item):
                raise TypeError(
                    f"only and without call a function with a parameter alone, and {item!r} takes other arguments: "
                    "select by name with patterns such as '*.bias'"
                )
        named = (groups,) if isinstance(groups, str) else tuple(groups)
        if not all(isinstance(name, str) for name in named):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"groups must be the names of param groups, got {groups!r}")
        if not where and not named:
            raise ValueError("a scope needs at least one pattern, function or group")
        return Scope((*self.conditions, Condition(keep, tuple(where), named)))

    def within(self, outer: "Scope") -> "Scope":
        """The parameters that are in both scopes."""
        return Scope((*outer.conditions, *self.conditions))

    def has(self, named: NamedParam) -> bool:
        """True if the parameter is in the scope."""
        return all(condition.holds(named) for condition in self.conditions)

    def __str__(self) -> str:
        return "".join(map(str, self.conditions))

    def _patterns(self) -> list[str]:
        return [where for condition in self.conditions for where in condition.where if isinstance(where, str)]

    def check_names(self, owner: object, params: Sequence[NamedParam]) -> None:
        """Raise if the scope selects by name and a parameter has none."""
        if self._patterns() and any(named.name is None for named in params):
            raise ValueError(
                f"{owner!r} chooses parameters by name, and these have none: give Modular the module, or "
                "before_step model=model; or choose by a function, such as lambda param: param.ndim > 1"
            )

    def unmatched_names(self, owner: object, params: Sequence[NamedParam]) -> dict[str, bool]:
        """The warning about each pattern and each group name, with True if it matches no parameter or group."""
        # such a name is mistyped, or its parameters are added later
        names = [named.name for named in params if named.name is not None]
        groups = {named.group for named in params}
        warnings: dict[str, bool] = {}
        for pattern in self._patterns():
            is_idle = not any(matches_name(pattern, name) for name in names)
            warnings[f"no parameter has a name that matches {pattern!r} of {owner!r}"] = is_idle
        for group in (group for condition in self.conditions for group in condition.groups):
            warnings[f"no param group has the name {group!r} of {owner!r}"] = group not in groups
        return warnings


def matches_name(pattern: str, name: str) -> bool:
    """True if a pattern is the name of a parameter or of a module that holds it, or a wildcard for its name."""
    return name == pattern or name.startswith(f"{pattern}.") or fnmatchcase(name, pattern)


def _matches(where: Where, named: NamedParam) -> bool:
    if isinstance(where, str):
        return named.name is not None and matches_name(where, named.name)
    return bool(where(named.param))


def _in_group(named: NamedParam, groups: Iterable[str]) -> bool:
    """True if a parameter is in one of the groups; parts of a group that was split are ``"<name> (2)"`` and so on."""
    return named.group is not None and any(
        named.group == g or (named.group.startswith(f"{g} (") and PART.search(named.group[len(g) :])) for g in groups
    )
