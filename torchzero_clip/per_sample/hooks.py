"""Hooks that capturing installs in a model, and the calls of the user's own hooks."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from torchzero_clip.compat import never_compiled


class Notice:
    """A hook that calls a function when a forward starts or ends. In copies of the model it has no effect.

    Args:
        told: The function. It gets the arguments of the hook except the module.
        only_with_gradients: Do not call the function in forwards without gradients.
    """

    def __init__(self, told: Callable[..., None], *, only_with_gradients: bool = False) -> None:
        self._told = told
        self._only_with_gradients = only_with_gradients

    @never_compiled
    def __call__(self, module: nn.Module, *args: Any) -> None:
        if not self._only_with_gradients or torch.is_grad_enabled():
            self._told(*args)

    @override
    def __reduce__(self) -> tuple[Any, ...]:
        return Notice, (_nobody,)


def _nobody(*args: Any) -> None:
    pass


class Outside:
    """A hook of a parameter that raises for a gradient from outside of the captured layers.

    Args:
        name: The name of the parameter.
        raises: Called with the error, and raises it if the clipper listens.
    """

    def __init__(self, name: str, refuse: Callable[[str], None]) -> None:
        self._name = name
        self._refuse = refuse

    def __call__(self, grad: Tensor) -> None:
        self._refuse(self._name)


def accumulate(values: Sequence[tuple[Any, Tensor]]) -> None:
    """Add to the gradients of parameters as a backward does, calling the hooks that users have registered.

    If a hook raises, no gradient changes, except if it is a hook that runs after accumulation.
    """
    changed: list[tuple[Any, Tensor]] = []
    for param, value in values:
        value = value.to(param.device, param.dtype).detach()
        hooks = [hook for hook in (param._backward_hooks or {}).values() if not isinstance(hook, Outside)]
        for hook in hooks:
            answer = hook(value)
            value = value if answer is None else answer
        if value.shape != param.shape:
            raise RuntimeError(
                f"a hook of a parameter of shape {tuple(param.shape)} returned a gradient of shape {tuple(value.shape)}"
            )
        changed.append((param, value.clone() if hooks else value))  # a user may have stored the tensor that a hook got
    for param, value in changed:
        if param.grad is None:
            param.grad = value
        else:
            param.grad.add_(value)
    for param, _ in changed:
        for hook in list((param._post_accumulate_grad_hooks or {}).values()):
            hook(param)
