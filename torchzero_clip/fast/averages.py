"""Averages that follow updates, moved piece by piece."""

from collections.abc import Sequence

from torch import Tensor
from typing_extensions import override

from torchzero_clip.core.elementwise import Elementwise
from torchzero_clip.functional import foreach
from torchzero_clip.types import Setting


class Average(Elementwise):
    """Moves an average towards updates, and leaves the updates unchanged."""

    def __init__(self, begins_with_update: bool) -> None:
        super().__init__({})
        self.begins_with_update = begins_with_update

    @override
    def change_(self, x: Tensor, state: Sequence[Tensor], setting: Setting, usable: Tensor, started: Tensor) -> Tensor:
        (average,) = state
        if self.begins_with_update:
            foreach.lerp_where_(usable & started.logical_not(), average, x, 1.0)
        foreach.lerp_where_(usable, average, x, 1 - setting["beta"])
        return usable  # this count is not used
