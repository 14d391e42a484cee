"""A limit of each tensor that follows its own norm."""

from collections.abc import Sequence

import torch
from torch import Tensor
from typing_extensions import override

from torchzero_clip.checks import positive, same_in_all_groups, steps, unit_interval
from torchzero_clip.clipping.statistics import NormStatistics, Tracked, averaged
from torchzero_clip.core.states import zero_numbers
from torchzero_clip.functional.choice import at_most_one, where
from torchzero_clip.functional.dtypes import moved
from torchzero_clip.functional.ways import may_look
from torchzero_clip.types import NewState, Schedule, Setting, Target


class AdaGC(NormStatistics):
    """Scales the update of each tensor so that its norm is at most ``ratio`` times its usual norm.

        first ``warmup_steps`` steps:  u ← u · min(1, max_norm / joint norm);   usual ← min(usual, ‖u‖)
        then, for each tensor:         u ← u · min(1, ratio · usual / ‖u‖);     usual ← beta · usual + (1 - beta) · ‖u‖

    where ‖u‖ on the right is the norm after the clip. A spike of one tensor does not shrink the updates of the others.
    The usual norm rises by at most ``(1 - beta) · (ratio - 1)`` of itself in a step. This is 0.04 % by default, so the
    norm needs 1,734 steps to double.

    **Guarantees.** Norms of 0 are never stored. The usual norm of a tensor starts as its first norm that is not 0, at
    any step. If a gradient is not finite in the warm-up, all updates of this step pass unchanged, and the step is not
    counted. After the warm-up, only the update of the tensor with this gradient passes unchanged.

    Args:
        ratio: The largest multiple of the usual norm, > 0; a setting of the param groups.
        beta: The decay rate of the usual norm, in [0, 1]; a setting.
        max_norm: The limit of the joint norm in the warm-up, > 0; a setting that must be the same in all param groups.
        warmup_steps: At least 0. With 0, the usual norm of each tensor starts as its first norm.
        target: What it acts on, see `Transform`.
        name: The name in the chain and in checkpoints; the class name in snake case if None.

    Raises:
        ValueError: For a setting out of range, an unknown ``target``, or groups that differ in ``max_norm``.
        TypeError: For an argument of the wrong type.

    State: two numbers for each tensor, and one for the whole chain. ``AdaGC(ratio=2.0, warmup_steps=0)`` is the
    ``max_grad_norm_ratio`` of OLMo.

    Examples:
        >>> import torch
        >>> from torchzero_clip import AdaGC, Modular
        >>> weight = torch.nn.Parameter(torch.zeros(1))
        >>> optimizer = Modular([weight], AdaGC(warmup_steps=1))
        >>> for gradient in (0.5, 5.0, 0.4):
        ...     weight.data = torch.zeros(1)
        ...     weight.grad = torch.tensor([gradient])
        ...     optimizer.step()
        ...     print(round(-weight.item(), 4))
        0.5
        0.52
        0.4

    Source: Wang et al., [AdaGC: enhancing LLM pretraining stability via adaptive gradient
    clipping](https://arxiv.org/abs/2502.11034), 2025. In the reference, a tensor with one gradient of 0 in the warm-up
    never changes again. The first matrix of LoRA is such a tensor.
    """

    pure = True
    checks = {"ratio": positive, "beta": unit_interval, "max_norm": positive}

    def __init__(
        self,
        ratio: float | Schedule = 1.04,
        beta: float | Schedule = 0.99,
        max_norm: float | Schedule = 1.0,
        warmup_steps: int = 100,
        *,
        target: Target = "update",
        name: str | None = None,
    ) -> None:
        steps("warmup_steps", warmup_steps, 0)
        self.warmup_steps = warmup_steps
        settings = {"ratio": ratio, "beta": beta, "max_norm": max_norm}
        super().__init__(settings, ord=2, joint=False, target=target, name=name)

    @override
    def check_groups(self, settings: Sequence[Setting]) -> None:
        super().check_groups(settings)
        same_in_all_groups(self, settings, ["max_norm"])

    @override
    def possible_state(self, param: Tensor, setting: Setting) -> NewState:
        return zero_numbers("usual", "started", device=param.device)

    @override
    def init_global_state(self) -> NewState:
        """How many steps of the warm-up were taken."""
        return zero_numbers("warm_steps")

    @override
    def factors_of(self, tracked: Tracked, updates: list[Tensor]) -> Tensor:
        norms, usual, started = tracked.norms, tracked["usual"], tracked.started
        limits = tracked.by_setting(lambda s, usual: s["ratio"] * usual, usual)
        limits = limits if tracked.is_usual else where(started, limits, torch.inf)
        stored = tracked.step.global_state["warm_steps"]
        warm_steps = moved(stored, norms.device)  # of the first gradient, which may be another one
        # with other processes, all exchange norms in every step: if one of them left this out, the others would hang
        if tracked.step.tools.process_group is None and may_look(warm_steps) and warm_steps.item() >= self.warmup_steps:
            limited, factors = tracked.limited(norms, limits)
            averages = tracked.by_setting(averaged, usual, limited)
            if not tracked.is_usual:
                averages = torch.where(started, averages, norms)
                tracked.restrict(norms > 0)
            tracked.keep(usual=averages)
            return tracked.where_usable(factors)
        joint, finite = tracked.joint_norm()
        warms_up, most = warm_steps < self.warmup_steps, tracked.shared[0][0]["max_norm"]
        # in the warm-up, a gradient that is not finite stops all averages, also one of another process
        tracked.restrict((norms > 0) & (finite >= warms_up))
        ratios = limits.masked_fill_(warms_up, most) / torch.where(warms_up, joint, norms)
        factors = tracked.where_usable(at_most_one(ratios))
        limited = norms * factors
        first = torch.where(started, usual, limited)
        averages = tracked.by_setting(averaged, first, limited)
        # in place, so that a captured step counts whenever it is replayed
        stored.add_((warms_up & finite & joint.logical_or(warm_steps)).to(stored.device))
        tracked.keep(usual=torch.where(warms_up, torch.minimum(first, limited), averages))
        return factors
