"""The only part of the fast way that an optimizer sees."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import Tensor

from torchzero_clip.engine.ordinary_step import StepOptions
from torchzero_clip.engine.walk import Walk
from torchzero_clip.fast.fast import Fast
from torchzero_clip.fast.plan import Plan
from torchzero_clip.fast.repeated import PlannedStep
from torchzero_clip.fast.workspace import Workspace
from torchzero_clip.types import Group, State


class FastWay:
    """The fast way of the steps of one optimizer. It is not saved or copied: a new one works the same.

    After a few steps in a row that looked the same, it makes a plan that the next steps follow. If few steps follow a
    plan, the next plan needs twice as many such steps, so that a model whose steps vary spends little time on plans.
    """

    _FIRST_WAIT, _LONGEST_WAIT = 2, 64

    def __init__(self, workspace: Workspace | None = None) -> None:
        self._workspace = workspace or Workspace()
        self.columns = self._workspace.columns
        """Returns parameters, gradients and state by key, if the tensors need no further checks; else None."""
        self.executor = partial(Fast, self._workspace)  # makes the executor of a step, from its updates and `columns`
        self.plan: Plan | None = None  # the plan; None if there is none yet, or if the last one did not fit
        self._layout: object = None
        self._alike = self._uses = 0
        self._wait = self._FIRST_WAIT
        self._of_parts: dict[object, FastWay] = {}

    def held(self) -> object:
        """The memory that steps use between each other. Whoever captures a step has to keep it."""
        return self._workspace.held()

    def of_part(self, key: object) -> "FastWay":
        """The fast way of some of the parameters, which take their steps in turns and share memory."""
        if key not in self._of_parts:
            workspace = Workspace()
            workspace.scratch, workspace.tried = self._workspace.scratch, self._workspace.tried
            self._of_parts[key] = FastWay(workspace)
        return self._of_parts[key]

    def planned(
        self, groups: list[Group], kept: Mapping[Tensor, State], options: StepOptions, *rest: Any
    ) -> PlannedStep | None:
        """Begin a step by the plan; ``rest`` are the arguments of `PlannedStep` from ``chain_state`` on.

        Return None, before any change, if there is no plan or it does not fit. Raise if a setting is out of range.
        """
        plan, self.plan = self.plan, None  # an error drops the plan
        if plan is None or options != plan.options:
            return None
        gathered = plan.tensors.gathered(groups, kept, self._workspace.vectors)
        if gathered is None or not plan.settings.are_kept(groups):
            return None
        self.plan, self._workspace.layout = plan, plan.course.layout
        self._uses += 1
        scratch = self._workspace.scratch.knowing(gathered[0]["grads"], plan.course.layout)
        return PlannedStep(plan.course, plan.settings.of_groups, groups, *gathered, self._workspace, scratch, *rest)

    def learn(self, walk: Walk, options: StepOptions) -> None:
        """Make a plan of a step, if a kernel took it for all parameters and the steps before looked the same."""
        ended = walk.executor.ended if isinstance(walk.executor, Fast) else None
        if ended is None:
            return
        self._alike = self._alike + 1 if ended.layout is self._layout else 0
        self._layout = ended.layout
        if self._alike >= self._wait:
            self._wait = self._FIRST_WAIT if self._uses >= 2 * self._wait else min(2 * self._wait, self._LONGEST_WAIT)
            self._alike = self._uses = 0
            self.plan = Plan.of(walk, ended, options)
