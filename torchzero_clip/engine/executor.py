"""The interface of walk and executor. The walk knows the order of the transforms, an executor computes the updates."""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeAlias

from torch import Tensor

from torchzero_clip.core.nodes import Node
from torchzero_clip.core.states import States
from torchzero_clip.core.step import Step
from torchzero_clip.core.tools import Tools
from torchzero_clip.engine.device_decisions import DeviceDecisions
from torchzero_clip.engine.table import Table
from torchzero_clip.engine.updates import Updates
from torchzero_clip.functional.measure import Measured
from torchzero_clip.functional.norms import JointNorm
from torchzero_clip.types import Setting, State


class WalkLike(Protocol):
    """What an executor and an end ask of the walk."""

    executor: "Executor"
    settings: Mapping[str, list[Setting]]  # the settings of each transform by path, one dict for each group
    table: Table  # the parameters that take part in the step
    undecided: DeviceDecisions | None  # set while only the device knows whether the step is taken

    def step_for(self, node: Node, rows: list[int], rest: Sequence[Node] = ()) -> Step:
        """What a transform sees of the step, with the settings of the ``rest`` of the chain beside its own."""
        ...

    def ask(self, reason: str) -> None:
        """Let the host read whether the step is taken, for this reason. Raise a `RefusedByDevice` if it is not."""

    def store(self, node: Node, step: Step) -> None:
        """Store the state and the metrics of a transform."""


Multiply: TypeAlias = Callable[[list[Tensor], Tensor | float], None]
"""Multiplies gradients by one factor, now or in the step that follows."""


class Measurer(Tools):
    """Measures tensors and gradients."""

    @abstractmethod
    def joint_norm(self, grads: list[Tensor], *, beside: bool) -> JointNorm | None:
        """The L2 norm of all gradients together, and with ``beside`` that of each.

        None if measuring each gradient costs no more: `norms_of_each` does so.
        """

    @abstractmethod
    def norms_of_each(self, grads: list[Tensor]) -> Tensor:
        """The L2 norm of each gradient: a float64 vector, equal on all ranks."""


class Executor(Measurer):
    """Reads and changes the updates of one step."""

    updates: Updates  # the updates, and the memory that they are in

    @abstractmethod
    def host_reasons(self) -> list[str]:
        """Why the host has to decide whether the step is taken; empty if the device may."""

    @abstractmethod
    def read(self, rows: list[int], *, writable: bool = False) -> list[Tensor]:
        """The updates of some rows, after all that was done so far; see `Updates.current`."""

    @abstractmethod
    def flush(self, rows: Sequence[int]) -> None:
        """Carry out all operations that wait on some rows, so that ``updates`` has them."""

    @abstractmethod
    def abandon(self) -> None:
        """Called after an error: finish what transforms have begun to store, so that their state is consistent."""

    @abstractmethod
    def scale(self, rows: list[int], measured: Measured, factors: Tensor, over_grads: bool) -> None:
        """Multiply what was measured by its factors. With ``over_grads`` this may write over the gradients."""

    @abstractmethod
    def defer(self, walk: WalkLike, node: Node, rows: list[int]) -> bool:
        """Let a transform wait, to be carried out together with others. Return False if it cannot wait."""

    @abstractmethod
    def finish(self, walk: WalkLike, node: Node, rows: list[int], rest: Sequence[Node]) -> set[int]:
        """Change the parameters as an update rule and the ``rest`` of the chain would. Return the rows done."""

    @abstractmethod
    def deliver(self, rows: list[int], multiply: Multiply) -> None:
        """Write the updates of rows into their gradients. ``multiply`` does it if only one factor is left to do."""

    @abstractmethod
    def states(self, node: Node, stored: list[State], begin: Callable[[int], State]) -> States:
        """The state of a transform."""
