"""Refuses steps of optimizers that come before the release of private gradients, or that get more than it."""

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from torchzero_clip.compat import never_compiled
from torchzero_clip.private_losses import private_ids, refuse_loss


def watch_steps(clipper: Any) -> Callable[[], None]:
    """Let steps over the parameters raise if they have a closure, come before `pre_step`, or use other gradients.

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
    params = [param for group in optimizer.param_groups for param in group["params"]]
    own = set(map(id, clipper.released_params()))
    if not any(id(param) in own for param in params):
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
