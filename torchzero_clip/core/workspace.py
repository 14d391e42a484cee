"""Buffers and caches that the steps of an optimizer reuse. They are not state."""

from torchzero_clip.core.gathering import Layouts
from torchzero_clip.core.states import Vectors
from torchzero_clip.functional.scratch import Scratch


class Workspace:
    """Memory for intermediate results, numbers of state as vectors, and layouts that passed a check.

    It is never saved or copied with an optimizer, because a new one serves as well.
    """

    def __init__(self) -> None:
        self.scratch = Scratch()
        self.vectors = Vectors()
        self.layouts = Layouts()
