"""A limit of each element by the average of its squares."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from torchzero_clip.checks import positive, steps, unit_interval
from torchzero_clip.clipping.statistics import numbers
from torchzero_clip.core.elementwise import Elementwise, Flags
from torchzero_clip.core.step import Step
from torchzero_clip.functional import foreach
from torchzero_clip.functional.foreach import wide_dtype
from torchzero_clip.functional.scratch import Scratch
from torchzero_clip.types import Schedule, Setting, Target


class SpikeAwareClip(Elementwise):
    """Clips every element whose square is far above the average of its squares.

        limit = √(threshold · v)
        u     ← sign(u) · min(|u|, limit)       from step ``warmup_steps`` on, and where v is not 0
        v     ← beta · v + (1 - beta) · u²      (u after the clip)

    Each element has its own limit, from the steps before this one. An element has no limit until its first gradient
    that is not 0. So rows of an embedding may be used for the first time at any step.

    **Guarantees.** Elements within the limit are bitwise unchanged. A non-finite gradient does not change the
    averages of its tensor, and its update passes unchanged. The averages start at the first gradient that is not all
    zero.

    Args:
        threshold: The largest ratio of a square to the average square, > 0; a setting of the param groups.
        beta: The decay rate of the average, in [0, 1]; a setting.
        warmup_steps: The first step in which elements are clipped, at least 1.
        target: What it acts on, see `Transform`.
        name: The name in the chain and in checkpoints; the class name in snake case if None.

    Raises:
        ValueError: For a setting out of range, or an unknown ``target``.
        TypeError: For an argument of the wrong type.

    It has one metric, ``clipped``: the share of elements that changed. State: one number for each element, float32 or
    wider, and one for each tensor.

    Examples:
        >>> import torch
        >>> from torchzero_clip import Modular, SpikeAwareClip
        >>> weight = torch.nn.Parameter(torch.zeros(1))
        >>> optimizer = Modular([weight], SpikeAwareClip(threshold=4.0, beta=0.5, warmup_steps=3))
        >>> for gradient in (1.0, 1.0, 9.0):
        ...     weight.data = torch.zeros(1)
        ...     weight.grad = torch.tensor([gradient])
        ...     optimizer.step()
        >>> round(-weight.item(), 3)
        1.732

    Source: Huang et al., [SPAM: spike-aware Adam with momentum reset](https://arxiv.org/abs/2501.06842), 2025. This is
    the clip without the reset. In the reference, an element without a gradient before step 20 never changes.
    """

    checks = {"threshold": positive, "beta": unit_interval}
    keeps_statistics = True
    keys = ("square",)

    def __init__(
        self,
        threshold: float | Schedule = 5000.0,
        beta: float | Schedule = 0.999,
        warmup_steps: int = 20,
        *,
        target: Target = "update",
        name: str | None = None,
    ) -> None:
        steps("warmup_steps", warmup_steps)
        self.warmup_steps = warmup_steps
        super().__init__({"threshold": threshold, "beta": beta}, target=target, name=name)

    @override
    def init_state(self, param: Tensor, setting: Setting) -> dict[str, Any]:
        """The average of squares, float32 or wider, and how many entered it."""
        square = torch.zeros_like(param, dtype=wide_dtype(param.dtype))
        return {"square": square, **numbers("started", device=param.device)}

    @override
    def flags(self, updates: Sequence[Tensor], step: Step, rows: Sequence[int] | None) -> Flags:
        """Which averages are usable and limit in this step, after counting the usable ones."""
        count = step.live_numbers("started", rows)
        usable = step.usable(count > 0, indices=rows)
        limits = count + 1 >= self.warmup_steps
        step.keep("started", count + usable, rows)
        return Flags(usable, limits)

    @override
    def change_(self, x: Tensor, state: Sequence[Tensor], setting: Setting, usable: Tensor, started: Tensor) -> Tensor:
        """Clip the elements, and move the averages."""
        (square,) = state
        usable = usable & x.isfinite()  # an earlier transform may have made an inf of a finite gradient
        size = x.abs().to(square.dtype)
        limit = (square * setting["threshold"]).sqrt()
        exceeds = usable & started & (limit > 0) & (size > limit)
        limited = torch.where(exceeds, limit, size)
        seen = limited.square().clamp(max=torch.finfo(square.dtype).max)
        moved = setting["beta"] * square + (1 - setting["beta"]) * seen
        foreach.copy_([square], [torch.where(usable, moved, square)])
        foreach.copy_([x], [torch.where(exceeds, torch.copysign(limited, x), x)])
        return exceeds.count_nonzero()

    @override
    def change_usual_(
        self, x: Tensor, result: Tensor, state: Sequence[Tensor], setting: Setting, scratch: Scratch
    ) -> Tensor | None:
        """Clip the elements, and move the averages."""
        (square,) = state
        new, other = (scratch.memory(name, x.numel(), square) for name in ("new", "other"))
        torch.mul(x, x, out=new)
        if torch.add(new, square, alpha=-setting["threshold"], out=other).amax() <= 0:  # all are within their limits
            result.copy_(x)
            count = torch.zeros_like(other.select(0, 0))
        else:
            limit = torch.mul(square, setting["threshold"], out=new).sqrt_()
            # an element without a history has no limit; numbers are written several times faster than booleans
            limit.add_(torch.eq(square, 0, out=other), alpha=torch.finfo(square.dtype).max)
            count = torch.gt(torch.abs(x, out=other), limit, out=other).sum()
            torch.clamp(x, torch.neg(limit, out=other), limit, out=result)
            torch.mul(result, result, out=new).clamp_(max=torch.finfo(square.dtype).max)
        square.mul_(setting["beta"]).add_(new, alpha=1 - setting["beta"])
        return count
