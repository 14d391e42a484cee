"""The readable way of a step: each transform is applied in its turn, by the method that its author wrote."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final

from torch import Tensor
from typing_extensions import override

from torchzero_clip.compat import any_distributed
from torchzero_clip.core.nodes import Node
from torchzero_clip.core.states import States
from torchzero_clip.engine.executor import Executor, Multiply, WalkLike
from torchzero_clip.engine.updates import Updates
from torchzero_clip.functional.measure import Measured, scale_measured_
from torchzero_clip.functional.norms import JointNorm, joint_norm_of_meshes
from torchzero_clip.functional.shards import pack, wholes
from torchzero_clip.functional.slices import norms_of_slices
from torchzero_clip.functional.ways import extent, may_look
from torchzero_clip.types import State


@final
@dataclass(eq=False)
class ReadableExecutor(Executor):
    """Does everything at once, with whole tensors. It says what any other executor has to compute."""

    updates: Updates
    runs_formulas = True

    @override
    def host_reasons(self) -> list[str]:
        return ["the step is not a fast one"]

    @override
    def read(self, rows: list[int], *, writable: bool = False) -> list[Tensor]:
        return self.updates.current(rows, writable=writable)

    @override
    def flush(self, rows: Sequence[int]) -> None:
        """The memory always holds the updates."""

    @override
    def abandon(self) -> None:
        """Transforms store their state at once."""

    @override
    def scale(self, rows: list[int], measured: Measured, factors: Tensor, over_grads: bool) -> None:
        extremes = extent(factors) if may_look(factors) else None
        if extremes == (1.0, 1.0):
            self.updates.mark(rows)
            return
        # the measured tensors may be the gradients themselves: multiply the copies
        scale_measured_(measured.with_targets(self.updates.writable(rows, over_grads)), factors, extremes=extremes)

    @override
    def defer(self, walk: WalkLike, node: Node, rows: list[int]) -> bool:
        return False

    @override
    def finish(self, walk: WalkLike, node: Node, rows: list[int], rest: Sequence[Node]) -> set[int]:
        return set()

    @override
    def deliver(self, rows: list[int], multiply: Multiply) -> None:
        self.updates.write_back(rows)

    @override
    def joint_norm(self, grads: list[Tensor], *, beside: bool) -> JointNorm | None:
        return joint_norm_of_meshes(wholes(grads), 2.0, beside=beside) if any_distributed(grads) else None

    @override
    def norms_of_each(self, grads: list[Tensor]) -> Tensor:
        return pack(norms_of_slices(wholes(grads), 2.0))

    @override
    def states(self, node: Node, stored: list[State], begin: Callable[[int], State]) -> States:
        return States(stored, node.path, node.state, begin)
