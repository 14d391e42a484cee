"""Settings that are functions of the number of steps taken."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from torchzero_clip.checks import as_builtin, takes_one
from torchzero_clip.core.chain_state import SCHEDULE_STEP, ChainState
from torchzero_clip.types import Group, Schedule


class Schedules:
    """The functions behind settings, per param group. The groups hold the values that the next step will use."""

    # a function may have no value for the step after the last one; its error is raised only if that step is taken

    def __init__(self, defaults: Mapping[str, Schedule], settings: Iterable[str], chain_state: ChainState) -> None:
        self._defaults, self._chain_state = dict(defaults), chain_state
        self._settings = set(settings)  # functions under other keys belong to other packages
        self.of_groups: list[tuple[list[Any], dict[str, Schedule]]] = []  # by the list of parameters of each group
        self.is_behind = False  # the groups do not have the values of the next step yet

    @property
    def any(self) -> bool:
        """True if some setting is a function of the step."""
        return any(schedules for _, schedules in self.of_groups)

    def split(self, group: Group, was_at: int | None) -> tuple[Group, dict[str, Schedule]]:
        """A group with values in the place of functions, and these functions."""
        # ``was_at`` is the step of the optimizer that the group comes from
        step = self._chain_state.values.get(SCHEDULE_STEP, 0)
        schedules = {key: value for key, value in group.items() if key in self._settings and callable(value)}
        schedules |= {key: schedule for key, schedule in self._defaults.items() if key not in group}
        if was_at is not None:
            schedules |= _in_use({**self._defaults, **(self._find(group) or {})}, group, was_at)
        return {**group, **{key: at(schedule, step, key) for key, schedule in schedules.items()}}, schedules

    def add(self, group: Group, schedules: dict[str, Schedule]) -> None:
        """Store the functions of a group that was added to the optimizer."""
        # an entry keeps the parameters of a removed group alive, so a chain without schedules has none
        if schedules or self._defaults or self.of_groups:
            self.of_groups.append((group["params"], schedules))

    def __contains__(self, key: str) -> bool:
        return any(key in schedules for _, schedules in self.of_groups)

    def catch_up(self, groups: Sequence[Group]) -> None:
        """Before a step: take over counters from the groups, and compute settings that were not known a step before."""
        self._chain_state.adopt_counters(groups)
        is_counted = SCHEDULE_STEP in self._chain_state.values
        for group in groups if is_counted and self.any else ():
            schedules = self._of(group)  # it raises for a group that was added by hand
            if self.is_behind:
                step = self._chain_state.values[SCHEDULE_STEP]
                group.update({key: at(schedule, step, key) for key, schedule in schedules.items()})
        self.is_behind = False

    def advance(self, groups: Sequence[Group]) -> None:
        """After a step that was taken: count it, and write the values for the next to the groups."""
        values = self._chain_state.values
        values[SCHEDULE_STEP] += 1
        for group, changed in zip(groups, self.applied(groups, groups, values[SCHEDULE_STEP]), strict=True):
            group.update(changed)

    def applied(self, groups: Sequence[Group], saved: Sequence[Group], step: int) -> list[Group]:
        """Saved groups with the scheduled values of a step. They are in the order of the groups of the optimizer."""
        if not self.any:
            return list(saved)
        try:
            values = [{key: at(schedule, step, key) for key, schedule in self._of(group).items()} for group in groups]
        except Exception:
            self.is_behind = True
            return list(saved)
        self.is_behind = False
        return [{**group, **scheduled} for group, scheduled in zip(saved, values, strict=True)]

    def _of(self, group: Group) -> dict[str, Schedule]:
        """The functions of a group. The group may be a copy, or may have another index than before."""
        schedules = self._find(group)
        if schedules is None and SCHEDULE_STEP in group:  # it is of a copy of this optimizer: Lightning's finetuning
            schedules = _in_use(self._defaults, group, group[SCHEDULE_STEP])
            self.of_groups.append((group["params"], schedules))
        if schedules is None:
            raise ValueError("a param group was added by hand, and settings depend on the step: use add_param_group")
        return schedules

    def _find(self, group: Group) -> dict[str, Schedule] | None:
        first = next(iter(group["params"]), None)
        first = first[1] if isinstance(first, tuple) else first
        # the last first: a group may have been removed, and its parameters added again
        for params, schedules in reversed(self.of_groups):
            if group["params"] is params or (params and first is params[0]):
                return schedules
        return None


def _in_use(schedules: Mapping[str, Schedule], group: Group, step: int) -> dict[str, Schedule]:
    """The functions that gave the values of a group after so many steps; other values are constant."""
    in_use: dict[str, Schedule] = {}
    for key, schedule in schedules.items():
        with suppress(Exception):  # a function may have no value for the step after the last
            if key in group and not callable(group[key]) and group[key] == at(schedule, step, key):
                in_use[key] = schedule
    return in_use


def at(value: object, step: int, key: str) -> Any:
    """A setting, or the value of its schedule after ``step`` steps. Errors name ``key``."""
    if not callable(value):
        return value
    try:
        return as_builtin(value(step))
    except Exception as error:
        if isinstance(error, TypeError) and not takes_one(value):
            raise TypeError(
                f"{key} is a function that cannot be called with one argument: {value!r}. It must take the number of "
                "steps, as in lambda step: 0.1 * step"
            ) from error
        error.add_note(f"in the schedule of {key}, {value!r}, of step {step}")
        raise
