"""Lets a process without gradients take part in the joint transforms of the others."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from typing_extensions import override

from torchzero_clip.core.nodes import Node
from torchzero_clip.core.step import Step
from torchzero_clip.core.tools import Tools
from torchzero_clip.engine.numbers import Numbers
from torchzero_clip.engine.others import Others
from torchzero_clip.engine.readable import Readable
from torchzero_clip.engine.updates import Updates
from torchzero_clip.engine.walk import Walk
from torchzero_clip.types import State


class StandIn(Walk):
    """A walk through the chain with one parameter that is not in the optimizer: a 0, with a gradient of 0.

    If the process has no tensor for a joint transform, the transform runs on this parameter. It then exchanges its
    numbers with the other processes, and changes its state as they do. The parameter does not count in norms and
    metrics. If no process has a tensor for the transform, the state of the transform stays as it was.

    Args:
        walk: The walk of the parameters of the process.
        others: The other processes.
    """

    def __init__(self, walk: Walk, others: Others) -> None:
        zero = torch.zeros(1, dtype=torch.float32, device=others.device)
        param, grad = zero, zero.clone()
        states: list[State] = [{}]
        executor = Readable(Updates([param], [grad], states, walk.chain_state, False))
        lists = (walk.nodes, walk.groups, walk.settings, [param], [grad], states, [0])
        super().__init__(*lists, walk.chain_state, walk.loss, walk.loss_count, executor, keep_grads=True)
        self.metrics = walk.metrics
        self.gradient_norms = torch.zeros(1, dtype=torch.float64, device=others.device)
        self.others, self.numbers = others, Numbers()
        self._group, self._device = others.group, others.device

    @override
    def in_scope(self, node: Node, rows: list[int]) -> list[int]:
        """All rows for joint transforms; none for others, which exchange no numbers."""
        return rows if node.path in self.nodes.joint else []

    @override
    def step_for(self, node: Node, rows: list[int], rest: Sequence[Node] = ()) -> Step:
        step = super().step_for(node, rows, rest)
        step.tools = _Absent(self._group)
        # copies, because transforms may write to them, and `store` needs the values from before
        step.global_state = {key: self._copy(value) for key, value in step.global_state.items()}
        return step

    @override
    def store(self, node: Node, step: Step) -> None:
        """Store the state of a transform. If no process has a tensor for it, keep the state as it was."""
        someone, before = step.tools.someone, node.global_state(self.chain_state)
        if someone is not None:
            values = step.global_state.items()
            step.global_state = {key: _where(someone, value, before.get(key, value)) for key, value in values}
        super().store(node, step)

    def _copy(self, value: Any) -> Any:
        return value.to(self._device, copy=True) if isinstance(value, Tensor) else value


class _Absent(Tools):
    """The tools of a transform for which this process has no tensors."""

    is_stand_in = True

    def __init__(self, group: ProcessGroup) -> None:
        self.process_group = group


def _where(condition: Tensor, value: Any, other: Any) -> Any:
    """``value`` if the condition is true, else ``other``. Choosing between tensors does not wait for the device."""
    if isinstance(value, Tensor) and isinstance(other, Tensor):
        return torch.where(condition.to(other.device), value.to(other.device), other)
    return value if condition else other
