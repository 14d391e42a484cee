"""An object that sees the steps of an optimizer, and changes nothing."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from torchzero_clip.core.nodes import Nodes
from torchzero_clip.engine.device_decisions import DeviceDecisions
from torchzero_clip.engine.gradient_norms import GradientNorms
from torchzero_clip.engine.reported_loss import Loss
from torchzero_clip.engine.table import Table
from torchzero_clip.functional.measure import Effect
from torchzero_clip.types import Setting


class Seen(Protocol):
    """What a listener sees of a step."""

    nodes: Nodes  # the transforms
    settings: Mapping[str, list[Setting]]  # the settings of each transform by path, one dict per group
    table: Table  # the parameters that take part
    gradient_norms: GradientNorms
    """Of the gradients before the first transform: ``before`` are their L2 norms, if there were any."""
    loss: Loss  # the loss of the step
    metrics: dict[str, Tensor]  # what the transforms have measured
    refused_by: list[str]  # who has refused the step
    decisions: DeviceDecisions | None  # set if the device decides, and only ``decisions`` knows who refuses the step
    effect: Effect | None  # what the scaling of the step has done, if ``metrics`` lacks it, because nobody has read it


class HasListener(ABC):
    """An object whose methods are hooks of an optimizer, as of a recorder. `before_step` takes over its listener."""

    listener: "Listener"


class Listener(ABC):
    """Sees every step of a `Modular`. It must not change what it sees."""

    @abstractmethod
    def begin(self, step: Seen) -> None:
        """Called before the first transform of a step that is taken, or about which the device decides."""

    @abstractmethod
    def end(self, step: Seen) -> None:
        """Called at the end of every step, also of one that was refused, raised an error, or had no gradients."""
