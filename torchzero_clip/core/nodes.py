"""The transforms of a chain as a flat list: where each stands, and where its settings and its state are stored."""

from collections.abc import Container, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, TypeVar

from torchzero_clip.checks import HOW_TO_COMPUTE, NO_SETTINGS
from torchzero_clip.compat import cpu_by_default
from torchzero_clip.core.kinds import FinalRule, Gate, Scaling, UpdateRule
from torchzero_clip.core.scope import NamedParam, Scope
from torchzero_clip.core.transform import Transform, is_pure, storable, treats_each_alone
from torchzero_clip.types import Group, NewState, Schedule, Setting, State

_V = TypeVar("_V")

_COMPARED = bool, int, float, complex, str


@dataclass(frozen=True)
class Node:
    """One transform at its place in a chain."""

    path: str  # the names of the composites around it and then its name, as in "chain/adam": the prefix of its keys
    transform: Transform
    outer: tuple[Transform, ...]  # the composites that it is in, the outermost first
    storage_keys: Mapping[str, str]  # the key of a param group under which each of its settings is stored
    global_keys: tuple[str, ...]  # the keys of its state of the whole chain
    children: frozenset[str]  # the names of its own children, if it is a composite
    has_state: bool  # its parameters may have state
    stored: Set[str] | None  # for final rules, which read keys of other packages too: all keys of the chain

    @property
    def scope(self) -> Scope:
        """The parameters that it acts on: those in its own scope and in the scopes of all composites around it."""
        scope = self.transform.scope
        for transform in reversed(self.outer):
            scope = scope.within(transform.scope)
        return scope

    def settings(self, group: Group) -> dict[str, Any]:
        """Its settings in a param group, and the keys of other packages if it reads them."""
        try:
            settings = {key: group[stored] for key, stored in self.storage_keys.items()}
        except KeyError as error:
            raise KeyError(f"a param group has no {error}: add groups by add_param_group, which fills it in") from None
        if self.stored is None:
            return settings
        others = group.keys() - self.stored - NO_SETTINGS - HOW_TO_COMPUTE
        # "/" is in keys of other transforms, and ":" in those that `as_lr` lets schedulers store
        return {key: group[key] for key in others if "/" not in key and ":" not in key} | settings

    def state(self, values: State) -> State:
        """Its state of a parameter, without the prefix."""
        prefix, start = f"{self.path}/", len(self.path) + 1
        state = {key[start:]: value for key, value in values.items() if key.startswith(prefix)}
        if self.children:
            return {key: value for key, value in state.items() if key.partition("/")[0] not in self.children}
        return state

    def global_state(self, values: State) -> State:
        """Its state of the whole chain, without the prefix."""
        return {key: values[f"{self.path}/{key}"] for key in self.global_keys}

    def init_global_state(self) -> NewState:
        """Its state of the whole chain before its first step, by qualified keys: on the CPU, whatever the default."""
        with cpu_by_default():
            return self.qualified(storable(self.transform, self.transform.init_global_state()))

    def keeps_refused(self, settings: Sequence[Setting]) -> bool:
        """True if it may act in a step that the device refuses, because that changes no state of it."""
        transform, has_state = self.transform, self.has_state or bool(self.global_keys)
        # a pure transform changes only updates, state and metrics
        return is_pure(transform) and (not has_state or transform.keeps_refused(settings))

    def qualified(self, values: Mapping[str, _V]) -> dict[str, _V]:
        """Values under keys with the prefix."""
        return {f"{self.path}/{key}": value for key, value in values.items()}

    def init_state(self, named: NamedParam, setting: Setting) -> NewState:
        """The state of a parameter before its first step, by qualified keys; empty out of scope."""
        return self.qualified(self.transform.init_state(named.param, setting)) if self.scope.has(named) else {}

    def possible_state(self, named: NamedParam, setting: Setting) -> NewState:
        """Every entry that the state of a parameter may ever have, by qualified keys; empty out of scope."""
        return self.qualified(self.transform.possible_state(named.param, setting)) if self.scope.has(named) else {}


class Nodes:
    """All transforms of a chain, at any depth, each composite before its children."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self.by_path = {node.path: node for node in nodes}
        self.storage_keys = {f"{n.path}/{key}": stored for n in nodes for key, stored in n.storage_keys.items()}
        """The key of a param group for each qualified key of a setting."""
        self.targets = {node.transform.target for node in nodes}
        self.joining = {node.path for node in nodes if _joins_tensors(node.transform)}
        """The paths of transforms whose result for a tensor may depend on others."""
        self.joint = {n.path for n in nodes if any(f"{path}/".startswith(f"{n.path}/") for path in self.joining)}
        """The paths in ``joining``, and those of composites around such a transform."""
        self.of_final_rules = tuple(f"{node.path}/" for node in nodes if isinstance(node.transform, FinalRule))
        """The prefixes of the state of final rules, which do not convert state of another dtype than the parameter."""
        self.zeros_matter = _zeros_matter(nodes)
        """True if a gradient of zeros may change the results for other tensors, or state that several tensors share."""

    def __iter__(self) -> Iterator[Node]:
        return iter(self.by_path.values())

    def defaults(self) -> dict[str, Any]:
        """The settings that the constructors were given, as param groups store them."""
        return {stored: n.transform.defaults[key] for n in self for key, stored in n.storage_keys.items()}

    def schedules(self) -> dict[str, Schedule]:
        """The settings that are functions of the step, as param groups store them."""
        return {n.storage_keys[key]: schedule for n in self for key, schedule in n.transform.schedules.items()}

    def init_global_state(self) -> NewState:
        """The state of the whole chain before its first step, by qualified keys."""
        return {key: value for n in self for key, value in n.init_global_state().items()}

    def checked_settings(
        self, groups: Sequence[Group], paths: Container[str] | None = None
    ) -> dict[str, list[Setting]]:
        """The settings of each transform, or of those at ``paths``, by its path: one dict per param group.

        Raises if a setting is out of range. Neighbouring groups with equal settings share one dict, so that one
        operation serves both.
        """
        checked: dict[str, list[Setting]] = {}
        for path, node in self.by_path.items():
            if paths is not None and path not in paths:
                continue
            settings: list[Setting] = []
            for group in groups:
                of_group = node.settings(group)
                settings.append(settings[-1] if settings and _same(of_group, settings[-1]) else of_group)
            try:
                node.transform.check_groups(settings)
            except Exception as error:
                error.add_note(f"in {node.transform!r}")
                raise
            checked[path] = settings
        return checked

    def init_state(self, named: NamedParam, group: Group | None = None) -> NewState:
        """The state of a parameter before its first step, with the settings of a group or those of the constructors."""
        state: State = {}
        for node in self:
            state |= node.init_state(named, node.transform.defaults if group is None else node.settings(group))
        return state

    def possible_state(self, named: NamedParam, group: Group) -> NewState:
        """Every entry that the state of a parameter may ever have."""
        return {key: value for n in self for key, value in n.possible_state(named, n.settings(group)).items()}


def _joins_tensors(transform: Transform) -> bool:
    return not (isinstance(transform, UpdateRule | Gate) or treats_each_alone(transform))


def _zeros_matter(nodes: Sequence[Node]) -> bool:
    """False if, in every transform that joins tensors, zeros arrive as zeros and do not count."""
    are_zeros = True
    for node in nodes:
        transform = node.transform
        joins, is_gate = _joins_tensors(transform), isinstance(transform, Gate)
        # in a scope without gradients, a statistic would store the norm of zeros
        stores = node.scope.limited and (is_gate or (joins and transform.keeps_statistics))
        keeps_zeros = is_gate or (isinstance(transform, Scaling) and transform.target == "update")
        if stores or (joins and not (are_zeros and keeps_zeros and _is_blind_to_zeros(transform))):
            return True
        are_zeros = are_zeros and keeps_zeros
    return False


def _is_blind_to_zeros(transform: Transform) -> bool:
    if not isinstance(transform, Scaling) or transform.slicing.dim != "global":
        return True
    # a joint norm of averages includes the average of every tensor that takes part
    return not (transform.slicing.metric.counts_zeros or transform.has_state())


def _same(one: Setting, other: Setting) -> bool:
    """True if settings are equal. Tensors and other objects have to be one object in both."""
    return one.keys() == other.keys() and all(_equal(value, other[key]) for key, value in one.items())


def _equal(value: object, other: object) -> bool:
    if isinstance(value, tuple) and isinstance(other, tuple):
        return len(value) == len(other) and all(map(_equal, value, other))
    # comparing tensors would synchronize with the GPU, and arrays of other packages are compared by elements
    is_plain = isinstance(value, _COMPARED) and isinstance(other, _COMPARED)
    return value is other or (is_plain and value == other)
