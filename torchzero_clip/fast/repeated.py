"""A planned step: at most one scaling, and then the kernel of a rule, or updates for the optimizer that steps."""

from collections.abc import Callable, Hashable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, cast, final

import torch
from torch import Tensor
from typing_extensions import override

from torchzero_clip.core.kinds import Gate, Scaling, UpdateRule
from torchzero_clip.core.nodes import Node, Nodes
from torchzero_clip.core.step import Step
from torchzero_clip.core.transform import is_pure
from torchzero_clip.core.undo import Undo
from torchzero_clip.engine.end import End
from torchzero_clip.engine.gradient_norms import GradientNorms, NormNeeds
from torchzero_clip.engine.idle import Idle
from torchzero_clip.engine.listener import Listener
from torchzero_clip.engine.nonfinite import StepPolicy
from torchzero_clip.engine.ordinary_step import AnyStep, StepOptions, clones
from torchzero_clip.engine.reported_loss import Loss
from torchzero_clip.engine.scaling import find_factors, unless_refused
from torchzero_clip.engine.table import Table
from torchzero_clip.engine.updates import Updates
from torchzero_clip.engine.walk import Walk, may_change_state, settings_of
from torchzero_clip.fast.fast import NO_KERNEL, Averaging, Fast
from torchzero_clip.fast.kernels import EndedByDelivery, EndedByKernel, run_kernel
from torchzero_clip.fast.ops import Scale
from torchzero_clip.fast.pieces import run_pieces
from torchzero_clip.fast.vectors import VectorStates
from torchzero_clip.fast.workspace import StepLayout, Workspace
from torchzero_clip.functional import foreach
from torchzero_clip.functional.blocks import joint_norm_with_scratch
from torchzero_clip.functional.measure import L2, Effect, Measured, by_setting, effect, scale_measured_
from torchzero_clip.functional.scratch import Scratch
from torchzero_clip.types import Group, Metrics, Setting, State


@dataclass(eq=False)
class Course:
    """What all steps by one plan do, without a tensor of a step."""

    nodes: Nodes
    norm_needs: NormNeeds
    end: End
    layout: StepLayout
    group_of: list[int]
    options: StepOptions
    scaling: "RepeatedScaling | None"
    ending: "ByRule | ByDelivery"

    def __post_init__(self) -> None:
        self.in_place = not (self.options.maximize or self.options.keep_grads)
        """True if updates are the gradients themselves; else they need memory beside them."""
        self.may_read = self.layout.is_on_cpu
        """True if the host may read numbers of a step. On CUDA this would synchronize with the GPU."""
        self.tells_zeros = self.may_read and bool(self.norm_needs.norm_metric)
        """True if the host may find by the metrics that all gradients are 0."""

    def divides_in_kernel(self, measured: Measured, factors: Tensor) -> bool:
        """True if the kernel itself divides by the factors, so that gradients stay as they are in a refused step."""
        is_joint = measured.is_whole and measured.joint and foreach.is_one_number(factors)
        return self.in_place and self.layout.divides_in_kernel and is_joint

    def host_reasons(self) -> list[str]:
        """Why the host has to decide whether a step is taken; empty if the device may."""
        reasons = ["the parameters are on the CPU"] if self.may_read else []
        if self.scaling is not None and not self.scaling.keeps_refused:
            reasons.append(may_change_state(self.scaling.node))
        if not self.ending.takes_found_inf:
            reasons.append(NO_KERNEL)
        return reasons


@final
@dataclass(eq=False)
class PlannedStep(AnyStep):
    """A step that follows a plan. What only some steps need is made when it is asked for."""

    course: Course
    settings: Mapping[str, list[Setting]]  # of each transform by path, one dict per group
    groups: list[Group]
    columns: dict[str, list[Tensor]]  # parameters, gradients and state by key
    states: list[State]
    counters: list[Tensor]  # the step counts that a kernel reads: a vector for each key
    workspace: Workspace
    scratch: Scratch  # memory for intermediate results of the gradients
    chain_state: State
    loss: Callable[[], Loss]
    listener: Listener | None
    undo: Undo | None  # as in a `Walk`
    needs_walk: bool
    is_measured: bool = False  # `measure` was called, by a step whose factor follows from the joint norm alone
    total: Tensor | None = None  # the joint norm of the gradients, if it was measured, is finite and not extreme
    effect: Effect | None = None  # of the scaling, for a listener that computes the metrics later
    takes_part: bool = True  # always: the plan compares the parameters that take part

    # pyright does not take a cached_property for an attribute
    @cached_property
    def params(self) -> list[Tensor]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.columns["params"]

    @cached_property
    def table(self) -> Table:
        return Table(self.groups, self.params, self.columns["grads"], self.states, self.course.group_of)

    @cached_property
    def executor(self) -> Fast:
        updates = Updates(self.table, self.chain_state, maximize=self.course.options.maximize)
        return Fast(self.workspace, updates, self.columns)

    @cached_property
    def gradient_norms(self) -> GradientNorms:  # pyright: ignore[reportIncompatibleVariableOverride]
        grads = self.columns["grads"]
        measurer = _Measurer(grads, self.scratch) if self.course.in_place else self.executor
        return GradientNorms(self.course.norm_needs, grads, measurer, listens=self.listener is not None)

    @cached_property
    def walk(self) -> Walk:  # pyright: ignore[reportIncompatibleVariableOverride]
        course, table, executor, loss = self.course, self.table, self.executor, self.loss()
        return Walk(
            course.nodes, self.settings, table, self.chain_state, executor, self.gradient_norms, course.end, loss
        )

    def measure(self) -> Tensor | None:
        """Measure the ``total`` once, and return it. None if the factor of the step does not follow from it."""
        scaling = self.course.scaling
        if scaling is not None and scaling.factor_of is not None and not self.is_measured:
            self.is_measured = True
            if self.needs_walk:
                self.total = self.gradient_norms.total()
            # the gradients are plain, float32 and on CPU, so blocks measure them
            elif (joint := joint_norm_with_scratch(self.columns["grads"], self.scratch)) is not None:
                self.total = joint[0]
        return self.total

    @override
    def host_reasons(self) -> list[str]:
        return self.course.host_reasons()

    @override
    def is_allowed(self, policy: StepPolicy, counts: State) -> bool:
        total = None if self.needs_walk else self.measure()
        if total is None:
            self.needs_walk = True  # for `run` too
            return policy.decide(self.walk, counts)
        policy.allow(total, counts)
        return True

    @override
    def run(self) -> bool:
        course, listener, factor = self.course, self.listener, None
        if listener is not None:
            self.walk.decisions = self.decisions
            listener.begin(self.walk)
        metrics: Metrics = dict
        try:
            if course.scaling is not None:
                factor, metrics = course.scaling.find(self)
            elif listener is not None:
                self.gradient_norms.before_first(without_gates(course.nodes)[0].transform)
            course.ending.finish(self, factor)
        except BaseException:
            if self.needs_walk:
                self.walk.refused_by.append("error")
            raise
        self.metrics = self._shown(metrics) if self.needs_walk else metrics
        are_zero = self.needs_walk and self.walk.are_zero  # gates have measured the gradients
        self.may_be_zero = are_zero or (course.tells_zeros and self.total is None)
        return True

    def _shown(self, metrics: Metrics) -> Metrics:
        """The metrics beside those of gates. A listener gets them now, or an `Effect` to compute them from later."""
        walk = self.walk
        of_gates, walk.effect = walk.metrics, self.effect
        if self.listener is not None and self.effect is None:
            computed = metrics()
            metrics = partial(dict, computed)
            walk.metrics = {**of_gates, **computed}
        return lambda: {**clones(of_gates), **metrics()}

    @override
    def note_zeros(self, idle: Idle, steps_taken: int) -> None:
        # if ``total`` is set, it is not 0
        if self.needs_walk and self.walk.are_zero:
            idle.zeros(steps_taken)
        elif self.metrics is not None and (self.is_measured or idle.is_due(steps_taken)):
            norm = self.metrics().get(self.course.norm_needs.norm_metric)
            if norm is not None and not norm.item():
                idle.zeros(steps_taken)


class RepeatedScaling:
    """The scaling of a planned step."""

    def __init__(self, node: Node, group_of: list[int], *, may_read: bool) -> None:
        self.node, self.paths, self._group_of = node, {node.path}, group_of
        scaling = cast(Scaling, node.transform)
        is_joint = scaling.slicing.is_joint_l2 and is_pure(scaling)
        # a factor that is a number saves many operations on tensors of one element
        self._joint_factor_of = scaling.factor if may_read and is_joint and scaling.has_factor else None
        self._is_tried = False  # `Scaling.factor` was compared with the factors
        self.factor_of: Callable[[float, Setting], float] | None = None
        """`Scaling.factor`, if the factor follows from the joint norm alone."""

    def variants(self, settings: Mapping[str, list[Setting]]) -> Set[Hashable]:
        return frozenset()

    def use_settings(self, settings: Mapping[str, list[Setting]]) -> None:
        of_groups = settings[self.node.path]
        self._settings = [of_groups[g] for g in self._group_of]
        self.keeps_refused = self.node.keeps_refused(of_groups)
        """True if a refused step changes no state of it."""
        are_numbers = not any(isinstance(value, Tensor) for value in self._settings[0].values())
        self.factor_of = self._joint_factor_of if len(by_setting(self._settings)) == 1 and are_numbers else None

    def find(self, step: PlannedStep) -> tuple[Tensor | float | None, Metrics]:
        """The factors that the end has to apply, and the metrics. No factors if all are 1, or wait in the executor."""
        if self.factor_of is not None and (total := step.measure()) is not None:
            factor = self.factor_of(total.item(), self._settings[0])
            if not self._is_tried:
                self._try_out(factor, total, step)
            # the kernel divides by the inverse in float32, so a factor beyond its range needs the other way
            if foreach.TINY32 <= factor <= foreach.MAX32:
                return None if factor == 1 else factor, partial(self._metrics_of, total, factor)
        return self._by_tensors(step)

    def _metrics_of(self, total: Tensor, factor: float) -> dict[str, Tensor]:
        measured = _measured_jointly(total)
        # not torch.tensor(factor), which would be on the default device of the user
        return self.node.qualified(effect(measured, torch.full_like(measured.vector, factor)))

    def _try_out(self, factor: float, total: Tensor, step: PlannedStep) -> None:
        """Raise if the factor as a number is not the one that the ordinary step computes."""
        transform, measured = cast(Scaling, self.node.transform), _measured_jointly(total)
        expected = transform.factors(measured, step.columns["grads"], self._step_for(step)).flatten()[0].item()
        if factor != expected:
            raise RuntimeError(
                f"{transform!r}.factor returned {factor} for a norm of {total.item():.9g}, and its factors "
                f"{expected}. Correct one of the two methods, or delete factor"
            )
        self._is_tried = True

    def _step_for(self, step: PlannedStep) -> Step:
        """What the transform sees. `Walk.step_for` would take five times as long."""
        columns, node, settings = step.columns, self.node, self._settings
        params, grads = columns["params"], columns["grads"]

        def begin(i: int) -> State:
            return node.transform.init_state(params[i], settings[i])

        vectors = step.workspace.vectors
        states = VectorStates(step.states, node.path, node.state, begin, vectors, columns)
        states.undo = step.undo
        state = node.global_state(step.chain_state) if node.global_keys else {}
        loss = None if node.transform.pure else step.loss().value
        return Step(params, grads, loss, states, settings, state, tools=step.gradient_norms.measurer)

    def _by_tensors(self, step: PlannedStep) -> tuple[Tensor | None, Metrics]:
        node, course, seen = self.node, step.course, self._step_for(step)
        rows = list(range(len(seen.grads)))
        updates = seen.grads if course.in_place else step.executor.read(rows)
        measured, factors = find_factors(node, rows, updates, seen, step.gradient_norms, None, step.chain_state)
        left, used, taken = None, factors, None if step.decisions is None else step.decisions.taken
        if taken is not None and not course.divides_in_kernel(measured, factors):
            used = unless_refused(factors, taken)  # a gradient times 1 keeps its bits
        if course.in_place:
            left = _left(Scale(measured, used, over_grads=True), step)
        else:
            step.executor.scale(rows, measured, used, not course.options.keep_grads)
        shown = seen.metrics

        def metrics() -> dict[str, Tensor]:
            acting = factors if taken is None else unless_refused(factors, taken)
            return node.qualified({**shown, **effect(measured, acting)})

        if not (measured.is_whole and measured.targets):
            return left, partial(dict, metrics())
        measured.targets = [measured.vector]  # so that metrics do not keep the gradients alive
        if step.listener is not None and not course.may_read and is_pure(node.transform):
            step.walk.metrics.update(node.qualified(shown))
            one = foreach.is_one_number(factors)
            step.effect = Effect(node.path, measured.total, factors.narrow(0, 0, 1) if one else factors)
        return left, metrics


class ByRule:
    """A step ends by the kernel of a rule."""

    def __init__(self, ended: EndedByKernel, group_of: list[int]) -> None:
        self._rule, self._kernel, self._rest, self._group_of = ended.node, ended.kernel, ended.rest, group_of
        self.paths = {node.path for node in (ended.node, *ended.rest)}
        self.counters = [f"{self._rule.path}/{key}" for key in ended.fused.counters]
        self.takes_found_inf = ended.fused.takes_found_inf
        self._state = [f"{self._rule.path}/{key}" for key in (*ended.fused.state, *ended.fused.counters)]

    def variants(self, settings: Mapping[str, list[Setting]]) -> Set[Hashable]:
        rule = self._rule.transform
        return set(map(rule.variant, settings[self._rule.path])) if isinstance(rule, UpdateRule) else set()

    def use_settings(self, settings: Mapping[str, list[Setting]]) -> None:
        of_groups = settings_of(self._rule, self._rest, settings)
        self._settings: list[Setting] = [of_groups[g] for g in self._group_of]
        self._runs = by_setting(self._settings)

    def applies(self, waiting: Scale) -> bool:
        """True if the end may multiply by the factors of a scaling."""
        return waiting.fits_kernels

    def finish(self, step: PlannedStep, factor: Tensor | float | None) -> None:
        """Multiply the gradients by their factor, None for 1, and do the rest of the step."""
        decisions, kernel = step.decisions, self._kernel
        one: Any = 1
        if decisions is not None:
            one, kernel = decisions.taken, decisions.refusable(kernel)
        for counter in step.counters:  # before the kernel, which reads the counts
            counter.add_(one)
        try:
            columns = step.columns
            params, grads = columns["params"], columns["grads"]
            state = [columns[key] for key in self._state]
            if step.course.in_place:
                scratch = step.workspace.scratch
                run_kernel(kernel, [params, grads, *state], self._runs, factor, scratch)
            elif factor is None:
                step.executor.run(kernel, step.table.rows, params, state, self._settings, self._runs)
            else:
                scale = Scale.by_number(float(factor))
                run_pieces([scale], grads, self._settings, step.scratch, kernel, [params, *state])
        except BaseException:
            for counter in step.counters:
                counter.add_(-1 if decisions is None else -decisions.taken.to(counter.dtype))
            raise


class ByDelivery:
    """A step ends with the updates in the gradients. The methods are those of `ByRule`, without settings."""

    counters: Sequence[str] = ()
    takes_found_inf = True  # if the optimizer does, which `Deliver` asks

    def __init__(self, ended: EndedByDelivery) -> None:
        self._multiply = ended.multiply

    def applies(self, waiting: Scale) -> bool:
        return waiting.is_one_number and waiting.fits_kernels

    def finish(self, step: PlannedStep, factor: Tensor | float | None) -> None:
        if factor is not None:
            self._multiply(step.columns["grads"], factor)


class _Measurer(Averaging):  # the base class measures for statistics
    """Measures gradients that are plain."""

    _are_plain = True

    def __init__(self, grads: list[Tensor], scratch: Scratch) -> None:
        self._grads, self._scratch = grads, scratch

    @override
    def scratch_for(self, tensors: Sequence[Tensor]) -> Scratch | None:
        return self._scratch if tensors is self._grads or foreach.are_plain(tensors) else None


def without_gates(nodes: Nodes) -> list[Node]:
    """The transforms that act on updates: gates decide before."""
    return [node for node in nodes if not isinstance(node.transform, Gate)]


def _measured_jointly(total: Tensor) -> Measured:
    return Measured(L2, [0], total.view(1), total, [total])


def _left(waiting: Scale, step: PlannedStep) -> Tensor | None:
    """The factors of a scaling that the end has to apply, None for 1."""
    if step.course.may_read and waiting.does_nothing:
        return None
    if step.course.ending.applies(waiting):
        return waiting.factor
    # a statistic has changed its state, so an ordinary step is too late: multiply here
    scale_measured_(waiting.measured, waiting.factors, step.workspace.scratch, extremes=waiting.extent)
    return None
