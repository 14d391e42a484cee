"""Measures the gradients of optimizers that are not a `Modular`, by hooks of their steps."""

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from torchzero_clip.compat import may_call_base, never_compiled
from torchzero_clip.engine.listener import HasListener
from torchzero_clip.engine.reported_loss import ReportedLoss
from torchzero_clip.functional.norms import norms_of_each
from torchzero_clip.functional.scratch import Scratch
from torchzero_clip.modular.before_step import handle_of
from torchzero_clip.modular.host import end_surely, unwrap_method
from torchzero_clip.recorder.recording import FAILED, Recording, nothing
from torchzero_clip.recorder.tape import Note


class Depth:
    """How often `step` of an optimizer has been entered: twice if that of a subclass calls that of its base class."""

    def __init__(self) -> None:
        self.count = 0
        self._is_wrapped = False  # True from `begin` to `finish`, which a wrapper of ``optimizer.step`` calls

    def begin(self, optimizer: Optimizer) -> None:
        self.count, self._is_wrapped = 0, True

    def finish(self, optimizer: Optimizer) -> None:
        self.count, self._is_wrapped = 0, False

    def enter(self, optimizer: Optimizer) -> bool:
        """Count a step that calls its hooks. True for the outermost one."""
        # a step that was stored before may come without the wrapper, after one that has raised
        is_inner = self.count > 0 and (self._is_wrapped or may_call_base(optimizer))
        self.count = self.count + 1 if is_inner else 1
        return not is_inner

    def leave(self) -> bool:
        """True at the end of the outermost step."""
        self.count -= 1
        return self.count <= 0


class StepHooks(HasListener):
    """Measures the gradients of an optimizer that is not a `Modular`, before its step."""

    def __init__(self, run: Recording, optimizer: Optimizer) -> None:
        self.reported = ReportedLoss()
        self._handles = optimizer.register_step_pre_hook(self.before), optimizer.register_step_post_hook(self.after)
        self._depth = Depth()
        self._wrapper = end_surely(optimizer, self._depth.begin, self._depth.finish)
        self._optimizer = weakref.ref(optimizer)
        self._recording = self.listener = run
        self._scratch = Scratch()

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        if (optimizer := self._optimizer()) is not None:
            unwrap_method(optimizer, "step", self._wrapper)

    @never_compiled
    def before(
        self, optimizer: Optimizer, args: tuple[object, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[object, ...], dict[str, Any]] | None:
        """Measure the gradients, or wrap the closure that makes them."""
        # the transforms before the steps tell the listener what they have seen
        if not self._depth.enter(optimizer) or handle_of(optimizer) is not None:
            return None
        self._recording.output.check()
        self._recording.finish(FAILED)
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
    def _measure(self, optimizer: Optimizer, loss: object) -> None:
        groups = optimizer.param_groups
        params = [param for group in groups for param in group["params"] if param.grad is not None]
        measurable = self._recording.measurable
        grads = measurable.among([param.grad for param in params])
        measured = params if len(grads) == len(params) else [p for p in params if measurable.among([p.grad])]
        grads = [g.coalesce().values() if g.layout == torch.sparse_coo else g.detach() for g in grads]
        norms = norms_of_each(grads, self._scratch) if grads else None
        scale = getattr(optimizer, "grad_scale", None)
        if norms is not None and isinstance(scale, Tensor):
            norms = norms / scale.to(norms)
        if loss is None:
            loss = self.reported.loss().value
        self.reported.clear()
        numbers = {"loss": loss, "found_inf": getattr(optimizer, "found_inf", None)}
        self._recording.save_params(params)
        write = partial(self._recording.write, groups, measured, norms, numbers, is_first=self._recording.step == 0)
        self._recording.finish = partial(self._finish, write)

    @never_compiled
    def after(self, optimizer: Optimizer, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        if self._depth.leave():
            self._recording.finish("")

    @torch.no_grad()
    def _finish(self, write: Callable[[Note], None], reason: str | None = None) -> None:
        """Write a step that was measured. Without a reason it has failed, unless it is still being taken."""
        if reason is None and self._depth.count:
            return
        self._recording.finish = nothing
        write(Note(self._recording.step, FAILED if reason is None else reason))


def _measured(closure: Callable[[], object], measure: Callable[[object], None]) -> Callable[[], object]:
    """A closure that measures the gradients after its first call. `torch.optim.LBFGS` calls it several times."""
    waiting = [measure]

    def call() -> object:
        loss = closure()
        while waiting:
            waiting.pop()(loss)
        return loss

    return call
