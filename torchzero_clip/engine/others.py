"""Joins one step with those of processes that hold other parameters, such as the stages of a pipeline."""

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from torchzero_clip.core.nodes import Nodes
from torchzero_clip.engine.numbers import Numbers, joint_metrics
from torchzero_clip.functional.measure import Measured
from torchzero_clip.functional.norms import combine
from torchzero_clip.functional.processes import gathered


class Others:
    """Joins the norms and metrics of this process with those of the others.

    What is sent depends only on the chain, which is the same on all processes.

    Args:
        group: The processes.
        device: The device from which numbers are sent.
    """

    def __init__(self, group: ProcessGroup, device: torch.device) -> None:
        self.group = group
        self.device = device

    def joined(self, measured: Measured, own: Tensor, norms: Tensor | None) -> tuple[Measured, Tensor | None]:
        """The joint norm over all processes, and the joint norm of each process's gradients, in one collective.

        Args:
            measured: The joint norm of this process.
            own: The `Measured.numbers` of this process.
            norms: The norms of the gradients of this process, if statistics need them.
        """
        beside = own.new_zeros(0) if norms is None else combine(norms, 2.0).to(own.device).view(1)
        rows = gathered(torch.cat([own, beside]).to(self.device), self.group).to(own.device)
        found = measured.of_processes(rows.narrow(1, 0, len(own)))
        return found, None if norms is None else rows.select(1, len(own))

    def metrics(self, nodes: Nodes, numbers: Numbers) -> dict[str, Tensor]:
        """The metrics of all processes together, by name, in one collective.

        Args:
            nodes: The transforms.
            numbers: The numbers of this process.
        """
        own = numbers.vector(nodes, self.device)
        return joint_metrics(nodes, gathered(own, self.group)) if len(own) > 0 else {}
