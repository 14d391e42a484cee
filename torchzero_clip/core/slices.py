"""Transforms that scale every slice of every tensor by what its norm says."""

from abc import abstractmethod
from collections.abc import Sequence

from torch import Tensor
from typing_extensions import override

from torchzero_clip.core.transform import Transform
from torchzero_clip.functional.measure import Measured, Scaled, Slicing, measure, summary
from torchzero_clip.types import Dim, Ord, Setting, State, Target


class SliceScaling(Transform):
    """Measures the slices of the updates, and scales them in place: subclasses implement `scale`.

    Args:
        defaults: As in `Transform`.
        ord: The metric.
        dim: The dimensions that one slice spans.
        inverse_dims: Slices span the dimensions that ``dim`` does not list.
        min_size: Slices of fewer elements are left alone.
        target: As in `Transform`.
    """

    scaling = True

    def __init__(
        self, defaults: Setting, *, ord: Ord, dim: Dim, inverse_dims: bool, min_size: int, target: Target
    ) -> None:
        super().__init__(defaults, target=target)
        self.ord = ord
        self.dim = dim
        self.inverse_dims = inverse_dims
        self.min_size = min_size
        self._slicing = Slicing.checked(ord, dim, inverse_dims, min_size)

    @abstractmethod
    def scale(self, measured: Measured, settings: Sequence[Setting]) -> Scaled:
        """Scale what was measured; ``settings`` has one entry per tensor."""

    @override
    def apply_tensors(
        self,
        tensors: list[Tensor],
        params: list[Tensor],
        grads: list[Tensor],
        loss: Tensor | float | None,
        states: Sequence[State],
        settings: Sequence[Setting],
    ) -> Sequence[Tensor]:
        """Scale every slice, in place."""
        measured = measure(tensors, self._slicing)
        self.metrics.update(summary(measured, self.scale(measured, settings)))
        return tensors
