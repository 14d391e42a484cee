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
    """A walk through the chain with one parameter that is not in the optimizer: a 0, with a gradient of 0.

    If the process has no tensor for a joint transform, the transform runs on this parameter. It then exchanges its
    numbers with the other processes, and changes its state as it does there. The parameter does not count in norms and
    metrics.

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
