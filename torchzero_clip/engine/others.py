"""The processes that hold other parameters, such as the stages of a pipeline, in one step."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from typing_extensions import override

from torchzero_clip.core.elementwise import Elementwise
from torchzero_clip.core.kinds import Scaling
from torchzero_clip.core.nodes import Node, Nodes
from torchzero_clip.core.step import Step
from torchzero_clip.functional.measure import Measured, effect_numbers, effect_of, joint_root, no_numbers, summary
from torchzero_clip.functional.norms import combine
from torchzero_clip.functional.processes import gathered


class Others:
    """Joins the norms and metrics of this process with those of the others.

    What is sent follows from the chain alone, which is the same on all processes.

    Args:
        group: The processes.
        device: Where the numbers are that are sent.
        nodes: The transforms.
    """

    def __init__(self, group: ProcessGroup, device: torch.device, nodes: Nodes) -> None:
        self.group = group
        self.device = device
        self._nodes = nodes
        self._own: dict[str, Tensor] = {}
        """The numbers of this process that metrics are computed from, by the paths of the transforms."""

    def without_params(self) -> "Others":
        """The same for a walk whose tensors are no parameters: it sends numbers that do not count."""
        return _WithoutParams(self.group, self.device, self._nodes)

    def own_numbers(self, measured: Measured, tensors: Sequence[Tensor]) -> Tensor:
        """The numbers of this process from which the metric of all is found."""
        return measured.numbers(sum(map(Tensor.numel, tensors)))

    def joined(self, measured: Measured, own: Tensor, norms: Tensor | None) -> tuple[Measured, Tensor | None]:
        """The joint norm of all processes, and the joint norm of the gradients of each: one collective for both.

        Args:
            measured: The joint norm of this process.
            own: Its `own_numbers`.
            norms: The norms of its gradients, if statistics need them.
        """
        beside = own.new_zeros(0) if norms is None else combine(norms, 2.0).to(own.device).view(1)
        rows = gathered(torch.cat([own, beside]).to(self.device), self.group).to(own.device)
        found = measured.of_processes(rows.narrow(1, 0, len(own)))
        return found, None if norms is None else rows.select(1, len(own)).contiguous()

    def note_scaling(self, node: Node, measured: Measured, own: Tensor, factors: Tensor) -> None:
        """Remember what a scaling of this process did.

        Args:
            node: The scaling.
            measured: The slices.
            own: Its `own_numbers`.
            factors: The factor of each slice.
        """
        self._own[node.path] = torch.cat([effect_numbers(measured, factors).to(own.device), own]).to(self.device)

    def note_shares(self, node: Node, step: Step) -> None:
        """Remember the share of elements that a transform has shown."""
        for changed, count in step.shares.values():
            self._own[node.path] = torch.stack([changed.double(), changed.new_full((), count).double()]).to(self.device)

    def metrics(self) -> dict[str, Tensor]:
        """The metrics of all processes together, by their names. It takes one collective."""
        every = ((node, node.transform) for node in self._nodes)
        measuring = [(node, t) for node, t in every if isinstance(t, Scaling | Elementwise)]
        if not measuring:
            return {}
        own = [self._own.get(node.path, _nothing(transform)).to(self.device) for node, transform in measuring]
        rows = gathered(torch.cat(own), self.group).split(list(map(len, own)), dim=1)
        found: dict[str, Tensor] = {}
        for (node, transform), own_rows in zip(measuring, rows, strict=True):
            found |= node.qualified(_metrics(transform, own_rows))
        return found


class _WithoutParams(Others):
    @override
    def own_numbers(self, measured: Measured, tensors: Sequence[Tensor]) -> Tensor:
        return no_numbers(measured.metric, measured.total.device)

    @override
    def note_scaling(self, node: Node, measured: Measured, own: Tensor, factors: Tensor) -> None:
        pass

    @override
    def note_shares(self, node: Node, step: Step) -> None:
        pass


def _nothing(transform: Scaling | Elementwise) -> Tensor:
    """The numbers of a process on which a transform has done nothing."""
    cpu = torch.device("cpu")
    if isinstance(transform, Elementwise):
        return torch.zeros(2, dtype=torch.float64, device=cpu)
    return torch.cat([torch.zeros(3, dtype=torch.float64, device=cpu), no_numbers(transform.slicing.metric, cpu)])


def _metrics(transform: Scaling | Elementwise, rows: Tensor) -> dict[str, Tensor]:
    """The metrics of a transform from the numbers of all processes, a row for each."""
    if isinstance(transform, Elementwise):
        changed, count = rows.sum(dim=0).unbind()
        return {"clipped": changed / count.clamp(min=1)}
    metric = transform.slicing.metric
    total = joint_root(metric, rows.narrow(1, 3, rows.shape[1] - 3)) ** metric.degree
    return summary(total, effect_of(rows.narrow(1, 0, 3)))
