"""Buffers and caches that an optimizer uses again from step to step; none of them is state."""

from torchzero_clip.core.gathering import Layouts
from torchzero_clip.core.states import Vectors
from torchzero_clip.functional.scratch import Scratch


class Workspace:
    """Memory for intermediate results, and numbers of state as vectors.

    It is never saved or copied with an optimizer, because a new one is as good.
    """

    def __init__(self) -> None:
        self.scratch = Scratch()
        self.vectors = Vectors()
        self.layouts = Layouts()
