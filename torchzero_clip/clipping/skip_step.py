"""Skipping of whole steps."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from torchzero_clip.checks import at_least_one, non_negative, optional, unit_interval
from torchzero_clip.clipping.statistics import numbers, same_in_all_groups
from torchzero_clip.core.kinds import Gate
from torchzero_clip.core.step import Step
from torchzero_clip.functional import foreach
from torchzero_clip.types import Schedule, Setting, Target


class SkipStep(Gate):
    """Skips the whole step when the joint norm of the gradients is too large.

        skipped if  ‖g‖ > max_norm  or  ‖g‖ > max_ratio · mean  or  ‖g‖ is not finite
        mean ← mean + (1 - beta) · (‖g‖ - mean)          (first mean = ‖g‖; skipped steps do not change it)

    The decision is made before the first transform, wherever in the chain this one stands. A skipped step changes no
    parameter and no state of any transform. A clipped step still follows the direction of a bad gradient; a skipped
    step does not.

    Args:
        max_norm: The largest L2 norm of all gradients together for which a step is taken; None for no such limit. A
            setting that must be the same in all param groups, like the next two.
        max_ratio: The largest multiple of the running mean for which a step is taken, >= 1; None for no such limit. The
            first gradient that is not all zero always passes this limit.
        beta: The decay rate of the running mean, in [0, 1].
        target: Must be "update", because gradients are judged before any transform.
        name: The name in the chain and in checkpoints; the class name in snake case if None.

    Raises:
        ValueError: If neither limit is given, or for a setting out of range.
        TypeError: For a setting of the wrong type.

    Each step waits for the device once. The norm covers the gradients of the parameters that `only` and `without`
    select, before any transform. ``metrics()["skipped_steps"]`` is the number of skipped steps; checkpoints store it.

    Examples:
        >>> import torch
        >>> from torchzero_clip import Modular, SkipStep
        >>> weight = torch.nn.Parameter(torch.zeros(1))
        >>> optimizer = Modular([weight], SkipStep(max_ratio=10.0))
        >>> for gradient in (1.0, 2.0, 500.0, 1.0):
        ...     weight.grad = torch.tensor([gradient])
        ...     optimizer.step()
        >>> weight.data
        tensor([-4.])
        >>> optimizer.metrics()["skipped_steps"]
        tensor(1)

    Source: not published in this form. Related: Chowdhery et al., [PaLM: scaling language modeling with
    pathways](https://arxiv.org/abs/2204.02311), 2022, where a run goes back before a loss spike and skips its batches.
    """

    checks = {"max_norm": optional(non_negative), "max_ratio": optional(at_least_one), "beta": unit_interval}

    def __init__(
        self,
        max_norm: float | Schedule | None = None,
        max_ratio: float | Schedule | None = None,
        beta: float | Schedule = 0.99,
        *,
        target: Target = "update",
        name: str | None = None,
    ) -> None:
        if max_norm is None and max_ratio is None:
            raise ValueError("SkipStep needs max_norm or max_ratio")
        if target != "update":
            raise ValueError(
                f"SkipStep judges the gradients before any transform: target must be 'update', got {target!r}"
            )
        super().__init__({"max_norm": max_norm, "max_ratio": max_ratio, "beta": beta}, target=target, name=name)

    @override
    def check_groups(self, settings: Sequence[Setting]) -> None:
        """Raise if a setting is out of range, or differs between groups."""
        super().check_groups(settings)
        same_in_all_groups(self, settings, self.defaults)

    @override
    def init_global_state(self) -> dict[str, Any]:
        """The running mean."""
        return numbers("mean", "started")

    @override
    def refuses(self, norm: Tensor, step: Step) -> Tensor:
        """True if the norm exceeds a limit, or is not finite."""
        setting, state = step.settings[0], step.global_state
        limit = torch.full_like(norm, torch.inf if setting["max_norm"] is None else setting["max_norm"])
        if setting["max_ratio"] is not None:
            known = (state["started"] > 0) & (state["mean"] > 0)
            limit = torch.minimum(limit, torch.where(known, setting["max_ratio"] * state["mean"], torch.inf))
        return (norm > limit) | norm.isfinite().logical_not()

    @override
    def accept(self, norm: Tensor, step: Step) -> None:
        """Move the running mean towards the norm; it starts at the first norm that is not 0."""
        setting, state = step.settings[0], step.global_state
        started = state["started"] > 0
        usable = (norm > 0) | started
        foreach.lerp_where_(usable & started.logical_not(), state["mean"], norm, 1.0)
        foreach.lerp_where_(usable, state["mean"], norm, 1 - setting["beta"])
        foreach.copy_([state["started"]], [usable])
        step.metrics["mean"] = state["mean"].clone()
