"""Refuses steps of optimizers that come before the release of private gradients, or that get a loss."""

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from torchzero_clip.compat import never_compiled
from torchzero_clip.private_losses import refuse_loss


def watch_steps(clipper: Any) -> Callable[[], None]:
    """Let steps of optimizers over the parameters raise if they have a closure, or come before `pre_step`.

    Return what ends this if called.
    """
    return register_optimizer_step_pre_hook(partial(_check_step, weakref.ref(clipper))).remove


@never_compiled
def _check_step(
    reference: "weakref.ref[Any]", optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    clipper = reference()
    if clipper is None:
        return
    if kwargs.get("closure", args[1] if len(args) > 1 else None) is not None:
        refuse_loss(optimizer, "a closure")
    params = (param for group in optimizer.param_groups for param in group["params"])
    if clipper.waits and clipper.covers(params):
        raise RuntimeError(
            "private gradients wait to be released, and .grad does not contain them: call clipper.pre_step() before "
            "the step of the optimizer. clipper.discard() drops them"
        )
