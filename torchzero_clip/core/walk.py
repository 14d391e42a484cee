"""The way of one step down a chain: from the gradients to the parameters."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias, TypeGuard

import torch
from torch import Tensor

from torchzero_clip.core.chain import Chain
from torchzero_clip.core.kinds import FinalRule, Gate, Scaling, UpdateRule
from torchzero_clip.core.learning_rate import LR
from torchzero_clip.core.nodes import Node, Nodes
from torchzero_clip.core.scope import NamedParam, named_params
from torchzero_clip.core.step import Step
from torchzero_clip.core.transform import Transform
from torchzero_clip.functional import foreach
from torchzero_clip.functional.measure import measure, scale_, summary
from torchzero_clip.functional.norms import p_norms
from torchzero_clip.functional.shards import chosen, pack, whole
from torchzero_clip.types import Setting, State, Target

Group: TypeAlias = dict[str, Any]


@dataclass
class Walk:
    """One step on its way down a chain.

    Lists have one entry, a row, per parameter that has a gradient.

    Args:
        nodes: The transforms.
        groups: The param groups.
        settings: The settings of each transform by path, one dict per group.
        params: The parameters.
        grads: Their gradients.
        states: The state of each parameter, by qualified keys.
        group_of: The index of the group of each parameter.
        chain_state: The state of the whole chain, by qualified keys.
        loss: What the closure returned.
        maximize: Updates start as the negative gradients.
        keep_grads: Norm clips never write over gradients.
    """

    nodes: Nodes
    groups: list[Group]
    settings: Mapping[str, list[Setting]]
    params: list[Tensor]
    grads: list[Tensor]
    states: list[State]
    group_of: list[int]
    chain_state: dict[str, Any]
    loss: Tensor | float | None
    maximize: bool
    keep_grads: bool
    metrics: dict[str, Tensor] = field(default_factory=dict)
    gradient_norms: Tensor | None = None
    """A norm of each gradient as it entered the chain, once it was measured."""

    def __post_init__(self) -> None:
        self.updates: list[Tensor | None] = [None] * len(self.params)
        """The update of each parameter, once a transform has returned one; until then it is the gradient."""
        self.borrowed = [True] * len(self.params)
        """True for updates whose memory is that of a gradient, a parameter or state."""
        self._scopes: dict[str, set[int]] = {}

    @property
    def named_params(self) -> list[NamedParam]:
        """The parameters with their names."""
        named = [n for group in self.groups for n in named_params(group)]
        return [n for n in named if n.param.grad is not None and n.param.requires_grad]

    def all_params(self) -> list[Tensor]:
        """All parameters of the optimizer, with or without a gradient."""
        return [param for group in self.groups for param in group["params"]]

    def rows_of(self, path: str) -> list[int]:
        """The rows in the scope of a transform of the outermost chain."""
        return self._in_scope(self.nodes.by_path[path], list(range(len(self.params))))

    def _in_scope(self, node: Node, rows: list[int]) -> list[int]:
        scope = node.transform.scope
        if len(scope.conditions) == 0:  # `not` of a tuple breaks the graphs of `torch.compile`
            return rows
        if node.path not in self._scopes:
            self._scopes[node.path] = {i for i, named in enumerate(self.named_params) if scope.has(named)}
        chosen = self._scopes[node.path]
        return [i for i in rows if i in chosen]

    def measure_gradients(self) -> Tensor:
        """The L2 norm of each gradient: a vector of float64, equal on all ranks."""
        if self.gradient_norms is None:
            self.gradient_norms = pack(p_norms([whole(grad) for grad in self.grads], 2.0))
        return self.gradient_norms

    def change_closure_gradients(self, chain: Chain) -> None:
        """Apply the transforms with ``target="closure"`` to the gradients that the closure left."""
        for path, transform in chain.transforms.items():
            if transform.target == "closure":
                if self.nodes.keeps_statistics:
                    self.measure_gradients()
                rows = self.rows_of(path)
                if rows:
                    _change_gradients(self, self.nodes.by_path[path], rows, False)
                self.gradient_norms = None

    def run(self, chain: Chain, prefix: str, rows: list[int], *, to_params: bool = False) -> None:
        """Send the updates of some rows down a chain; ``to_params`` subtracts what comes out from the parameters."""
        nodes = [self.nodes.by_path[prefix + name] for name in chain.transforms]
        for i, node in enumerate(nodes):
            transform, rest = node.transform, nodes[i + 1 :]
            own = self._in_scope(node, rows)
            if to_params and isinstance(transform, UpdateRule) and _has_own_fuse(type(transform)):
                rows, own = self._fuse(node, rows, own, rest)
            if not rows:
                return
            if to_params and not rest and self._is_subtracted(transform):
                transform.subtract(self.current(rows), self.step_for(node, rows))
                return
            if own and not isinstance(transform, Gate):
                if self.nodes.keeps_statistics and not _measures_gradients(transform):
                    self.measure_gradients()
                if "grad" in self.nodes.targets:
                    self.keep_updates(own)
                over_grads = to_params and isinstance(transform, Scaling) and self._may_write_grads(rest)
                TARGETS[transform.target](self, node, own, over_grads)
        if to_params:
            foreach.subtract_([self.params[i] for i in rows], self.current(rows))

    def _is_subtracted(self, transform: Transform) -> TypeGuard[LR]:
        """True for a learning rate that is applied when updates are subtracted. The compiler fuses by itself."""
        is_lr = isinstance(transform, LR) and type(transform).apply_tensors is LR.apply_tensors
        return is_lr and transform.target == "update" and not torch.compiler.is_compiling()

    def current(self, rows: list[int], *, writable: bool = False, over_grads: bool = False) -> list[Tensor]:
        """The updates of some rows.

        ``writable`` ones share no memory with gradients, parameters or state; with ``over_grads`` they may be the
        gradients themselves.
        """
        found: list[Tensor] = []
        for i in rows:
            update, borrowed, grad = self.updates[i], self.borrowed[i], self.grads[i]
            if update is None:
                update, borrowed = (-grad, False) if self.maximize else (grad, True)
            found.append(update.clone() if writable and borrowed and not (over_grads and update is grad) else update)
        return found

    def put(self, rows: list[int], updates: Sequence[Tensor]) -> None:
        """Store the updates that a transform returned: new tensors, or gradients, parameters and state themselves."""
        values = [*self.chain_state.values(), *(value for state in self.states for value in state.values())]
        others = {*self.grads, *self.params, *(value for value in values if isinstance(value, Tensor))}
        counts: dict[Tensor, int] = {}
        for update in updates:
            counts[update] = counts.get(update, 0) + 1
        for i, update in zip(rows, updates, strict=True):
            self.updates[i], self.borrowed[i] = update, update in others or counts[update] > 1

    def keep_updates(self, rows: list[int]) -> None:
        """Copy updates that share a tensor with ``.grad``, because a ``target="grad"`` transform will write to it."""
        for i in rows:
            if self.updates[i] is self.grads[i]:
                self.updates[i], self.borrowed[i] = self.grads[i].clone(), False

    def apply(self, node: Node, rows: list[int], updates: list[Tensor]) -> list[Tensor]:
        """What one transform makes of tensors. It may write to them, unless it is an update rule."""
        transform = node.transform
        if isinstance(transform, Chain):
            return self._apply_chain(node, transform, rows, updates)
        step = self.step_for(node, rows)
        try:
            if isinstance(transform, Scaling):
                self._scale(transform, updates, step, rows)
                result = updates
            else:
                result = transform.apply_tensors(updates, step)
                _check_result(node, result, updates)
            _check_state(node, step)
            return list(result)
        finally:
            self.store(node, rows, step)

    def _apply_chain(self, node: Node, chain: Chain, rows: list[int], updates: list[Tensor]) -> list[Tensor]:
        outside = self.updates, self.borrowed
        self.updates, self.borrowed = list(self.updates), list(self.borrowed)
        for i, update in zip(rows, updates, strict=True):
            self.updates[i], self.borrowed[i] = update, False
        self.run(chain, f"{node.path}/", rows)
        result = self.current(rows, writable=True)
        self.updates, self.borrowed = outside
        return result

    def _apply_child(self, node: Node, rows: list[int], name: str, updates: list[Tensor]) -> list[Tensor]:
        child = self.nodes.by_path[f"{node.path}/{name}"]
        own = self._in_scope(child, rows)
        result = dict(zip(rows, updates, strict=True))
        if own:
            result.update(zip(own, self.apply(child, own, [result[i] for i in own]), strict=True))
        return [result[i] for i in rows]

    def _scale(self, transform: Scaling, updates: list[Tensor], step: Step, rows: list[int]) -> None:
        measured = measure(updates, transform.slicing, transform.slice_dims)
        if self.nodes.keeps_statistics and self.gradient_norms is None:
            self.gradient_norms = measured.tensor_norms  # the updates are the gradients: see `_measures_gradients`
            self.measure_gradients()
        if transform.keeps_statistics:
            step.gradient_norms = chosen(self.measure_gradients(), rows)
        factors = transform.factors(measured, updates, step)
        count = sum(norms.numel() for norms in measured.norms)
        if getattr(factors, "shape", None) != (count,):
            got = f"shape {tuple(factors.shape)}" if isinstance(factors, Tensor) else type(factors).__name__  # pyright: ignore
            raise RuntimeError(f"{transform!r} returned factors of {got} for {count} slices: see Measured.joined")
        step.metrics.update(summary(measured, scale_(measured, factors)))

    def step_for(self, node: Node, rows: list[int]) -> Step:
        """What a transform sees of the step, with the state that it begins with."""
        transform = node.transform
        params = [self.params[i] for i in rows]
        settings = [self.settings[node.path][self.group_of[i]] for i in rows]
        known = transform.keeps_statistics and self.gradient_norms is not None
        return Step(
            params,
            [self.grads[i] for i in rows],
            self.loss,
            self._states_for(node, rows, params, settings),
            settings,
            node.global_state(self.chain_state),
            {},
            chosen(self.measure_gradients(), rows) if known else None,
            partial(self._apply_child, node, rows) if node.children else None,
        )

    def _states_for(self, node: Node, rows: list[int], params: list[Tensor], settings: list[Setting]) -> list[State]:
        if not node.has_state:
            return [{} for _ in rows]
        begins = not isinstance(node.transform, FinalRule)
        found: dict[Tensor, State] = {}  # a parameter that is listed twice has one state
        for i, param, setting in zip(rows, params, settings, strict=True):
            if param not in found:
                state = node.state(self.states[i])
                found[param] = node.transform.init_state(param, setting) if begins and not state else state
        return [found[param] for param in params]

    def store(self, node: Node, rows: list[int], step: Step) -> None:
        """Keep the state and the metrics of a transform."""
        if node.has_state:
            for i, own in zip(rows, step.states, strict=True):
                for key, value in own.items():
                    self.states[i][f"{node.path}/{key}"] = value
        self.chain_state.update(node.qualified(step.global_state))
        self.metrics.update(node.qualified(step.metrics))

    def _may_write_grads(self, rest: Sequence[Node]) -> bool:
        """True if an update rule follows, after scalings only: it only reads, so gradients may be scaled in place."""
        acting = (n.transform for n in rest if n.transform.target == "update")
        following = next((t for t in acting if not isinstance(t, Scaling | Gate)), None)
        return not self.keep_grads and isinstance(following, UpdateRule) and not isinstance(following, FinalRule)

    def _fuse(self, node: Node, rows: list[int], own: list[int], rest: Sequence[Node]) -> tuple[list[int], list[int]]:
        """Let an update rule do the rest of the chain where it can. Return the rows still to process: all, its own."""
        rest = [n for n in rest if n.transform.target != "closure" and not isinstance(n.transform, Gate)]
        acting = [set(self._in_scope(n, own)) for n in rest]
        alike: dict[Any, list[int]] = {}  # rows that the rest of the chain treats alike
        for i in own:
            later = tuple(k for k, chosen in enumerate(acting) if i in chosen)
            alike.setdefault((later, self.params[i].dtype), []).append(i)
        done: set[int] = set()
        for (later, _), part in alike.items():
            if self._take_step(node, part, [rest[k] for k in later]):
                done.update(part)
        if not done:
            return rows, own
        return [i for i in rows if i not in done], [i for i in own if i not in done]

    def _take_step(self, node: Node, rows: list[int], rest: Sequence[Node]) -> bool:
        rule: Any = node.transform
        step = self.step_for(node, rows)
        merged = [  # for equal keys the rule wins, then the earlier transform
            {key: value for n in (*rest[::-1], node) for key, value in self.settings[n.path][g].items()}
            for g in range(len(self.groups))
        ]
        step.settings = [merged[self.group_of[i]] for i in rows]
        try:
            updates = self.current(rows, writable=isinstance(rule, FinalRule))
            take_step = rule.fuse([n.transform for n in rest], updates, step)
            if take_step is not None:
                take_step()
            _check_state(node, step)
        finally:
            self.store(node, rows, step)
        return take_step is not None


def _measures_gradients(transform: Transform) -> bool:
    """True if a transform, as the first of the chain, measures the gradients of all parameters."""
    if transform.scope.limited or transform.target not in ("update", "update_difference", "grad"):
        return False
    if isinstance(transform, Chain):
        return _measures_gradients(next(iter(transform.transforms.values())))
    return isinstance(transform, Scaling)


def _has_own_fuse(kind: type[Transform]) -> bool:
    """True unless a subclass overrides ``apply_tensors`` below the class that implements ``fuse``."""
    return next(name for base in kind.__mro__ for name in ("fuse", "apply_tensors") if name in vars(base)) == "fuse"


def _check_result(node: Node, result: Any, given: Sequence[Tensor]) -> None:
    """Raise if a transform returned unusable tensors; the message names the transform."""
    transform = node.transform
    if not isinstance(result, list | tuple):
        raise RuntimeError(f"{transform!r} returned {type(result).__name__} instead of a list of tensors")
    if len(result) != len(given):
        raise RuntimeError(f"{transform!r} returned {len(result)} tensors for {len(given)}")
    for new, old in zip(result, given, strict=True):
        if not isinstance(new, Tensor):
            raise RuntimeError(f"{transform!r} returned {type(new).__name__} instead of a tensor")
        if new.shape != old.shape or new.dtype != old.dtype:
            got, expected = (f"{tuple(t.shape)} of {t.dtype}" for t in (new, old))
            raise RuntimeError(f"{transform!r} returned a tensor of shape {got} for one of shape {expected}")


def _check_state(node: Node, step: Step) -> None:
    """Raise if a transform has state of parameters that it did not declare, and that would be lost."""
    if not node.has_state:
        for state in step.states:
            if len(state) > 0:
                keys = list(state)
                raise RuntimeError(f"{node.transform!r} keeps state {keys} that its init_state does not return")


# What a transform is applied to, and where its result goes. ``over_grads``: a scaling may write over the gradients.


def _change_updates(walk: Walk, node: Node, rows: list[int], over_grads: bool) -> None:
    only_reads = isinstance(node.transform, UpdateRule)
    walk.put(rows, walk.apply(node, rows, walk.current(rows, writable=not only_reads, over_grads=over_grads)))


def _change_gradients(walk: Walk, node: Node, rows: list[int], over_grads: bool) -> None:
    grads = [walk.grads[i] for i in rows]
    foreach.copy_(grads, walk.apply(node, rows, foreach.clone(grads)))


def _do_nothing(walk: Walk, node: Node, rows: list[int], over_grads: bool) -> None:
    """The transform was applied by `Walk.change_closure_gradients`."""


def _change_params(walk: Walk, node: Node, rows: list[int], over_grads: bool) -> None:
    params = [walk.params[i] for i in rows]
    foreach.copy_(params, walk.apply(node, rows, foreach.clone(params)))


def _pass_params_difference(walk: Walk, node: Node, rows: list[int], over_grads: bool) -> None:
    params = [walk.params[i] for i in rows]
    walk.put(rows, foreach.subtract(params, walk.apply(node, rows, foreach.clone(params))))


def _pass_update_difference(walk: Walk, node: Node, rows: list[int], over_grads: bool) -> None:
    updates = walk.current(rows, writable="grad" in walk.nodes.targets)
    walk.put(rows, foreach.subtract(updates, walk.apply(node, rows, foreach.clone(updates))))


TARGETS: Mapping[Target, Callable[[Walk, Node, list[int], bool], None]] = {
    "update": _change_updates,
    "grad": _change_gradients,
    "closure": _do_nothing,
    "params_direct": _change_params,
    "params_difference": _pass_params_difference,
    "update_difference": _pass_update_difference,
}
