"""Skipping of whole steps."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from torchzero_clip.checks import at_least_one, non_negative, optional, positive, steps, unit_interval
from torchzero_clip.clipping.statistics import filled, put_
from torchzero_clip.core.kinds import Gate
from torchzero_clip.core.states import zero_numbers
from torchzero_clip.core.step import Step
from torchzero_clip.functional import foreach
from torchzero_clip.functional.dtypes import squarable
from torchzero_clip.types import NewState, Schedule, Setting, Target

VALUES = ("norms", "losses")


class SkipStep(Gate):
    """Skips the step when the joint norm of the gradients, or the loss, is too large.

        skipped if  ‖g‖ > max_norm  or  ‖g‖ > max_ratio · mean  or  ‖g‖ is not finite
        mean ← mean + (1 - beta) · (‖g‖ - mean)          (first mean = ‖g‖; skipped steps do not change it)

        with sigma also if  ‖g‖ or the loss exceeds the mean of the last ``window`` of its values by more than
        sigma · their standard deviation, or the loss is not finite

    The decision is made before the first transform, for any place of `SkipStep` in the chain. A skipped step changes no
    parameter and no state of any other transform. A clipped step still follows the direction of a bad gradient. A
    skipped step does not.

    **The window** stores the norms and losses of steps that were taken, so a spike does not raise the standard
    deviation. Norm and loss are judged after ``max(2, window // 2 - 1)`` of their values are stored. A standard
    deviation counts as at least a thousandth of the mean. If ``max(3, window // 8)`` steps in a row are skipped for
    their size, their values become the window, because a lasting change is not a spike.

    The loss is the value that a closure returned, or that was passed to `Modular.report_loss`. Without a loss, only the
    norm is judged. With ``sigma`` and several processes, each step takes one all-reduce for the mean loss of all
    processes.

    Args:
        max_norm: The largest L2 norm of all gradients together for which a step is taken; None for no such limit. A
            setting that must be the same in all param groups, like the next two and ``sigma``.
        max_ratio: The largest multiple of the running mean for which a step is taken, >= 1; None for no such limit. The
            first gradient that is not all zero always passes this limit.
        beta: The decay rate of the running mean, in [0, 1].
        sigma: How many standard deviations above the mean a norm or a loss may be, > 0; None for no such limit.
        window: How many norms and losses are stored, at least 4, if ``sigma`` is given.
        target: Must be "update", because gradients are judged before any transform.
        name: The name in the chain and in checkpoints; the class name in snake case if None.

    Raises:
        ValueError: If no limit is given, or for a setting out of range.
        TypeError: For a setting of the wrong type.

    A step synchronizes with a GPU once, unless the GPU decides: see `Modular.host_decides`. The norm covers the
    gradients of the parameters that `only` and `without` select, before any transform. ``metrics()["skipped_steps"]``
    is the number of skipped steps. Checkpoints store it.

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

    Source: for ``sigma``, OLMo et al., [2 OLMo 2 Furious](https://arxiv.org/abs/2501.00656), 2024. There, skipped
    values raise the standard deviation, and one NaN skips 129 steps. The other limits are not published in this form.
    Related: Chowdhery et al., [PaLM: scaling language modeling with pathways](https://arxiv.org/abs/2204.02311), 2022,
    where training restarts from a checkpoint before a loss spike and skips the batches around it.
    """

    pure = True
    checks = {
        "max_norm": optional(non_negative),
        "max_ratio": optional(at_least_one),
        "beta": unit_interval,
        "sigma": optional(positive),
    }

    def __init__(
        self,
        max_norm: float | Schedule | None = None,
        max_ratio: float | Schedule | None = None,
        beta: float | Schedule = 0.99,
        *,
        sigma: float | Schedule | None = None,
        window: int = 128,
        target: Target = "update",
        name: str | None = None,
    ) -> None:
        if max_norm is None and max_ratio is None and sigma is None:
            raise ValueError("SkipStep needs max_norm, max_ratio or sigma")
        if target != "update":
            problem = f"target must be 'update', got {target!r}"
            raise ValueError(f"SkipStep judges the gradients before any transform: {problem}")
        steps("window", window, 4)
        self.window = window
        self.needs_loss = sigma is not None
        settings = {"max_norm": max_norm, "max_ratio": max_ratio, "beta": beta, "sigma": sigma}
        super().__init__(settings, target=target, name=name)

    @override
    def check_groups(self, settings: Sequence[Setting]) -> None:
        super().check_groups(settings)
        if not self.needs_loss and settings[0]["sigma"] is not None:
            raise ValueError("sigma cannot be set later: SkipStep stores no values without sigma in its constructor")

    @override
    def init_global_state(self) -> NewState:
        """The running mean; with ``sigma``, the last norms and losses, and those of the steps skipped in a row."""
        state = zero_numbers("mean", "started")
        if not self.needs_loss:
            return state
        vectors: dict[str, Any] = {}
        for key in VALUES:
            vectors[key] = torch.zeros(self.window, dtype=torch.float64)
            vectors[f"skipped_{key}"] = torch.zeros(max(3, self.window // 8), dtype=torch.float64)
        return {**state, **vectors, **zero_numbers(*(f"{key}_stored" for key in VALUES), "in_a_row", "losses_in_a_row")}

    @override
    def refuses(self, norm: Tensor, step: Step) -> Tensor:
        setting = step.settings[0]
        bad = (norm < torch.inf).logical_not()
        if setting["max_norm"] is not None:
            bad = bad | (norm > setting["max_norm"])
        if setting["max_ratio"] is not None:
            mean = step.global_state["mean"]  # 0 until it has started
            bad = bad | (norm > setting["max_ratio"] * mean).logical_and(mean)
        if not self.needs_loss:
            return bad
        values = self._values(norm, step)
        for value, exists in values.values():
            bad = bad | (exists & value.isfinite().logical_not())
        return bad | self._is_large(values, step)

    @override
    def accept(self, norm: Tensor, step: Step) -> None:
        """Move the running mean towards the norm; it starts at the first norm that is not 0. Store norm and loss."""
        setting, state = step.settings[0], step.global_state
        started = state["started"] > 0
        usable = (norm > 0) | started
        if self.needs_loss:
            for key, (value, exists) in self._values(norm, step).items():
                put_(state[key], state[f"{key}_stored"], value, exists & (usable if key == "norms" else exists))
            foreach.copy_([state["in_a_row"], state["losses_in_a_row"]], [torch.zeros_like(norm)] * 2)
        foreach.lerp_where_(usable & started.logical_not(), state["mean"], norm, 1.0)
        foreach.lerp_where_(usable, state["mean"], norm, 1 - setting["beta"])
        foreach.copy_([state["started"]], [usable])
        step.metrics["mean"] = state["mean"].clone()

    @override
    def refused(self, norm: Tensor, step: Step) -> None:
        """Store the values of a step that was skipped for its size; after several in a row they become the window."""
        step.metrics["mean"] = step.global_state["mean"].clone()  # by which the step was judged
        if not self.needs_loss:
            return
        state, values = step.global_state, self._values(norm, step)
        large = self._is_large(values, step)
        for value, exists in values.values():
            large = large & (exists.logical_not() | value.isfinite())
        counts = {"norms": "in_a_row", "losses": "losses_in_a_row"}
        for key, (value, exists) in values.items():
            put_(state[f"skipped_{key}"], state[counts[key]], value, large & exists)
        lasts = state["in_a_row"] >= len(state["skipped_norms"])
        for key, count in counts.items():
            few = state[f"skipped_{key}"]
            window = torch.cat([few, torch.zeros_like(state[key])])[: self.window]
            becomes_window = lasts & (state[count] > 0)
            foreach.copy_([state[key]], [torch.where(becomes_window, window, state[key])])
            foreach.copy_([state[f"{key}_stored"]], [torch.where(becomes_window, state[count], state[f"{key}_stored"])])
            foreach.copy_([state[count]], [torch.where(lasts, 0.0, state[count])])

    @override
    def record(self, norm: Tensor, step: Step, taken: Tensor) -> None:
        """Move the running mean as `accept` does, if the step is taken."""
        mean, started = step.global_state["mean"], step.global_state["started"]
        moved = torch.where(started > 0, mean.lerp(norm, 1 - step.settings[0]["beta"]), norm)
        torch.where(taken, moved, mean, out=mean)  # a norm of 0 is the mean before the start
        started.masked_fill_(norm.logical_and(taken), 1.0)
        step.metrics["mean"] = mean

    @override
    def why(self, norm: Tensor, step: Step) -> str:
        values = self._values(norm, step)
        limits = {"norms": [_limit(norm, step)], "losses": []}
        for key, (limit, counts) in (self._windows(values, step) if self.needs_loss else {}).items():
            limits[key] += [limit] if counts else []
        said: list[str] = []
        for key, (value, exists) in values.items():
            number, limit = value.item(), min([limit.item() for limit in limits[key]], default=math.inf)
            if exists and not (number <= limit and math.isfinite(number)):
                what = "the norm of the gradients" if key == "norms" else "the loss"
                said.append(f"{what} was {number:.4g}" + (f", and its limit is {limit:.4g}" if number > limit else ""))
        return ", and ".join(said)

    def _values(self, norm: Tensor, step: Step) -> dict[str, tuple[Tensor, Tensor]]:
        """The norm and, if a process has one, the loss; each with whether there is one."""
        values = {"norms": (norm, torch.ones_like(norm, dtype=torch.bool))}
        if step.has_loss is not None and isinstance(step.loss, Tensor):
            values["losses"] = step.loss.to(norm), step.has_loss.to(norm.device)
        return values

    def _is_large(self, values: dict[str, tuple[Tensor, Tensor]], step: Step) -> Tensor:
        """True if the norm or the loss is above the limit of its window."""
        result = torch.zeros_like(values["norms"][1])
        for key, (limit, counts) in self._windows(values, step).items():
            result = result | (counts & (values[key][0] > limit))
        return result

    def _windows(self, values: dict[str, tuple[Tensor, Tensor]], step: Step) -> dict[str, tuple[Tensor, Tensor]]:
        """The limits of norm and loss, from earlier values; each with whether it applies."""
        sigma: float | None = step.settings[0]["sigma"]
        state = step.global_state
        limits: dict[str, tuple[Tensor, Tensor]] = {}
        for key, (_, exists) in values.items():
            if sigma is None:
                break
            count = state[f"{key}_stored"].clamp(max=len(state[key]))
            stored = filled(state[key], count)
            most = squarable(stored)
            stored = stored.clamp(-most, most)
            mean = stored.nanmean()
            deviation = ((stored - mean).square().nansum() / (count - 1).clamp(min=1)).sqrt()
            enough = count >= max(2, len(state[key]) // 2 - 1)
            limits[key] = mean + sigma * torch.maximum(deviation, mean.abs() / 1000), exists & enough
        return limits


def _limit(norm: Tensor, step: Step) -> Tensor:
    """The largest norm that ``max_norm`` and ``max_ratio`` let pass."""
    setting, state = step.settings[0], step.global_state
    limit = torch.full_like(norm, torch.inf if setting["max_norm"] is None else setting["max_norm"])
    if setting["max_ratio"] is None:
        return limit
    has_mean = (state["started"] > 0) & (state["mean"] > 0)
    return torch.minimum(limit, torch.where(has_mean, setting["max_ratio"] * state["mean"], torch.inf))
