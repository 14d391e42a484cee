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

    def __init__(self, grads: Sequence[Tensor]) -> None:
        self._grads = grads
        self._flags: Flags | None = None
        self._norms: Tensor | None = None
        self._untouched = True

    def flags(self, measured: Measured | None = None) -> Flags:
        """The answers about each gradient.

        Args:
            measured: What the asking transform found in the tensors that it got. To the first transform of a chain
                these are the gradients, and their norms serve here too: no second pass, and no second all-reduce.
        """
        if self._flags is None:
            norms = measured.norms if measured is not None and self._untouched else None
            norms = self.norms() if norms is None else norms
            self._flags = Flags(norms.isfinite(), norms != 0)
        return self._flags

    def norms(self) -> Tensor:
        """The L2 norm of each gradient, a vector of float64."""
        if self._norms is None:
            self._norms = pack(p_norms([whole(grad) for grad in self._grads], 2.0))
        return self._norms

    def part(self, indices: Sequence[int]) -> "Entering":
        """The answers about some of the gradients, which have been given if anybody will ask for them."""
        part = Entering([self._grads[i] for i in indices])
        part._untouched = False
        if self._norms is not None:
            part._norms = torch.stack([self._norms.select(0, i) for i in indices])
        if self._flags is not None:
            part._flags = self._flags.some(indices)
        return part

    def total(self) -> Tensor:
        """The L2 norm of all gradients together, 0-d."""
        return combine(self.norms(), 2.0)

    def settle(self) -> None:
        """Answer now, for what comes next may change the gradients, or is not given them."""
        self.flags()
        self._untouched = False
