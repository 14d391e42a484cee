"""One step through a chain, from the gradients to the parameters."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias, TypeGuard, TypeVar

import torch
from torch import Tensor

from torchzero_clip.core.chain import Chain
from torchzero_clip.core.elementwise import Elementwise
from torchzero_clip.core.gathering import Alike
from torchzero_clip.core.kernels import Fused, call_kernel, run_kernel
from torchzero_clip.core.kinds import FinalRule, Gate, Scaling, Shifting, UpdateRule
from torchzero_clip.core.learning_rate import LR
from torchzero_clip.core.nodes import Node, Nodes
from torchzero_clip.core.pieces import Stage, run_pieces
from torchzero_clip.core.scope import NamedParam, named_params
from torchzero_clip.core.states import States
from torchzero_clip.core.step import Step
from torchzero_clip.core.transform import Transform, overridden_last
from torchzero_clip.core.updates import Pending, Updates
from torchzero_clip.core.workspace import Workspace
from torchzero_clip.functional import foreach
from torchzero_clip.functional.measure import L2, Measured, effect, measure, scale_, summary
from torchzero_clip.functional.norms import p_norms, whole_norm, whole_norms
from torchzero_clip.functional.scratch import Scratch
from torchzero_clip.functional.shards import chosen, is_partial, locals_of, pack, whole
from torchzero_clip.types import Setting, State, Target

T = TypeVar("T")
Group: TypeAlias = dict[str, Any]

FUSED = ("fuse", "kernel", "apply_tensors")
"""If a subclass overrides only ``apply_tensors``, the other two are not called, because they would ignore it."""


@dataclass
class Walk:
    """One step through a chain.

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
        loss: What the closure returned, or the mean of the losses that were reported; None without either.
        loss_count: How many losses that are.
        maximize: Updates start as the negative gradients.
        keep_grads: Norm clips never write over gradients.
        may_fuse: The rest of a chain may be one operation on lists.
        workspace: Buffers and caches of the optimizer; None to apply transforms one by one.
        plain: The state by key, if parameters, gradients and state are plain and alike; else None.
        listens: A `Listener` needs ``norms_before``.
        new_states: The states of parameters that had none.
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
    loss_count: int
    maximize: bool
    keep_grads: bool
    may_fuse: bool = False
    workspace: Workspace | None = None
    plain: Alike | None = None
    listens: bool = False
    new_states: dict[Tensor, State] = field(default_factory=dict)
    metrics: dict[str, Tensor] = field(default_factory=dict)
    has_loss: Tensor | None = None
    """Whether a process has a loss, once that was asked."""
    gradient_norms: Tensor | None = None
    """A norm of each gradient before the first transform, or their joint norm, once it was measured."""
    norms_before: Tensor | None = None
    """The L2 norm of each gradient before the first transform, once it was measured for a listener."""
    refused_by: list[str] = field(default_factory=list)
    """The gates that refused the step, and "nonfinite" if a gradient that is not finite did."""

    def __post_init__(self) -> None:
        self.updates = Updates(self.params, self.grads, self.states, self.chain_state, self.maximize, self.workspace)
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

    def measure_gradients(self, *, jointly: bool = False) -> Tensor:
        """The L2 norm of each gradient: a vector of float64, equal on all ranks.

        With ``jointly`` it may be one number, the norm of all together, if the statistics of the chain need only that.
        """
        if self.gradient_norms is None:
            total = None
            if jointly and self.nodes.only_joint_statistics and self._is_plain():
                total = whole_norm(self.grads)
            self.gradient_norms = self._norm_of_each() if total is None else total.view(1)
            self._note_norms(self.gradient_norms if total is None else None)
        return self.gradient_norms

    def _note_norms(self, norms: Tensor | None = None) -> None:
        """Give a listener the L2 norms of the gradients before the first transform; None to measure them."""
        if self.listens and self.norms_before is None:
            self.norms_before = self._norm_of_each() if norms is None else norms

    def _is_plain(self) -> bool:
        """True if gradients are plain, so that few operations measure them."""
        return self.workspace is not None and (self.plain is not None or foreach.are_plain(self.grads))

    def _norm_of_each(self) -> Tensor:
        if self.workspace is not None and self._is_plain():
            return whole_norms(self.grads, self.workspace.scratch)
        return pack(p_norms([whole(grad) for grad in self.grads], 2.0))

    def norms_of(self, rows: list[int]) -> Tensor:
        """The norm of the gradient of each row, or the joint norm if statistics need only that."""
        norms = self.measure_gradients()
        return norms if len(norms) < len(self.params) else chosen(norms, rows)

    def change_closure_gradients(self, chain: Chain) -> None:
        """Apply the transforms with ``target="closure"`` to the gradients that the closure left."""
        for path, transform in chain.transforms.items():
            if transform.target == "closure":
                if self.nodes.keeps_statistics:
                    self.measure_gradients()
                self._note_norms()
                rows = self.rows_of(path)
                if rows:
                    _change_gradients(self, self.nodes.by_path[path], rows, False)
                self.gradient_norms = None

    def run(self, chain: Chain, prefix: str, rows: list[int], *, to_params: bool = False) -> None:
        """Send the updates of some rows down a chain; ``to_params`` subtracts the result from the parameters."""
        nodes = [self.nodes.by_path[prefix + name] for name in chain.transforms]
        for i, node in enumerate(nodes):
            transform, rest = node.transform, nodes[i + 1 :]
            own = self._in_scope(node, rows)
            if self.listens and not (isinstance(transform, Gate) or _measures_gradients(transform)):
                self._note_norms()
            is_rule = to_params and isinstance(transform, UpdateRule)
            if is_rule and own and overridden_last(type(transform), *FUSED) != "apply_tensors":
                rows, own = self._fuse(node, rows, own, rest)
            if not rows:
                return
            if to_params and not rest and self._is_subtracted(transform):
                transform.subtract(self.updates.current(rows), self.step_for(node, rows))
                return
            if own and not isinstance(transform, Gate):
                if self.nodes.keeps_statistics and not _measures_gradients(transform):
                    self.measure_gradients()
                if transform.target != "update":
                    self.updates.catch_up(own)
                if "grad" in self.nodes.targets:
                    self.updates.keep(own)
                over_grads = to_params and isinstance(transform, Scaling) and self._may_write_grads(rest)
                TARGETS[transform.target](self, node, own, over_grads)
        if to_params:
            foreach.subtract_([self.params[i] for i in rows], self.updates.current(rows))

    def _is_subtracted(self, transform: Transform) -> TypeGuard[LR]:
        """True for an `LR` that can be applied in the subtraction. The compiler fuses the two by itself."""
        is_lr = isinstance(transform, LR) and type(transform).apply_tensors is LR.apply_tensors
        return is_lr and transform.target == "update" and not torch.compiler.is_compiling()

    def apply(self, node: Node, rows: list[int], updates: list[Tensor]) -> list[Tensor]:
        """Return the result of one transform for tensors. It may write to them, unless it is an update rule."""
        transform = node.transform
        if isinstance(transform, Chain):
            return self._apply_chain(node, transform, rows, updates)
        if isinstance(transform, Scaling):
            scale_(*self._measured(node, transform, rows, updates))
            return updates
        step = self.step_for(node, rows)
        try:
            result = transform.apply_tensors(updates, step)
            _check_result(node, result, updates)
            _check_state(node, step)
            return list(result)
        finally:
            self.store(node, step)

    def scale(self, node: Node, transform: Scaling, rows: list[int], over_grads: bool) -> None:
        """Measure the updates, and postpone their multiplication until they are read."""
        measured, factors = self._measured(node, transform, rows, self.updates.current(rows))
        self.updates.pend(Pending(rows, measured, factors, over_grads))

    def shift(self, node: Node, transform: Shifting, rows: list[int]) -> bool:
        """Postpone the subtraction of numbers until the updates are read. Return False if that is not possible."""
        if self.workspace is None or self.plain is None:
            return False
        updates = self.updates.current(rows)
        if not self.updates.untouched or not foreach.is_real_and_wide(updates[0].dtype):
            return False
        shifts = transform.shifts(updates, self.step_for(node, rows))
        if shifts is not None:
            self.updates.pend(Pending(rows, shifts=shifts))
        return shifts is not None

    def postpone(self, node: Node, transform: Elementwise, rows: list[int]) -> bool:
        """Postpone an elementwise transform until the updates are read. Return False if that is not possible."""
        if self.workspace is None or self.plain is None or not self.updates.untouched or node.children:
            return False
        if not foreach.is_real_and_wide(self.params[0].dtype) or not transform.is_elementwise():
            return False
        step = self.step_for(node, rows)
        if transform.rows_of(step) is not None or not transform.may_wait(step):
            return False
        if transform.reads_tensors:
            self.updates.catch_up(rows)
            if not self.updates.untouched:
                return False
        state = [step.column(key) for key in transform.keys]
        is_known = self.plain.has(f"{node.path}/{key}" for key in transform.keys)
        if not is_known and not foreach.are_alike([step.params, *state]):
            return False
        flags = transform.flags(self.updates.before_pending(rows), step, None)
        done = partial(self.store, node, step)
        stage = Stage(transform, step.settings, state, flags, self.updates.are_safe(), step, done)
        self.updates.pend(Pending(rows, stage=stage))
        return True

    def _apply_chain(self, node: Node, chain: Chain, rows: list[int], updates: list[Tensor]) -> list[Tensor]:
        with self.updates.inside(rows, updates):
            self.run(chain, f"{node.path}/", rows)
            return self.updates.current(rows, writable=True)

    def _apply_child(self, node: Node, rows: list[int], name: str, updates: list[Tensor]) -> list[Tensor]:
        child = self.nodes.by_path[f"{node.path}/{name}"]
        own = self._in_scope(child, rows)
        result = dict(zip(rows, updates, strict=True))
        if own:
            result.update(zip(own, self.apply(child, own, [result[i] for i in own]), strict=True))
        return [result[i] for i in rows]

    def _measured(
        self, node: Node, transform: Scaling, rows: list[int], updates: list[Tensor]
    ) -> tuple[Measured, Tensor]:
        """The norms of updates, and the factors that a scaling computes from them."""
        step = self.step_for(node, rows)
        scratch = self._scratch_for(updates)
        dims_of = None if type(transform).slice_dims is Scaling.slice_dims else transform.slice_dims
        try:
            keeps, slicing = self.nodes.keeps_statistics, transform.slicing
            jointly = self.nodes.only_joint_statistics and slicing.dim == "global" and slicing.metric == L2
            is_plain, each = scratch is not None, keeps and not jointly
            beside = self.listens and self.norms_before is None
            measured = measure(
                updates, slicing, dims_of, scratch, plain=is_plain, each=each, beside=beside, name=node.path
            )
            if keeps and self.gradient_norms is None:  # updates are gradients here: see `_measures_gradients`
                jointly = jointly and len(measured.vector) > 0
                self.gradient_norms = measured.vector.narrow(0, 0, 1) if jointly else measured.tensor_norms
                self.measure_gradients()
            if beside:
                self._note_norms(measured.tensor_norms if measured.metric == L2 else None)
            if transform.keeps_statistics:
                step.gradient_norms = self.norms_of(rows)
            factors = transform.factors(measured, updates, step)
            count = len(measured.vector)
            if getattr(factors, "shape", None) != (count,):
                got = f"shape {tuple(factors.shape)}" if isinstance(factors, Tensor) else type(factors).__name__  # pyright: ignore
                raise RuntimeError(f"{transform!r} returned factors of {got} for {count} slices: see Measured.joined")
            step.metrics.update(summary(measured, effect(measured, factors)))
            _check_state(node, step)
        finally:
            self.store(node, step)
        return measured, factors

    def _scratch_for(self, updates: Sequence[Tensor]) -> Scratch | None:
        """Memory for norms in few operations; None unless local parts are plain and none is a pending sum."""
        if self.workspace is None:
            return None
        is_plain = self.plain is not None and self.updates.untouched
        if not is_plain:
            is_plain = foreach.are_plain(locals_of(updates), 0) and not any(map(is_partial, updates))
        return self.workspace.scratch if is_plain else None

    def _picked(self, column: list[T], rows: list[int]) -> list[T]:
        """Some rows, in order, of a list with one entry per parameter, as a new list."""
        return list(column) if len(rows) == len(column) else [column[i] for i in rows]

    def _by_group(self, settings: Sequence[Setting], rows: list[int]) -> list[Setting]:
        """The setting of each row, from one for each group."""
        if len(settings) == 1:
            return [settings[0]] * len(rows)
        return [settings[g] for g in self._picked(self.group_of, rows)]

    def step_for(self, node: Node, rows: list[int]) -> Step:
        """The `Step` for one transform, with its state before the step."""
        transform = node.transform
        own_settings = self.settings[node.path]
        settings = self._by_group(own_settings, rows)
        params = self._picked(self.params, rows)
        known = transform.keeps_statistics and self.gradient_norms is not None
        return Step(
            params,
            self._picked(self.grads, rows),
            self.loss,
            States(
                self._picked(self.states, rows),
                node.path,
                node.state,
                partial(_begin, transform, params, settings),
                None if self.workspace is None else self.workspace.vectors,
                self.plain.columns if self.plain is not None and len(rows) == len(self.params) else None,
            ),
            settings,
            node.global_state(self.chain_state),
            {},
            self.norms_of(rows) if known else None,
            partial(self._apply_child, node, rows) if node.children else None,
            None if self.workspace is None else self.workspace.scratch,
            self.has_loss,
        )

    def store(self, node: Node, step: Step) -> None:
        """Store the state and the metrics of a transform."""
        if node.has_state:
            step.store_states()
        self.chain_state.update(node.qualified(step.global_state))
        self.metrics.update(node.qualified(step.metrics))

    def _may_write_grads(self, rest: Sequence[Node]) -> bool:
        """True if only scalings stand before the next update rule, which does not write to its updates."""
        acting = (n.transform for n in rest if n.transform.target == "update")
        following = next((t for t in acting if not isinstance(t, Scaling | Gate)), None)
        return not self.keep_grads and isinstance(following, UpdateRule) and not isinstance(following, FinalRule)

    def _fuse(self, node: Node, rows: list[int], own: list[int], rest: Sequence[Node]) -> tuple[list[int], list[int]]:
        """Let an update rule do the rest of the chain where it can. Return the rows that remain: all, and its own."""
        rest = [n for n in rest if n.transform.target != "closure" and not isinstance(n.transform, Gate)]
        done: set[int] = set()
        for later, part in self._alike(node, own, rest):
            if self._take_step(node, part, later):
                done.update(part)
        if not done:
            return rows, own
        if len(done) == len(rows):
            return [], []
        return [i for i in rows if i not in done], [i for i in own if i not in done]

    def _alike(self, node: Node, rows: list[int], rest: Sequence[Node]) -> list[tuple[list[Node], list[int]]]:
        """Rows that the rest of the chain treats alike, with the transforms that act on them."""
        rule: Any = node.transform
        variants = list(map(rule.variant, self.settings[node.path]))
        acting = [self._in_scope(n, rows) for n in rest]
        same_dtype = self.plain is not None or len({self.params[i].dtype for i in rows}) == 1
        if same_dtype and len(set(variants)) == 1 and all(own is rows for own in acting):
            return [(list(rest), rows)]
        chosen = list(map(set, acting))
        alike: dict[Any, list[int]] = {}
        for i in rows:
            later = tuple(k for k, own in enumerate(chosen) if i in own)
            alike.setdefault((later, self.params[i].dtype, variants[self.group_of[i]]), []).append(i)
        return [([rest[k] for k in later], part) for (later, *_), part in alike.items()]

    def _take_step(self, node: Node, rows: list[int], rest: Sequence[Node]) -> bool:
        rule: Any = node.transform
        step = self.step_for(node, rows)
        merged = [  # for equal keys the rule wins, then the earlier transform
            {key: value for n in (*rest[::-1], node) for key, value in self.settings[n.path][g].items()}
            for g in range(len(self.groups))
        ]
        step.settings = self._by_group(merged, rows)
        transforms = [n.transform for n in rest]
        try:
            fused = rule.kernel(transforms, step) if self.may_fuse else None
            if fused is not None and self._fits(node, fused, rows, step):
                self._run_kernel(fused, rows, step)
                return True
            updates = self.updates.current(rows, writable=isinstance(rule, FinalRule))
            take_step = rule.fuse(transforms, updates, step)
            if take_step is not None:
                take_step()
            _check_state(node, step)
        finally:
            self.store(node, step)
        return take_step is not None

    def _fits(self, node: Node, fused: Fused, rows: list[int], step: Step) -> bool:
        """True if parameters, updates and state are laid out as a kernel needs them."""
        keys = [f"{node.path}/{key}" for key in fused.state]
        if self.plain is not None and self.plain.has(keys) and self.updates.untouched:
            return True
        columns = [step.params, self.updates.before_pending(rows), *map(step.column, fused.state)]
        return foreach.are_alike([locals_of(column) for column in columns])

    def _run_kernel(self, fused: Fused, rows: list[int], step: Step) -> None:
        """Apply pending operations and the rest of the chain in one pass over memory."""
        for key in fused.counters:
            step.add(key, 1)
        pending = self.updates.take(rows)
        stages = [item.stage for item in pending if item.stage is not None]
        factors = next((item.factor for item in pending if item.factors is not None), None)
        params, *state = (step.params, *map(step.column, (*fused.state, *fused.counters)))
        if self.plain is None:
            params, *state = map(locals_of, (params, *state))
        shifts = next((item.shifts for item in pending if item.shifts is not None), None)
        over_grads = all(item.over_grads for item in pending)
        is_wide = foreach.is_real_and_wide(step.params[0].dtype)
        if self.workspace is not None and self.plain is not None and is_wide and not over_grads:
            sink = partial(call_kernel, fused.kernel, params, state, step.settings)
            updates = self.updates.current(rows)
            run_pieces(stages, updates, step.settings, (factors, shifts), self.workspace.scratch, sink)
            for stage in stages:
                stage.finish()
            return
        updates = locals_of(self.updates.current(rows, writable=factors is not None, over_grads=over_grads))
        run_kernel(fused.kernel, params, updates, state, step.settings, factors)


def _begin(transform: Transform, params: Sequence[Tensor], settings: Sequence[Setting], i: int) -> State:
    """The state of a parameter before its first step; empty if a final rule makes it itself."""
    return {} if isinstance(transform, FinalRule) else transform.init_state(params[i], settings[i])


def _measures_gradients(transform: Transform) -> bool:
    """True if a transform, as the first of the chain, measures the gradients of all parameters."""
    if transform.scope.limited or transform.target not in ("update", "update_difference", "grad"):
        return False
    if isinstance(transform, Chain):
        return _measures_gradients(next(iter(transform.transforms.values())))
    return isinstance(transform, Scaling)


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
    """Raise if a transform stored state of a parameter without declaring it, because the state would be lost."""
    if not node.has_state:
        for state in step.touched_states():
            if len(state) > 0:
                keys = list(state)
                raise RuntimeError(f"{node.transform!r} keeps state {keys} that its init_state does not return")


# One function for each target: it chooses the tensors that a transform gets, and where the result goes. With
# ``over_grads`` a scaling may write over the gradients.


def _change_updates(walk: Walk, node: Node, rows: list[int], over_grads: bool) -> None:
    if isinstance(node.transform, Scaling):
        walk.scale(node, node.transform, rows, over_grads)
        return
    if isinstance(node.transform, Shifting) and walk.shift(node, node.transform, rows):
        return
    if isinstance(node.transform, Elementwise) and walk.postpone(node, node.transform, rows):
        return
    only_reads = isinstance(node.transform, UpdateRule)
    walk.updates.put(rows, walk.apply(node, rows, walk.updates.current(rows, writable=not only_reads)))


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
    walk.updates.put(rows, foreach.subtract(params, walk.apply(node, rows, foreach.clone(params))))


def _pass_update_difference(walk: Walk, node: Node, rows: list[int], over_grads: bool) -> None:
    updates = walk.updates.current(rows, writable="grad" in walk.nodes.targets)
    walk.updates.put(rows, foreach.subtract(updates, walk.apply(node, rows, foreach.clone(updates))))


TARGETS: Mapping[Target, Callable[[Walk, Node, list[int], bool], None]] = {
    "update": _change_updates,
    "grad": _change_gradients,
    "closure": _do_nothing,
    "params_direct": _change_params,
    "params_difference": _pass_params_difference,
    "update_difference": _pass_update_difference,
}
