"""Measures the gradients of optimizers that are not a `Modular`, by hooks of their steps."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from torchzero_clip.compat import never_compiled
from torchzero_clip.engine.reported_loss import ReportedLoss
from torchzero_clip.functional.norms import each_norm
from torchzero_clip.functional.scratch import Scratch
from torchzero_clip.recorder.run import FAILED, Run, nothing
from torchzero_clip.recorder.tape import Note


class Hooks:
    """Measures the gradients of an optimizer that is not a `Modular`, before its step."""

    def __init__(self, run: Run, optimizer: Optimizer) -> None:
        self.reported = ReportedLoss()
        before, after = optimizer.register_step_pre_hook(self.before), optimizer.register_step_post_hook(self.after)
        self._handles = (before, after)
        self._run = run
        self._scratch = Scratch()
        self._seen: list[tuple[int, int]] | None = None
        """The gradients of the step that was measured, and their versions."""

    def remove(self) -> None:
        """Remove the hooks from the optimizer."""
        for handle in self._handles:
            handle.remove()

    def forget(self) -> None:
        """Forget what was measured and reported for a step that was not taken."""
        self._seen = None
        self.reported.clear()

    @never_compiled
    def before(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Measure the gradients, or wrap the closure that makes them."""
        self._run.output.check()
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if isinstance(closure, _Measured):  # a subclass calls the step of its base class
            return None
        if closure is None:
            if self._seen is None or self._seen != _versions(optimizer):
                self._run.finish()
                self._measure(optimizer, None)
            return None
        self._run.finish()
        closure = _Measured(closure, partial(self._measure, optimizer))
        return (
            (args, {**kwargs, "closure": closure}) if "closure" in kwargs else ((optimizer, closure, *args[2:]), kwargs)
        )

    @torch.no_grad()
    @never_compiled
    def _measure(self, optimizer: Optimizer, loss: Any) -> None:
        groups = optimizer.param_groups
        params = [param for group in groups for param in group["params"] if param.grad is not None]
        grads = [_dense(param.grad) for param in params]
        norms = each_norm(grads, self._scratch) if grads else None
        scale = getattr(optimizer, "grad_scale", None)
        if norms is not None and isinstance(scale, Tensor):
            norms = norms / scale.to(norms.device, torch.float64)
        if loss is None and self.reported.count:
            loss = self.reported.mean()
        self.reported.clear()
        numbers: dict[str, Any] = {} if loss is None else {"loss": loss}
        found_inf = getattr(optimizer, "found_inf", None)
        if isinstance(found_inf, Tensor):
            numbers["found_inf"] = found_inf.detach()
        self._run.save_params(params)
        self._seen = _versions(optimizer)
        self._run.finish = partial(self._write, groups, params, norms, numbers, FAILED)

    @torch.no_grad()
    def _write(self, groups: Any, params: Any, norms: Tensor | None, numbers: dict[str, Any], reason: str) -> None:
        self._run.finish, self._seen = nothing, None
        self._run.write(groups, params, norms, numbers, Note(self._run.step, reason))

    @never_compiled
    def after(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Write a step that was taken."""
        finish = self._run.finish
        if isinstance(finish, partial):
            finish.func(*finish.args[:-1], "")


class _Measured:
    """A closure that measures the gradients after its first call. `torch.optim.LBFGS` calls it several times."""

    def __init__(self, closure: Callable[[], Any], measure: Callable[[Any], None]) -> None:
        self._closure = closure
        self._measure: Callable[[Any], None] | None = measure

    def __call__(self) -> Any:
        loss = self._closure()
        measure, self._measure = self._measure, None
        if measure is not None:
            measure(loss)
        return loss


def _versions(optimizer: Optimizer) -> list[tuple[int, int]]:
    grads = (param.grad for group in optimizer.param_groups for param in group["params"])
    return [(id(grad), grad._version) for grad in grads if grad is not None]


def _dense(grad: Any) -> Tensor:
    """A gradient, or the values of a sparse one."""
    return grad.coalesce().values() if grad.layout == torch.sparse_coo else grad.detach()
