"""Settings that are functions of the number of steps taken."""

from collections.abc import Mapping, Sequence
from typing import Any

from torchzero_clip.core.settings import at
from torchzero_clip.types import Schedule

SCHEDULE_STEP = "schedule_step"
"""Where the first param group counts the steps taken, in optimizers with schedules."""

Group = dict[str, Any]


class Schedules:
    """The functions behind settings, per param group. The groups hold the values that the next step will use.

    Args:
        defaults: Those of the chain, by the keys under which groups store settings.
    """

    def __init__(self, defaults: Mapping[str, Schedule]) -> None:
        self._defaults = dict(defaults)
        self._of_groups: list[dict[str, Schedule]] = []

    def add(self, group: Group, step: int) -> Group:
        """Remember the functions of a new group, and return it with their values in their place."""
        own = {key: value for key, value in group.items() if key != "params" and callable(value)}
        own.update({key: schedule for key, schedule in self._defaults.items() if key not in group})
        self._of_groups.append(own)
        return {**group, **{key: at(schedule, step) for key, schedule in own.items()}}

    def forget(self, first: int) -> None:
        """Drop the groups from the given one on."""
        del self._of_groups[first:]

    def begin(self, groups: Sequence[Group]) -> None:
        """Start counting, if there is anything to count for."""
        if any(self._of_groups):
            groups[0].setdefault(SCHEDULE_STEP, 0)

    def values(self, groups: Sequence[Group], ahead: int = 0) -> list[dict[str, Any]]:
        """The scheduled settings of each group, as they are to be after so many more steps."""
        step = groups[0].get(SCHEDULE_STEP, 0) + ahead
        return [{key: at(schedule, step) for key, schedule in own.items()} for own in self._of_groups]

    def advance(self, groups: Sequence[Group], values: Sequence[Mapping[str, Any]]) -> None:
        """Count a step that was taken, and let the groups have the values for the next."""
        if SCHEDULE_STEP in groups[0]:
            groups[0][SCHEDULE_STEP] += 1
        self.set(groups, values)

    def set(self, groups: Sequence[Group], values: Sequence[Mapping[str, Any]]) -> None:
        """Let the groups have these values."""
        for group, own in zip(groups, values, strict=True):
            group.update(own)
