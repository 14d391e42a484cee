"""What a transform is applied to, and where its result goes: one small function per ``target=``."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from torch import Tensor

from torchzero_clip.core.entering import Entering
from torchzero_clip.functional import foreach
from torchzero_clip.types import Target

Apply: TypeAlias = Callable[[list[Tensor]], list[Tensor]]
"""One transform, bound to its states and settings: tensors in, new tensors out; it may overwrite what it gets."""


@dataclass
class Step:
    """What flows down a chain during one step: one entry per parameter that has a gradient."""

    params: list[Tensor]
    grads: list[Tensor]
    loss: Tensor | float | None
    entering: Entering
    maximize: bool = False
    keep_grads: bool = False
    made: list[Tensor] | None = field(default=None)
    """The updates, once an earlier transform has made some; until then they are the gradients."""

    def updates(self, *, writable: bool) -> list[Tensor]:
        """The current updates; ``writable`` ones share no memory with the gradients."""
        if self.made is None:
            self.made = foreach.negative(self.grads) if self.maximize else list(self.grads)
        if writable:
            pairs = zip(self.made, self.grads, strict=True)
            self.made = [u.clone() if u is g else u for u, g in pairs]
        return self.made


def _update(step: Step, apply: Apply, on_grads: bool) -> None:
    step.made = apply(step.updates(writable=not on_grads))


def _grad(step: Step, apply: Apply, on_grads: bool) -> None:
    foreach.copy_(step.grads, apply(foreach.clone(step.grads)))


def _closure(step: Step, apply: Apply, on_grads: bool) -> None:
    """Has acted already, on the gradients that the closure left."""


def _params_direct(step: Step, apply: Apply, on_grads: bool) -> None:
    foreach.copy_(step.params, apply(foreach.clone(step.params)))


def _params_difference(step: Step, apply: Apply, on_grads: bool) -> None:
    step.made = foreach.subtract(step.params, apply(foreach.clone(step.params)))


def _update_difference(step: Step, apply: Apply, on_grads: bool) -> None:
    updates = step.updates(writable=False)
    step.made = foreach.subtract(updates, apply(foreach.clone(updates)))


# `on_grads`: the transform may be given the gradients themselves, because it does not write, or only scales them
TARGETS: Mapping[Target, Callable[[Step, Apply, bool], None]] = {
    "update": _update,
    "grad": _grad,
    "closure": _closure,
    "params_direct": _params_direct,
    "params_difference": _params_difference,
    "update_difference": _update_difference,
}
