"""Distributed parameters that have no gradient on this process, and may have one on the others."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from torchzero_clip.compat import is_distributed
from torchzero_clip.core.chain import Chain
from torchzero_clip.core.kinds import Gate, Scaling, UpdateRule
from torchzero_clip.core.learning_rate import LR
from torchzero_clip.core.nodes import Nodes
from torchzero_clip.functional.shards import Part, all_reduce
from torchzero_clip.optimizers.weight_decay import WeightDecay
from torchzero_clip.types import State

Group = dict[str, Any]


class Missing:
    """Gives zeros to distributed parameters without a gradient, so that all processes send as many numbers.

    Their gradients count as zeros in norms, and numbers of state, such as statistics and counts of steps, move as on
    the other processes. `put_back` takes back all other changes of these parameters and of their state.

    Args:
        nodes: The transforms.
        groups: The param groups.
        states: ``optimizer.state``.
    """

    def __init__(self, nodes: Nodes, groups: Sequence[Group], states: dict[Tensor, State]) -> None:
        self._states = states
        self._kept: list[tuple[Tensor, Tensor, State]] = []
        """Each of the parameters, with copies of it and of its state."""
        params = [p for group in groups for p in group["params"] if is_distributed(p) and p.requires_grad]
        missing = [param for param in params if param.grad is None]
        if _asks_each(nodes):
            missing = _present_elsewhere(params, missing)
        for param in missing:
            param.grad = torch.zeros_like(param)
            state = states.get(param, {})
            copies = {key: value.clone() for key, value in state.items() if isinstance(value, Tensor) and value.ndim}
            self._kept.append((param, param.detach().clone(), copies))

    def put_back(self) -> None:
        """Take back what a step has changed, but for numbers of state."""
        for param, value, copies in self._kept:
            param.grad = None
            param.detach().copy_(value)
            state = self._states.get(param, {})
            state.update(copies)
        self._kept.clear()


def _asks_each(nodes: Nodes) -> bool:
    """False if zeros change nothing, so that it makes no difference whether another process has the gradient."""
    if any(node.has_state for node in nodes):
        return True
    for transform in (node.transform for node in nodes):
        if isinstance(transform, Scaling) and transform.slicing.dim == "global":
            metric = transform.slicing.metric
            if metric.kind != "norm" or metric.p <= 0:
                return True
        elif not isinstance(transform, UpdateRule | LR | WeightDecay | Gate | Chain):
            return True
    return False


def _present_elsewhere(params: Sequence[Tensor], missing: Sequence[Tensor]) -> list[Tensor]:
    """The ``missing`` ones that have a gradient on another process of their mesh.

    All processes call it, and only those where a gradient is missing wait for the result.

    Args:
        params: All distributed parameters.
        missing: Those without a gradient on this process.
    """
    parts: list[Part] = []
    flags: list[Tensor] = []
    for param in params:
        mesh = param.device_mesh  # pyright: ignore[reportAttributeAccessIssue]
        groups = tuple(mesh.get_group(k) for k in range(mesh.ndim))
        flag = torch.full((1,), float(param.grad is not None), dtype=torch.float64, device=param.device)
        parts.append(Part(flag, (0,), 1, groups))
        flags.append(flag)
    counts = all_reduce(parts, flags, ReduceOp.SUM)
    if not missing:
        return []
    wanted = {id(param) for param in missing}
    return [param for param, count in zip(params, counts, strict=True) if id(param) in wanted and count.item() > 0]
