"""Joins one step with those of processes that hold other parameters, such as the stages of a pipeline."""

from dataclasses import replace
from typing import final

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from typing_extensions import override

from torchzero_clip.core.kinds import Scaling
from torchzero_clip.core.nodes import Node, Nodes
from torchzero_clip.core.step import Step
from torchzero_clip.engine.company import Absence, Company, Walking
from torchzero_clip.engine.gradient_norms import GradientNorms
from torchzero_clip.engine.joint_metrics import joint_metrics, measuring, path_of, vector_of
from torchzero_clip.engine.readable import ReadableExecutor
from torchzero_clip.engine.table import Table
from torchzero_clip.engine.updates import Updates
from torchzero_clip.engine.walk import Walk
from torchzero_clip.functional.dtypes import widest
from torchzero_clip.functional.measure import Measured
from torchzero_clip.functional.processes import gathered
from torchzero_clip.functional.slices import joint_of_norms


@final
class OtherProcesses(Company):
    """The processes that hold other parameters. All have the same chain, and so send equally many numbers."""

    def __init__(self, group: ProcessGroup, device: torch.device, *, has_schedules: bool = False) -> None:
        super().__init__()
        self.group, self.device = group, device
        self._group, self._device = group, device  # which are never None, unlike those of other kinds
        self._has_schedules = has_schedules  # True if any process has a setting that is a function of the step
        self._empty: set[str] = set()
        """The paths of joint transforms that have only tensors without elements on this process."""

    @override
    def exchanged(
        self, node: Node, measured: Measured, numbers: Tensor, step: Step, gradient_norms: GradientNorms
    ) -> Measured:
        """The joint norm over all processes; statistics get the joint norm of each process's gradients beside it."""
        if not isinstance(node.transform, Scaling) or node.transform.slicing.dim != "global":
            return measured
        if node.path == gradient_norms.norm_needs.joint_clip and gradient_norms.norm_of_decision is not None:
            return measured.of_processes(gradient_norms.norm_of_decision.to(numbers.device).view(1, 1))
        norms = step.gradient_norms
        beside = numbers.new_zeros(0) if norms is None else joint_of_norms(norms, 2.0).to(numbers.device).view(1)
        by_process = step.tools.by_process(torch.cat([numbers, beside]).to(self._device)).to(numbers.device)
        step.gradient_norms = None if norms is None else by_process.select(1, len(numbers))
        return measured.of_processes(by_process.narrow(1, 0, len(numbers)))

    def join(self, walk: Walk) -> None:
        """Let a walk exchange numbers with the other processes."""
        walk.executor.process_group = self._group
        walk.company, self.stand_in = self, _stand_in(walk, self._group, self._device)

    @override
    def acting(self, walk: Walking, node: Node, rows: list[int]) -> list[int]:
        """The rows of a transform; none if the stand-in has acted for it.

        The stand-in acts for a joint transform that has no element on this process. It exchanges as many numbers as the
        transform does on the other processes.
        """
        if self.stand_in is None or node.path not in walk.nodes.joint:
            return rows
        # a composite is applied to empty tensors, too, and lets a stand-in act for its children
        if rows and (node.path not in walk.nodes.joining or any(walk.table.params[i].numel() for i in rows)):
            return rows
        if rows:
            walk.store(node, walk.step_for(node, rows))  # the state of empty tensors begins, as in one process
            self._empty.add(node.path)
        stand_in = self.stand_in
        stand_in.gradient_norms.norm_of_decision = walk.gradient_norms.norm_of_decision
        stand_in.apply(node, [0], list(stand_in.table.grads))
        return []

    def metrics(self, nodes: Nodes, metrics: dict[str, Tensor], has_gradients: bool) -> dict[str, Tensor] | None:
        """The metrics of all processes together, by name, in one collective; None if no process has a gradient.

        ``metrics`` are those that transforms have set themselves. This synchronizes with the GPU if only other
        processes know whether some transform has run.
        """
        paths = [node.path for node, _ in measuring(nodes)]
        if not paths and not self._has_schedules:
            return dict(metrics)
        # of each transform: 1 if it has run, 0.5 if all its tensors are without elements
        ran = [float(has_gradients)]
        ran += [1.0 if path in self.numbers else 0.5 if path in self._empty else 0.0 for path in paths]
        flags = torch.ones(len(ran), dtype=widest(self._device), device=self._device)
        if min(ran) < 1:  # only then, because copying numbers to the device waits
            flags = torch.tensor(ran, dtype=widest(self._device), device=self._device)
        by_process = gathered(torch.cat([flags, vector_of(self.numbers, nodes, self._device)]), self._group)
        if min(ran) < 1:
            ran = by_process.narrow(1, 0, len(ran)).amax(dim=0).tolist()
        if not ran[0]:
            return None
        joint = joint_metrics(nodes, by_process.narrow(1, len(ran), by_process.shape[1] - len(ran)))
        acted = dict(zip(paths, ran[1:], strict=True))
        # leave out what a transform has shown for a stand-in if no process has an element for the transform
        shown = {name: value for name, value in metrics.items() if acted.get(path_of(name), 1.0) == 1}
        return shown | {name: value for name, value in joint.items() if acted[path_of(name)]}


def _stand_in(walk: Walk, group: ProcessGroup, device: torch.device) -> Walk:
    """A walk through the same chain with one parameter that is not in the optimizer: a 0, with a gradient of 0.

    If the process has no tensor for a joint transform, the transform runs on this parameter. It then exchanges its
    numbers with the other processes, and changes its state as they do. The parameter does not count in norms and
    metrics.
    """
    zero = torch.zeros(1, dtype=torch.float32, device=device)
    table = Table(walk.table.groups, [zero], [zero.clone()], [{}], [0], acting_paths=walk.nodes.joint)
    executor = ReadableExecutor(Updates(table, walk.chain_state, maximize=False))
    gradient_norms = GradientNorms(walk.gradient_norms.norm_needs, table.grads, executor)
    gradient_norms.norms = torch.zeros(1, dtype=widest(device), device=device)
    company = OtherProcesses(group, device)
    company.absence = Absence(group, device)
    return replace(walk, table=table, executor=executor, gradient_norms=gradient_norms, company=company)
