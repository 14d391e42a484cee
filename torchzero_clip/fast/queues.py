"""Queues of operations that wait, so that several can be carried out in one pass over memory."""

from collections.abc import Sequence
from dataclasses import dataclass

from torchzero_clip.fast.ops import Op


@dataclass(eq=False)
class Queue:
    """Operations on exactly the same rows, in order.

    A scaling or a shift needs the updates before it can be made, so it can only be the first operation.
    """

    rows: list[int]
    ops: list[Op]


class Queues(list[Queue]):
    """All operations that wait. A row is in at most one queue.

    An operation joins a queue on exactly its rows. Queues that share only some of its rows have to be carried out
    first: then no operation ever overtakes another.
    """

    def on(self, rows: list[int]) -> Queue | None:
        """The queue on exactly these rows."""
        return next((queue for queue in self if queue.rows == rows), None)

    def wait(self, rows: list[int], op: Op) -> None:
        """Let an operation wait. No other queue may share its rows."""
        queue = self.on(rows)
        if queue is None:
            self.append(Queue(rows, [op]))
        else:
            queue.ops.append(op)

    def claim(self, rows: Sequence[int]) -> list[Queue]:
        """Remove all queues that share a row with ``rows``, and return them."""
        asked = set(rows)
        found = [queue for queue in self if not asked.isdisjoint(queue.rows)]
        self[:] = [queue for queue in self if asked.isdisjoint(queue.rows)]
        return found
