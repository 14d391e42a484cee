"""The base class of captured layers, with what `broadcast_row` uses."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

from torch import Tensor, nn

from torchzero_clip.per_sample.capture import Capture
from torchzero_clip.per_sample.layer import Layer
from torchzero_clip.per_sample.samples.call import Contribute, LayerInput
from torchzero_clip.per_sample.shared_inputs import SharedInputs


@dataclass
class Learnt:
    """What rules have learnt about a layer in earlier calls."""

    other_sizes: set[Hashable] = field(default_factory=set)
    """Functions that once expanded a row to another size than that of the batch."""
    sample_dims: dict[Hashable, list[int] | None] = field(default_factory=dict)
    """The dimensions of the samples in the outputs of functions of rows; None if there are none."""
    known_arguments: set[Hashable] = field(default_factory=set)
    """Arguments of a module that runs whole: those that all samples share, and those with samples in a dimension."""
    compared: set[Hashable] = field(default_factory=set)
    """Kinds of arguments for which a module that runs whole was compared with its batch."""
    by_vmap: bool = True
    """False if vmap cannot run the module."""
    has_hooks: bool = False
    """True if modules in it have hooks of `hook_modules`."""
    may_rerun: bool = False
    """True if its graph has a function that may run modules again."""
    has_warned: bool = False
    """True after the warning about its memory."""


class RowsLayer(Layer, ABC):
    """A captured layer, with what it has learnt of values that all samples share."""

    def __init__(self, capture: Capture, name: str, module: nn.Module) -> None:
        super().__init__(name, module, capture.model, capture.reruns)
        self.capture = capture
        self.shared = SharedInputs(capture)
        self.learnt = Learnt()
        self.written: dict[int, tuple[Tensor, Tensor]] | None = None
        """By id: tensors into which the module has written rows, so that they stay alive, with rows in their place.

        None outside of the module.
        """
        self.misuse: tuple[str, bool] | None = None
        """The last function that got a row and cannot run for each sample, and whether the layer called it."""

    @abstractmethod
    def refuse_row(self) -> None:
        """Raise for a gradient that is summed over samples."""

    @abstractmethod
    def watch(
        self,
        output: Tensor,
        inputs: Sequence[Tensor],
        contribute: Contribute,
        samples: LayerInput | None = None,
        *,
        on_shared: Callable[[], bool] | None = None,
    ) -> Tensor:
        """Return the output, whose gradient and inputs will be passed to ``contribute``."""
