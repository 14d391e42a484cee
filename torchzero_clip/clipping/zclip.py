"""A limit at a z-score of past norms."""

from typing import Any, Literal

import torch
from torch import Tensor
from typing_extensions import override

from torchzero_clip.checks import non_negative, one_of, optional, positive, steps, unit_interval
from torchzero_clip.clipping.statistics import NormStatistics, Tracked, numbers
from torchzero_clip.types import Schedule, Target

ClipOption = Literal["adaptive_scaling", "mean"]


class ZClip(NormStatistics):
    """Scales updates whose joint norm is far above the usual, in standard deviations of past norms.

        z     = (‖u‖ - mean) / (deviation + eps)
        limit = clip_factor · (mean + deviation · z_thresh² / z)  if z > z_thresh, else none
        mean  ← beta · mean + (1 - beta) · x,   variance ← beta · variance + (1 - beta) · (x - mean)²

    where x is the norm, or the limit if there is one. So a spike is cut to less than ``z_thresh`` deviations above the
    mean, the further the larger it is. Mean and variance begin as those of the first ``warmup_steps`` norms, in which
    only ``max_norm`` limits. After that, ``max_norm`` limits too; the statistics do not see it.

    **Guarantees.** Updates that are no spike are bitwise unchanged. A non-finite gradient does not change the
    statistics, and its step passes unchanged. They start at the first gradient that is not all zero.

    Args:
        beta: The decay rate of mean and variance, in [0, 1]; a setting that must be the same in all param groups, like
            the next four.
        z_thresh: The z-score above which a norm is a spike, > 0.
        max_norm: A fixed limit beside the other, >= 0; None for none.
        eps: Added to the deviation, >= 0. After constant norms the deviation is 0, and every rise by more than
            ``z_thresh * eps`` is a spike.
        warmup_steps: How many norms the statistics begin with, at least 1.
        clip_factor: Multiplies the limit of a spike, > 0.
        clip_option: "adaptive_scaling" for the limit above; with "mean" the limit of a spike is the mean.
        target: What it acts on, see `Transform`.
        name: The name in the chain and in checkpoints; the class name in snake case if None.

    Raises:
        ValueError: For a setting out of range, an unknown ``clip_option`` or ``target``, or groups that differ.
        TypeError: For an argument of the wrong type.

    It adds the metrics ``limit`` (inf where there is none) and ``z``. State: ``warmup_steps`` numbers and three more
    for the whole chain.

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
    2025. There, one NaN switches the clip off for ever.
    """

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
    def init_global_state(self) -> dict[str, Any]:
        """The norms of the warm-up, the mean, the variance, and how many norms were seen."""
        return {
            "ring": torch.zeros(self.warmup_steps, dtype=torch.float64),
            **numbers("mean", "variance", "started"),
        }

    @override
    def limit(self, tracked: Tracked, updates: list[Tensor]) -> Tensor:
        """Judge the norm, and let it or its limit enter the statistics."""
        setting, norm, count = tracked.shared[0][0], tracked.norms, tracked["started"]
        beta, most = setting["beta"], torch.inf if setting["max_norm"] is None else setting["max_norm"]
        mean, variance = tracked["mean"], tracked["variance"]
        warms_up = count < self.warmup_steps
        first = tracked.remember(warms_up)
        start = first.nanmean()

        deviation = variance.sqrt()
        z = (norm - mean) / (deviation + setting["eps"])
        is_spike = (z > setting["z_thresh"]) & warms_up.logical_not()
        cut = mean
        if self.clip_option == "adaptive_scaling":
            cut = (mean + deviation * (setting["z_thresh"] ** 2 / z)) * setting["clip_factor"]
        seen = torch.where(is_spike, cut, norm)
        moved = beta * mean + (1 - beta) * seen
        spread = beta * variance + (1 - beta) * (seen - moved).square()
        tracked.keep(
            mean=torch.where(warms_up, start, moved),
            variance=torch.where(warms_up, (first - start).square().nanmean(), spread),
            started=count + 1,
        )
        limit = torch.where(is_spike, cut, torch.inf).clamp(max=most)
        tracked.show(limit=limit, z=torch.where(warms_up, 0.0, z))
        return torch.where(norm > limit, limit / norm, 1.0)
