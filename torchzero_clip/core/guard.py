"""Decides whether a step is taken, before anything changes."""

import math
from collections.abc import MutableMapping
from typing import Any, Literal, TypeAlias

import torch

from torchzero_clip.checks import count, one_of
from torchzero_clip.core.chain import Chain
from torchzero_clip.core.checkpoint import COUNTS
from torchzero_clip.core.namespace import Namespace
from torchzero_clip.core.target import Step

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
        norm, *refusals = torch.stack([step.entering.total(), *self._refusals(step)]).tolist()
        self._norms = [*self._norms, norm][-REMEMBERED:]
        if not math.isfinite(norm) and self.nonfinite == "raise":
            raise RuntimeError(_nonfinite_message(step))
        if not any(refusals) and (math.isfinite(norm) or self.nonfinite == "propagate"):
            counts.update({"consecutive_skips": 0} if self.may_skip else {})
            return True
        counts["skipped_steps"] += 1
        counts["consecutive_skips"] += 1
        if self.max_consecutive_skips is not None and counts["consecutive_skips"] > self.max_consecutive_skips:
            skips, shown = counts["consecutive_skips"], ", ".join(f"{norm:.4g}" for norm in self._norms)
            raise RuntimeError(
                f"{skips} steps in a row were skipped. The norms of the last gradients, the latest at the end: {shown}"
            )
        return False

    def _refusals(self, step: Step) -> list[torch.Tensor]:
        """What each gate says, as numbers."""
        refusals: list[torch.Tensor] = []
        for name, transform in self._gates.items():
            step.entering.norms()
            indices = transform.scope.indices(step.members)
            norm = step.entering.part(indices).total() if indices else torch.zeros_like(step.entering.total())
            own = Namespace(step.global_state, name), Namespace(step.settings[0], name)
            refusals.append(transform.refuses(norm, *own).to(norm.device, torch.float64))
        return refusals


def _nonfinite_message(step: Step) -> str:
    finite = step.entering.flags().finite.tolist()
    names = [
        member.name or f"parameter {i} of those with a gradient, of shape {tuple(member.param.shape)}"
        for i, (member, good) in enumerate(zip(step.members, finite, strict=True))
        if not good
    ]
    return (
        f"gradients are not finite: {', '.join(names) or 'their joint norm overflows'}. Nothing was changed; use "
        'nonfinite="skip" to skip such steps'
    )
