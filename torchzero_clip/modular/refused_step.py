"""A refused step: the optimizer takes it without gradients, and what it has changed is put back."""

from collections import deque
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from torchzero_clip.compat import never_compiled

COUNTERS = 1024
"""Tensors of more elements are not counters. An optimizer does not change them without gradients."""

Restore = Callable[[], Any]
"""Returns a value with what it contained when it was noted."""


class RefusedStep:
    """Hides the gradients of an optimizer until `undo`, which also puts back what its step has counted."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        params = {param for group in optimizer.param_groups for param in group["params"]}
        self._grads = [(param, param.grad) for param in params if param.grad is not None]
        groups = [(group, {k: v for k, v in group.items() if k != "params"}) for group in optimizer.param_groups]
        self._groups = [(group, _noted(entries)) for group, entries in groups]
        self._state = _noted(dict(optimizer.state))
        self._attributes = _noted({k: v for k, v in vars(optimizer).items() if not _belongs_to_torch(k)})
        for param, _ in self._grads:
            param.grad = None

    def give_back(self) -> None:
        """Give the gradients back, where there are no new ones."""
        for param, grad in self._grads:
            if param.grad is None:
                param.grad = grad

    @torch.no_grad()
    @never_compiled
    def undo(self) -> None:
        """Put everything back as it was."""
        self.give_back()
        for group, restore in self._groups:
            _replace(group, restore(), keep=("params",))
        _replace(self._optimizer.state, self._state())
        own = vars(self._optimizer)
        _replace(own, self._attributes(), keep=list(filter(_belongs_to_torch, own)))


def _belongs_to_torch(name: str) -> bool:
    """True for attributes that every optimizer has: groups, state, hooks, and `step` as schedulers wrap it."""
    return name in ("param_groups", "state", "defaults", "step") or name.startswith("_optimizer_")


def _replace(mapping: Any, values: Mapping[Any, Any], *, keep: Collection[str] = ()) -> None:
    for key in [key for key in mapping if key not in values and key not in keep]:
        del mapping[key]
    mapping.update(values)


def _noted(value: Any) -> Restore:
    """Note what a value contains: numbers, small tensors, and containers of them at any depth."""
    if isinstance(value, Tensor):
        return _noted_tensor(value)
    if isinstance(value, dict):
        items = {key: _noted(own) for key, own in value.items()}  # pyright: ignore[reportUnknownVariableType]
    elif isinstance(value, list | tuple | set | deque):
        items = dict(enumerate(map(_noted, value)))  # pyright: ignore[reportUnknownArgumentType]
    else:
        return lambda: value

    def restore() -> Any:
        old = {key: restore() for key, restore in items.items()}
        if isinstance(value, dict):
            _replace(value, old)
        elif isinstance(value, set):
            value.intersection_update(old.values())
            value.update(old.values())
        elif not isinstance(value, tuple):
            value.clear()
            value.extend(old.values())
        return value

    return restore


def _noted_tensor(tensor: Tensor) -> Restore:
    if tensor.numel() > COUNTERS or tensor.layout != torch.strided or tensor.is_inference():
        return lambda: tensor
    kept, version = tensor.detach().clone(), tensor._version

    def restore() -> Tensor:
        if tensor._version != version:
            tensor.detach().copy_(kept)
        return tensor

    return restore
