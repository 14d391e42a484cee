"""Joins one step with those of processes that hold other parameters, such as the stages of a pipeline."""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from torchzero_clip.core.nodes import Nodes
from torchzero_clip.core.tools import Tools
from torchzero_clip.engine.numbers import Numbers, joint_metrics, measuring
from torchzero_clip.functional.measure import Measured
from torchzero_clip.functional.norms import combine
from torchzero_clip.functional.processes import gathered


class Others:
    """Joins the norms and metrics of this process with those of the others.

    Which numbers are sent depends only on the chain, which is the same on all processes.

    Args:
        group: The processes.
        device: The device from which numbers are sent.
        has_schedules: True if any process has a setting that is a function of the step.
    """

    def __init__(self, group: ProcessGroup, device: torch.device, has_schedules: bool) -> None:
        self.group = group
        self.device = device
        self._has_schedules = has_schedules

    def joined(
        self, measured: Measured, own: Tensor, norms: Tensor | None, tools: Tools
    ) -> tuple[Measured, Tensor | None]:
        """The joint norm over all processes, and the joint norm of each process's gradients, in one collective.

        Args:
            measured: The joint norm of this process.
            own: The `Measured.numbers` of this process.
            norms: The norms of the gradients of this process, if statistics need them.
            tools: The tools of the step.
        """
        beside = own.new_zeros(0) if norms is None else combine(norms, 2.0).to(own.device).view(1)
        rows = tools.rows(torch.cat([own, beside]).to(self.device)).to(own.device)
        found = measured.of_processes(rows.narrow(1, 0, len(own)))
        return found, None if norms is None else rows.select(1, len(own))

    def metrics(
        self, nodes: Nodes, numbers: Numbers, own: Mapping[str, Tensor], has_gradients: bool
    ) -> dict[str, Tensor] | None:
        """The metrics of all processes together, by name, in one collective; None if no process has a gradient.

        It waits for the device if only the other processes know whether some transform has run.

        Args:
            nodes: The transforms.
            numbers: The numbers of this process.
            own: The metrics that transforms have set themselves.
            has_gradients: True if any parameter of this process has a gradient.
        """
        paths = [node.path for node, _ in measuring(nodes)]
        if not paths and not self._has_schedules:
            return dict(own)
        ran = [has_gradients, *(path in numbers.paths for path in paths)]
        flags = torch.ones(len(ran), dtype=torch.float64, device=self.device)
        if not all(ran):  # only then, because copying numbers to the device waits
            flags = torch.tensor(ran, dtype=torch.float64, device=self.device)
        rows = gathered(torch.cat([flags, numbers.vector(nodes, self.device)]), self.group)
        if not all(ran):
            ran = [flag > 0 for flag in rows.narrow(1, 0, len(ran)).amax(dim=0).tolist()]
        if not ran[0]:
            return None
        found = {**own, **joint_metrics(nodes, rows.narrow(1, len(ran), rows.shape[1] - len(ran)))}
        idle = {path for path, has_run in zip(paths, ran[1:], strict=True) if not has_run}
        return {name: value for name, value in found.items() if name.rpartition("/")[0] not in idle}
