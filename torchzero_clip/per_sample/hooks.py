"""Hooks that capturing installs in a model and in optimizers, and the calls of the user's own hooks."""

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from typing_extensions import override

from torchzero_clip.compat import never_compiled
from torchzero_clip.functional.gradients import new_gradient

_Owner = TypeVar("_Owner")


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
        # torch calls hooks in a backward only, and has no public list of them. Ours would raise, as for a gradient from
        # outside of the layers
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
    for param, _ in changed:  # of these hooks, too, torch has no public list
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


def before_steps(owner: _Owner, check: Callable[[_Owner, Optimizer, bool], None]) -> Callable[[], object]:
    """Call a check before each step of any optimizer, until the owner is deleted, or what this returns is called.

    It gets the owner, the optimizer, and whether the step has a closure.
    """
    handle = register_optimizer_step_pre_hook(partial(_step, weakref.ref(owner), check))
    end = weakref.finalize(owner, handle.remove)  # in copies of the owner, it does nothing
    end.atexit = False  # at exit, nobody takes a step
    return end


def _step(
    reference: "weakref.ref[_Owner]",
    check: Callable[[_Owner, Optimizer, bool], None],
    optimizer: Optimizer,
    args: tuple[object, ...],
    kwargs: dict[str, object],
) -> None:
    if (owner := reference()) is not None:
        check(owner, optimizer, kwargs.get("closure", args[1] if len(args) > 1 else None) is not None)
