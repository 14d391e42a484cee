"""The updates of one step: the memory that they are in, and the operations on them that are pending."""

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from torchzero_clip.core.pieces import Stage, run_pieces
from torchzero_clip.core.workspace import Workspace
from torchzero_clip.functional import foreach
from torchzero_clip.functional.measure import Measured, scale_
from torchzero_clip.functional.norms import all_ones, beyond_float32
from torchzero_clip.functional.shards import memory
from torchzero_clip.types import State


@dataclass(eq=False)
class Pending:
    """A postponed operation on the updates of some rows: a scaling, a shift, or an elementwise transform."""

    rows: list[int]
    measured: Measured | None = None
    factors: Tensor | None = None
    over_grads: bool = False
    """A scaling may write over the gradients."""
    shifts: Tensor | None = None
    """The number to subtract from each update."""
    stage: Stage | None = None

    @property
    def factor(self) -> Tensor | None:
        """The factors, one for each update, or a 0-d tensor if there is one for all."""
        if self.factors is None or self.measured is None:
            return None
        one = self.measured.joint and foreach.is_one_number(self.factors)
        return self.factors.select(0, 0) if one else self.factors

    @property
    def fits_kernels(self) -> bool:
        """True if a kernel can apply it. On CUDA factors are clamped instead of checked: reading them would wait."""
        if self.factors is None or self.measured is None:
            return True
        return self.measured.is_plain and not (self.factors.is_cpu and beyond_float32(self.factors))


class Updates:
    """The update of each parameter, which is its gradient until a transform has returned another.

    Args:
        params: The parameters.
        grads: Their gradients.
        states: Their states.
        chain_state: The state of the whole chain.
        maximize: Updates start as the negative gradients.
        workspace: Memory of the optimizer; without it, operations are not postponed.
    """

    def __init__(
        self,
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        states: Sequence[State],
        chain_state: Mapping[str, Any],
        maximize: bool,
        workspace: Workspace | None,
    ) -> None:
        self._params, self._grads, self._states, self._chain_state = params, grads, states, chain_state
        self._maximize = maximize
        self._workspace = workspace
        self._updates: list[Tensor | None] = [None] * len(params)
        self._borrowed = [True] * len(params)
        """True for updates whose memory is that of a gradient, a parameter or state."""
        self._pending: list[Pending] = []
        self.untouched = True
        """True while all updates are the gradients or their negatives, apart from pending operations."""

    def current(self, rows: list[int], *, writable: bool = False, over_grads: bool = False) -> list[Tensor]:
        """The updates of some rows.

        With ``writable`` they share no memory with gradients, parameters or state, except that with ``over_grads`` they
        may be the gradients themselves.
        """
        if self._pending:
            self.catch_up(rows)
        return self.before_pending(rows, writable, over_grads)

    def before_pending(self, rows: list[int], writable: bool = False, over_grads: bool = False) -> list[Tensor]:
        """The updates of some rows, without the pending operations."""
        if self.untouched and not self._maximize and (over_grads or not writable):
            return list(self._grads) if len(rows) == len(self._grads) else [self._grads[i] for i in rows]
        found: list[Tensor] = []
        for i in rows:
            update, borrowed, grad = self._updates[i], self._borrowed[i], self._grads[i]
            if update is None:
                update, borrowed = (-grad, False) if self._maximize else (grad, True)
            found.append(update.clone() if writable and borrowed and not (over_grads and update is grad) else update)
        return found

    def put(self, rows: list[int], updates: Sequence[Tensor]) -> None:
        """Store the updates that a transform returned: new tensors, or gradients, parameters and state themselves."""
        values = [*self._chain_state.values(), *(value for state in self._states for value in state.values())]
        others = {*self._grads, *self._params, *(value for value in values if isinstance(value, Tensor))}
        counts: dict[Tensor, int] = {}
        for update in updates:
            counts[update] = counts.get(update, 0) + 1
        for i, update in zip(rows, updates, strict=True):
            self._updates[i], self._borrowed[i] = update, update in others or counts[update] > 1
        self.untouched = False

    def keep(self, rows: list[int]) -> None:
        """Copy updates that share a tensor with ``.grad``, because a ``target="grad"`` transform will write to it."""
        shared = [i for i in rows if self._updates[i] is self._grads[i]]
        self._put_own(shared, [self._grads[i].clone() for i in shared])

    def _put_own(self, rows: Sequence[int], updates: Sequence[Tensor]) -> None:
        """Store updates in memory of their own."""
        for i, update in zip(rows, updates, strict=True):
            self._updates[i], self._borrowed[i], self.untouched = update, False, False

    @contextmanager
    def inside(self, rows: list[int], updates: Sequence[Tensor]) -> Generator[None]:
        """Use other tensors as the updates of some rows within the block, for a chain inside a composite."""
        outside = self._updates, self._borrowed, self.untouched, self._pending
        self._updates, self._borrowed, self._pending = list(self._updates), list(self._borrowed), []
        self._put_own(rows, updates)
        try:
            yield
        finally:
            self._updates, self._borrowed, self.untouched, self._pending = outside

    def pend(self, pending: Pending) -> None:
        """Postpone an operation until the updates are read."""
        self._pending.append(pending)
        if self._workspace is None:
            self.catch_up(pending.rows)

    def are_safe(self) -> bool:
        """True if updates are finite where gradients are. Always False where reading would wait for the device."""
        if not self.untouched or not self._grads[0].is_cpu:
            return False
        for item in self._pending:
            shrinks = item.factors is not None and bool((item.factors.abs() <= 1).all())
            clips = item.stage is not None and item.stage.transform.stays_finite()
            if not (shrinks or clips):
                return False
        return True

    def catch_up(self, rows: Sequence[int]) -> None:
        """Apply the pending operations on some rows."""
        asked = set(rows)
        pending, self._pending = self._pending, []
        for item in pending:
            if asked.isdisjoint(item.rows):
                self._pending.append(item)
            elif item.stage is not None:
                self._run_alone(item.stage, self._own(item.rows, False))
            elif item.shifts is not None:
                foreach.subtract_each_(self._own(item.rows, False), item.shifts)
            elif item.measured is None or item.factors is None or all_ones(item.factors):
                self._mark(item.rows)
            else:
                updates = self._own(item.rows, item.over_grads)
                targets = [memory(updates[i]) for i in item.measured.indices]
                scale_(replace(item.measured, targets=targets), item.factors)

    def _mark(self, rows: Sequence[int]) -> None:
        """Note that a transform has acted on updates without changing them: they are the gradients still."""
        for i in rows if self._workspace is None and not self._maximize else ():
            if self._updates[i] is None:
                self._updates[i] = self._grads[i]

    def _own(self, rows: list[int], over_grads: bool) -> list[Tensor]:
        """The updates of some rows, without the pending operations, in memory that may be written to."""
        updates = self.before_pending(rows, True, over_grads)
        if not (over_grads and self.untouched and not self._maximize):
            pairs = zip(rows, updates, strict=True)
            own = [(i, update) for i, update in pairs if update is not self._grads[i]]
            self._put_own([i for i, _ in own], [update for _, update in own])
        return updates

    def _run_alone(self, stage: Stage, updates: list[Tensor]) -> None:
        def store(rows: list[int], cut: slice | None, views: list[Tensor]) -> None:
            own = [updates[i] if cut is None else updates[i].view(-1)[cut] for i in rows]
            foreach.copy_plain_(own, views)

        assert self._workspace is not None
        run_pieces([stage], updates, stage.settings, (None, None), self._workspace.scratch, store)
        stage.finish()

    def take(self, rows: list[int]) -> list[Pending]:
        """Remove the pending operations on exactly these rows, and return them for the caller to apply.

        If one cannot be combined with the kernel, or concerns other rows too, all are applied here instead.
        """
        concerned = [item for item in self._pending if item.rows == rows or not set(rows).isdisjoint(item.rows)]
        kinds = [item.stage is not None for item in concerned]
        # a scaling or a shift, then elementwise transforms
        in_order = kinds == sorted(kinds) and kinds.count(False) <= 1
        if not in_order or any(item.rows != rows or not item.fits_kernels for item in concerned):
            self.catch_up(rows)
            return []
        self._pending = [item for item in self._pending if item not in concerned]
        return [item for item in concerned if item.factors is None or not all_ones(item.factors)]
