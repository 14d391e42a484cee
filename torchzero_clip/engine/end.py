"""The end of the outermost chain: updates are subtracted from the parameters, or written into the gradients."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from typing_extensions import override

from torchzero_clip.core.kinds import FinalRule, Gate, Scaling, UpdateRule
from torchzero_clip.core.learning_rate import LR
from torchzero_clip.core.nodes import Node
from torchzero_clip.engine.checked import take_step
from torchzero_clip.engine.executor import Multiply, WalkLike
from torchzero_clip.functional import foreach

NO_RULE = "no update rule ends the chain"


class End(ABC):
    """What is done with the updates that come out of the outermost chain."""

    over_grads: bool = False
    """True if all transforms may write over the gradients."""

    into_grads: ClassVar[bool] = False
    """True if updates end in the gradients, which a refused step has to keep."""

    @abstractmethod
    def finish(self, walk: WalkLike, node: Node, rows: list[int], rest: Sequence[Node]) -> set[int]:
        """If a transform and the ``rest`` of the chain can be one operation for some rows, run it, and return these.

        No later transform sees them.
        """

    @abstractmethod
    def deliver(self, walk: WalkLike, rows: list[int]) -> None:
        """Subtract or write the updates of rows that have passed all transforms."""

    @abstractmethod
    def may_write_grads(self, rest: Sequence[Node]) -> bool:
        """True if a scaling may write over the gradients, before the ``rest`` of the chain."""


@final
@dataclass
class Subtract(End):
    """Subtracts the updates from the parameters."""

    keep_grads: bool  # scalings never write over gradients

    @override
    def finish(self, walk: WalkLike, node: Node, rows: list[int], rest: Sequence[Node]) -> set[int]:
        transform = node.transform
        if not isinstance(transform, UpdateRule | LR):
            return set()
        # gates have decided before, and transforms of closures have acted
        rest = [n for n in rest if n.transform.target != "closure" and not isinstance(n.transform, Gate)]
        if isinstance(transform, UpdateRule):
            if not isinstance(transform, FinalRule):
                return walk.executor.finish(walk, node, rows, rest)
            walk.ask(f"{transform!r} takes the step")
            step = walk.step_for(node, rows, rest)
            try:
                take_step(node, walk.executor.read(rows, writable=True), step)
            finally:
                walk.store(node, step)
            return set(rows)
        # an override has its own arithmetic
        if rest or type(transform).apply_tensors is not LR.apply_tensors:
            return set()
        if transform.target != "update" or torch.compiler.is_compiling():  # the compiler combines the two itself
            return set()
        if walk.undecided is not None:
            walk.ask(NO_RULE)
        # torch subtracts lr times the update in one operation, which rounds once instead of twice
        transform.subtract(walk.executor.read(rows), walk.step_for(node, rows))
        return set(rows)

    @override
    def deliver(self, walk: WalkLike, rows: list[int]) -> None:
        if walk.undecided is not None:
            walk.ask(NO_RULE)
        foreach.subtract_([walk.table.params[i] for i in rows], walk.executor.read(rows))

    @override
    def may_write_grads(self, rest: Sequence[Node]) -> bool:
        # torch's clip leaves the clipped gradient in .grad too; a final rule may write to what it gets
        acting = (n.transform for n in rest if n.transform.target == "update")
        following = next((t for t in acting if not isinstance(t, Scaling | Gate)), None)
        return not self.keep_grads and isinstance(following, UpdateRule) and not isinstance(following, FinalRule)


@final
@dataclass
class Deliver(End):
    """Writes the updates into the gradients, for another optimizer that takes the step."""

    into_grads: ClassVar[bool] = True
    multiply: Multiply = foreach.multiply_  # changes the gradients if the updates are these times one factor
    over_grads: bool = False
    host_reasons: Callable[[], list[str]] = list
    """Why the optimizer cannot leave it to the device whether a step is taken; empty if it can."""

    @override
    def finish(self, walk: WalkLike, node: Node, rows: list[int], rest: Sequence[Node]) -> set[int]:
        return set()

    @override
    def deliver(self, walk: WalkLike, rows: list[int]) -> None:
        walk.executor.deliver(rows, self.multiply)

    @override
    def may_write_grads(self, rest: Sequence[Node]) -> bool:
        return self.over_grads
