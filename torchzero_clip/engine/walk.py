"""One step through a chain, from the gradients to what comes out of the last transform."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from torchzero_clip.compat import is_capturing
from torchzero_clip.core.chain import Chain
from torchzero_clip.core.kinds import FinalRule, Gate, Scaling, UpdateRule
from torchzero_clip.core.nodes import Node, Nodes
from torchzero_clip.core.step import Step
from torchzero_clip.core.transform import Transform, storable
from torchzero_clip.core.undo import Undo
from torchzero_clip.engine.checked import applied
from torchzero_clip.engine.company import Company
from torchzero_clip.engine.device_decisions import DeviceDecisions
from torchzero_clip.engine.end import End
from torchzero_clip.engine.executor import Executor
from torchzero_clip.engine.gradient_norms import GradientNorms
from torchzero_clip.engine.reported_loss import Loss
from torchzero_clip.engine.scaling import find_factors, store_state, unless_refused
from torchzero_clip.engine.table import Table
from torchzero_clip.functional import foreach
from torchzero_clip.functional.measure import Effect, Measured, effect, scale_measured_
from torchzero_clip.types import Setting, State


class RefusedByDevice(BaseException):
    """The device has refused the step, as the host finds in the middle of it.

    It is no `Exception`, so a transform that catches errors of its children does not catch it.
    """


@dataclass(eq=False)
class Walk:
    """One step through a chain."""

    nodes: Nodes
    settings: Mapping[str, list[Setting]]  # of each transform by path, one dict per group
    table: Table  # the parameters that take part; each is a row
    chain_state: State  # by qualified keys
    executor: Executor  # reads and changes the updates
    gradient_norms: GradientNorms  # the gradients before the first transform
    end: End  # what becomes of the updates that come out of the outermost chain
    loss: Loss
    undo: Undo | None = None  # what notes state before it changes, if another optimizer takes the step
    company: Company | None = None  # who else takes part in the step
    metrics: dict[str, Tensor] = field(default_factory=dict)
    refused_by: list[str] = field(default_factory=list)
    """The gates that refused the step; "nonfinite" if a gradient was not finite; "error" if the step raised."""
    decisions: DeviceDecisions | None = None
    """Set if the device decides whether the step is taken."""
    undecided: DeviceDecisions | None = None
    """The same while the host does not know the decision."""
    asked: str = ""
    """Why the host has asked for the decision."""
    effect: Effect | None = None
    """What the scaling of a planned step has done, if its metrics are computed later."""
    are_zero: bool = False
    """True if all gradients are 0. It stays False if reading a norm would wait, or no norm was measured."""

    def ask(self, reason: str) -> None:
        """Read whether the device takes the step, before the host does what must not be done in a refused step.

        Raise `RefusedByDevice` if it is refused. Do nothing if the host knows the decision. Callers for which this is
        usual check ``undecided`` themselves, to save the time of the call.
        """
        undecided, self.undecided = self.undecided, None
        if undecided is None:
            return
        self.asked = reason
        if is_capturing():
            raise RuntimeError(
                f"this step cannot be captured in a CUDA graph, because the host has to decide: {reason}"
            )
        if not undecided.taken.item():
            raise RefusedByDevice

    def change_closure_gradients(self, chain: Chain) -> None:
        """Apply the transforms with ``target="closure"`` to the gradients that the closure left."""
        table = self.table
        for path, transform in chain.transforms.items():
            if transform.target == "closure":
                self.ask(f"{transform!r} changes gradients")
                self.gradient_norms.before_closure()
                node = self.nodes.by_path[path]
                rows = table.in_scope(node, table.rows)
                # other processes wait in the exchange of a joint transform, so without a tensor here a stand-in acts
                rows = rows if self.company is None else self.company.acting(self, node, rows)
                if rows:
                    _, grads, *_ = table.picked(rows)
                    foreach.copy_(grads, self.apply(node, rows, foreach.clone(grads)))
                # norms that were taken before describe other gradients now
                self.gradient_norms.forget()

    def run(self, chain: Chain, prefix: str, rows: list[int], end: End | None = None) -> None:
        """Send the updates of some rows down a chain, to its ``end`` if it is the outermost one."""
        nodes = [self.nodes.by_path[prefix + name] for name in chain.transforms]
        company = self.company
        for i, node in enumerate(nodes):
            transform, rest = node.transform, nodes[i + 1 :]
            acting = self.table.in_scope(node, rows)
            if self.gradient_norms.listens:
                self.gradient_norms.before_first(transform)
            # transforms with target="closure" have exchanged their numbers in `change_closure_gradients`
            if company is not None and transform.target != "closure":
                acting = company.acting(self, node, acting)
            if end is not None and acting:
                done = end.finish(self, node, acting, rest)
                if done:  # no later transform may see these rows
                    rows, acting = ([i for i in these if i not in done] for these in (rows, acting))
                    # with company the walk goes on without rows, because others wait for this process in the exchanges
                    if not rows and company is None:
                        return
            # gates have decided before the walk: see `StepPolicy.decide`
            if acting and not isinstance(transform, Gate):
                self._change(node, acting, end, rest)
        if end is not None and rows:
            end.deliver(self, rows)

    def _change(self, node: Node, rows: list[int], end: End | None, rest: Sequence[Node]) -> None:
        """Apply a transform to what its target names."""
        transform = node.transform
        if self.undecided is not None:
            self._ask_before(node, end)
        if self.gradient_norms.norm_needs.has_statistics:
            self.gradient_norms.before_change(transform)
        # a transform with target="grad" writes to .grad, which a rule may have returned as its update
        if "grad" in self.nodes.targets:
            self.executor.updates.keep(rows)
        if transform.target != "update":
            # what waits on these updates comes first, because the target may be memory that it reads, such as .grad
            self.executor.flush(rows)
            self._change_target(node, rows)
        elif isinstance(transform, Scaling):
            measured, factors = self._measured(node, rows, self.executor.read(rows))
            # before a rule, clipped gradients may stay in .grad, as after torch's clip; a copy would cost a pass
            self.executor.scale(rows, measured, factors, end is not None and end.may_write_grads(rest))
        elif not self.executor.defer(self, node, rows):
            # a rule only reads, so it may get the gradients themselves: a copy would cost a pass over memory
            updates = self.executor.read(rows, writable=not isinstance(transform, UpdateRule))
            self.executor.updates.put(rows, self.apply(node, rows, updates))

    def _ask_before(self, node: Node, end: End | None) -> None:
        """Ask for the decision, if a transform does more in a refused step than to change updates."""
        transform = node.transform
        if transform.target != "update" or node.children or not node.keeps_refused(self.settings[node.path]):
            self.ask(may_change_state(node))
        elif not isinstance(transform, Scaling) and (end is None or end.into_grads):
            self.ask(f"{transform!r} writes to gradients")

    def _change_target(self, node: Node, rows: list[int]) -> None:
        """Apply a transform with another target than "update". Those of "closure" have acted already."""
        params, grads, *_ = self.table.picked(rows)
        put, apply = self.executor.updates.put, partial(self.apply, node, rows)
        match node.transform.target:
            case "grad":
                foreach.copy_(grads, apply(foreach.clone(grads)))
            case "params_direct":
                foreach.copy_(params, apply(foreach.clone(params)))
            case "params_difference":
                put(rows, foreach.subtract(params, apply(foreach.clone(params))))
            case "update_difference":
                updates = self.executor.read(rows)
                removed = foreach.clone(updates)  # before a child with target="grad" changes the gradient
                foreach.subtract_(removed, apply(foreach.clone(updates)))
                put(rows, removed)
            case "closure" | "update":
                pass

    def apply(self, node: Node, rows: list[int], updates: list[Tensor]) -> list[Tensor]:
        """Return the result of one transform for tensors. It may write to them, unless it is an update rule."""
        transform = node.transform
        if isinstance(transform, Chain):
            with self.executor.updates.inside(rows, updates):
                self.run(transform, f"{node.path}/", rows)
                return self.executor.read(rows, writable=True)
        if isinstance(transform, Scaling):
            scale_measured_(*self._measured(node, rows, updates))
            return updates
        step = self.step_for(node, rows)
        try:
            return applied(node, updates, step)
        finally:
            self.store(node, step)  # also after an error: states that were changed have to match the others

    def _apply_child(self, node: Node, rows: list[int], name: str, updates: list[Tensor]) -> list[Tensor]:
        child = self.nodes.by_path[f"{node.path}/{name}"]
        acting = self.table.in_scope(child, rows)
        acting = acting if self.company is None else self.company.acting(self, child, acting)
        # rows outside of the scope of the child keep their updates
        result = dict(zip(rows, updates, strict=True))
        if acting:
            result.update(zip(acting, self.apply(child, acting, [result[i] for i in acting]), strict=True))
        return [result[i] for i in rows]

    def _measured(self, node: Node, rows: list[int], updates: list[Tensor]) -> tuple[Measured, Tensor]:
        step, company = self.step_for(node, rows), self.company
        measured, factors = find_factors(node, rows, updates, step, self.gradient_norms, company, self.chain_state)
        if self.undecided is not None:
            factors = unless_refused(factors, self.undecided.taken)
        # with company the metrics are those of all processes, and are computed when the step has ended
        if company is None:
            step.metrics.update(effect(measured, factors))
        else:
            company.report(node, measured, factors)
        self.metrics.update(node.qualified(step.metrics))
        return measured, factors

    def step_for(self, node: Node, rows: list[int], rest: Sequence[Node] = ()) -> Step:
        """The `Step` for one transform, with its state before the step. Settings include those of the ``rest``."""
        transform, table, gradient_norms = node.transform, self.table, self.gradient_norms
        of_groups = settings_of(node, rest, self.settings)
        params, grads, states, group_of = table.picked(rows)
        # one object for all parameters of a group: `by_setting` then finds a range without comparing
        settings = of_groups * len(rows) if len(of_groups) == 1 else [of_groups[g] for g in group_of]
        # only statistics ask which gradients are usable. A scaling measures them if they are not known yet
        reads_norms = transform.keeps_statistics and gradient_norms.norms is not None
        step = Step(
            params,
            grads,
            self.loss.value,
            self.executor.states(node, states, partial(_begin, transform, params, settings)),
            settings,
            node.global_state(self.chain_state) if node.global_keys else {},
            gradient_norms=gradient_norms.of_rows(rows) if reads_norms else None,
            apply_child=partial(self._apply_child, node, rows) if node.children else None,
            tools=self.executor,
            has_loss=self.loss.exists,
        )
        step.stored.undo = self.undo
        # authors' methods are checked in the first step of a parameter only, because each check takes time
        # what a first step compares, such as versions of tensors, torch.compile cannot trace
        step.is_first = bool(table.new_states) and not torch.compiler.is_compiling()
        if self.company is not None and self.company.absence is not None:  # this is the walk of a stand-in
            self.company.absence.begin(step)
        return step

    def store(self, node: Node, step: Step) -> None:
        """Store the state and the metrics of a transform."""
        store_state(node, step, self.chain_state, self.company)
        if step.metrics:
            self.metrics.update(node.qualified(step.metrics))


def settings_of(node: Node, rest: Sequence[Node], settings: Mapping[str, list[Setting]]) -> list[Setting]:
    """The settings of each group: those of a transform and, where it has none of that name, of the rest."""
    if not rest:
        return settings[node.path]
    # a kernel does the rest of the chain in one call, so it needs the settings of LR too
    by_transform = [settings[n.path] for n in (*rest[::-1], node)]  # later ones replace earlier ones of the same name
    return [{key: value for s in of_group for key, value in s.items()} for of_group in zip(*by_transform, strict=True)]


def may_change_state(node: Node) -> str:
    """The reason why the host has to know whether a step is taken before this transform acts."""
    return f"{node.transform!r} may change its state in a refused step"


def _begin(transform: Transform, params: Sequence[Tensor], settings: Sequence[Setting], i: int) -> State:
    """The state of a parameter before its first step; empty if a final rule makes it itself."""
    return {} if isinstance(transform, FinalRule) else storable(transform, transform.init_state(params[i], settings[i]))
