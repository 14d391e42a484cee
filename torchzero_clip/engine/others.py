"""The processes that hold other parameters, such as the stages of a pipeline, in one step."""

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from torchzero_clip.core.nodes import Nodes
from torchzero_clip.engine.numbers import Numbers, measuring, metrics_of
from torchzero_clip.functional.measure import Measured
from torchzero_clip.functional.norms import combine
from torchzero_clip.functional.processes import gathered


class Others:
    """Joins the norms and metrics of this process with those of the others.

    What is sent follows from the chain alone, which is the same on all processes.

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
            own: Its `Measured.numbers`.
            norms: The norms of its gradients, if statistics need them.
        """
        beside = own.new_zeros(0) if norms is None else combine(norms, 2.0).to(own.device).view(1)
        rows = gathered(torch.cat([own, beside]).to(self.device), self.group).to(own.device)
        found = measured.of_processes(rows.narrow(1, 0, len(own)))
        return found, None if norms is None else rows.select(1, len(own))

    def metrics(self, nodes: Nodes, numbers: Numbers) -> dict[str, Tensor]:
        """The metrics of all processes together, by their names: one collective.

        Args:
            nodes: The transforms.
            numbers: The numbers of this process.
        """
        transforms = measuring(nodes)
        if not transforms:
            return {}
        own = [numbers.row(node.path, transform, self.device) for node, transform in transforms]
        columns = gathered(torch.cat(own), self.group).split(list(map(len, own)), dim=1)
        found: dict[str, Tensor] = {}
        for (node, transform), rows in zip(transforms, columns, strict=True):
            found |= metrics_of(node, transform, rows)
        return found
