"""A limit at a z-score of past norms."""

from typing import Literal

import torch
from torch import Tensor
from typing_extensions import override

from torchzero_clip.checks import non_negative, one_of, optional, positive, steps, unit_interval
from torchzero_clip.clipping.statistics import NormStatistics, Tracked
from torchzero_clip.core.states import zero_numbers
from torchzero_clip.functional.choice import where
from torchzero_clip.functional.clip import within
from torchzero_clip.functional.dtypes import squarable
from torchzero_clip.types import NewState, Schedule, Target

ClipOption = Literal["adaptive_scaling", "mean"]


class ZClip(NormStatistics):
    """Scales updates whose joint norm is many standard deviations above the mean of past norms.

        z     = (‖u‖ - mean) / (deviation + eps)
        limit = clip_factor · (mean + deviation · z_thresh² / z)  if z > z_thresh, else none
        mean  ← beta · mean + (1 - beta) · x,   variance ← beta · variance + (1 - beta) · (x - mean)²

    where x is the norm, or the limit if there is one. So a spike is clipped to less than ``z_thresh`` deviations above
    the mean. The larger the spike, the closer the limit is to the mean. Mean and variance start as those of the first
    ``warmup_steps`` norms, in which ``max_norm`` is the only limit. After that, the lower of the two limits applies.
    ``max_norm`` has no effect on the statistics.

    **Guarantees.** Updates below both limits are bitwise unchanged. A non-finite gradient does not change the
    statistics, and all updates of its step pass unchanged. The statistics start at the first gradient that is not all
    zero.

    Args:
        beta: The decay rate of mean and variance, in [0, 1]; a setting that must be the same in all param groups, like
            ``z_thresh``, ``max_norm``, ``eps`` and ``clip_factor``.
        z_thresh: The z-score above which a norm is a spike, > 0.
        max_norm: A second limit, which is fixed, >= 0; None for no such limit.
        eps: Added to the deviation, >= 0. After constant norms the deviation is 0, and every rise by more than
            ``z_thresh * eps`` is a spike.
        warmup_steps: How many norms the first mean and variance are computed from, at least 1.
        clip_factor: Multiplies the limit of a spike with "adaptive_scaling", > 0.
        clip_option: With "adaptive_scaling", the limit of a spike is the one above. With "mean", it is the mean.
        target: What it acts on, see `Transform`.
        name: The name in the chain and in checkpoints; the class name in snake case if None.

    Raises:
        ValueError: For a setting out of range, an unknown ``clip_option`` or ``target``, or groups that differ.
        TypeError: For an argument of the wrong type.

    It adds the metrics ``limit`` (inf if there is no limit) and ``z``. State: three numbers for the whole chain.

    Examples:
        >>> import torch
        >>> from torchzero_clip import Modular, ZClip
        >>> weight = torch.nn.Parameter(torch.zeros(1))
        >>> optimizer = Modular([weight], ZClip(max_norm=None, warmup_steps=3))
        >>> for gradient in (1.0, 1.2, 0.8, 10.0):
        ...     weight.data = torch.zeros(1)
        ...     weight.grad = torch.tensor([gradient])
        ...     optimizer.step()
        >>> round(-weight.item(), 3)
        1.019

    Source: Kumar et al., [ZClip: adaptive spike mitigation for LLM pre-training](https://arxiv.org/abs/2504.02507),
    2025. In the reference, no step is clipped after one NaN.
    """

    pure = True
    checks = {
        "beta": unit_interval,
        "z_thresh": positive,
        "max_norm": optional(non_negative),
        "eps": non_negative,
        "clip_factor": positive,
    }

    def __init__(
        self,
        beta: float | Schedule = 0.97,
        z_thresh: float | Schedule = 2.5,
        max_norm: float | Schedule | None = 1.0,
        eps: float | Schedule = 1e-6,
        warmup_steps: int = 25,
        clip_factor: float | Schedule = 1.0,
        *,
        clip_option: ClipOption = "adaptive_scaling",
        target: Target = "update",
        name: str | None = None,
    ) -> None:
        steps("warmup_steps", warmup_steps)
        one_of("clip_option", clip_option, ("adaptive_scaling", "mean"))
        self.warmup_steps = warmup_steps
        self.clip_option: ClipOption = clip_option
        settings = {"beta": beta, "z_thresh": z_thresh, "max_norm": max_norm, "eps": eps, "clip_factor": clip_factor}
        super().__init__(settings, ord=2, joint=True, target=target, name=name)

    @override
    def init_global_state(self) -> NewState:
        """The mean, the variance, and how many norms were seen."""
        return zero_numbers("mean", "variance", "started")

    @override
    def factors_of(self, tracked: Tracked, updates: list[Tensor]) -> Tensor:
        # all parameters share one setting: that of the first range
        setting, norm, mean, variance = tracked.shared[0][0], tracked.norms, tracked["mean"], tracked["variance"]
        is_warm, count, threshold = tracked["started"] >= self.warmup_steps, tracked["started"] + 1, setting["z_thresh"]
        deviation = variance.sqrt()
        z = where(is_warm, (norm - mean) / (deviation + setting["eps"]), 0.0)
        is_spike, cut = z > threshold, mean
        if self.clip_option == "adaptive_scaling":
            cut = torch.addcdiv(mean, deviation, z, value=threshold**2)
            cut = cut if setting["clip_factor"] == 1 else cut * setting["clip_factor"]
        limit = where(is_spike, cut, torch.inf)
        seen = torch.where(is_spike, cut, norm).clamp(max=squarable(norm))
        # in the warm-up, mean and variance are those of all norms so far
        weight = count.reciprocal().masked_fill_(is_warm, 1 - setting["beta"])
        moved = mean.lerp(seen, weight)
        distance = seen - moved
        square = distance * torch.where(is_warm, distance, seen - mean)
        tracked.keep(mean=moved, variance=variance.lerp(square, weight), started=count)
        if setting["max_norm"] is not None:
            limit = limit.clamp(max=setting["max_norm"])
        tracked.show(limit=limit, z=z)
        return within(norm, limit, tracked.usable)
