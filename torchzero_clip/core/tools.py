"""Norms and averages of lists of tensors, which transforms get from the optimizer."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from torchzero_clip.functional import foreach
from torchzero_clip.functional.dtypes import widened
from torchzero_clip.functional.measure import Measured, Resources, Slicing, measure
from torchzero_clip.functional.norms import JointNorm
from torchzero_clip.functional.processes import device_of, gathered
from torchzero_clip.functional.scratch import Scratch
from torchzero_clip.types import Runs


class Tools:
    """Norms and averages of the tensors of a step. An optimizer may lend others, with the same results to rounding."""

    process_group: ProcessGroup | None = None  # the processes that hold other parameters
    runs_formulas = False
    """True in the readable way: an elementwise transform runs its formula, even if it also has a faster form."""
    is_stand_in = False
    """True if this process has no tensors for a joint transform: the tensors of the step are zeros that do not count.
    """
    someone: Tensor | None = None
    """For a stand-in, after numbers were gathered: a 0-d tensor, True if any process has tensors for the transform."""

    def measure(self, tensors: Sequence[Tensor], slicing: Slicing, norms: JointNorm | None = None) -> Measured:
        """The norms of tensors, as `torchzero_clip.functional.measure.measure` returns them.

        A joint norm is that of the tensors of all processes of the ``process_group``. ``norms``: see `Resources`.
        """
        measured = measure(tensors, slicing, resources=self.resources(tensors)._replace(norms=norms))
        if self.process_group is None or slicing.dim != "global":
            return measured
        count = 0 if self.is_stand_in else sum(map(Tensor.numel, tensors))
        numbers = measured.numbers(count).to(device_of(tensors, self.process_group))
        return measured.of_processes(self.by_process(numbers).to(measured.total))

    def resources(self, tensors: Sequence[Tensor]) -> Resources:
        """What measures tensors in few operations."""
        scratch = self.scratch_for(tensors)
        return Resources(scratch is not None, scratch)

    def gathered(self, *numbers: Tensor) -> list[Tensor]:
        """A vector for each 0-d number, with the numbers of all processes of the ``process_group``: float64."""
        return list(self.by_process(torch.stack(list(map(widened, numbers)))).unbind(dim=1))

    def by_process(self, numbers: Tensor) -> Tensor:
        """A matrix with the float64 vector of each process of the ``process_group``, from that of this process."""
        if self.process_group is None:
            return numbers.unsqueeze(0)
        takes_part = numbers.new_full((1,), float(not self.is_stand_in))
        vectors = gathered(torch.cat([numbers, takes_part]), self.process_group)
        if self.is_stand_in:
            self.someone = vectors.select(1, len(numbers)).amax() > 0
        return vectors.narrow(1, 0, len(numbers))

    def scratch_for(self, tensors: Sequence[Tensor]) -> Scratch | None:
        """Memory with which tensors can be measured in few operations. None if they have to be measured one by one."""
        return None

    def average_(
        self,
        averages: list[Tensor],
        updates: list[Tensor],
        runs: Runs,
        usable: Tensor,
        started: Tensor,
        *,
        into: list[Tensor],
        from_update: bool,
    ) -> JointNorm | None:
        """Move the averages that are usable towards updates by ``1 - beta``, each by its setting.

        ``started`` may be numbers, 0 before the start.
        The results are written to ``into``: other tensors, or the averages. Return their joint L2 norm and the norm of
        each if moving them has measured them; else None.
        """
        if into is not averages:
            foreach.copy_(into, averages)
        # an average starts at its first update with ``from_update``, else at 0
        if from_update:
            foreach.lerp_chosen_(usable & started.logical_not(), into, updates, 1.0)
        for setting, span in runs:
            chosen = usable.narrow(0, span.start, span.stop - span.start)
            foreach.lerp_chosen_(chosen, into[span], updates[span], 1 - setting["beta"])
        return None
