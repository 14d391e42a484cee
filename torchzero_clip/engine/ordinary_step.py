"""What a step is, and the ordinary one, which follows no plan: it calls one transform after the other."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, final

from torch import Tensor
from torch.distributed import ProcessGroup
from typing_extensions import override

from torchzero_clip.core.chain import Chain
from torchzero_clip.engine.device_decisions import DeviceDecisions
from torchzero_clip.engine.gradient_norms import GradientNorms
from torchzero_clip.engine.idle import Idle
from torchzero_clip.engine.listener import Listener
from torchzero_clip.engine.nonfinite import StepPolicy
from torchzero_clip.engine.other_processes import OtherProcesses
from torchzero_clip.engine.parts import Parts
from torchzero_clip.engine.walk import RefusedByDevice, Walk
from torchzero_clip.functional.ways import may_look
from torchzero_clip.types import Metrics, State, StateByParam

MISSING_OPERATION = (
    "If the device lacks this operation, let the CPU carry it out (PYTORCH_ENABLE_MPS_FALLBACK=1 for a GPU of Apple), "
    "or try fast=False, which takes other operations"
)


class StepOptions(NamedTuple):
    """The options of a step. A plan holds for one set of options."""

    maximize: bool
    keep_grads: bool
    parts: Parts | None
    """What the backward has updated, if the optimizer steps in the backward."""
    process_group: ProcessGroup | None


class AnyStep(ABC):
    """A step, ordinary or planned, which the device or the host lets `run`."""

    walk: Walk  # the step as a policy and a listener see it
    gradient_norms: GradientNorms
    params: list[Tensor]  # that take part
    needs_walk: bool  # something uses the ``walk``, such as a listener or a gate
    takes_part: bool  # False if this process has no gradient, and no other process takes part
    decisions: DeviceDecisions | None = None  # set before `run` if the device decides
    metrics: Metrics | None = None  # computes the metrics after `run`; None if those of the walk are read at once
    may_be_zero: bool = False  # after `run`: True if all gradients are 0, or `note_zeros` has to find out

    @abstractmethod
    def host_reasons(self) -> list[str]:
        """Why the host has to decide about this step, for reasons of its tensors; empty if the device may."""

    @abstractmethod
    def is_allowed(self, policy: StepPolicy, counts: State) -> bool:
        """Let the host decide by a policy; True to take the step."""

    @abstractmethod
    def run(self) -> bool:
        """Change parameters and state. Return False if the device has refused the step, or nobody has gradients."""

    @abstractmethod
    def note_zeros(self, idle: Idle, steps_taken: int) -> None:
        """Tell ``idle`` if all gradients were 0. Call it after `run` if they ``may_be_zero``."""


@final
@dataclass(eq=False)
class OrdinaryStep(AnyStep):
    """A step that follows no plan."""

    chain: Chain
    states: StateByParam  # of the optimizer
    parts: Parts | None
    learn: Callable[[Walk, StepOptions], object]  # called after a fast step, to make a plan of it
    options: StepOptions | None  # None for a readable step
    listener: Listener | None
    takes_part: bool
    walk: Walk
    gradient_norms: GradientNorms
    params: list[Tensor]
    needs_walk: bool = True

    @override
    def host_reasons(self) -> list[str]:
        reasons = self.walk.executor.host_reasons()
        if self.walk.table.new_states:
            reasons.append("a parameter takes its first step")
        if self.walk.company is not None:
            reasons.append("others take part in the step")
        return reasons

    @override
    def is_allowed(self, policy: StepPolicy, counts: State) -> bool:
        return policy.decide(self.walk, counts)

    @override
    def note_zeros(self, idle: Idle, steps_taken: int) -> None:
        idle.zeros(steps_taken)

    @override
    def run(self) -> bool:
        walk, table, company = self.walk, self.walk.table, self.walk.company
        if self.decisions is not None:
            walk.decisions = walk.undecided = self.decisions
            self.metrics = partial(clones, walk.metrics)
        if self.listener is not None:
            self.listener.begin(walk)
        try:
            if "closure" in walk.nodes.targets:
                walk.change_closure_gradients(self.chain)
            walk.run(self.chain, "", list(range(len(self.params))), walk.end)
            has_gradients = True
            if isinstance(company, OtherProcesses):
                metrics = company.metrics(walk.nodes, walk.metrics, len(table.params) > 0)
                walk.metrics, has_gradients = metrics or {}, metrics is not None
            gradient_norms = walk.gradient_norms
            norms = gradient_norms.norms if company is None else None  # those of others may not be 0
            norms = walk.metrics.get(gradient_norms.norm_needs.norm_metric) if norms is None else norms
            if norms is not None and may_look(norms):
                walk.are_zero = not norms.any()
            self.may_be_zero = walk.are_zero
        except RefusedByDevice:
            walk.executor.abandon()
            return False
        except BaseException as error:
            if isinstance(error, NotImplementedError):
                error.add_note(MISSING_OPERATION)
            walk.refused_by.append("error")
            walk.executor.abandon()
            raise
        finally:  # also after an error: transforms that ran earlier have changed their state
            self.states.update({param: state for param, state in table.new_states.items() if state})
        # Also entries without a key: while optimizer.state is empty, or lacks a parameter,
        # torch.distributed.checkpoint takes a step on zero gradients in a training that it saves, or raises when it
        # loads
        self.states.update(table.new_states)
        if self.parts is not None and company is not None:
            self.parts.add(company.numbers, walk.metrics, table.params)
        if has_gradients and self.options is not None:
            self.learn(walk, self.options)
        return has_gradients


def clones(metrics: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies of metrics, which may be state that the next step changes."""
    return {name: value.clone() for name, value in metrics.items()}
