"""Hooks that capturing installs in a model, and the calls of the user's own hooks."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from typing_extensions import override

from torchzero_clip.compat import never_compiled
from torchzero_clip.functional.gradients import new_gradient


class Hook:
    """A hook of the clipper's own, which calls a function. In copies of the model it does nothing."""

    def __init__(self, function: Callable[..., Tensor | None]) -> None:
        self._function = function

    @never_compiled
    def __call__(self, *args: object) -> Tensor | None:
        return self._function(*args)

    @override
    def __reduce__(self) -> tuple[object, ...]:
        return Hook, (_nothing,)


def _nothing(*args: object) -> None:
    pass


def accumulate(values: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Add to the gradients of parameters as a backward does, calling the hooks that users have registered.

    The values may become gradients, so the caller must not use them afterwards. If a hook raises, no gradient changes,
    except if it is a hook that runs after accumulation.
    """
    changed: list[tuple[Tensor, Tensor]] = []
    for param, value in values:
        dtype = getattr(param, "grad_dtype", None) or param.dtype  # torch 2.8 and 2.9 have no grad_dtype
        value = value.to(param.device, dtype).detach()
        # ours would raise, because they take any gradient for one from outside of the layers
        hooks = [hook for hook in (param._backward_hooks or {}).values() if not isinstance(hook, Hook)]
        for hook in hooks:
            answer = hook(value)
            value = value if answer is None else answer
        if value.shape != param.shape:
            raise RuntimeError(
                f"a hook of a parameter of shape {tuple(param.shape)} returned a gradient of shape {tuple(value.shape)}"
            )
        # a user may have stored the tensor that a hook got
        changed.append((param, value.detach().clone() if hooks else value))
    for param, value in changed:
        grad = param.grad
        if grad is not None and grad.layout == torch.strided and 0 not in grad.stride():
            grad.add_(value)
        else:  # a sparse gradient becomes dense, as in torch, and an expanded one gets memory for each element
            param.grad = new_gradient(value if grad is None else value + grad.detach(), param)
    for param, _ in changed:
        for hook in list((param._post_accumulate_grad_hooks or {}).values()):
            hook(param)


def replace_gradients(values: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Set the gradients of parameters to values, as `accumulate` does. If a hook raises, no gradient changes."""
    before = [(param, param.grad) for param, _ in values]
    try:
        for param, _ in values:
            param.grad = None
        accumulate(values)
    except BaseException:
        for param, grad in before:
            param.grad = grad
        raise
