"""Distributed parameters that have no gradient on this process, and may have one on the others."""

from collections.abc import Sequence

import torch
from torch import Tensor

from torchzero_clip.core.nodes import Nodes
from torchzero_clip.core.scope import named_params
from torchzero_clip.engine.listener import Seen
from torchzero_clip.functional.lists import params_of
from torchzero_clip.functional.shards import without_gradient
from torchzero_clip.types import Group, State, StateByParam


class Missing:
    """Gives zeros to distributed parameters without a gradient, so that all processes send equally many numbers."""

    # the zeros count in norms, and the numbers of statistics change as they do on the other processes

    def __init__(self, nodes: Nodes, groups: Sequence[Group], states: StateByParam) -> None:
        self._nodes, self._groups, self._states = nodes, groups, states
        self._kept: list[tuple[Tensor, Tensor, State | None]] = []  # each parameter, with copies of it and of its state
        params = params_of(groups)
        for param in without_gradient(params, zeros_count=nodes.zeros_matter):
            param.grad = torch.zeros_like(param)
            state = states.get(param)
            copies = None if state is None else {k: v.clone() if isinstance(v, Tensor) else v for k, v in state.items()}
            self._kept.append((param, param.detach().clone(), copies))

    def put_back(self, walk: Seen | None) -> None:
        """Undo what a step has changed in these parameters and their state, except for the numbers of statistics."""
        if not self._kept:
            return
        norms = {} if walk is None else _known_norms(walk)
        statistics = tuple(f"{node.path}/" for node in self._nodes if node.transform.keeps_statistics)
        for param, value, copies in self._kept:
            param.grad = None
            param.detach().copy_(value)
            state = self._states.pop(param, {})
            moved: State = {}
            if norms.get(id(param), 0.0):  # else perhaps no process has a gradient
                # if the numbers of a statistic start, its elementwise state has to exist
                is_new = not any("/" in key for key in copies or ())  # bare keys are those of other packages
                numbers = {k: value for k, value in state.items() if isinstance(value, Tensor) and not value.ndim}
                first = {**(self._first_state(param) if is_new else {}), **numbers}
                moved = {key: value for key, value in first.items() if key.startswith(statistics)}
            if copies is not None or moved:
                self._states[param] = {**(copies or {}), **moved}
        self._kept.clear()

    def _first_state(self, param: Tensor) -> State:
        pairs = ((named, group) for group in self._groups for named in named_params(group))
        return next(self._nodes.possible_state(named, group) for named, group in pairs if named.param is param)


def _known_norms(walk: Seen) -> dict[int, float]:
    """The norm of each gradient on all processes together, by the id of the parameter; empty if they are not known."""
    norms, params = walk.gradient_norms.norms, walk.table.params
    if norms is None or len(norms) != len(params):
        return {}
    return dict(zip(map(id, params), norms.tolist(), strict=True))
