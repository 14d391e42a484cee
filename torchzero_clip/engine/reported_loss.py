"""The loss of a step, for transforms that judge it."""

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from torchzero_clip.functional.dtypes import widened, widest
from torchzero_clip.functional.processes import gathered
from torchzero_clip.functional.shards import mesh_groups


@dataclass
class Loss:
    """The loss of one step, as transforms see it."""

    value: Tensor | float | None = None
    """What the closure returned, or the mean of the losses that were reported; None without either."""
    count: int = 0  # of how many losses it is the mean
    exists: Tensor | None = None  # 0-d: True if a process has a loss; None before `join`

    def join(self, device: torch.device, params: Sequence[Tensor], process_group: ProcessGroup | None) -> None:
        """Replace the value by the mean over all processes, unless no process can have one."""
        # All processes of the meshes and of the process group call it; without either, all of the default group do.
        meshes = mesh_groups(params)
        is_parallel = bool(meshes) or process_group is not None
        is_replicated = not is_parallel and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        if self.value is None and not is_parallel and not is_replicated:
            return
        value = 0.0 if self.value is None else self.value
        _check_loss(value)
        loss = value if isinstance(value, Tensor) else torch.tensor(float(value), dtype=torch.float64, device="cpu")
        mean = loss.detach().reshape(()).to(device, widest(device))
        total = torch.stack([mean * self.count, torch.full_like(mean, self.count)])
        if is_replicated:
            dist.all_reduce(total)
        for group in meshes:
            dist.all_reduce(total, group=group)
        total = gathered(total, process_group).sum(dim=0)
        self.value, self.exists = total[0] / total[1].clamp(min=1), total[1] > 0


class ReportedLoss:
    """The losses that a training loop has reported since the last step."""

    # A report after `zero_grad` replaces those before it, because the step that they belong to was never taken: a
    # gradient scaler may have refused it.

    def __init__(self) -> None:
        self.clear()

    def add(self, loss: Any) -> None:
        """Take the loss of one part of the batch; raises if it is not one number."""
        _check_loss(loss)
        if self._begins_anew:
            self.clear()
        value = widened(loss.detach().reshape(())) if isinstance(loss, Tensor) else float(loss)
        self._sum = self._sum + value if self.count else value  # one loss takes no launches for sum and mean
        self.count += 1

    def zeroed(self) -> None:
        """Gradients were set to zero: the next report begins anew."""
        self._begins_anew = True

    def clear(self) -> None:
        """Forget all reports."""
        self._sum: Tensor | float = 0.0
        self.count = 0  # how many losses were reported
        self._begins_anew = False

    def loss(self) -> Loss:
        """The mean of the reports."""
        mean = self._sum / self.count if self.count > 1 else self._sum
        return Loss(mean, self.count) if self.count else Loss()


def _check_loss(loss: Any) -> None:
    if isinstance(loss, bool) or not isinstance(loss, Real | Tensor):
        raise TypeError(f"loss must be a number or a 0-d tensor, got {type(loss).__name__}")
    if isinstance(loss, Tensor) and loss.numel() != 1:
        raise ValueError(f"loss must be a number or a 0-d tensor, got a tensor of shape {tuple(loss.shape)}")
