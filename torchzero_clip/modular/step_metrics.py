"""What the last step of an optimizer has measured."""

from collections.abc import Mapping

import torch
from torch import Tensor

from torchzero_clip.types import Metrics


class StepMetrics:
    """The metrics of the last step. Those of a planned step are computed when they are read."""

    compute: Metrics | None = None
    """Computes the metrics of a planned step."""

    def __init__(self, values: Mapping[str, Tensor]) -> None:
        self.values = dict(values)
        """The metrics of an ordinary step, which change in place, because torch.compile loses a dict that is assigned.
        """

    def read(self) -> dict[str, Tensor]:
        """The metrics by name. They are computed in each call, because replays of a step change them."""
        if self.compute is None:
            return self.values
        with torch.inference_mode(False), torch.no_grad():  # whatever the mode of the caller
            return self.compute()

    def forget(self) -> None:
        """Have no metrics until the next step."""
        self.values.clear()
        self.compute = None

    def copy(self) -> "StepMetrics":
        """The metrics of now, which later steps do not replace. Replays still change what they compute."""
        copied = StepMetrics(self.values)
        copied.compute = self.compute
        return copied

    def __reduce__(self) -> tuple[type["StepMetrics"], tuple[dict[str, Tensor]]]:
        return StepMetrics, (dict(self.read()),)
