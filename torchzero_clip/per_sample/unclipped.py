"""Refuses steps of optimizers whose gradients wait to be clipped."""

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from torchzero_clip.compat import never_compiled


def refuse_steps(engine: Any) -> Callable[[], Any]:
    """Let steps of any optimizer over parameters raise while their gradients wait. Return what ends this if called."""
    handle = register_optimizer_step_pre_hook(partial(_refuse, weakref.ref(engine)))
    end = weakref.finalize(engine, handle.remove)  # in copies of the engine, it does nothing
    end.atexit = False
    return end


@never_compiled
def _refuse(reference: "weakref.ref[Any]", optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    engine = reference()
    if engine is None or not (engine.waiting or engine.accumulated):
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
