"""A plan repeats a step of at most one scaling and its end: a rule, whose kernel does the rest, or a delivery.

In a small model, an ordinary step spends more time on deciding what to do than on doing it. After steps that looked the
same, the next ones follow a plan while everything that decides the course of a step stays the same. Otherwise the
optimizer takes an ordinary step. The results are the same, bit for bit.

What a plan assumes, and what is compared in each step before anything changes:

* On CPU, the chain is at most one scaling and then a rule of this package, without scopes and other targets. A second
  scaling would be a second factor, and `WeightDecay` before the rule is not a scaling. A chain that delivers its
  updates to another optimizer is one scaling.
* Types, dtypes, sizes, strides and ``requires_grad`` of parameters, gradients and state are compared by a guard that is
  private to torch. Plans need this guard, because a check in Python takes ten times as long.
* A parameter that moves to the next group keeps the order of all, so the groups of the parameters are compared too.
* Attributes of transforms, which a user may set at any time, are compared by identity.
* Immutable settings of our own classes are compared by identity and checked if they are new. All others are checked in
  every step, because a tensor may change in place, and an author's check may have effects.
* Numbers of state have to be views of the vectors that the last step made, because a load or a user may replace them.
* A statistic changes its state before the kernel runs. After that, an ordinary step can no longer be taken instead.
* A plan has no tensor of a step, so that ``zero_grad()`` frees the gradients. Metrics are computed when they are read.
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from typing_extensions import override

from torchzero_clip.compat import SameLayout, native_guard
from torchzero_clip.core.kinds import Scaling, UpdateRule
from torchzero_clip.core.nodes import Node
from torchzero_clip.core.step import Step
from torchzero_clip.core.transform import Transform, overridden_last
from torchzero_clip.engine.executor import DeliveredScale, Measurer
from torchzero_clip.engine.judged import Judged
from torchzero_clip.engine.listener import Seen
from torchzero_clip.engine.scaling import find_factors
from torchzero_clip.engine.table import taking_part
from torchzero_clip.fast.kernels import Delivered, Ended, run_kernel
from torchzero_clip.fast.ops import Scale
from torchzero_clip.fast.vectors import VectorStates
from torchzero_clip.fast.workspace import Workspace
from torchzero_clip.functional import foreach
from torchzero_clip.functional.measure import L2, Measured, Slicing, by_setting, effect
from torchzero_clip.functional.norms import whole_norm, whole_norms
from torchzero_clip.functional.scratch import Scratch
from torchzero_clip.types import Setting, State

Group: TypeAlias = dict[str, Any]
Factor: TypeAlias = Callable[[float, Setting], float]
Metrics: TypeAlias = Callable[[], dict[str, Tensor]]  # computes the metrics of a step when they are read

_FLOAT32 = torch.finfo(torch.float32)
_IMMUTABLE = {float, int, bool, str, type(None)}


class _Found(NamedTuple):
    """The tensors of a step that fits the plan."""

    params: list[Tensor]
    grads: list[Tensor]
    states: list[State]
    columns: dict[str, list[Tensor]]  # state by key
    counters: list[Tensor]  # the step counts that the kernel reads: a vector for each key
    workspace: Workspace


class _ByRule:
    """A step ends by the kernel of a rule."""

    def __init__(self, ended: Ended, group_of: list[int]) -> None:
        self._rule, self._kernel, self._rest, self._group_of = ended.node, ended.kernel, ended.rest, group_of
        self.counters = [f"{self._rule.path}/{key}" for key in ended.fused.counters]
        self._state = [f"{self._rule.path}/{key}" for key in (*ended.fused.state, *ended.fused.counters)]

    def variants(self, settings: Mapping[str, list[Setting]]) -> set[Any]:
        """The kinds of step that the rule takes with these settings."""
        rule = self._rule.transform
        return set(map(rule.variant, settings[self._rule.path])) if isinstance(rule, UpdateRule) else set()

    def settle(self, settings: Mapping[str, list[Setting]]) -> None:
        """Take over checked settings."""
        together = [*(settings[node.path] for node in self._rest[::-1]), settings[self._rule.path]]
        count = len(together[0])
        merged = [{key: value for own in together for key, value in own[g].items()} for g in range(count)]
        self._runs = by_setting([merged[g] for g in self._group_of])

    def takes(self, waiting: Scale) -> bool:
        """True if the end may multiply by the factors of a scaling."""
        return waiting.fits_kernels

    def take(self, found: _Found, factor: Tensor | float | None) -> None:
        """Multiply the updates by their factor, None for 1, and end the step."""
        for counter in found.counters:  # before the kernel, which reads the counts
            counter.add_(1)
        try:
            state = [found.columns[key] for key in self._state]
            scratch = found.workspace.scratch
            run_kernel(self._kernel, found.params, found.grads, state, self._runs, factor, scratch, "")
        except BaseException:
            for counter in found.counters:
                counter.add_(-1)
            raise


class _ByDelivery:
    """A step ends with the updates in the gradients. The methods are those of `_ByRule`."""

    counters: Sequence[str] = ()

    def __init__(self, scale: DeliveredScale) -> None:
        self._scale = scale

    def variants(self, settings: Mapping[str, list[Setting]]) -> set[Any]:
        return set()

    def settle(self, settings: Mapping[str, list[Setting]]) -> None:
        pass

    def takes(self, waiting: Scale) -> bool:
        return waiting.is_one_number and waiting.fits_kernels

    def take(self, found: _Found, factor: Tensor | float | None) -> None:
        if factor is not None:
            self._scale(found.grads, factor)


class Plan:
    """What a step did, without its tensors.

    Args:
        walk: The step.
        ended: How the step ended.
        scaling: The first transform, if it is a scaling.
        fits: Returns True for tensors that are laid out as in this step.
    """

    def __init__(self, walk: Seen, ended: Ended | Delivered, scaling: Node | None, fits: SameLayout) -> None:
        self._nodes, self._scaling, self._fits, self._layout = walk.nodes, scaling, fits, ended.layout
        self._judging = walk.judged.judging
        self._sizes = [len(group["params"]) for group in walk.table.groups]
        self._group_of = walk.table.group_of
        self._all_take_part = sum(self._sizes) == len(walk.table.params)
        is_rule = isinstance(ended, Ended)
        self._end = _ByRule(ended, self._group_of) if is_rule else _ByDelivery(ended.scale)
        self._own_state = [key for key in ended.columns if key not in ("params", "grads")]
        self._like = _shaped(ended)
        self._numbers = [key for key in self._own_state if key not in (*self._like, *self._end.counters)]
        self._attributes = [vars(node.transform) for node in walk.nodes]
        self._arguments = self._current_arguments()
        self._are_ours = all(node.is_ours for node in walk.nodes)
        self._keys = list(walk.nodes.storage_keys.values())
        self._values: list[Any] = []
        self._variants = self._end.variants(walk.settings)
        self._settle(walk.settings, walk.table.groups)
        params = walk.table.params
        are_narrow = params[0].dtype == torch.float32 and all(map(Tensor.numel, params))
        # joint norms of other dtypes are computed in another way, and an empty tensor does not have a norm to join
        self._by_number = None if scaling is None or not are_narrow else _by_number(scaling.transform)

    @classmethod
    def of(cls, walk: Seen, ended: Ended | Delivered) -> "Plan | None":
        """A plan of a step; None if it cannot be repeated."""
        nodes = list(walk.nodes)
        first = nodes[0] if isinstance(nodes[0].transform, Scaling) else None
        # state that is new enters the optimizer after the step, so the next one gathers other tensors
        last = [ended.node, *ended.rest] if isinstance(ended, Ended) else []
        if nodes != [*([] if first is None else [first]), *last] or walk.table.new_states:
            return None
        if any(node.transform.scope.limited or node.transform.target != "update" for node in nodes):
            return None
        if not all(node.is_ours for node in last):
            return None
        like = chain.from_iterable(ended.columns[key] for key in ("params", "grads", *_shaped(ended)))
        fits = native_guard(list(like)) if walk.table.params[0].is_cpu else None
        return None if fits is None else cls(walk, ended, first, fits)

    def repeat(
        self,
        groups: list[Group],
        kept: Mapping[Tensor, State],
        workspace: Workspace,
        chain_state: dict[str, Any],
        loss: Tensor | float | None,
    ) -> Metrics | None:
        """Take a step, as in `FastWay.repeat`."""
        found = self._gathered(groups, kept, workspace)
        if found is None or not self._is_settled(groups):
            return None
        factor: Tensor | float | None = None
        metrics: Metrics = dict
        node = self._scaling
        if node is not None and isinstance(node.transform, Scaling):
            known = None if self._by_number is None else self._clipped(node, self._by_number, found)
            factor, metrics = known or self._scaled(node, node.transform, found, chain_state, loss)
        self._end.take(found, factor)
        return metrics

    def _is_settled(self, groups: list[Group]) -> bool:
        """True if the rule takes the same kind of step with these settings. Raise if a setting is invalid."""
        arguments = self._current_arguments()
        # by identity, because == compares the elements of tensors, which waits for the device and gives many answers
        if len(arguments) != len(self._arguments) or not all(map(operator.is_, arguments, self._arguments)):
            return False
        if list(map(len, groups)) != self._lengths:  # an ordinary step looks at a key that is new
            return False
        try:
            values = [group[key] for group in groups for key in self._keys]
        except KeyError:
            return False
        if len(values) == len(self._values) and all(map(operator.is_, values, self._values)):
            return True
        settings = self._nodes.checked_settings(groups)
        if len(groups) != len(self._sizes) or self._end.variants(settings) != self._variants:
            return False
        self._settle(settings, groups)
        return True

    def _current_arguments(self) -> list[Any]:
        """The values of all attributes of the transforms and their classes, which a user may set at any time."""
        own = [value for attributes in self._attributes for value in attributes.values()]
        return own + [type(node.transform) for node in self._nodes]

    def _settle(self, settings: Mapping[str, list[Setting]], groups: Sequence[Group]) -> None:
        """Take over checked settings."""
        self._end.settle(settings)
        own = [] if self._scaling is None else settings[self._scaling.path]
        self._own = [own[g] for g in self._group_of] if own else []
        self._alone = self._own[0] if len(by_setting(self._own)) == 1 else None
        self._lengths = list(map(len, groups))
        values = [group[key] for group in groups for key in self._keys]
        parts = chain.from_iterable(value if type(value) is tuple else (value,) for value in values)
        # every step checks values that can change in place, such as tensors, and values of other authors, whose checks
        # may have effects
        self._values = values if self._are_ours and _IMMUTABLE.issuperset(map(type, parts)) else []

    def _gathered(self, groups: list[Group], kept: Mapping[Tensor, State], workspace: Workspace) -> _Found | None:
        """The tensors of the step; None if they are not laid out as in the step of the plan."""
        if self._all_take_part:
            params: list[Tensor] = [param for group in groups for param in group["params"]]
            grads: list[Any] = [param.grad for param in params]
            fits = [len(group["params"]) for group in groups] == self._sizes
        else:
            params, grads, group_of = taking_part(groups)
            fits = group_of == self._group_of
        vectors = workspace.vectors
        states: list[Any] = list(kept.values())
        # usually the states are in the order of the parameters, and 400 look-ups by hash are saved
        if len(kept) != len(params) or not all(map(operator.is_, kept, params)):
            states = list(map(kept.get, params))
        if not fits or None in states or set(map(len, states)) != {len(self._own_state)}:
            return None
        try:
            columns = {key: [state[key] for state in states] for key in self._own_state}
        except KeyError:
            return None
        tensors = params + grads
        for key in self._like:
            tensors += columns[key]
        if not self._fits(tensors) or not all(vectors.are_views(key, columns[key]) for key in self._numbers):
            return None
        known = [vectors.known(key, columns[key]) for key in self._end.counters]
        counters = [counter for counter in known if counter is not None]
        return _Found(params, grads, states, columns, counters, workspace) if len(counters) == len(known) else None

    def _clipped(self, node: Node, factor_of: Factor, found: _Found) -> tuple[float | None, Metrics] | None:
        """The factor of a joint norm as a number (None for 1), and the metrics; None if `_scaled` has to find them."""
        if self._alone is None:
            return None
        total = whole_norm(found.grads, found.workspace.scratch.knowing(found.grads, self._layout))
        if total is None:
            return None
        factor = factor_of(total.item(), self._alone)
        # the kernel divides by the inverse in float32: a factor beyond its range is left to `_scaled`
        if not (factor == 0 or _FLOAT32.tiny <= factor <= _FLOAT32.max):
            return None

        def metrics() -> dict[str, Tensor]:
            measured = Measured(L2, [0], total.view(1), total, [total])
            # not torch.tensor(factor), which would be on the default device of the user
            return node.qualified(effect(measured, torch.full_like(measured.vector, factor)))

        return None if factor == 1 else factor, metrics

    def _scaled(
        self, node: Node, transform: Scaling, found: _Found, chain_state: dict[str, Any], loss: Any
    ) -> tuple[Tensor | None, Metrics]:
        """The factors that the kernel has to apply, None for 1, and the metrics."""
        grads, workspace = found.grads, found.workspace
        measurer = _Measurer(grads, workspace.scratch.knowing(grads, self._layout))
        judged = Judged(self._judging, grads, measurer)
        columns = {"params": found.params, "grads": grads, **found.columns}

        def begin(i: int) -> State:
            return transform.init_state(found.params[i], self._own[i])

        states = VectorStates(found.states, node.path, node.state, begin, workspace.vectors, columns)
        step = Step(found.params, grads, loss, states, self._own, node.global_state(chain_state), tools=measurer)
        rows = range(len(grads))
        measured, factors = find_factors(node, transform, rows, grads, step, judged, None, chain_state)
        waiting = Scale(measured, factors, over_grads=True)
        kept = None if waiting.does_nothing else waiting.factor
        # a statistic has changed its state, so an ordinary step is too late: multiply here, and call the kernel without
        if kept is not None and not self._end.takes(waiting):
            waiting.carry_out(grads, workspace.scratch, "")
            kept = None
        shown = step.metrics
        if not (measured.is_whole and measured.targets):
            return kept, partial(node.qualified, {**shown, **effect(measured, factors)})
        measured.targets = [measured.total]  # so that metrics do not keep the gradients alive
        return kept, lambda: node.qualified({**shown, **effect(measured, factors)})


class _Measurer(Measurer):
    """Measures gradients that are plain.

    Args:
        grads: The gradients.
        scratch: Memory for intermediate results.
    """

    def __init__(self, grads: list[Tensor], scratch: Scratch) -> None:
        self._grads, self.scratch = grads, scratch

    @override
    def scratch_for(self, tensors: Sequence[Tensor]) -> Scratch | None:
        return self.scratch if tensors is self._grads or foreach.are_plain(tensors) else None

    @override
    def joint_norm(self, grads: list[Tensor], *, beside: bool) -> None:
        """None, because statistics of a planned step use the norms of the scaling or of each gradient."""

    @override
    def norm_of_each(self, grads: list[Tensor]) -> Tensor:
        return whole_norms(grads, self.scratch)


def _by_number(transform: Transform) -> Factor | None:
    """The method ``factor`` of a joint clip, which saves many operations on one element; None if it has none.

    The class that has ``factors`` must have it too, because a subclass that overrides only ``factors`` has others.
    """
    if not isinstance(transform, Scaling) or transform.slicing != Slicing(L2, "global") or "factors" in vars(transform):
        return None
    is_its_own = overridden_last(type(transform), "factor", "factors") == "factor"
    return getattr(transform, "factor", None) if is_its_own else None


def _shaped(ended: Ended | Delivered) -> list[str]:
    """The keys of state that is shaped like the parameters."""
    return [key for key in ended.columns if key not in ("params", "grads") and ended.layout.has([key])]
