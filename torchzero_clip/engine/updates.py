"""The updates of one step, and the memory that they are in."""

from collections.abc import Generator, Sequence
from contextlib import contextmanager

from torch import Tensor

from torchzero_clip.engine.table import Table
from torchzero_clip.functional import foreach
from torchzero_clip.types import State


class Updates:
    """The update of each parameter: its gradient (negated to maximize) until a transform has returned another."""

    def __init__(self, table: Table, chain_state: State, *, maximize: bool, over_grads: bool = False) -> None:
        self._table, self._grads = table, table.grads
        self._chain_state, self._maximize = chain_state, maximize
        self._over_grads = over_grads  # updates are always written over the gradients
        self._updates: list[Tensor | None] = [None] * len(table.params)
        self._borrowed = [True] * len(table.params)
        """True for updates whose memory is that of a gradient, a parameter or state."""
        self.untouched = True  # True while all updates are the gradients or their negatives

    def current(self, rows: list[int], *, writable: bool = False, over_grads: bool = False) -> list[Tensor]:
        """The updates of some rows; if ``writable``, they share no memory with gradients, parameters or state."""
        # with over_grads they may be the gradients themselves
        over_grads = over_grads or self._over_grads
        # the usual case first: a list of gradients needs no look at each row
        if self.untouched and not self._maximize and (over_grads or not writable):
            return list(self._grads) if len(rows) == len(self._grads) else [self._grads[i] for i in rows]
        updates: list[Tensor] = []
        for i in rows:
            update, borrowed, grad = self._updates[i], self._borrowed[i], self._grads[i]
            if update is None:  # no transform has acted: with maximize the sign turns here, and only once
                update, borrowed = (-grad, False) if self._maximize else (grad, True)
            # a copy, because another transform may still need what the memory belongs to
            updates.append(update.clone() if writable and borrowed and not (over_grads and update is grad) else update)
        return updates

    def writable(self, rows: list[int], over_grads: bool) -> list[Tensor]:
        """Return the updates of some rows, copied where they may not be written to, and store the copies."""
        over_grads = over_grads or self._over_grads
        updates = self.current(rows, writable=True, over_grads=over_grads)
        if not (over_grads and self.untouched and not self._maximize):
            pairs = zip(rows, updates, strict=True)
            copies = [(i, update) for i, update in pairs if update is not self._grads[i]]
            self._put_writable([i for i, _ in copies], [update for _, update in copies])
        return updates

    def put(self, rows: list[int], updates: Sequence[Tensor]) -> None:
        """Store the updates that a transform returned: new tensors, or gradients, parameters and state themselves."""
        # a rule may return its input or its own state (momentum without Nesterov): writing to that would change them.
        # One tensor for two parameters is shared too. Tensors hash by identity, so this reads no value
        values = [*self._chain_state.values(), *(value for state in self._table.states for value in state.values())]
        others = {*self._grads, *self._table.params, *(value for value in values if isinstance(value, Tensor))}
        counts: dict[Tensor, int] = {}
        for update in updates:
            counts[update] = counts.get(update, 0) + 1
        for i, update in zip(rows, updates, strict=True):
            self._updates[i], self._borrowed[i] = update, update in others or counts[update] > 1
        self.untouched = False

    def keep(self, rows: list[int]) -> None:
        """Copy updates that share a tensor with ``.grad``, because a ``target="grad"`` transform will write to it."""
        # an update of None is read from .grad later, so it gets what a `target="grad"` transform writes
        shared = [i for i in rows if self._updates[i] is self._grads[i]]
        self._put_writable(shared, [self._grads[i].clone() for i in shared])

    def write_back(self, rows: list[int]) -> None:
        """Write the updates of some rows into their gradients. An update that is the gradient itself is left out."""
        grads, pairs = set(self._grads), zip([self._grads[i] for i in rows], self.current(rows), strict=True)
        # an author's transform may return the gradient of another parameter, which is written over too
        changed = [(grad, new.clone() if new in grads else new) for grad, new in pairs if new is not grad]
        foreach.copy_([grad for grad, _ in changed], [new for _, new in changed])

    def _put_writable(self, rows: Sequence[int], updates: Sequence[Tensor]) -> None:
        for i, update in zip(rows, updates, strict=True):
            self._updates[i], self._borrowed[i], self.untouched = update, False, False

    def mark(self, rows: Sequence[int]) -> None:
        """Note for `keep` that a transform has acted on updates, although it has left them equal to the gradients."""
        for i in rows if not self._maximize else ():
            if self._updates[i] is None:
                self._updates[i] = self._grads[i]

    @contextmanager
    def inside(self, rows: list[int], updates: Sequence[Tensor]) -> Generator[None]:
        """Use other tensors as the updates of some rows within the block, for a chain inside a composite."""
        outside = self._updates, self._borrowed, self.untouched
        self._updates, self._borrowed = list(self._updates), list(self._borrowed)
        self._put_writable(rows, updates)
        try:
            yield
        finally:
            self._updates, self._borrowed, self.untouched = outside
