"""Distributed parameters that have no gradient on this process, and may have one on the others."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torchzero_clip.compat import is_distributed
from torchzero_clip.core.chain import Chain
from torchzero_clip.core.kinds import Gate, Scaling, UpdateRule
from torchzero_clip.core.learning_rate import LR
from torchzero_clip.core.nodes import Nodes
from torchzero_clip.core.scope import named_params
from torchzero_clip.functional.shards import present_elsewhere
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
        self._nodes = nodes
        self._groups = groups
        self._states = states
        self._kept: list[tuple[Tensor, Tensor, State]] = []
        """Each of the parameters, with copies of it and of its state."""
        params = [p for group in groups for p in group["params"] if is_distributed(p) and p.requires_grad]
        missing = [param for param in params if param.grad is None]
        if _asks_each(nodes):
            missing = present_elsewhere(params, missing)
        for param in missing:
            param.grad = torch.zeros_like(param)
            copies = {key: value.clone() for key, value in _of_elements(states.get(param, {})).items()}
            self._kept.append((param, param.detach().clone(), copies))

    def put_back(self) -> None:
        """Take back what a step has changed, but for numbers of state."""
        for param, value, copies in self._kept:
            param.grad = None
            param.detach().copy_(value)
            state = self._states.get(param, {})
            made = _of_elements(state).keys() - copies.keys()
            if made:
                first = self._first_state(param)
                state.update({key: first[key] for key in made & first.keys()})
            state.update(copies)
        self._kept.clear()

    def _first_state(self, param: Tensor) -> State:
        """The state that a parameter has before its first gradient."""
        for group in self._groups:
            for named in named_params(group):
                if named.param is param:
                    return self._nodes.possible_state(named, group)
        return {}


def _of_elements(state: State) -> State:
    """The entries of the state of a parameter that are not numbers."""
    return {key: value for key, value in state.items() if isinstance(value, Tensor) and value.ndim}


def _asks_each(nodes: Nodes) -> bool:
    """False if zeros change nothing, so that it makes no difference whether another process has the gradient."""
    if any(node.has_state for node in nodes):
        return True
    for transform in (node.transform for node in nodes):
        if isinstance(transform, Scaling) and transform.slicing.dim == "global":
            metric = transform.slicing.metric
            if metric.kind != "norm" or metric.p <= 0:
                return True
        elif not isinstance(transform, UpdateRule | LR | Gate | Chain):
            return True
    return False
