"""The arguments of an optimizer that decide about its steps."""

from typing import NamedTuple

from torch.distributed import ProcessGroup

from torchzero_clip.engine.parts import Parts


class StepOptions(NamedTuple):
    """What decides about a step beside its chain and its tensors. A plan is of one of these."""

    maximize: bool
    keep_grads: bool
    parts: Parts | None
    """What the backward has updated, if the optimizer steps in the backward."""
    process_group: ProcessGroup | None

    @property
    def is_alone(self) -> bool:
        """True if the step is taken at once, by this process."""
        return self.parts is None and self.process_group is None
