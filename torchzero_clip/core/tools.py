"""Norms and averages of lists of tensors, which transforms get from the optimizer."""

from collections.abc import Callable, Sequence

from torch import Tensor

from torchzero_clip.functional import foreach
from torchzero_clip.functional.measure import Measured, Slicing, measure
from torchzero_clip.functional.scratch import Scratch
from torchzero_clip.types import Setting


class Tools:
    """Norms and averages of the tensors of a step. An optimizer may lend others, with the same results to rounding."""

    def measure(
        self,
        tensors: Sequence[Tensor],
        slicing: Slicing,
        dims_of: Callable[[Tensor], tuple[int, ...]] | None = None,
        *,
        each: bool = False,
        beside: bool = False,
        name: str = "",
    ) -> Measured:
        """The norms of tensors, as `torchzero_clip.functional.measure.measure` returns them.

        Args:
            tensors: As in `measure`.
            slicing: As in `measure`.
            dims_of: As in `measure`.
            each: The norm of each tensor is needed also where slices are joined.
            beside: The norm of each tensor is wanted too if this takes less than a second pass.
            name: The name of what is measured, the same in each step.
        """
        scratch = self.scratch_for(tensors)
        is_plain = scratch is not None
        return measure(tensors, slicing, dims_of, scratch, plain=is_plain, each=each, beside=beside, name=name)

    def scratch_for(self, tensors: Sequence[Tensor]) -> Scratch | None:
        """Memory with which tensors can be measured in few operations. None if they have to be measured one by one."""
        return None

    def average_(
        self,
        averages: Sequence[Tensor],
        updates: Sequence[Tensor],
        settings: Sequence[tuple[Setting, slice]],
        usable: Tensor,
        started: Tensor,
        *,
        begins_with_update: bool,
    ) -> None:
        """Move averages towards usable updates by ``1 - beta``, in place.

        Args:
            averages: The averages.
            updates: What they move to.
            settings: Settings with ``"beta"``, each with the range of averages that it applies to.
            usable: Which averages move: a vector of booleans.
            started: Which have moved before.
            begins_with_update: Averages that have not moved before start at their update; else at 0.
        """
        if begins_with_update:
            foreach.lerp_rows_(usable & started.logical_not(), averages, updates, 1.0)
        for setting, own in settings:
            chosen = usable.narrow(0, own.start, own.stop - own.start)
            foreach.lerp_rows_(chosen, averages[own], updates[own], 1 - setting["beta"])
