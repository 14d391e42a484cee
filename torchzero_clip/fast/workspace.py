"""Buffers and caches that the fast steps of an optimizer reuse. They are not state."""

import torch
from torch import Tensor

from torchzero_clip.engine.table import Table
from torchzero_clip.fast.layout import Layout, columns_of
from torchzero_clip.fast.vectors import Vectors
from torchzero_clip.functional.scratch import Scratch


class Workspace:
    """Memory for intermediate results, numbers of state as vectors, and the layout of the last step.

    It is never saved or copied with an optimizer, because a new one serves as well.
    """

    def __init__(self) -> None:
        self.scratch = Scratch()
        self.vectors = Vectors()
        self.layout: Layout | None = None
        self.tried: set[tuple[int, torch.dtype]] = set()
        """The ids of elementwise transforms that were tried out, see `fast.trial`."""

    def beside(self) -> "Workspace":
        """A workspace with the same scratch memory, for other parameters that take their steps in turns with these."""
        other = Workspace()
        other.scratch, other.tried = self.scratch, self.tried
        return other

    def columns(self, table: Table) -> dict[str, list[Tensor]] | None:
        """Parameters, gradients and state by key, if they have a layout, which becomes that of this step; else None."""
        found = columns_of(table.params, table.grads, table.states) if table.params else None
        if found is None or (self.layout and self.layout.fits(found, self.vectors)):
            return found
        layout = Layout.of(found, self.vectors)
        self.layout = layout or self.layout
        return found if layout else None
