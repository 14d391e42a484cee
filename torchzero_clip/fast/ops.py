"""Operations that wait (scalings, shifts, elementwise transforms), and their queues: several run in one pass."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor
from typing_extensions import override

from torchzero_clip.core.elements import Elements, Flags
from torchzero_clip.core.elementwise import Elementwise
from torchzero_clip.functional import foreach
from torchzero_clip.functional.measure import L2, Measured
from torchzero_clip.functional.scratch import Scratch
from torchzero_clip.functional.shards import pack
from torchzero_clip.functional.ways import beyond_float32, extent, may_look
from torchzero_clip.types import Setting


@dataclass(eq=False)
class Scale:
    """Multiplies each slice of the updates by its factor."""

    measured: Measured
    factors: Tensor
    over_grads: bool  # it may write over the gradients
    _extent: tuple[float, float] | None = field(default=None, init=False)

    @classmethod
    def by_number(cls, factor: float) -> "Scale":
        """Multiplies all updates by one number, in new memory."""
        number = torch.full((1,), factor, dtype=torch.float64, device="cpu")
        return cls(Measured(L2, [0], number, number, [], joint=True), number, over_grads=False)

    @property
    def is_one_number(self) -> bool:
        """True if there is one factor for all updates."""
        return self.measured.joint and foreach.is_one_number(self.factors)

    @property
    def factor(self) -> Tensor:
        """The factors, one for each update, or a 0-d tensor if there is one for all."""
        return self.factors.select(0, 0) if self.is_one_number else self.factors

    @property
    def extent(self) -> tuple[float, float] | None:
        """The smallest and the largest factor; None where reading them would wait."""
        if self._extent is None and self.factors.is_cpu and may_look(self.factors):
            self._extent = extent(self.factors)
        return self._extent

    @property
    def fits_kernels(self) -> bool:
        """True if a kernel can apply it. On CUDA factors are clamped instead of checked: reading them would wait."""
        return self.measured.is_whole and not (self.factors.is_cpu and beyond_float32(self.factors, self.extent))

    @property
    def keeps_finite(self) -> bool:
        """True if all factors are between -1 and 1. This reads their values, so call it on CPU only."""
        return bool((self.factors.abs() <= 1).all())

    @property
    def does_nothing(self) -> bool:
        """True if all factors are known to be 1."""
        return self.extent == (1.0, 1.0)


@dataclass(eq=False)
class Shift:
    """Subtracts its number from each update."""

    numbers: Tensor
    keeps_finite = False


@dataclass(eq=False)
class Pointwise:
    """Sends updates through an elementwise transform. The updates and the state have the layout of the parameters."""

    transform: Elementwise
    settings: Sequence[Setting]
    state: list[list[Tensor]]
    flags: Flags
    follows_finite: bool = False  # its updates are known to be finite where gradients are
    counts: list[Tensor] = field(default_factory=list)  # how many elements of each piece changed
    into: list[list[Tensor]] = field(default_factory=list)  # where the next state goes; ``state`` keeps its values
    done: Callable[[Tensor], None] | None = None  # called at the end with the number of elements that changed
    scratch: Scratch | None = field(default=None, init=False)
    unmasked: list[bool] = field(default_factory=list, init=False)
    """For each parameter, True if all its elements are known to take part. Flags on CUDA are not read."""

    @property
    def keeps_finite(self) -> bool:
        """True if finite updates stay finite."""
        return self.transform.keeps_finite

    def begin(self, scratch: Scratch) -> None:
        """Find out which parameters take part. Called before `elements`."""
        self.scratch = scratch
        flags = [flag for flag in (self.flags.usable, self.flags.started) if flag is not None]
        if flags and flags[0].is_cpu:
            self.unmasked = torch.stack(flags).all(0).tolist()
        else:
            self.unmasked = [not flags] * len(self.settings)

    def elements(self) -> Elements:
        """The elements of tensors that are known to take part."""
        # ``follows_finite`` holds if gradients were judged: for statistics, or where there is no state to protect
        is_judged = self.transform.keeps_statistics or not self.transform.keys
        return Elements(finite=self.follows_finite and is_judged, scratch=self.scratch)

    def run(self, x: Tensor, result: Tensor, state: Sequence[Tensor], row: int, at: Elements) -> None:
        """Change elements, and note how many changed."""
        self.counts.append(self.transform.counted(x, result, state, self.settings[row], at, by_formula=False))

    def finish(self) -> None:
        """Report how many elements changed."""
        if self.done is not None:
            self.done(pack(self.counts).sum())


Op: TypeAlias = Scale | Shift | Pointwise


class Average(Elementwise):
    """Moves an average towards updates, and leaves the updates unchanged."""

    keeps_statistics = True

    def __init__(self, from_update: bool) -> None:
        super().__init__({})
        self.from_update = from_update

    @override
    def change(self, x: Tensor, result: Tensor, state: Sequence[Tensor], setting: Setting, at: Elements) -> Tensor:
        (average,) = state
        if self.from_update:
            at.begin_(average, x)
        at.lerp_(average, x, 1 - setting["beta"])
        return average.view(-1).narrow(0, 0, 1)  # a placeholder: averages have no share of changed elements


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
        claimed = [queue for queue in self if not asked.isdisjoint(queue.rows)]
        self[:] = [queue for queue in self if asked.isdisjoint(queue.rows)]
        return claimed
