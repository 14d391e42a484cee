"""One step through a chain, from the gradients to the parameters."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias, TypeGuard, TypeVar

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from torchzero_clip.core.chain import Chain
from torchzero_clip.core.kinds import FinalRule, Gate, Scaling, UpdateRule
from torchzero_clip.core.learning_rate import LR
from torchzero_clip.core.nodes import Node, Nodes
from torchzero_clip.core.scope import NamedParam, named_params
from torchzero_clip.core.step import Step
from torchzero_clip.core.transform import Transform, storable
from torchzero_clip.engine import targets
from torchzero_clip.engine.checked import check_factors, check_result, check_state
from torchzero_clip.engine.executor import Executor
from torchzero_clip.engine.numbers import Numbers
from torchzero_clip.engine.others import Others
from torchzero_clip.functional import foreach
from torchzero_clip.functional.measure import L2, Measured, effect, scale_
from torchzero_clip.functional.shards import elements_at, memories
from torchzero_clip.types import Setting, State

T = TypeVar("T")
Group: TypeAlias = dict[str, Any]


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
        executor: Reads and changes the updates.
        keep_grads: Norm clips never write over gradients.
        listens: A `Listener` needs ``norms_before``.
        new_states: The states of parameters that had none.
        numbers: Receives the numbers behind the metrics, if they are joined with those of other parts of the step or of
            other processes.
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
    executor: Executor
    keep_grads: bool
    listens: bool = False
    new_states: dict[Tensor, State] = field(default_factory=dict)
    numbers: Numbers | None = None
    metrics: dict[str, Tensor] = field(default_factory=dict)
    has_loss: Tensor | None = None
    """Whether a process has a loss, once that was asked."""
    gradient_norms: Tensor | None = None
    """A norm of each gradient before the first transform, or their joint norm, once it was measured."""
    joint_norm: Tensor | None = None
    """The joint L2 norm of the gradients of all processes, once gates have measured it: 0-d."""
    norms_before: Tensor | None = None
    """The L2 norm of each gradient before the first transform, once it was measured for a listener."""
    refused_by: list[str] = field(default_factory=list)
    """The gates that refused the step, and "nonfinite" if a gradient that is not finite did."""
    others: Others | None = None
    """The processes that hold other parameters."""
    stand_in: "Walk | None" = None
    """With other processes: what joint transforms act on where this process has no tensor for them."""
    _scopes: dict[str, set[int]] = field(default_factory=dict, init=False)

    @property
    def process_group(self) -> ProcessGroup | None:
        """The processes that hold other parameters."""
        return None if self.others is None else self.others.group

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
        return self.in_scope(self.nodes.by_path[path], list(range(len(self.params))))

    def in_scope(self, node: Node, rows: list[int]) -> list[int]:
        """The rows that a transform acts on; the same list if these are all."""
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
            # the joint norm of finite gradients is finite, and 0 only if all are 0: joint statistics ask no more
            jointly = jointly and self.nodes.only_joint_statistics
            joint = self.executor.joint_norm(self.grads, beside=self.listens) if jointly else None
            if joint is None:
                self.gradient_norms = norms = self.executor.norm_of_each(self.grads)
            else:
                total, norms = joint
                self.gradient_norms = total.view(1)
            self._note_norms(norms)
        return self.gradient_norms

    def _note_norms(self, norms: Tensor | None = None) -> None:
        """Give a listener the L2 norms of the gradients before the first transform; None to measure them."""
        if self.listens and self.norms_before is None:
            self.norms_before = self.executor.norm_of_each(self.grads) if norms is None else norms

    def norms_of(self, rows: list[int]) -> Tensor:
        """The norm of the gradient of each row, or the joint norm if statistics need only that."""
        norms = self.measure_gradients()
        return norms if len(norms) < len(self.params) else elements_at(norms, rows)

    def change_closure_gradients(self, chain: Chain) -> None:
        """Apply the transforms with ``target="closure"`` to the gradients that the closure left."""
        for path, transform in chain.transforms.items():
            if transform.target == "closure":
                if self.nodes.keeps_statistics:
                    self.measure_gradients()
                self._note_norms()
                node = self.nodes.by_path[path]
                rows = self._or_stand_in(node, self.rows_of(path))
                if rows:
                    targets.change_gradients(self._picked(self.grads, rows), partial(self.apply, node, rows))
                # later statistics judge the gradients that enter the rest of the chain
                self.gradient_norms = self.joint_norm = None

    def run(self, chain: Chain, prefix: str, rows: list[int], *, to_params: bool = False) -> None:
        """Send the updates of some rows down a chain; ``to_params`` subtracts the result from the parameters."""
        nodes = [self.nodes.by_path[prefix + name] for name in chain.transforms]
        for i, node in enumerate(nodes):
            transform, rest = node.transform, nodes[i + 1 :]
            own = self.in_scope(node, rows)
            # the last moment to measure what entered the chain, unless this transform measures just that
            if self.listens and not (isinstance(transform, Gate) or _measures_gradients(transform)):
                self._note_norms()
            if self.stand_in is not None and transform.target != "closure":
                own = self._or_stand_in(node, own)
            if to_params and own and isinstance(transform, UpdateRule):
                done = self._finish(node, own, rest)
                if done:  # their parameters have changed: no later transform may see these rows
                    rows, own = ([i for i in these if i not in done] for these in (rows, own))
            if not rows:
                if self.stand_in is None:
                    return
                continue
            # torch subtracts lr times the update in one operation, which rounds once instead of twice
            if to_params and not rest and _is_subtracted(transform):
                transform.subtract(self.executor.read(rows), self.step_for(node, rows))
                return
            if own and not isinstance(transform, Gate):
                over_grads = to_params and isinstance(transform, Scaling) and self._may_write_grads(rest)
                self._change(node, own, over_grads)
        if to_params and rows:
            foreach.subtract_([self.params[i] for i in rows], self.executor.read(rows))

    def _or_stand_in(self, node: Node, rows: list[int]) -> list[int]:
        """The rows of a transform; none if a stand-in has acted for it.

        With other processes, the stand-in acts for a joint transform that has no element on this process. It exchanges
        as many numbers as the transform does on the other processes.
        """
        if self.stand_in is None or node.path not in self.nodes.joint:
            return rows
        # a composite is applied to empty tensors, too, and lets a stand-in act for its children
        if rows and (node.path not in self.nodes.joining or any(self.params[i].numel() for i in rows)):
            return rows
        if rows:
            self.store(node, self.step_for(node, rows))  # the state of empty tensors begins, as in one process
        self.stand_in.joint_norm = self.joint_norm
        self.stand_in.apply(node, [0], list(self.stand_in.grads))
        return []

    def _finish(self, node: Node, rows: list[int], rest: Sequence[Node]) -> set[int]:
        """Let an update rule take the rest of the step itself. Return the rows that it took."""
        rest = [n for n in rest if n.transform.target != "closure" and not isinstance(n.transform, Gate)]
        if not isinstance(node.transform, FinalRule):
            return self.executor.finish(self, node, rows, rest)
        step = self.step_for(node, rows, rest)
        try:
            node.transform.take_step(self.executor.read(rows, writable=True), step)
            check_state(node, step)
        finally:
            self.store(node, step)
        return set(rows)

    def _change(self, node: Node, rows: list[int], over_grads: bool) -> None:
        """Apply a transform to what its target names. With ``over_grads`` a scaling may write over the gradients."""
        transform = node.transform
        if self.nodes.keeps_statistics and not _measures_gradients(transform):
            self.measure_gradients()  # before this transform changes what a later statistic has to judge
        if "grad" in self.nodes.targets:
            self.executor.memory.keep(rows)
        if transform.target != "update":
            self.executor.settle(rows)
            tensors = (self._picked(self.params, rows), self._picked(self.grads, rows))
            targets.change(transform.target, self.executor, rows, *tensors, partial(self.apply, node, rows))
        elif isinstance(transform, Scaling):
            measured, factors = self._measured(node, transform, rows, self.executor.read(rows))
            self.executor.scale(rows, measured, factors, over_grads)
        elif not self.executor.take(self, node, rows):
            # a rule only reads, so it may get the gradients themselves: a copy would cost a pass over memory
            updates = self.executor.read(rows, writable=not isinstance(transform, UpdateRule))
            self.executor.memory.put(rows, self.apply(node, rows, updates))

    def apply(self, node: Node, rows: list[int], updates: list[Tensor]) -> list[Tensor]:
        """Return the result of one transform for tensors. It may write to them, unless it is an update rule."""
        transform = node.transform
        if isinstance(transform, Chain):
            with self.executor.memory.inside(rows, updates):
                self.run(transform, f"{node.path}/", rows)
                return self.executor.read(rows, writable=True)
        if isinstance(transform, Scaling):
            scale_(*self._measured(node, transform, rows, updates))
            return updates
        step = self.step_for(node, rows)
        try:
            result = transform.apply_tensors(list(updates), step)  # an author may change the list
            check_result(node, result, updates)
            check_state(node, step)
            return list(result)
        finally:
            self.store(node, step)  # also after an error: states that were changed have to match the others

    def _apply_child(self, node: Node, rows: list[int], name: str, updates: list[Tensor]) -> list[Tensor]:
        child = self.nodes.by_path[f"{node.path}/{name}"]
        own = self._or_stand_in(child, self.in_scope(child, rows))
        result = dict(zip(rows, updates, strict=True))
        if own:
            result.update(zip(own, self.apply(child, own, [result[i] for i in own]), strict=True))
        return [result[i] for i in rows]

    def _measured(
        self, node: Node, transform: Scaling, rows: list[int], updates: list[Tensor]
    ) -> tuple[Measured, Tensor]:
        """The norms of updates, and the factors that a scaling computes from them."""
        step, numbers, own = self.step_for(node, rows), self.numbers, None
        try:
            measured = self._measure(node, transform, updates)
            if transform.keeps_statistics:
                step.gradient_norms = self.norms_of(rows)
            if numbers is not None:
                own = measured.numbers(0 if step.tools.is_stand_in else sum(map(Tensor.numel, updates)))
                if self.others is not None and transform.slicing.dim == "global":
                    if node.path == self.nodes.of_gradients and self.joint_norm is not None:
                        measured = measured.of_processes(self.joint_norm.to(own.device).view(1, 1))
                    else:
                        joined = self.others.joined(measured, own, step.gradient_norms, step.tools)
                        measured, step.gradient_norms = joined
            factors = transform.factors(measured, updates, step)
            check_factors(node, factors, measured)
            if numbers is None or own is None:
                step.metrics.update(effect(measured, factors))
            else:
                numbers.add_scaling(node, measured, own, factors)
            check_state(node, step)
        finally:
            self.store(node, step)
        return measured, factors

    def _measure(self, node: Node, transform: Scaling, updates: list[Tensor]) -> Measured:
        """The norms of updates on this process, which may be those of the gradients too."""
        known, count = self.gradient_norms, len(updates)
        if node.path == self.nodes.of_gradients and known is not None and len(known) < count and not self.listens:
            total = known.squeeze(0)  # gates have measured the gradients jointly
            return Measured(L2, list(range(count)), total.expand(count), total, memories(updates), joint=True)
        beside = self.listens and self.norms_before is None
        how = self.nodes.measuring[node.path]
        measured = self.executor.measure_here(
            updates, transform.slicing, how.dims_of, each=how.each, beside=beside, name=node.path
        )
        if self.nodes.keeps_statistics and self.gradient_norms is None:
            self.gradient_norms = how.norms_for_statistics(measured)  # of gradients: see `_measures_gradients`
            self.measure_gradients()
        if beside:  # the same pass gave the listener its norms, unless they are of another metric
            self._note_norms(measured.tensor_norms if measured.metric == L2 else None)
        return measured

    def _picked(self, column: list[T], rows: list[int]) -> list[T]:
        """Some rows, in order, of a list with one entry per parameter, as a new list."""
        return list(column) if len(rows) == len(column) else [column[i] for i in rows]

    def dtypes(self, rows: list[int]) -> list[torch.dtype]:
        """The dtype of each parameter."""
        return [self.params[i].dtype for i in rows]

    def _settings(self, node: Node, rows: list[int], rest: Sequence[Node]) -> list[Setting]:
        """The settings of each parameter: those of a transform and, where it has none of that name, of the rest."""
        own = self.settings[node.path]
        if rest:  # for equal keys the transform wins, then the next one
            together = [*(self.settings[n.path] for n in rest[::-1]), own]
            own = [{k: v for settings in together for k, v in settings[g].items()} for g in range(len(own))]
        if len(own) == 1:  # one object for all: `by_setting` then finds one range without comparing
            return [own[0]] * len(rows)
        return [own[g] for g in self._picked(self.group_of, rows)]

    def step_for(self, node: Node, rows: list[int], rest: Sequence[Node] = ()) -> Step:
        """The `Step` for one transform, with its state before the step. Settings include those of the ``rest``."""
        transform = node.transform
        settings, params = self._settings(node, rows, rest), self._picked(self.params, rows)
        begin = partial(_begin, transform, params, settings)
        known = transform.keeps_statistics and self.gradient_norms is not None
        return Step(
            params,
            self._picked(self.grads, rows),
            self.loss,
            self.executor.states(node, self._picked(self.states, rows), begin),
            settings,
            node.global_state(self.chain_state),
            {},
            self.norms_of(rows) if known else None,
            partial(self._apply_child, node, rows) if node.children else None,
            self.executor,
            self.has_loss,
        )

    def step_of_gate(self, node: Node) -> Step:
        """The `Step` for a gate, which may decide about a process that has no gradients in its scope."""
        rows = self.rows_of(node.path)
        if rows or self.stand_in is None:
            return self.step_for(node, rows)
        self.stand_in.loss, self.stand_in.has_loss = self.loss, self.has_loss  # which the gates have asked for
        return self.stand_in.step_for(node, [0])

    def store(self, node: Node, step: Step) -> None:
        """Store the state and the metrics of a transform."""
        if node.has_state:
            step.store_states()
        if self.numbers is not None:
            self.numbers.add_share(node, step)
        self.chain_state.update(node.qualified(step.global_state))
        self.metrics.update(node.qualified(step.metrics))

    def _may_write_grads(self, rest: Sequence[Node]) -> bool:
        """True if only scalings stand before the next update rule, which does not write to its updates."""
        # torch's clip leaves the clipped gradient in .grad too; a final rule may write to what it gets
        acting = (n.transform for n in rest if n.transform.target == "update")
        following = next((t for t in acting if not isinstance(t, Scaling | Gate)), None)
        return not self.keep_grads and isinstance(following, UpdateRule) and not isinstance(following, FinalRule)


def _is_subtracted(transform: Transform) -> TypeGuard[LR]:
    """True for an `LR` that can be applied in the subtraction. torch.compile combines the two itself."""
    is_lr = isinstance(transform, LR) and type(transform).apply_tensors is LR.apply_tensors
    return is_lr and transform.target == "update" and not torch.compiler.is_compiling()


def _begin(transform: Transform, params: Sequence[Tensor], settings: Sequence[Setting], i: int) -> State:
    """The state of a parameter before its first step; empty if a final rule makes it itself."""
    return {} if isinstance(transform, FinalRule) else storable(transform, transform.init_state(params[i], settings[i]))


def _measures_gradients(transform: Transform) -> bool:
    """True if a transform, as the first of the chain, measures the gradients of all parameters."""
    # with a scope it measures only some gradients, and with another target it measures parameters
    if transform.scope.limited or transform.target not in ("update", "update_difference", "grad"):
        return False
    if isinstance(transform, Chain):
        return _measures_gradients(next(iter(transform.transforms.values())))
    return isinstance(transform, Scaling)
