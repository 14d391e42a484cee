"""Decides whether a step is taken, before anything changes."""

from collections.abc import MutableMapping
from typing import Any, Literal, TypeAlias

import torch

from torchzero_clip.checks import count, one_of
from torchzero_clip.core.chain import Chain
from torchzero_clip.core.checkpoint import COUNTS
from torchzero_clip.core.namespace import Namespace
from torchzero_clip.core.target import Step
from torchzero_clip.core.transform import Transform

Nonfinite: TypeAlias = Literal["propagate", "raise", "skip"]

REMEMBERED = 10  # norms that an error shows


class Guard:
    """What to do about gradients that are not finite, and about those that a transform refuses.

    Args:
        nonfinite: "propagate" passes them on, "raise" raises, "skip" skips the step.
        max_consecutive_skips: How many steps in a row may be skipped; None for any number.
        chain: The chain, some transforms of which may be gates.
    """

    def __init__(self, nonfinite: Nonfinite, max_consecutive_skips: int | None, chain: Chain) -> None:
        one_of("nonfinite", nonfinite, ("propagate", "raise", "skip"))
        if max_consecutive_skips is not None:
            count("max_consecutive_skips", max_consecutive_skips)
        self.nonfinite: Nonfinite = nonfinite
        self.max_consecutive_skips = max_consecutive_skips
        self._gates = {name: transform for name, transform in chain.transforms.items() if transform.gate}
        if nested := [t for t in chain.walk() if t.gate and all(t is not gate for gate in self._gates.values())]:
            raise ValueError(f"{nested[0]!r} decides about whole steps: it cannot stand inside another transform")
        self._norms: list[float] = []
        if max_consecutive_skips is not None and not self.may_skip:
            raise ValueError("max_consecutive_skips needs nonfinite='skip' or a SkipStep: nothing skips steps here")

    @property
    def may_skip(self) -> bool:
        """Whether steps may be skipped, and so are counted."""
        return self.nonfinite == "skip" or bool(self._gates)

    def described(self) -> list[str]:
        """The arguments that are not their defaults."""
        most = self.max_consecutive_skips
        lines = [] if self.nonfinite == "propagate" else [f"nonfinite={self.nonfinite!r}"]
        return lines if most is None else [*lines, f"max_consecutive_skips={most}"]

    def counts(self) -> dict[str, int]:
        """What the first param group keeps for it."""
        return dict.fromkeys(COUNTS, 0) if self.may_skip else {}

    def allows(self, step: Step, counts: MutableMapping[str, Any]) -> bool:
        """Whether the step is to be taken. It reads from the device once, and not at all for "propagate".

        Raises:
            RuntimeError: If a gradient is not finite and is to raise, or if too many steps in a row were skipped.
        """
        if self.nonfinite == "propagate" and not self._gates:
            return True
        entering = step.entering
        judged = {name: self._norm(transform, step) for name, transform in self._gates.items()}
        refused = [
            transform.refuses(judged[name], *self._views(name, step)).to(entering.total().device)
            for name, transform in self._gates.items()
        ]
        all_finite = entering.flags().finite.all()
        norm, finite, *refusals = torch.stack([x.double() for x in (entering.total(), all_finite, *refused)]).tolist()
        self._norms = [*self._norms, norm][-REMEMBERED:]
        if not finite and self.nonfinite == "raise":
            raise RuntimeError(_nonfinite_message(step))
        if any(refusals) or (not finite and self.nonfinite == "skip"):
            self._count(counts)
            return False
        counts.update({"consecutive_skips": 0} if self.may_skip else {})
        for name, transform in self._gates.items():
            transform.accept(judged[name], *self._views(name, step))
        return True

    def _count(self, counts: MutableMapping[str, Any]) -> None:
        counts["skipped_steps"] += 1
        counts["consecutive_skips"] += 1
        skips = counts["consecutive_skips"]
        if self.max_consecutive_skips is not None and skips > self.max_consecutive_skips:
            shown = ", ".join(f"{norm:.4g}" for norm in self._norms)
            raise RuntimeError(
                f"{skips} steps in a row were skipped. The norms of the last gradients, the latest at the end: {shown}"
            )

    def _norm(self, transform: Transform, step: Step) -> torch.Tensor:
        """The norm of the gradients that a gate judges."""
        total = step.entering.total()
        if not transform.scope.limited:
            return total
        indices = transform.scope.indices(step.members)
        return step.entering.part(indices).total() if indices else torch.zeros_like(total)

    def _views(self, name: str, step: Step) -> tuple[Namespace, Namespace]:
        return Namespace(step.global_state, name), Namespace(step.settings[0], name)


def _nonfinite_message(step: Step) -> str:
    finite = step.entering.flags().finite.tolist()
    names = [
        member.name or f"parameter {i} of those with a gradient, of shape {tuple(member.param.shape)}"
        for i, (member, good) in enumerate(zip(step.members, finite, strict=True))
        if not good
    ]
    return f'gradients are not finite: {", ".join(names)}. Nothing was changed; use nonfinite="skip" to skip such steps'
