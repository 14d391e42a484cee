"""Settings that are functions of the number of steps taken."""

from collections.abc import Mapping, Sequence
from typing import Any

from torchzero_clip.checks import plain
from torchzero_clip.types import Schedule

SCHEDULE_STEP = "schedule_step"
"""Where the first param group counts the steps taken, in optimizers with schedules."""

Group = dict[str, Any]


class Schedules:
    """The functions behind settings, per param group. The groups hold the values that the next step will use.

    A function may have no value for the step after the last one: that is an error only if this step is taken.

    Args:
        defaults: Those of the chain, by the keys under which groups store settings.
    """

    def __init__(self, defaults: Mapping[str, Schedule]) -> None:
        self._defaults = dict(defaults)
        self._of_groups: list[dict[str, Schedule]] = []
        self._behind = False

    def add(self, group: Group, step: int) -> Group:
        """Remember the functions of a new group, and return it with their values in their place."""
        own = {key: value for key, value in group.items() if key != "params" and callable(value)}
        own.update({key: schedule for key, schedule in self._defaults.items() if key not in group})
        self._of_groups.append(own)
        return {**group, **{key: at(schedule, step) for key, schedule in own.items()}}

    def __contains__(self, key: str) -> bool:
        return any(key in own for own in self._of_groups)

    def forget(self, first: int) -> None:
        """Drop the groups from the given one on."""
        del self._of_groups[first:]

    def begin(self, groups: Sequence[Group]) -> None:
        """Start counting, if there is anything to count for."""
        if any(self._of_groups):
            groups[0].setdefault(SCHEDULE_STEP, 0)

    def catch_up(self, groups: Sequence[Group]) -> None:
        """Before a step: compute scheduled settings that could not be computed after the step before."""
        if not any(self._of_groups):
            return
        if len(groups) != len(self._of_groups):
            raise ValueError("param_groups was changed by hand, and has schedules: use add_param_group")
        if self._behind:
            for group, values in zip(groups, self._values(groups[0][SCHEDULE_STEP]), strict=True):
                group.update(values)
            self._behind = False

    def advance(self, groups: Sequence[Group]) -> None:
        """Count a step that was taken, and let the groups have the values for the next."""
        if any(self._of_groups):
            groups[0][SCHEDULE_STEP] += 1
            for group, changed in zip(groups, self.applied(groups), strict=True):
                group.update(changed)

    def applied(self, groups: Sequence[Group]) -> list[Group]:
        """The groups with the values for the number of steps that the first one says, if these can be told."""
        if not any(self._of_groups):
            return list(groups)
        try:
            values = self._values(groups[0].get(SCHEDULE_STEP, 0))
        except Exception:
            self._behind = True
            return list(groups)
        self._behind = False
        return [{**group, **own} for group, own in zip(groups, values, strict=True)]

    def _values(self, step: int) -> list[dict[str, Any]]:
        return [{key: at(schedule, step) for key, schedule in own.items()} for own in self._of_groups]


def at(value: Any, step: int) -> Any:
    """A setting, or what its schedule gives after so many steps."""
    if not callable(value):
        return value
    try:
        return plain(value(step))
    except Exception as error:
        error.add_note(f"in a schedule, {value!r}, of step {step}")
        raise
