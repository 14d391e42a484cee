"""A limit of each element by the average of its squares."""

from collections.abc import Sequence

import torch
from torch import Tensor
from typing_extensions import override

from torchzero_clip.checks import positive, steps, unit_interval
from torchzero_clip.core.elements import Elements, Flags
from torchzero_clip.core.elementwise import Elementwise
from torchzero_clip.core.step import Step
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
    each_alone = pure = True
    keys = ("square",)
    keeps_finite = True

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
    def flags(self, updates: Sequence[Tensor], step: Step, rows: Sequence[int] | None) -> Flags:
        """Which averages are usable and limit in this step, after counting the usable ones."""
        count = step.live_numbers("started", rows)
        usable = step.usable(count > 0, indices=rows)
        limits = count >= self.warmup_steps - 1
        step.keep("started", count + usable, rows)
        return Flags(usable, limits, beside=(limits,))

    @override
    def formula(self, x: Tensor, state: Sequence[Tensor], setting: Setting) -> tuple[Tensor, Sequence[Tensor]]:
        square, limits = state
        limit = (setting["threshold"] * square).sqrt()
        new = torch.where((square > 0) & (limits > 0), x.clamp(-limit, limit), x)
        largest = torch.finfo(square.dtype).max
        return new, (setting["beta"] * square + (1 - setting["beta"]) * new.square().clamp(max=largest),)

    @override
    def change(self, x: Tensor, result: Tensor, state: Sequence[Tensor], setting: Setting, at: Elements) -> Tensor:
        (square,) = state
        new, other = (at.memory(name, square) for name in ("new", "other"))
        if at.usual and _are_within(x, square, setting["threshold"], new, other):  # so it is in most steps
            result.copy_(x)
            count = other.new_zeros(())
        else:
            limit = torch.mul(square, setting["threshold"], out=new).sqrt_()
            # an element without a history has no limit; numbers are written several times faster than booleans
            limit.add_(torch.eq(square, 0, out=other), alpha=torch.finfo(square.dtype).max)
            size = torch.abs(x, out=other)
            at = at.only_finite(size)
            at.fill_new_(limit, torch.inf)
            count = at.count(at.compare(torch.gt, size, limit, size))
            at.clamp(x, torch.neg(limit, out=other), limit, result)
            torch.mul(result, result, out=new).clamp_(max=torch.finfo(square.dtype).max)
        moved = torch.mul(square, setting["beta"], out=at.draft("moved", square))
        at.put(moved.add_(new, alpha=1 - setting["beta"]), square)
        return count


def _are_within(x: Tensor, square: Tensor, threshold: float, new: Tensor, other: Tensor) -> bool:
    """True if all elements are within their limits. Writes their squares to ``new``, and overwrites ``other``."""
    torch.mul(x, x, out=new)
    return bool(torch.add(new, square, alpha=-threshold, out=other).amax() <= 0)
