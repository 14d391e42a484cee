"""State of the whole chain: joint averages, counters, the step of schedules."""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from torchzero_clip.checks import count
from torchzero_clip.functional.dtypes import moved
from torchzero_clip.types import Group, NewState, State

SCHEDULE_STEP = "schedule_step"  # how many steps were taken, in optimizers with schedules

SKIPPED, CONSECUTIVE = "skipped_steps", "consecutive_skips"
"""How many steps were skipped, in all and in a row, in optimizers that may skip steps."""

COUNTERS = (SKIPPED, CONSECUTIVE, SCHEDULE_STEP)


class ChainState:
    """State of the whole chain: plain 0-d tensors and numbers, by qualified keys. Every param group holds a copy."""

    # Each group has all of it, because loaders reorder, drop and merge groups. It is written to the groups after each
    # step and each load, and whenever a checkpoint is made. ``identity`` is written, but never read back from them.

    def __init__(self, values: State, identity: Mapping[str, str]) -> None:
        self.values = dict(values)
        self.identity = dict(identity)

    @property
    def keys(self) -> set[str]:
        """The keys of this state in param groups, and the keys of counters that this optimizer does not need."""
        return {*self.values, *COUNTERS, *self.identity}

    def start(self, groups: Iterable[Group], *, has_schedules: bool) -> None:
        """Write the state to new param groups, with a count of steps if settings are functions of it."""
        if has_schedules:
            self.values.setdefault(SCHEDULE_STEP, 0)
        self.show(groups)

    def show(self, groups: Iterable[Group]) -> None:
        """Write the state to param groups."""
        for group in groups:
            group.update({**self.values, **self.identity})

    def adopt_counters(self, groups: Sequence[Group]) -> None:
        """Adopt a number that a user has written to a param group."""
        for key, value in self.values.items():
            if isinstance(value, Tensor):
                continue
            written = [group[key] for group in groups if group.get(key, value) != value]
            if written:
                if key in COUNTERS:
                    count(key, written[0])
                self.values[key] = written[0]
                self.show(groups)

    def move(self, groups: Iterable[Group]) -> None:
        """Move tensors to the device of the first parameter, because trainers move parameters after construction."""
        param = next((param for group in groups for param in group["params"]), None)
        if param is None or param.is_meta:  # meta parameters have no values
            return
        for key, value in self.values.items():
            if isinstance(value, Tensor):
                self.values[key] = moved(value, param.device)


def saved_chain_state(saved_groups: Sequence[Group], keys: Iterable[str]) -> NewState:
    """The values of keys in the param groups of a checkpoint; raises ValueError if groups disagree."""
    state: NewState = {}
    for key in keys:
        values = [group[key] for group in saved_groups if key in group]
        if any(not same(values[0], value) for value in values[1:]):
            shown = ", ".join(str(v.item() if isinstance(v, Tensor) and v.numel() == 1 else v) for v in values)
            raise ValueError(
                f"the param groups of the checkpoint disagree about {key!r}, which is one value of the whole chain: "
                f"{shown}. They come from several optimizers: set it to one value in all of them"
            )
        if values:
            state[key] = values[0].detach() if isinstance(values[0], Tensor) else values[0]
    return state


def same(first: object, second: object) -> bool:
    """True if two values of state or settings are equal. NaN equals NaN."""
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        # `torch.equal` says that a NaN differs from itself
        return first.shape == second.shape and bool(
            torch.isclose(first.cpu(), second.cpu(), 0, 0, equal_nan=True).all()
        )
    return type(first) is type(second) and first == second
