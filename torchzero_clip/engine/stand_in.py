"""Lets a process without gradients take part in the joint transforms of the others."""

import torch
from typing_extensions import override

from torchzero_clip.core.nodes import Node
from torchzero_clip.engine.numbers import Numbers
from torchzero_clip.engine.others import Others
from torchzero_clip.engine.readable import Readable
from torchzero_clip.engine.updates import Updates
from torchzero_clip.engine.walk import Walk
from torchzero_clip.types import State


class StandIn(Walk):
    """A walk with one parameter that the optimizer does not have: a 0, with a gradient of 0.

    Joint transforms run on it where the process has no tensor for them, so that they exchange their numbers with the
    other processes and change their state as there. The parameter counts in no norm and no metric.

    Args:
        walk: The walk of the parameters of the process.
        others: The other processes.
    """

    def __init__(self, walk: Walk, others: Others) -> None:
        zero = torch.zeros(1, dtype=torch.float32, device=others.device)
        param, grad = zero, zero.clone()
        states: list[State] = [{}]
        executor = Readable(Updates([param], [grad], states, walk.chain_state, False))
        executor.process_group, executor.is_stand_in = others.group, True
        lists = (walk.nodes, walk.groups, walk.settings, [param], [grad], states, [0])
        super().__init__(*lists, walk.chain_state, walk.loss, walk.loss_count, executor, keep_grads=True)
        self.metrics = walk.metrics
        self.gradient_norms = torch.zeros(1, dtype=torch.float64, device=others.device)
        self.others, self.numbers = others, Numbers()

    @override
    def in_scope(self, node: Node, rows: list[int]) -> list[int]:
        return rows
