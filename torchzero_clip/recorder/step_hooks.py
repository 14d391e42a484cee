"""Measures the gradients of optimizers that are not a `Modular`, by hooks of their steps."""

import weakref
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.optim import Optimizer

from torchzero_clip.compat import never_compiled
from torchzero_clip.engine.listener import HasListener
from torchzero_clip.engine.reported_loss import ReportedLoss
from torchzero_clip.functional.norms import norms_of_each
from torchzero_clip.functional.scratch import Scratch
from torchzero_clip.other_optimizer.before_step import handle_of
from torchzero_clip.other_optimizer.wrapping import Depth, unwrap_method, with_closure, wrap_method
from torchzero_clip.recorder.recording import FAILED, Recording, nothing
from torchzero_clip.recorder.tape import Note


class StepHooks(HasListener):
    """Measures the gradients of an optimizer that is not a `Modular`, before its step."""

    def __init__(self, run: Recording, optimizer: Optimizer) -> None:
        self.reported = ReportedLoss()
        self._handles = optimizer.register_step_pre_hook(self.before), optimizer.register_step_post_hook(self.after)
        self._depth = Depth()
        self._wrapper = wrap_method(optimizer, "step", self._around)
        self._optimizer = weakref.ref(optimizer)
        self._recording = self.listener = run
        self._scratch = Scratch()

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        if (optimizer := self._optimizer()) is not None:
            unwrap_method(optimizer, "step", self._wrapper)

    def _around(self, optimizer: Optimizer, step: Callable[[], object]) -> object:
        """Take a step of the optimizer."""
        self._depth.count, self._depth.is_wrapped = 0, True
        try:
            return step()
        finally:
            self._depth.count, self._depth.is_wrapped = 0, False

    @never_compiled
    def before(
        self, optimizer: Optimizer, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> tuple[tuple[object, ...], dict[str, object]] | None:
        """Measure the gradients, or wrap the closure that makes them."""
        if self._depth.enters_base(optimizer):
            return None
        self._depth.count = 1
        if handle_of(optimizer) is not None:  # its transforms tell the listener what they have seen
            return None
        self._recording.output.check()
        self._recording.finish(FAILED)
        measured = with_closure(args, kwargs, lambda closure: _measured(closure, partial(self._measure, optimizer)))
        if measured is None:
            self._measure(optimizer, None)
        return measured

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
        if not self._depth.leaves_base():
            self._depth.count = 0
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
