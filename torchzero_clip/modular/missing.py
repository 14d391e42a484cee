"""Distributed parameters that have no gradient on this process, and may have one on the others."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torchzero_clip.compat import is_distributed
from torchzero_clip.core.kinds import Gate, Scaling, UpdateRule
from torchzero_clip.core.nodes import Nodes
from torchzero_clip.core.scope import named_params
from torchzero_clip.core.transform import treats_each_alone
from torchzero_clip.engine.walk import Walk
from torchzero_clip.functional.gradients import zeros_change
from torchzero_clip.functional.shards import present_elsewhere
from torchzero_clip.types import State

Group = dict[str, Any]


class Missing:
    """Gives zeros to distributed parameters without a gradient, so that all send equally many numbers.

    The zeros count in norms, and the numbers of statistics move as on the other processes. `put_back` takes back all
    other changes of these parameters and of their state.

    Args:
        nodes: The transforms.
        groups: The param groups.
        states: ``optimizer.state``.
    """

    def __init__(self, nodes: Nodes, groups: Sequence[Group], states: dict[Tensor, State]) -> None:
        self._nodes = nodes
        self._groups = groups
        self._states = states
        self._kept: list[tuple[Tensor, Tensor, State | None]] = []
        """Each of the parameters, with copies of it and of its state."""
        params = [p for group in groups for p in group["params"] if is_distributed(p) and p.requires_grad]
        missing = [param for param in params if param.grad is None]
        if any(_zeros_change_others(node.transform) for node in nodes):
            missing = present_elsewhere(params, missing)
        for param in missing:
            param.grad = torch.zeros_like(param)
            state = states.get(param)
            copies = None if state is None else {k: v.clone() if isinstance(v, Tensor) else v for k, v in state.items()}
            self._kept.append((param, param.detach().clone(), copies))

    def put_back(self, walk: Walk | None) -> None:
        """Take back what a step has changed, but for the numbers of statistics.

        Args:
            walk: The step; None if it did not begin.
        """
        for param, value, copies in self._kept:
            param.grad = None
            param.detach().copy_(value)
            state = self._states.pop(param, {})
            numbers = self._numbers_of_statistics(state) if _has_gradient(walk, param) else {}
            if copies is not None or numbers:
                # elementwise state of statistics begins with the numbers
                first = self._first_state(param) if copies is None else {}
                begun = {key: value for key, value in first.items() if self._is_of_statistics(key)}
                self._states[param] = {**begun, **(copies or {}), **numbers}
        self._kept.clear()

    def _numbers_of_statistics(self, state: State) -> State:
        return {k: v for k, v in state.items() if isinstance(v, Tensor) and not v.ndim and self._is_of_statistics(k)}

    def _is_of_statistics(self, key: str) -> bool:
        return key.startswith(tuple(f"{node.path}/" for node in self._nodes if node.transform.keeps_statistics))

    def _first_state(self, param: Tensor) -> State:
        """The state that a parameter has before its first gradient."""
        for group in self._groups:
            for named in named_params(group):
                if named.param is param:
                    return self._nodes.possible_state(named, group)
        return {}


def _has_gradient(walk: Walk | None, param: Tensor) -> bool:
    """True if the gradient on all processes together is known not to be 0. It waits for the device."""
    norms = None if walk is None else walk.gradient_norms
    if walk is None or norms is None or len(norms) != len(walk.params):
        return False
    return any(own is param and norm != 0 for own, norm in zip(walk.params, norms.tolist(), strict=True))


def _zeros_change_others(transform: Any) -> bool:
    """True if a gradient of zeros changes the result for other tensors."""
    if isinstance(transform, Scaling):
        # a joint norm of averages has those of all tensors that take part
        return transform.slicing.dim == "global" and (zeros_change(transform.slicing) or transform.has_state())
    return not (isinstance(transform, UpdateRule | Gate) or treats_each_alone(transform))
