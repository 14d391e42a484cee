"""The only part of the fast way that an optimizer sees."""

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from torch import Tensor

from torchzero_clip.engine.executor import Executor
from torchzero_clip.engine.table import Group, Table
from torchzero_clip.engine.updates import Updates
from torchzero_clip.engine.walk import Walk
from torchzero_clip.fast.fast import Fast
from torchzero_clip.fast.plan import Plans
from torchzero_clip.fast.workspace import Workspace
from torchzero_clip.types import State

Columns: TypeAlias = dict[str, list[Tensor]]
Metrics: TypeAlias = Callable[[], dict[str, Tensor]]


class FastWay:
    """The fast way of the steps of one optimizer. It is never saved or copied, because a new one serves as well.

    Args:
        beside: The fast way of other parameters, which take their steps in turns with these and lend their memory.
    """

    def __init__(self, beside: "FastWay | None" = None) -> None:
        self._workspace = Workspace() if beside is None else beside._workspace.beside()
        self._plans = Plans(self._workspace)

    def columns(self, table: Table) -> Columns | None:
        """Parameters, gradients and state by key, if they need no further checks; else None."""
        return self._workspace.columns(table.params, table.grads, table.states)

    def executor(self, updates: Updates, columns: Columns | None) -> Executor:
        """The executor of a step."""
        return Fast(updates, self._workspace, columns)

    @property
    def has_plan(self) -> bool:
        """True if the next step may follow a plan."""
        return self._plans.plan is not None

    def repeat(
        self, groups: list[Group], kept: Mapping[Tensor, State], chain_state: dict[str, Any], loss: Any
    ) -> Metrics | None:
        """Take a step by the plan, as `Plans.repeat` does."""
        return self._plans.repeat(groups, kept, chain_state, loss)

    def learn(self, walk: Walk) -> None:
        """Make a plan of a step that was taken, if it may be repeated."""
        if isinstance(walk.executor, Fast) and walk.executor.ended is not None:
            self._plans.learn(walk, walk.executor.ended)
