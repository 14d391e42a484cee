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
    made: list[Tensor | None] = field(default_factory=list)
    """The update of each parameter, once an earlier transform has made one; until then it is the gradient."""

    def __post_init__(self) -> None:
        self.params = [member.param for member in self.members]
        self.made = self.made or [None] * len(self.members)

    def part(self, indices: Sequence[int]) -> "Step":
        """The same for some of the parameters."""
        return replace(
            self,
            members=[self.members[i] for i in indices],
            grads=[self.grads[i] for i in indices],
            states=[self.states[i] for i in indices],
            settings=[self.settings[i] for i in indices],
            entering=self.entering.part(indices),
            made=[self.made[i] for i in indices],
        )

    def take(self, part: "Step", indices: Sequence[int]) -> None:
        """Put the updates that were made for some of the parameters in their places."""
        for i, update in zip(indices, part.made, strict=True):
            self.made[i] = update

    def updates(self, *, writable: bool) -> list[Tensor]:
        """The current updates; ``writable`` ones share no memory with the gradients."""
        pairs = list(zip(self.made, self.grads, strict=True))
        if self.maximize:
            negative = iter(foreach.negative([grad for made, grad in pairs if made is None]))
            return [next(negative) if made is None else _apart(made, grad, writable) for made, grad in pairs]
        return [_apart(grad if made is None else made, grad, writable) for made, grad in pairs]

    def keep_made(self) -> None:
        """Let the updates that were made stay as they are when the gradients change."""
        pairs = zip(self.made, self.grads, strict=True)
        self.made = [None if made is None else _apart(made, grad, True) for made, grad in pairs]


def _apart(update: Tensor, grad: Tensor, writable: bool) -> Tensor:
    return update.clone() if writable and update is grad else update


def _update(step: Step, apply: Apply, on_grads: bool) -> None:
    step.made = [*apply(step.updates(writable=not on_grads))]


def change_gradients(step: Step, apply: Apply, on_grads: bool) -> None:
    """Write what the transform makes of the gradients over them."""
    foreach.copy_(step.grads, apply(foreach.clone(step.grads)))


def _closure(step: Step, apply: Apply, on_grads: bool) -> None:
    """Has acted already, on the gradients that the closure left."""


def _params_direct(step: Step, apply: Apply, on_grads: bool) -> None:
    foreach.copy_(step.params, apply(foreach.clone(step.params)))


def _params_difference(step: Step, apply: Apply, on_grads: bool) -> None:
    step.made = [*foreach.subtract(step.params, apply(foreach.clone(step.params)))]


def _update_difference(step: Step, apply: Apply, on_grads: bool) -> None:
    updates = step.updates(writable=False)
    step.made = [*foreach.subtract(updates, apply(foreach.clone(updates)))]


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
