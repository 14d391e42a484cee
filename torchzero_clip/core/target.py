"""What a transform is applied to, and where its result goes: one small function per ``target=``."""

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from torch import Tensor

from torchzero_clip.core.entering import Entering
from torchzero_clip.core.scope import Member
from torchzero_clip.functional import foreach
from torchzero_clip.types import Setting, State, Target

Apply: TypeAlias = Callable[[list[Tensor]], list[Tensor]]
"""One transform, bound to its states and settings: tensors in, new tensors out; it may overwrite what it gets."""


@dataclass
class Step:
    """What flows down a chain during one step: one entry per parameter that has a gradient."""

    members: list[Member]
    grads: list[Tensor]
    states: Sequence[State]
    settings: Sequence[Setting]
    loss: Tensor | float | None
    entering: Entering
    global_state: State
    metrics: MutableMapping[str, Tensor]
    maximize: bool = False
    keep_grads: bool = False
    made: list[Tensor] | None = field(default=None)
    """The updates, once an earlier transform has made some; until then they are the gradients."""

    def __post_init__(self) -> None:
        self.params = [member.param for member in self.members]

    def part(self, indices: Sequence[int]) -> "Step":
        """The same for some of the parameters."""
        made = None if self.made is None else [self.made[i] for i in indices]
        return replace(
            self,
            members=[self.members[i] for i in indices],
            grads=[self.grads[i] for i in indices],
            states=[self.states[i] for i in indices],
            settings=[self.settings[i] for i in indices],
            entering=self.entering.part(indices),
            made=made,
        )

    def take(self, part: "Step", indices: Sequence[int]) -> None:
        """Put the updates that were made for some of the parameters in their places."""
        if part.made is not None:
            updates = self.updates(writable=False)
            for i, update in zip(indices, part.made, strict=True):
                updates[i] = update

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


def change_gradients(step: Step, apply: Apply, on_grads: bool) -> None:
    """Write what the transform makes of the gradients over them."""
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


Action: TypeAlias = Callable[[Step, Apply, bool], None]

# `on_grads`: the transform may be given the gradients themselves, because it does not write, or only scales them
TARGETS: Mapping[Target, Action] = {
    "update": _update,
    "grad": change_gradients,
    "closure": _closure,
    "params_direct": _params_direct,
    "params_difference": _params_difference,
    "update_difference": _update_difference,
}
