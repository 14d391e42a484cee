"""Refuses steps of optimizers whose gradients wait to be clipped or released, or were not released."""

import weakref
from collections.abc import Callable, Collection
from functools import partial
from typing import Protocol, TypeVar

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from torchzero_clip.private_losses import TrainsPrivately, private_ids, refuse_loss

_Owner = TypeVar("_Owner")


class Clips(Protocol):
    """What the check of a step asks of an engine: the ids of parameters whose gradients are not in ``.grad`` yet."""

    @property
    def waiting(self) -> Collection[int]:
        """Those whose gradients wait to be clipped."""
        ...

    @property
    def accumulated(self) -> Collection[int]:
        """Those whose clipped sums wait for `pre_step`."""
        ...


class Releases(TrainsPrivately, Protocol):
    """What the check of a step asks of a private clipper."""

    @property
    def waits(self) -> bool:
        """True if there was a `backward` since the last `pre_step`."""
        ...


def watch_steps(owner: _Owner, check: Callable[[_Owner, Optimizer, bool], None]) -> Callable[[], object]:
    """Call a check before each step of any optimizer, until the owner is deleted, or what this returns is called.

    It gets the owner, the optimizer, and whether the step has a closure.
    """
    handle = register_optimizer_step_pre_hook(partial(_step, weakref.ref(owner), check))
    end = weakref.finalize(owner, handle.remove)  # in copies of the owner, it does nothing
    end.atexit = False
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


def refuse_unclipped(engine: Clips, optimizer: Optimizer, _: bool) -> None:
    """Raise a RuntimeError if gradients of the parameters wait."""
    if not (engine.waiting or engine.accumulated):
        return
    own = {id(param) for group in optimizer.param_groups for param in group["params"]}
    if not own.isdisjoint(engine.waiting):
        raise RuntimeError(
            "gradients of an earlier loss.backward() wait to be clipped, and .grad does not contain them. Before the "
            "step, call either clipper.backward(losses) with one loss for each sample, or loss.backward(); "
            "clipper.clip_and_accumulate(); clipper.pre_step(). For ordinary gradients, run forward and backward in "
            "'with clipper.paused():'. clipper.discard() drops the gradients that wait"
        )
    if not own.isdisjoint(engine.accumulated):
        raise RuntimeError(
            "clipped gradients wait for clipper.pre_step(), and .grad does not contain them: call it before the step. "
            "To drop them, call pre_step() and then optimizer.zero_grad()"
        )


def refuse_unreleased(clipper: Releases, optimizer: Optimizer, has_closure: bool) -> None:
    """Raise if a step over private parameters has a closure, comes before `pre_step`, or uses other gradients."""
    if has_closure:
        refuse_loss(optimizer.param_groups, "a closure")
    params = [param for group in optimizer.param_groups for param in group["params"]]
    if set(map(id, clipper.released_params())).isdisjoint(map(id, params)):
        return
    if clipper.waits:
        raise RuntimeError(
            "private gradients wait to be released, and .grad does not contain them: call clipper.pre_step() before "
            "the step of the optimizer. clipper.discard() drops them"
        )
    private = private_ids()
    for param in params:
        if param.requires_grad and param.grad is not None and id(param) not in private:
            raise RuntimeError(
                f"a parameter of shape {tuple(param.shape)} in the optimizer has a gradient that no "
                "PrivateGradientClipper has released: train it in the module of the clipper, or freeze it. If the "
                "gradient comes from public data only, use another optimizer for it"
            )
