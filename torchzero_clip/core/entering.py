"""The gradients that enter a chain: whether each is finite, and whether it is all zero."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torchzero_clip.functional.measure import Measured
from torchzero_clip.functional.norms import combine, p_norms
from torchzero_clip.functional.shards import pack, whole


class Flags(NamedTuple):
    """Two answers about gradients, as tensors of booleans: one element per gradient, or 0-d for one or for all."""

    finite: Tensor
    nonzero: Tensor

    def together(self) -> "Flags":
        """The answers about all gradients as one."""
        return Flags(self.finite.all(), self.nonzero.any())

    def some(self, indices: Sequence[int]) -> "Flags":
        """The answers about some of the gradients."""
        return Flags(*(torch.stack([flag.select(0, i) for i in indices]) for flag in self))

    def of(self, index: int, device: torch.device) -> "Flags":
        """The answers about one gradient, on its device."""
        return Flags(self.finite.select(0, index).to(device), self.nonzero.select(0, index).to(device))

    def usable(self, started: Tensor) -> Tensor:
        """Whether a statistic may use the gradient: it is finite, and is not all zero where the statistic starts."""
        return self.finite & (self.nonzero | started)


class Entering:
    """Answers, once a step and for all ranks alike, what the gradients were before any transform."""

    def __init__(self, grads: Sequence[Tensor], of: "tuple[Entering, Sequence[int]] | None" = None) -> None:
        self._grads = grads
        self._of = of
        self._flags: Flags | None = None
        self._norms: Tensor | None = None
        self._untouched = of is None

    def flags(self, measured: Measured | None = None) -> Flags:
        """The answers about each gradient.

        Args:
            measured: What the asking transform found in the tensors that it got. To the first transform of a chain
                these are the gradients, and their norms serve here too: no second pass, and no second all-reduce.
        """
        known = self._known_flags()
        if known is None:
            norms = measured.norms if measured is not None and self._untouched else None
            norms = self.norms() if norms is None else norms
            known = self._flags = Flags(norms.isfinite(), norms != 0)
        return known

    def norms(self) -> Tensor:
        """The L2 norm of each gradient, a vector of float64."""
        known = self._known_norms()
        if known is None:
            known = self._norms = pack(p_norms([whole(grad) for grad in self._grads], 2.0))
        return known

    def part(self, indices: Sequence[int]) -> "Entering":
        """The answers about some of the gradients, taken from those about all where they have been given."""
        return Entering([self._grads[i] for i in indices], (self, indices))

    def total(self) -> Tensor:
        """The L2 norm of all gradients together, 0-d."""
        return combine(self.norms(), 2.0)

    def settle(self) -> None:
        """Answer now, for what comes next may change the gradients, or is not given them."""
        self.flags()
        self._untouched = False

    def _known_flags(self) -> Flags | None:
        if self._flags is None and self._of is not None:
            step, indices = self._of
            known = step._known_flags()
            self._flags = None if known is None else known.some(indices)
        return self._flags

    def _known_norms(self) -> Tensor | None:
        if self._norms is None and self._of is not None:
            step, indices = self._of
            known = step._known_norms()
            self._norms = None if known is None else torch.stack([known.select(0, i) for i in indices])
        return self._norms
