"""A plan repeats a step of at most one scaling and its end: a rule, whose kernel does the rest, or a delivery.

In a small model, an ordinary step spends more time on deciding what to do than on doing it. After steps that looked the
same, the next ones follow a plan while everything that decides the course of a step stays the same. Otherwise the
optimizer takes an ordinary step. The results are the same, bit for bit.

What a plan assumes, and what is compared in each step before anything changes:

* On CPU, the chain is at most one scaling and then a rule of this package, without scopes and other targets. A second
  scaling would be a second factor, and `WeightDecay` before the rule is not a scaling. A chain that delivers its
  updates to another optimizer is one scaling. Gates may stand anywhere, because they decide before the first transform.
* Nobody else takes part: no other processes, and no parts of the step in the backward.
* Types, dtypes, sizes, strides and ``requires_grad`` of parameters, gradients and state are compared by a guard that is
  private to torch. Plans need this guard, because a check in Python takes ten times as long.
* A parameter that moves to the next group keeps the order of all, so the groups of the parameters are compared too.
* Attributes of transforms, which a user may set at any time, are compared by identity.
* Numbers of state have to be views of the vectors that the last step made, because a load or a user may replace them.
* A policy and a listener see a `Walk` and the norms of an ordinary step, made by the same functions when they ask. A
  usual joint norm answers ``nonfinite`` alone, and if a policy refuses the step, nothing has changed.
* A plan has no tensor of a step, so that ``zero_grad()`` frees the gradients. Metrics are computed when they are read.
"""

import operator
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain
from typing import Any, TypeAlias

import torch
from torch import Tensor
from typing_extensions import override

from torchzero_clip.compat import SameLayout, native_guard
from torchzero_clip.core.kinds import Gate, Scaling, UpdateRule
from torchzero_clip.core.nodes import Node, Nodes
from torchzero_clip.core.step import Step
from torchzero_clip.core.transform import Transform, overridden_last
from torchzero_clip.core.undo import Undo
from torchzero_clip.engine.judged import Judged
from torchzero_clip.engine.listener import Listener
from torchzero_clip.engine.reported_loss import Loss
from torchzero_clip.engine.scaling import find_factors
from torchzero_clip.engine.table import Table, taking_part
from torchzero_clip.engine.updates import Updates
from torchzero_clip.engine.walk import Walk, settings_of
from torchzero_clip.fast.fast import Averaging, Fast
from torchzero_clip.fast.kernels import Delivered, Ended, run_kernel
from torchzero_clip.fast.layout import Workspace
from torchzero_clip.fast.ops import Scale
from torchzero_clip.fast.pieces import run_pieces
from torchzero_clip.fast.vectors import Vectors, VectorStates
from torchzero_clip.functional import foreach
from torchzero_clip.functional.measure import L2, Measured, Slicing, by_setting, effect, scale_
from torchzero_clip.functional.norms import joint_norm, norms_of_each
from torchzero_clip.functional.scratch import Scratch
from torchzero_clip.types import Group, Setting, State

Options: TypeAlias = tuple[bool, bool, object, object]
"""What decides about a step beside its chain and its tensors: maximize, keep_grads, parts and process_group."""
Factor: TypeAlias = Callable[[float, Setting], float]
Metrics: TypeAlias = Callable[[], dict[str, Tensor]]  # computes the metrics of a step when they are read

_IMMUTABLE = {float, int, bool, str, type(None)}


@dataclass(eq=False)
class Planned:
    """A step that follows a plan. What only some steps need is made when it is asked for."""

    plan: "Plan"
    groups: list[Group]
    columns: dict[str, list[Tensor]]  # parameters, gradients and state by key
    states: list[State]
    counters: list[Tensor]  # the step counts that the kernel reads: a vector for each key
    workspace: Workspace
    chain_state: State
    loss: Callable[[], Loss]
    listener: Listener | None
    undo: Undo | None = None  # as in a `Walk`
    is_watched: bool = False  # somebody has asked for ``walk``
    metrics: Metrics | None = None  # computes the metrics, once the step was taken

    @cached_property
    def table(self) -> Table:
        columns = self.columns
        return Table(self.groups, columns["params"], columns["grads"], self.states, self.plan.group_of)

    @cached_property
    def executor(self) -> Fast:
        updates = Updates(self.table, self.chain_state, maximize=self.plan.maximize)
        return Fast(self.workspace, updates, self.columns)

    @cached_property
    def judged(self) -> Judged:
        alone = self.plan.in_place and not self.is_watched
        grads = self.columns["grads"]
        known = self.workspace.scratch.knowing(grads, self.plan.layout)
        measurer = _Measurer(grads, known) if alone else self.executor
        return Judged(self.plan.judging, grads, measurer, listens=self.listener is not None)

    @cached_property
    def walk(self) -> Walk:
        """The step as a policy and a listener see it. Ask for it before `take`."""
        self.is_watched = True
        plan, table, executor, loss = self.plan, self.table, self.executor, self.loss()
        return Walk(plan.nodes, plan.settings, table, self.chain_state, executor, self.judged, plan.end, loss)

    @cached_property
    def total(self) -> Tensor | None:
        """The joint norm of the gradients, which is finite; None if a step by this plan does not need it alone."""
        if not self.plan.needs_total:
            return None
        if self.is_watched:
            return self.judged.total()
        grads = self.columns["grads"]
        found = joint_norm(grads, self.workspace.scratch.knowing(grads, self.plan.layout), plain=True)
        return None if found is None else found[0]

    def take(self) -> Metrics:
        """Take a step that has a ``walk``, as `Plan.take`."""
        walk, listener = self.walk, self.listener
        if listener is not None:
            listener.begin(walk)
        try:
            found = self.plan.take(self)
        except BaseException:
            walk.refused_by.append("error")
            raise
        if listener is not None:
            walk.metrics, found = {**walk.metrics, **found()}, dict
        known = walk.metrics  # of gates
        self.metrics = lambda: {**known, **found()}
        return self.metrics


class _ByRule:
    """A step ends by the kernel of a rule."""

    def __init__(self, ended: Ended, group_of: list[int]) -> None:
        self._rule, self._kernel, self._rest, self._group_of = ended.node, ended.kernel, ended.rest, group_of
        self.paths = {node.path for node in (ended.node, *ended.rest)}  # of the transforms whose settings it reads
        self.counters = [f"{self._rule.path}/{key}" for key in ended.fused.counters]
        self._state = [f"{self._rule.path}/{key}" for key in (*ended.fused.state, *ended.fused.counters)]

    def variants(self, settings: Mapping[str, list[Setting]]) -> set[object]:
        """The kinds of step that the rule takes with these settings."""
        rule = self._rule.transform
        return set(map(rule.variant, settings[self._rule.path])) if isinstance(rule, UpdateRule) else set()

    def settle(self, settings: Mapping[str, list[Setting]]) -> None:
        """Take over checked settings."""
        of_groups = settings_of(self._rule, self._rest, settings)
        self._settings: list[Setting] = [of_groups[g] for g in self._group_of]
        self._runs = by_setting(self._settings)

    def takes(self, waiting: Scale) -> bool:
        """True if the end may multiply by the factors of a scaling."""
        return waiting.fits_kernels

    def take(self, step: Planned, factor: Tensor | float | None) -> None:
        """Multiply the gradients by their factor, None for 1, and end the step."""
        for counter in step.counters:  # before the kernel, which reads the counts
            counter.add_(1)
        try:
            columns, scratch = step.columns, step.workspace.scratch
            params, grads = columns["params"], columns["grads"]
            state = [columns[key] for key in self._state]
            if step.plan.in_place:
                run_kernel(self._kernel, [params, grads, *state], self._runs, factor, scratch, "")
            elif factor is None:
                step.executor.run(self._kernel, step.table.rows, params, state, self._settings, self._runs)
            else:
                scratch = scratch.knowing(grads, step.plan.layout)
                scale = Scale.by_number(float(factor))
                run_pieces([scale], grads, self._settings, scratch, self._kernel, [params, *state])
        except BaseException:
            for counter in step.counters:
                counter.add_(-1)
            raise


class _ByDelivery:
    """A step ends with the updates in the gradients. The methods are those of `_ByRule`."""

    counters: Sequence[str] = ()
    paths: Set[str] = frozenset()

    def __init__(self, ended: Delivered) -> None:
        self._scale = ended.scale

    def variants(self, settings: Mapping[str, list[Setting]]) -> set[object]:
        return set()

    def settle(self, settings: Mapping[str, list[Setting]]) -> None:
        pass

    def takes(self, waiting: Scale) -> bool:
        return waiting.is_one_number and waiting.fits_kernels

    def take(self, step: Planned, factor: Tensor | float | None) -> None:
        if factor is not None:
            self._scale(step.columns["grads"], factor)


class Plan:
    """What a step did, without its tensors. ``fits`` returns True for tensors that are laid out as in this step."""

    def __init__(self, walk: Walk, ended: Ended | Delivered, options: Options, fits: SameLayout) -> None:
        self.nodes, self.judging, self.end = walk.nodes, walk.judged.judging, walk.end
        self.options, self._fits = options, fits
        self.maximize, self._keeps, *_ = options
        self._acting = _acting(walk.nodes)
        self._scaling = self._acting[0] if isinstance(self._acting[0].transform, Scaling) else None
        self.in_place = not (self.maximize or self._keeps)  # else the updates need memory beside the gradients
        self.layout = ended.layout
        self._sizes = [len(group["params"]) for group in walk.table.groups]
        self.group_of = walk.table.group_of
        self._all_take_part = sum(self._sizes) == len(walk.table.params)
        self._ended = _ByRule(ended, self.group_of) if isinstance(ended, Ended) else _ByDelivery(ended)
        self._own_state = [key for key in ended.columns if key not in ("params", "grads")]
        self._like = _shaped(ended)
        self._numbers = [key for key in self._own_state if key not in (*self._like, *self._ended.counters)]
        self._transforms = [node.transform for node in walk.nodes]
        self._attributes = list(map(vars, self._transforms))
        self._arguments = self._current_arguments()
        self._are_ours = all(node.is_ours for node in walk.nodes)
        self._keys = list(walk.nodes.storage_keys.values())
        self._owners = [node.path for node in walk.nodes for _ in node.storage_keys]  # of each key
        self._paths = set(walk.nodes.by_path)
        params = walk.table.params
        # joint norms of other dtypes are computed in another way, and an empty tensor does not have a norm to join
        by_number = not self.maximize and params[0].dtype == torch.float32 and all(map(Tensor.numel, params))
        self._by_number = _by_number(self._acting[0].transform) if by_number else None
        self._values: list[Any] = []
        self.needs_total = False  # the factor follows from the joint norm alone
        self._variants = self._ended.variants(walk.settings)
        self._settle(walk.settings, walk.table.groups, self._paths)

    @classmethod
    def of(cls, walk: Walk, ended: Ended | Delivered, options: Options) -> "Plan | None":
        """A plan of a step; None if it cannot be repeated."""
        nodes = _acting(walk.nodes)
        first = [node for node in nodes[:1] if isinstance(node.transform, Scaling)]
        last = [ended.node, *ended.rest] if isinstance(ended, Ended) else []
        # state that is new enters the optimizer after the step, so the next one gathers other tensors
        if options[2:] != (None, None) or not nodes or nodes != [*first, *last] or walk.table.new_states:
            return None
        if any(node.transform.scope.limited or node.transform.target != "update" for node in walk.nodes):
            return None
        if not all(node.is_ours for node in last):
            return None
        like = chain.from_iterable(ended.columns[key] for key in ("params", "grads", *_shaped(ended)))
        fits = native_guard(list(like)) if walk.table.params[0].is_cpu else None
        return None if fits is None else cls(walk, ended, options, fits)

    def take(self, step: Planned) -> Metrics:
        """Change parameters and state, and return what computes the metrics, which becomes that of the step."""
        node, factor = self._scaling, None
        metrics: Metrics = dict
        if node is not None:
            known = None if self._by_number is None else self._clipped(node, self._by_number, step)
            factor, metrics = known or self._scaled(node, step)
        elif step.listener is not None:
            step.judged.before_first(self._acting[0].transform)
        self._ended.take(step, factor)
        step.metrics = metrics
        return metrics

    def is_settled(self, groups: list[Group]) -> bool:
        """True if the rule takes the same kind of step with these settings. Raise if a setting is invalid."""
        arguments = self._current_arguments()
        # by identity, because == compares the elements of tensors, which waits for the device and gives many answers
        if not all(map(operator.is_, arguments, self._arguments)):  # one more or less shifts the others
            return False
        if list(map(len, groups)) != self._lengths:  # an ordinary step looks at a key that is new
            return False
        try:
            values = [group[key] for group in groups for key in self._keys]
        except KeyError:
            return False
        paths = self._paths  # of the transforms with new values
        if len(values) == len(self._values):
            if all(map(operator.is_, values, self._values)):
                return True
            places = [k for k, value in enumerate(values) if value is not self._values[k]]
            paths = {self._owners[k % len(self._owners)] for k in places}
        settings = {**self.settings, **self.nodes.checked_settings(groups, paths)}
        if self._ended.variants(settings) != self._variants:
            return False
        self._settle(settings, groups, paths)
        return True

    def _current_arguments(self) -> list[Any]:
        """The values of all attributes of the transforms and their classes, which a user may set at any time."""
        own = [value for attributes in self._attributes for value in attributes.values()]
        return own + list(map(type, self._transforms))

    def _settle(self, settings: Mapping[str, list[Setting]], groups: Sequence[Group], paths: Set[str]) -> None:
        """Take over checked settings, which are new for the transforms at these ``paths``."""
        self.settings = settings
        if not paths.isdisjoint(self._ended.paths):
            self._ended.settle(settings)
        if self._scaling is not None and self._scaling.path in paths:
            own = settings[self._scaling.path]
            self._own = [own[g] for g in self.group_of]
            self._alone = self._own[0] if len(by_setting(self._own)) == 1 else None
            self.needs_total = self._by_number is not None and self._alone is not None
        self._lengths = list(map(len, groups))
        values = [group[key] for group in groups for key in self._keys]
        parts = chain.from_iterable(value if type(value) is tuple else (value,) for value in values)
        # every step checks values that can change in place, such as tensors, and values of other authors, whose checks
        # may have effects
        self._values = values if self._are_ours and _IMMUTABLE.issuperset(map(type, parts)) else []

    def gathered(
        self, groups: list[Group], kept: Mapping[Tensor, State], vectors: Vectors
    ) -> tuple[dict[str, list[Tensor]], list[State], list[Tensor]] | None:
        """Tensors by key, states and step counts; None if they are not laid out as in the step of the plan."""
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
            for key in self._own_state:
                columns[key] = [state[key] for state in states]
        except KeyError:
            return None
        tensors = params + grads
        for key in self._like:
            tensors += columns[key]
        if not self._fits(tensors) or not all(vectors.are_views(key, columns[key]) for key in self._numbers):
            return None
        known = [vectors.known(key, columns[key]) for key in self._ended.counters]
        counters = [counter for counter in known if counter is not None]
        return (columns, states, counters) if len(counters) == len(known) else None

    def _clipped(self, node: Node, factor_of: Factor, step: Planned) -> tuple[float | None, Metrics] | None:
        """The factor of a joint norm as a number (None for 1), and the metrics; None if `_scaled` has to find them."""
        total = step.total
        if total is None or self._alone is None:
            return None
        factor = factor_of(total.item(), self._alone)
        # the kernel divides by the inverse in float32: a factor beyond its range is left to `_scaled`
        if not foreach.TINY32 <= factor <= foreach.MAX32:
            return None

        def metrics() -> dict[str, Tensor]:
            measured = Measured(L2, [0], total.view(1), total, [total])
            # not torch.tensor(factor), which would be on the default device of the user
            return node.qualified(effect(measured, torch.full_like(measured.vector, factor)))

        return None if factor == 1 else factor, metrics

    def _scaled(self, node: Node, step: Planned) -> tuple[Tensor | None, Metrics]:
        """The factors that the end has to apply, None for 1 or if they wait in the executor, and the metrics."""
        columns, chain_state, own, judged = step.columns, step.chain_state, self._own, step.judged
        params, grads = columns["params"], columns["grads"]

        def begin(i: int) -> State:
            return node.transform.init_state(params[i], own[i])

        states = VectorStates(step.states, node.path, node.state, begin, step.workspace.vectors, columns)
        states.undo = step.undo
        state = node.global_state(chain_state)
        # not `Walk.step_for`, which takes five times as long
        given = Step(params, grads, step.loss().value, states, own, state, tools=judged.measurer)
        rows = list(range(len(grads)))
        updates = grads if self.in_place else step.executor.read(rows)
        measured, factors = find_factors(node, rows, updates, given, judged, None, chain_state)
        kept = None
        if self.in_place:
            kept = self._left(Scale(measured, factors, over_grads=True), step)
        else:
            step.executor.scale(rows, measured, factors, not self._keeps)
        shown = given.metrics
        if not (measured.is_whole and measured.targets):
            return kept, partial(node.qualified, {**shown, **effect(measured, factors)})
        measured.targets = [measured.total]  # so that metrics do not keep the gradients alive
        return kept, lambda: node.qualified({**shown, **effect(measured, factors)})

    def _left(self, waiting: Scale, step: Planned) -> Tensor | None:
        """The factors of a scaling that the end has to apply, None for 1."""
        if waiting.does_nothing:
            return None
        if self._ended.takes(waiting):
            return waiting.factor
        # a statistic has changed its state, so an ordinary step is too late: multiply here
        scale_(waiting.measured, waiting.factors, step.workspace.scratch, extremes=waiting.extent)
        return None


class _Measurer(Averaging):
    """Measures gradients that are plain, with memory for intermediate results."""

    def __init__(self, grads: list[Tensor], scratch: Scratch) -> None:
        self._grads, self._scratch = grads, scratch

    @override
    def scratch_for(self, tensors: Sequence[Tensor]) -> Scratch | None:
        return self._scratch if tensors is self._grads or foreach.are_plain(tensors) else None

    @override
    def joint_norm(self, grads: list[Tensor], *, beside: bool) -> None:
        """None, because statistics of a planned step use the norms of the scaling or of each gradient."""

    @override
    def norms_of_each(self, grads: list[Tensor]) -> Tensor:
        return norms_of_each(grads, self._scratch, plain=True)


def _acting(nodes: Nodes) -> list[Node]:
    """The transforms that act on updates. Gates decide before."""
    return [node for node in nodes if not isinstance(node.transform, Gate)]


def _by_number(transform: Transform) -> Factor | None:
    """The method ``_factor`` of a joint clip, which saves many operations on one element; None if it has none.

    The class that has ``factors`` must have it too, because a subclass that overrides only ``factors`` has others.
    """
    if not isinstance(transform, Scaling) or transform.slicing != Slicing(L2, "global") or "factors" in vars(transform):
        return None
    is_its_own = overridden_last(type(transform), "_factor", "factors") == "_factor"
    return getattr(transform, "_factor", None) if is_its_own else None


def _shaped(ended: Ended | Delivered) -> list[str]:
    """The keys of state that is shaped like the parameters."""
    return [key for key in ended.columns if key not in ("params", "grads") and ended.layout.has([key])]
