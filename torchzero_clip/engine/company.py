"""Who else takes part in a step, as the walk sees it: other parts of the step, or other processes."""

from abc import ABC, abstractmethod
from typing import Any, Protocol, final

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from typing_extensions import override

from torchzero_clip.core.elementwise import Elementwise
from torchzero_clip.core.nodes import Node, Nodes
from torchzero_clip.core.step import Step
from torchzero_clip.core.tools import Tools
from torchzero_clip.engine.executor import WalkLike
from torchzero_clip.engine.gradient_norms import GradientNorms
from torchzero_clip.functional.dtypes import widened
from torchzero_clip.functional.measure import Measured, effect_numbers
from torchzero_clip.types import State


class Walking(WalkLike, Protocol):
    """What the company asks of a walk."""

    nodes: Nodes
    gradient_norms: GradientNorms

    def apply(self, node: Node, rows: list[int], updates: list[Tensor]) -> list[Tensor]:
        """Return the result of one transform for tensors."""
        ...


class Absence:
    """What changes for a transform on a process that has no tensor for it."""

    def __init__(self, group: ProcessGroup, device: torch.device) -> None:
        self._group, self._device = group, device

    def begin(self, step: Step) -> None:
        """Let the transform exchange its numbers with the other processes, and change copies of the state."""
        step.tools = Tools()
        step.tools.process_group, step.tools.is_stand_in = self._group, True
        values = step.global_state.items()
        step.global_state = {k: v.to(self._device, copy=True) if isinstance(v, Tensor) else v for k, v in values}

    def undo_if_nobody_acts(self, node: Node, step: Step, chain_state: State) -> None:
        """Restore the state if no process has a tensor for the transform."""
        someone, before = step.tools.someone, node.global_state(chain_state)
        if someone is not None:
            values = step.global_state.items()
            step.global_state = {key: _where(someone, value, before.get(key, value)) for key, value in values}


class Company(ABC):
    """Who else takes part in a step. It collects the numbers behind the metrics, to join them with those of others."""

    group: ProcessGroup | None = None  # the processes that hold other parameters
    device: torch.device | None = None  # the device from which numbers are sent to them
    stand_in: Walking | None = None  # takes part in joint transforms and gates for which this process has no tensor
    absence: Absence | None = None  # set in the walk of a stand-in, whose row does not count

    def __init__(self) -> None:
        self.numbers: dict[str, Tensor] = {}  # of the transforms that have run, by path
        self._measured: dict[str, Tensor] = {}  # of the scalings that have measured, until `report`

    def joined(
        self, node: Node, measured: Measured, updates: list[Tensor], step: Step, gradient_norms: GradientNorms
    ) -> Measured:
        """What a scaling has measured, together with what others have measured."""
        numbers = measured.numbers(0 if self.absence is not None else sum(map(Tensor.numel, updates)))
        self._measured[node.path] = numbers
        return self.exchanged(node, measured, numbers, step, gradient_norms)

    @abstractmethod
    def exchanged(
        self, node: Node, measured: Measured, numbers: Tensor, step: Step, gradient_norms: GradientNorms
    ) -> Measured:
        """What a scaling has measured, joined with the numbers of others. ``numbers`` are `Measured.numbers`."""

    @abstractmethod
    def acting(self, walk: Walking, node: Node, rows: list[int]) -> list[int]:
        """The rows on which this process applies a transform; none if a stand-in has acted for it."""

    def report(self, node: Node, measured: Measured, factors: Tensor) -> None:
        """Collect the numbers of a scaling."""
        numbers = self._measured.pop(node.path)
        self.numbers[node.path] = torch.cat([effect_numbers(measured, factors).to(numbers.device), numbers])

    def store(self, node: Node, step: Step, chain_state: State) -> None:
        """Collect the numbers of an elementwise transform, and decide which state of the whole chain is stored."""
        if isinstance(node.transform, Elementwise) and (share := step.shares.get("clipped")) is not None:
            changed, count = share
            self.numbers[node.path] = torch.stack([widened(changed), widened(torch.full_like(changed, count))])
        if self.absence is not None:
            self.absence.undo_if_nobody_acts(node, step, chain_state)


@final
class OtherParts(Company):
    """The step has other parts, and this part measures its own tensors only."""

    @override
    def exchanged(
        self, node: Node, measured: Measured, numbers: Tensor, step: Step, gradient_norms: GradientNorms
    ) -> Measured:
        return measured

    @override
    def acting(self, walk: Walking, node: Node, rows: list[int]) -> list[int]:
        return rows


def _where(condition: Tensor, value: Any, other: Any) -> Any:
    """``value`` if the condition is true, else ``other``. Choosing between tensors does not read them."""
    if isinstance(value, Tensor) and isinstance(other, Tensor):
        return torch.where(condition.to(other.device), value.to(other.device), other)
    return value if condition else other
