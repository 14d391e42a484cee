"""The fast way of a step: operations wait until an update rule's kernel or another transform needs the updates.

The results are those of `ReadableExecutor`, up to rounding. `Fast` leaves transforms that cannot wait to the walk.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from operator import attrgetter
from typing import Any, final

from torch import Tensor
from typing_extensions import override

from torchzero_clip.core.elements import Flags
from torchzero_clip.core.elementwise import Elementwise
from torchzero_clip.core.kinds import Fused, Kernel, Shifting, UpdateRule
from torchzero_clip.core.nodes import Node
from torchzero_clip.core.states import States
from torchzero_clip.core.step import Step
from torchzero_clip.engine.executor import Executor, Measurer, Multiply, WalkLike
from torchzero_clip.engine.updates import Updates
from torchzero_clip.fast.kernels import EndedByDelivery, EndedByKernel, run_kernel
from torchzero_clip.fast.ops import Average, Op, Pointwise, Queues, Scale, Shift
from torchzero_clip.fast.pieces import run_pieces
from torchzero_clip.fast.trial import try_out
from torchzero_clip.fast.vectors import VectorStates
from torchzero_clip.fast.workspace import Workspace
from torchzero_clip.functional import foreach
from torchzero_clip.functional.blocks import SHORT, Lerp
from torchzero_clip.functional.measure import Measured, scale_measured_
from torchzero_clip.functional.norms import JointNorm, joint_norm, norms_of_each
from torchzero_clip.functional.scratch import Scratch
from torchzero_clip.functional.shards import is_partial, locals_of
from torchzero_clip.functional.ways import may_look
from torchzero_clip.types import Columns, Runs, Setting, State

NO_KERNEL = "the update rule has no kernel that can refuse a step"

_DTYPE_AND_DEVICE = attrgetter("dtype", "device")


class Averaging(Measurer):
    """Measures with memory for intermediate results.

    It moves long averages piece by piece, on a CPU measuring each piece while it is in the cache.
    """

    _scratch: Scratch
    _are_plain: bool  # the gradients are plain tensors, which `functional.norms` then need not find out

    @override
    def joint_norm(self, grads: list[Tensor], *, beside: bool) -> JointNorm | None:
        return joint_norm(grads, self._scratch, plain=self._are_plain, beside=beside)

    @override
    def norms_of_each(self, grads: list[Tensor]) -> Tensor:
        return norms_of_each(grads, self._scratch, plain=self._are_plain)

    @override
    def average_(
        self,
        averages: list[Tensor],
        updates: list[Tensor],
        runs: Runs,
        usable: Tensor,
        started: Tensor,
        *,
        into: list[Tensor],
        from_update: bool,
    ) -> JointNorm | None:
        each = [setting for setting, span in runs for _ in range(span.start, span.stop)]
        if not averages[0].is_cpu and _fit_pieces(updates, [averages]):
            op = Pointwise(Average(from_update), each, [averages], Flags(usable, started), into=[into])
            run_pieces([op], updates, each, self._scratch, writes=False)
            return None
        may_lerp = max(map(Tensor.numel, averages)) > SHORT and may_look(usable)
        all_lerp = may_lerp and bool((usable.logical_and(started) if from_update else usable).all())
        if all_lerp and foreach.fit_kernels([averages, updates]):
            lerp = Lerp(averages, updates, [1 - setting["beta"] for setting in each])
            return joint_norm(into, self._scratch, plain=True, beside=True, lerp=lerp)
        return super().average_(averages, updates, runs, usable, started, into=into, from_update=from_update)


@final
class Fast(Averaging, Executor):
    """Lets operations wait, and carries out several in one pass over memory."""

    def __init__(self, workspace: Workspace, updates: Updates, columns: dict[str, list[Tensor]] | None) -> None:
        self.updates = updates
        self._columns = columns  # parameters, gradients and state by key, if they have the layout of the workspace
        self._layout = None if columns is None else workspace.layout
        self._are_plain = self._layout is not None
        self._vectors = workspace.vectors
        self._scratch = workspace.scratch
        self._tried = workspace.tried
        if columns is not None:
            self._scratch = workspace.scratch.knowing(columns["grads"], self._layout)
        self._queues = Queues()
        self._last_read: list[Tensor] = []  # the list that `read` has returned last, which `scratch_for` recognizes
        self.ended: EndedByKernel | EndedByDelivery | None = None
        """How the step ended, if a kernel has taken it for all parameters, or all updates were delivered; else None."""

    @property
    def _has_layout(self) -> bool:
        """True if updates have the layout of the parameters: until a transform returns other tensors."""
        return self._layout is not None and self.updates.untouched

    def _are_like(self, node: Node, keys: Iterable[str]) -> bool:
        """True if the state of a transform under these keys has the layout of the parameters."""
        if self._layout is None or self._columns is None:
            return False
        names = [f"{node.path}/{key}" for key in keys]
        return self._layout.has(names) and all(name in self._columns for name in names)

    @override
    def states(self, node: Node, stored: list[State], begin: Callable[[int], State]) -> States:
        columns = self._columns if self._columns is not None and len(stored) == len(self._columns["params"]) else None
        return VectorStates(stored, node.path, node.state, begin, self._vectors, columns)

    @override
    def host_reasons(self) -> list[str]:
        if self._layout is None:
            return ["the tensors of the step are not laid out alike"]
        return ["the parameters are on the CPU"] if self._layout.is_on_cpu else []

    @override
    def read(self, rows: list[int], *, writable: bool = False) -> list[Tensor]:
        if self._queues:
            self.flush(rows)
        self._last_read = self.updates.current(rows, writable=writable)
        return self._last_read

    @override
    def scratch_for(self, tensors: Sequence[Tensor]) -> Scratch | None:
        """Scratch memory if local parts are plain, and none is a pending sum; else None."""
        if tensors is not self._last_read:
            is_plain = foreach.are_plain(tensors)
        else:
            is_plain = self._has_layout or (
                foreach.are_plain(locals_of(tensors), min_size=0) and not any(map(is_partial, tensors))
            )
        return self._scratch if is_plain else None

    @override
    def flush(self, rows: Sequence[int]) -> None:
        for queue in self._queues.claim(rows):
            for op in queue.ops:
                self._carry_out(op, queue.rows)

    @override
    def abandon(self) -> None:
        # a statistic is marked as started when its operation begins to wait, and moves when it is carried out
        for queue in list(self._queues):
            if any(isinstance(op, Pointwise) for op in queue.ops):
                self.flush(queue.rows)

    def _carry_out(self, op: Op, rows: list[int]) -> None:
        if isinstance(op, Scale):
            if not op.does_nothing:
                waiting = op.measured.with_targets(self.updates.writable(rows, op.over_grads))
                scale_measured_(waiting, op.factors, self._scratch, extremes=op.extent, owner=rows[0])
            return
        updates = self.updates.writable(rows, False)
        if isinstance(op, Shift):
            foreach.subtract_plain_(updates, self._scratch.elements(op.numbers.to(updates[0].dtype)))
            return
        run_pieces([op], updates, op.settings, self._scratch)

    @override
    def scale(self, rows: list[int], measured: Measured, factors: Tensor, over_grads: bool) -> None:
        self._queues.wait(rows, Scale(measured, factors, over_grads))

    @override
    def deliver(self, rows: list[int], multiply: Multiply) -> None:
        queue, columns = self._queues.on(rows), self._columns
        # other tensors, which a transform has returned, have to be written into the gradients
        alone = queue.ops[0] if queue is not None and len(queue.ops) == 1 and self.updates.untouched else None
        if self._layout is not None and columns is not None and len(rows) == len(columns["params"]):
            self.ended = EndedByDelivery(self._layout, columns, multiply)
            if queue is not None and isinstance(alone, Scale) and alone.is_one_number and alone.fits_kernels:
                self._queues.remove(queue)
                if not alone.does_nothing:
                    multiply(self.updates.current(rows), alone.factor)
                return
        self.flush(rows)
        self.updates.write_back(rows)

    @override
    def defer(self, walk: WalkLike, node: Node, rows: list[int]) -> bool:
        """Let a shift or an elementwise transform wait, where updates have the layout."""
        transform = node.transform
        if isinstance(transform, Elementwise):
            self._try_out(transform, walk.settings[node.path], walk.table.params, rows)
        if self._layout is None or not self._layout.runs_in_pieces or not self.updates.untouched:
            return False
        if isinstance(transform, Shifting):
            return self._shift(transform, rows)
        return isinstance(transform, Elementwise) and self._pointwise(walk, node, transform, rows)

    def _shift(self, transform: Shifting, rows: list[int]) -> bool:
        updates = self.read(rows)
        numbers = transform.shifts(updates, self._scratch) if self.updates.untouched else None
        if numbers is not None:
            self._queues.wait(rows, Shift(numbers))
        return numbers is not None

    def _try_out(
        self, transform: Elementwise, settings: Sequence[Setting], params: Sequence[Tensor], rows: Sequence[int]
    ) -> None:
        """Try a transform out in its first step with a dtype, once for each set of settings that are None."""
        dtypes = {params[rows[0]].dtype} if self._layout is not None else {params[i].dtype for i in rows}
        for dtype in dtypes:
            # an id is enough, because the chain keeps its transforms alive
            key = id(transform), foreach.wide_dtype(dtype.to_real())
            if key not in self._tried:
                acting = [s for s in settings if transform.acts_with(s)]
                for setting in {tuple(v is None for v in s.values()): s for s in acting}.values():
                    try_out(transform, setting, key[1])
                if acting:
                    self._tried.add(key)

    def _pointwise(self, walk: WalkLike, node: Node, transform: Elementwise, rows: list[int]) -> bool:
        if node.children or not transform.is_elementwise:
            return False
        step = walk.step_for(node, rows)
        if transform.rows_of(step) is not None or not transform.may_wait(step):
            return False
        queue = self._queues.on(rows)
        if transform.reads_tensors or queue is None:
            self.flush(rows)
            queue = None
            if not self.updates.untouched:
                return False
        columns = map(step.stored.column, transform.keys)
        if not self._are_like(node, transform.keys) and not _fit_pieces(step.params, list(columns)):
            return False
        drafts = [step.stored.draft(key) for key in transform.keys]
        state, into = [now for now, _ in drafts], [after for _, after in drafts]
        updates = self._last_read = self.updates.current(rows)
        flags = transform.flags(updates, step, None)
        flags = flags if transform.has_change else flags.of_formula()
        # False on other devices, where reading factors would wait
        finite = updates[0].is_cpu and (queue is None or all(op.keeps_finite for op in queue.ops))
        done = partial(_finished, walk, node, step)
        self._queues.wait(rows, Pointwise(transform, step.settings, state, flags, finite, into=into, done=done))
        return True

    @override
    def finish(self, walk: WalkLike, node: Node, rows: list[int], rest: Sequence[Node]) -> set[int]:
        rule = node.transform
        if not isinstance(rule, UpdateRule) or not rule.has_kernel:
            return set()
        done: set[int] = set()
        for later, part in self._grouped(walk, node, rule, rows, rest):
            if self._take_step(walk, node, rule, part, later):
                done.update(part)
        return done

    def _grouped(
        self, walk: WalkLike, node: Node, rule: UpdateRule, rows: list[int], rest: Sequence[Node]
    ) -> list[tuple[list[Node], list[int]]]:
        """Rows that the rest of the chain treats alike, with the transforms that act on them."""
        variants = list(map(rule.variant, walk.settings[node.path]))
        table = walk.table
        acting = [table.in_scope(n, rows) for n in rest]
        # kernels take tensors of one dtype on one device
        kinds = {} if self._layout is not None else {i: _DTYPE_AND_DEVICE(table.params[i]) for i in rows}
        if len(set(kinds.values())) <= 1 and len(set(variants)) == 1 and all(in_scope is rows for in_scope in acting):
            return [(list(rest), rows)]
        chosen = list(map(set, acting))
        grouped: dict[Any, list[int]] = {}
        for i in rows:
            later = tuple(k for k, in_scope in enumerate(chosen) if i in in_scope)
            grouped.setdefault((later, kinds.get(i), variants[table.group_of[i]]), []).append(i)
        return [([rest[k] for k in later], part) for (later, *_), part in grouped.items()]

    def _take_step(self, walk: WalkLike, node: Node, rule: UpdateRule, rows: list[int], rest: Sequence[Node]) -> bool:
        """Take the step of some rows by a call of torch. Return False if there is none."""
        step = walk.step_for(node, rows, rest)
        try:
            fused = rule.kernel([n.transform for n in rest], step)
            if fused is None:
                return False
            kernel = fused.kernel if fused.kernel is not None and self._fits(node, fused, rows, step) else None
            if walk.undecided is not None and (kernel is None or not fused.takes_found_inf):
                walk.ask(NO_KERNEL)
            undecided = walk.undecided
            if kernel is not None:
                if self._layout is not None and self._columns is not None and len(rows) == len(self._columns["params"]):
                    self.ended = EndedByKernel(node, list(rest), fused, kernel, self._layout, self._columns)
                kernel = kernel if undecided is None else undecided.refusable(kernel)
            each = self._by_tensor(fused, rows, step) if kernel is None else None
            if kernel is None and each is None:
                return False
            one = 1 if undecided is None else undecided.taken.float()
            for key in fused.counters:  # kernels read the counts
                step.add(key, one)
            try:
                if kernel is not None:
                    state = [step.stored.column(key) for key in (*fused.state, *fused.counters)]
                    self.run(kernel, rows, step.params, state, step.settings, step.by_setting())
                elif each is not None:
                    each()
            except BaseException:
                for key in fused.counters:
                    step.add(key, -one)
                raise
            return True
        finally:
            walk.store(node, step)

    def _fits(self, node: Node, fused: Fused, rows: list[int], step: Step) -> bool:
        """True if parameters, updates and state are laid out as a kernel needs them."""
        if self._has_layout and self._are_like(node, fused.state):
            return True
        columns = [step.params, self.updates.current(rows), *map(step.column, fused.state)]
        return foreach.fit_kernels([locals_of(column) for column in columns])

    def run(
        self, kernel: Kernel, rows: list[int], params: list[Tensor], state: Columns, settings: list[Setting], runs: Runs
    ) -> None:
        """Carry out what waits and the rest of the chain in one pass over memory."""
        ops = self._claimed(rows)
        # if no operation waits, this is True, and the kernel runs on whole tensors
        over_grads = all(isinstance(op, Scale) and op.over_grads for op in ops)
        if self._layout is not None and self._layout.runs_in_pieces and not over_grads:
            run_pieces(ops, self.updates.current(rows), settings, self._scratch, kernel, [params, *state])
            return
        factors = next((op.factor for op in ops if isinstance(op, Scale)), None)
        updates = self.updates.current(rows, writable=factors is not None, over_grads=over_grads)
        columns = [params, updates, *state]
        columns = columns if self._layout is not None else list(map(locals_of, columns))
        run_kernel(kernel, columns, runs, factors, self._scratch, rows[0])

    def _claimed(self, rows: list[int]) -> list[Op]:
        """Return the operations on these rows if a kernel can take them. Otherwise carry them out, and return none."""
        queue = self._queues.on(rows)
        if queue is None or any(isinstance(op, Scale) and not op.fits_kernels for op in queue.ops):
            self.flush(rows)
            return []
        self._queues.remove(queue)
        return [op for op in queue.ops if not (isinstance(op, Scale) and op.does_nothing)]

    def _by_tensor(self, fused: Fused, rows: list[int], step: Step) -> Callable[[], None] | None:
        """A function that passes each tensor to the kernel or to the loop. None if some tensor fits neither."""
        updates = self.read(rows)
        state = list(map(step.column, fused.state))
        calls = [_call_for(fused, row) for row in zip(step.params, updates, *state, strict=True)]
        return None if None in calls else partial(self._run_each, fused, calls, [step.params, updates, *state], step)

    def _run_each(self, fused: Fused, calls: Sequence[Kernel | None], columns: list[list[Tensor]], step: Step) -> None:
        columns = [*map(locals_of, columns), *map(step.column, fused.counters)]
        for setting, span in step.by_setting():
            for call in (fused.kernel, fused.loop):
                chosen = [i for i in range(span.start, span.stop) if calls[i] is call]
                if call is not None and chosen:
                    params, updates, *state = [[column[i] for i in chosen] for column in columns]
                    call(params, updates, state, setting, None)


def _call_for(fused: Fused, tensors: Sequence[Tensor]) -> Kernel | None:
    """The call that takes these tensors of one parameter."""
    first = tensors[0]
    if any(tensor.dtype != first.dtype for tensor in tensors):
        return None
    if fused.kernel is not None and foreach.laid_out_alike(*tensors):
        return fused.kernel
    return fused.loop if first.is_cpu else None  # on other devices torch's loop would wait for the step counts


def _fit_pieces(tensors: Sequence[Tensor], state: Sequence[Sequence[Tensor]]) -> bool:
    """True for contiguous plain tensors with contiguous plain state of their shapes, and of `wide_dtype`."""
    shapes, wide = [tensor.shape for tensor in tensors], foreach.wide_dtype(tensors[0].dtype)
    if any([tensor.shape for tensor in column] != shapes or column[0].dtype != wide for column in state):
        return False
    return all(foreach.kind(column) is not None and foreach.all_contiguous(column) for column in (tensors, *state))


def _finished(walk: WalkLike, node: Node, step: Step, changed: Tensor) -> None:
    """Report the share of elements that an elementwise transform changed, and store its state."""
    step.show_share("clipped", changed, sum(param.numel() for param in step.params))
    walk.store(node, step)
