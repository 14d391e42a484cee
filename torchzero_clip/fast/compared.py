"""What a plan compares in each step, before anything changes: tensors and settings."""

import operator
from collections.abc import Hashable, Mapping, Sequence, Set
from itertools import chain
from typing import Any, Protocol, TypeAlias

from torch import Tensor

from torchzero_clip.compat import SameLayout, native_guard
from torchzero_clip.core.transform import is_pure
from torchzero_clip.engine.table import Table, taking_part
from torchzero_clip.engine.walk import Walk
from torchzero_clip.fast.vectors import Vectors
from torchzero_clip.fast.workspace import StepLayout
from torchzero_clip.types import Group, Setting, State

ByKey: TypeAlias = Mapping[str, list[Tensor]]
"""Parameters, gradients and state by key."""

_IMMUTABLE = {float, int, bool, str, type(None)}


Gathered: TypeAlias = tuple[dict[str, list[Tensor]], list[State], list[Tensor]]
"""The tensors of a step that are laid out as a plan needs them.

They are parameters, gradients and state by key; the states; and a vector for each key of the step counts that a kernel
reads.
"""


class SameTensors:
    """Finds out whether a step has tensors like those of an earlier one, without keeping any of them.

    Types, dtypes, sizes, strides and ``requires_grad`` of parameters, gradients and state are compared by a guard that
    is private to torch, because a check in Python takes ten times as long. The list of all parameters stays the same
    if one moves to the next group, so the groups of the parameters are compared too. Numbers of state have to be views
    of the vectors that the last step made, because a load or a user may replace them.
    """

    def __init__(
        self, table: Table, columns: ByKey, shaped: Sequence[str], counters: Sequence[str], fits: SameLayout
    ) -> None:
        self.group_of = table.group_of
        self._sizes = [len(group["params"]) for group in table.groups]
        self._all_take_part = sum(self._sizes) == len(table.params)
        self._state = [key for key in columns if key not in ("params", "grads")]
        self._shaped = shaped  # the keys of state that is shaped like the parameters
        self._counters = counters  # the keys of step counts that a kernel reads
        self._numbers = [key for key in self._state if key not in (*shaped, *counters)]
        self._fits = fits

    @classmethod
    def of(cls, table: Table, columns: ByKey, layout: StepLayout, counters: Sequence[str]) -> "SameTensors | None":
        """Make the comparison of later steps with this one. None if this torch has no guard for such tensors."""
        shaped = [key for key in columns if key not in ("params", "grads") and layout.is_shaped(key)]
        like = chain.from_iterable(columns[key] for key in ("params", "grads", *shaped))
        first = table.params[0]
        fits = native_guard(list(like)) if first.is_cpu or first.is_cuda else None
        return None if fits is None else cls(table, columns, shaped, counters, fits)

    def gathered(self, groups: list[Group], kept: Mapping[Tensor, State], vectors: Vectors) -> Gathered | None:
        """The tensors of a step; None if they are not laid out as in the step of the plan."""
        if self._all_take_part:
            params: list[Tensor] = [param for group in groups for param in group["params"]]
            grads: list[Any] = [param.grad for param in params]
            fits = [len(group["params"]) for group in groups] == self._sizes
        else:
            params, grads, group_of = taking_part(groups)
            fits = group_of == self.group_of
        columns: dict[str, list[Tensor]] = {"params": params, "grads": grads}
        states: list[Any] = list(kept.values())
        # usually the states are in the order of the parameters, and 400 look-ups by hash are saved
        if len(kept) != len(params) or not all(map(operator.is_, kept, params)):
            states = list(map(kept.get, params))
        if not fits or None in states:
            return None
        try:
            for key in self._state:
                columns[key] = [state[key] for state in states]
        except KeyError:
            return None
        tensors = params + grads
        for key in self._shaped:
            tensors += columns[key]
        if not self._fits(tensors) or not all(vectors.are_views(key, columns[key]) for key in self._numbers):
            return None
        vectors_of = [vectors.last(key, columns[key]) for key in self._counters]
        counters = [vector for vector in vectors_of if vector is not None]
        return (columns, states, counters) if len(counters) == len(self._counters) else None


class Reader(Protocol):
    """A part of a planned step that reads settings."""

    @property
    def paths(self) -> Set[str]:
        """The paths of the transforms whose settings it reads."""
        ...

    def variants(self, settings: Mapping[str, list[Setting]]) -> Set[Hashable]:
        """The kinds of step that it takes with these settings. A plan knows only one."""
        ...

    def use_settings(self, settings: Mapping[str, list[Setting]]) -> None:
        """Take over checked settings."""
        ...


class SameSettings:
    """Finds out whether a step has settings with which an earlier step can be repeated.

    Attributes of transforms, which a user may set at any time, and values in param groups are compared by identity,
    because == compares the elements of tensors, which synchronizes with the GPU and gives many answers.
    """

    def __init__(self, walk: Walk, readers: Sequence[Reader]) -> None:
        nodes = self._nodes = walk.nodes
        self._transforms = [node.transform for node in nodes]
        self._attributes = list(map(vars, self._transforms))  # their dicts themselves, which show later changes
        self._arguments = self._current_arguments()
        self._are_pure = all(map(is_pure, self._transforms))
        self._keys = list(nodes.storage_keys.values())
        self._owners = [node.path for node in nodes for _ in node.storage_keys]  # of each key
        self._readers = readers
        self._variants = [reader.variants(walk.settings) for reader in readers]
        self._use_settings(walk.settings, walk.table.groups, set(nodes.by_path))

    def are_kept(self, groups: list[Group]) -> bool:
        """True if the same kind of step is taken with the settings of now. Raise if a setting is invalid."""
        if not all(map(operator.is_, self._current_arguments(), self._arguments)):  # one more or less shifts the others
            return False
        if list(map(len, groups)) != self._lengths:  # an ordinary step looks at a key that is new
            return False
        values = [group[key] for group in groups for key in self._keys]
        paths: Set[str] = self._nodes.by_path.keys()  # of the transforms with new values
        if len(values) == len(self._values):
            if all(map(operator.is_, values, self._values)):
                return True
            places = [k for k, value in enumerate(values) if value is not self._values[k]]
            paths = {self._owners[k % len(self._owners)] for k in places}
        settings = {**self.of_groups, **self._nodes.checked_settings(groups, paths)}
        if [reader.variants(settings) for reader in self._readers] != self._variants:
            return False
        self._use_settings(settings, groups, paths)
        return True

    def _current_arguments(self) -> list[object]:
        """The values of all attributes of the transforms and their classes."""
        values = [value for attributes in self._attributes for value in attributes.values()]
        return values + list(map(type, self._transforms))

    def _use_settings(self, settings: Mapping[str, list[Setting]], groups: Sequence[Group], paths: Set[str]) -> None:
        """Take over checked settings, which are new for the transforms at these ``paths``."""
        self.of_groups = settings
        for reader in self._readers:
            if not paths.isdisjoint(reader.paths):
                reader.use_settings(settings)
        self._lengths = list(map(len, groups))
        values = [group[key] for group in groups for key in self._keys]
        parts = chain.from_iterable(value if type(value) is tuple else (value,) for value in values)
        # every step checks values that can change in place, such as tensors, and values of transforms that are not
        # pure, whose checks may have effects
        self._values = values if self._are_pure and _IMMUTABLE.issuperset(map(type, parts)) else []
