"""Measures the gradients of optimizers that are not a `Modular`, by hooks of their steps."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from torchzero_clip.compat import never_compiled, steps_being_taken
from torchzero_clip.engine.listener import Attached
from torchzero_clip.engine.reported_loss import ReportedLoss
from torchzero_clip.functional.norms import norms_of_each
from torchzero_clip.functional.scratch import Scratch
from torchzero_clip.modular.before_step import handle_of
from torchzero_clip.recorder.run import FAILED, Run, nothing
from torchzero_clip.recorder.tape import Note


class Hooks(Attached):
    """Measures the gradients of an optimizer that is not a `Modular`, before its step."""

    def __init__(self, run: Run, optimizer: Optimizer) -> None:
        self.reported = ReportedLoss()
        self._handles = optimizer.register_step_pre_hook(self.before), optimizer.register_step_post_hook(self.after)
        self._run = self.listener = run
        self._scratch = Scratch()

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    @never_compiled
    def before(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Measure the gradients, or wrap the closure that makes them."""
        # the transforms before the steps tell the listener what they have seen
        if steps_being_taken(optimizer) > 1 or handle_of(optimizer) is not None:
            return None
        self._run.output.check()
        self._run.finish(FAILED)
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            self._measure(optimizer, None)
            return None
        closure = _measured(closure, partial(self._measure, optimizer))
        if "closure" in kwargs:
            return args, kwargs | {"closure": closure}
        return (optimizer, closure, *args[2:]), kwargs

    @torch.no_grad()
    @never_compiled
    def _measure(self, optimizer: Optimizer, loss: Any) -> None:
        groups = optimizer.param_groups
        params = [param for group in groups for param in group["params"] if param.grad is not None]
        found = self._run.measurable.among([param.grad for param in params])
        kept = params if len(found) == len(params) else [p for p in params if self._run.measurable.among([p.grad])]
        grads = [g.coalesce().values() if g.layout == torch.sparse_coo else g.detach() for g in found]
        norms = norms_of_each(grads, self._scratch) if grads else None
        scale = getattr(optimizer, "grad_scale", None)
        if norms is not None and isinstance(scale, Tensor):
            norms = norms / scale.to(norms.device, torch.float64)
        if loss is None:
            loss = self.reported.loss().value
        self.reported.clear()
        numbers = {"loss": loss, "found_inf": getattr(optimizer, "found_inf", None)}
        self._run.save_params(params)
        write = partial(self._run.write, groups, kept, norms, numbers, is_first=self._run.step == 0)
        self._run.finish = partial(self._finish, optimizer, write)

    @never_compiled
    def after(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if steps_being_taken(optimizer) <= 1:
            self._run.finish("")

    @torch.no_grad()
    def _finish(self, optimizer: Optimizer, write: Callable[[Note], None], reason: str | None = None) -> None:
        """Write a step that was measured. Without a reason it has failed, unless it is still being taken."""
        if reason is None and steps_being_taken(optimizer):
            return
        self._run.finish = nothing
        write(Note(self._run.step, FAILED if reason is None else reason))


def _measured(closure: Callable[[], Any], measure: Callable[[Any], None]) -> Callable[[], Any]:
    """A closure that measures the gradients after its first call. `torch.optim.LBFGS` calls it several times."""
    waiting = [measure]

    def call() -> Any:
        loss = closure()
        while waiting:
            waiting.pop()(loss)
        return loss

    return call
