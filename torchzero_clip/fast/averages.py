"""Averages that follow updates, moved piece by piece."""

from collections.abc import Sequence

from torch import Tensor
from typing_extensions import override

from torchzero_clip.core.elements import Elements
from torchzero_clip.core.elementwise import Elementwise
from torchzero_clip.types import Setting


class Average(Elementwise):
    """Moves an average towards updates, and leaves the updates unchanged."""

    keeps_statistics = True

    def __init__(self, begins_with_update: bool) -> None:
        super().__init__({})
        self.begins_with_update = begins_with_update

    @override
    def change(self, x: Tensor, result: Tensor, state: Sequence[Tensor], setting: Setting, at: Elements) -> Tensor:
        (average,) = state
        if self.begins_with_update:
            at.begin_(average, x)
        at.lerp_(average, x, 1 - setting["beta"])
        return average.view(-1).narrow(0, 0, 1)  # a placeholder: averages have no share of changed elements
