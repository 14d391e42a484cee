"""Limits on how fast updates may grow from step to step."""

from collections.abc import Sequence

import torch
from torch import Tensor
from typing_extensions import override

from torchzero_clip.checks import at_least_one, boolean, non_negative, optional, positive
from torchzero_clip.clipping.statistics import NormStatistics, Tracked
from torchzero_clip.core.elements import Elements
from torchzero_clip.core.elementwise import Elementwise
from torchzero_clip.core.step import Step
from torchzero_clip.functional.measure import Measured
from torchzero_clip.types import NewState, Ord, Schedule, Setting, Target

CHECKS = {
    "add": optional(non_negative),
    "mul": optional(positive),
    "min_value": optional(non_negative),
    "max_decay": optional(at_least_one),
}


class ClipValueGrowth(Elementwise):
    """Limits how fast the magnitude of every element may grow from step to step.

        a     = min(|u|, prev + add)
        floor = max(prev, min_value)
        u     ← sign(u) · min(a, floor · mul)
        prev  ← the new |u|, or prev / max_decay if a < floor / max_decay

    where ``prev`` is the tracked magnitude of the step before. A limit of None does not apply. A change of sign does
    not count as growth: 1, -1, -3 becomes 1, -1, -1.5. The first update passes unchanged.

    **Guarantees.** Elements that do not grow faster are bitwise unchanged. A non-finite gradient does not change the
    tracked magnitudes of its tensor, and its update passes unchanged; a tracked inf would be no limit for later
    updates. Tracking starts at the first gradient that is not all zero. Finite and non-zero are decided on the
    gradients before the first transform, equally on all ranks.

    Args:
        add: The most that a magnitude may grow by in a step, in units of the update, >= 0; None for no such limit. A
            setting of the param groups, as are the next three.
        mul: The largest factor by which a magnitude may grow in a step, > 0; None for no such limit. Without ``add``
            and ``mul`` updates pass unchanged and no magnitude is tracked.
        min_value: The smallest magnitude that ``mul`` multiplies, so that elements can grow from 0; None for no floor.
        max_decay: The largest factor by which a tracked magnitude may shrink in a step, >= 1, so that one small update
            does not limit the updates after it; None for no limit.
        target: What it acts on, see `Transform`.
        name: The name in the chain and in checkpoints; the class name in snake case if None.

    Raises:
        ValueError: For a setting out of range, or an unknown ``target``.
        TypeError: For a setting of the wrong type.

    | element | result |
    | --- | --- |
    | 0 before, 1 now | 1.5e-4 by default: ``min_value * mul`` |
    | inf or NaN anywhere in the gradient of the tensor | unchanged; so are the tracked magnitudes |
    | complex | the real and the imaginary part are limited separately |

    Examples:
        >>> import torch
        >>> from torchzero_clip import ClipValueGrowth, Modular
        >>> weight = torch.nn.Parameter(torch.zeros(2))
        >>> optimizer = Modular([weight], ClipValueGrowth())
        >>> for gradient in ([1.0, 1.0], [-1.0, 0.5], [-3.0, 9.0]):
        ...     weight.data = torch.zeros(2)
        ...     weight.grad = torch.tensor(gradient)
        ...     optimizer.step()
        ...     print([-x for x in weight.tolist()])
        [1.0, 1.0]
        [-1.0, 0.5]
        [-1.5, 0.75]

    Source: not published. It is the limit of `ClipNormGrowth`, applied to single elements.
    """

    checks = CHECKS
    each_alone = pure = True
    keys = ("prev",)
    keeps_finite = True

    def __init__(
        self,
        add: float | Schedule | None = None,
        mul: float | Schedule | None = 1.5,
        min_value: float | Schedule | None = 1e-4,
        max_decay: float | Schedule | None = 2.0,
        *,
        target: Target = "update",
        name: str | None = None,
    ) -> None:
        settings = {"add": add, "mul": mul, "min_value": min_value, "max_decay": max_decay}
        super().__init__(settings, target=target, name=name)

    @override
    def init_state(self, param: Tensor, setting: Setting) -> NewState:
        """The tracked magnitudes, float32 or wider; empty without a limit."""
        return self.possible_state(param, setting) if _limits(setting) else {}

    @override
    def acts_with(self, setting: Setting) -> bool:
        return _limits(setting)

    @override
    def rows_of(self, step: Step) -> list[int] | None:
        """The indices of the parameters with a limit; None for all. The tracking of the others ends."""
        _end_without_limit(step)
        return super().rows_of(step)

    @override
    def formula(self, x: Tensor, state: Sequence[Tensor], setting: Setting) -> tuple[Tensor, Sequence[Tensor]]:
        (prev,) = state
        add, mul, low, decay = (setting[key] for key in ("add", "mul", "min_value", "max_decay"))
        floor = prev if low is None else prev.clamp(min=low)
        size = x.abs() if add is None else x.abs().minimum(prev + add)
        allowed = size if mul is None else size.minimum(floor * mul)
        tracked = allowed if decay is None else torch.where(size < floor / decay, prev / decay, allowed)
        return allowed.copysign(x), (tracked,)

    @override
    def start(self, x: Tensor, setting: Setting) -> Sequence[Tensor]:
        return (x.abs(),)

    @override
    def change(self, x: Tensor, result: Tensor, state: Sequence[Tensor], setting: Setting, at: Elements) -> Tensor:
        (prev,) = state
        add, mul, low, decay = (setting[key] for key in ("add", "mul", "min_value", "max_decay"))
        size, limit, other = (at.memory(name, prev) for name in ("size", "limit", "other"))
        at = at.only_finite(torch.abs(x, out=size))
        if mul is None:
            torch.add(prev, add, out=limit)
        else:
            torch.mul(_floor(prev, low, limit), mul, out=limit)
            if add is not None:
                torch.minimum(limit, torch.add(prev, add, out=other), out=limit)
        at.fill_new_(limit, torch.inf)
        count = at.count(at.compare(torch.gt, size, limit, other))
        tracked = at.draft("tracked", prev)
        if decay is None:
            torch.minimum(size, limit, out=tracked)
        else:  # what dropped below floor / decay is tracked at prev / decay
            slowest = torch.div(_floor(prev, low, other), decay, out=other)
            at.fill_new_(slowest, 0.0)
            grown = size
            if add is not None:
                most = torch.add(prev, add, out=at.memory("grown", prev))
                grown = torch.minimum(size, most, out=most)
            is_tracked = torch.ge(grown, slowest, out=other)
            torch.minimum(size, limit, out=size)
            torch.lerp(torch.div(prev, decay, out=tracked), size, is_tracked, out=tracked)
        at.put(tracked, prev)
        at.clamp(x, torch.neg(limit, out=other), limit, result)
        return count


def _floor(prev: Tensor, low: float | None, out: Tensor) -> Tensor:
    return prev if low is None else torch.clamp(prev, min=low, out=out)


class ClipNormGrowth(NormStatistics):
    """Limits how fast the norm of the updates may grow from step to step.

        allowed = min(prev + add, max(prev, min_value) · mul)
        u       ← u · min(1, allowed / ‖u‖)
        prev    ← the new ‖u‖, but at least prev / max_decay

    where ``prev`` is the tracked norm of the step before. A limit of None does not apply. The first update passes
    unchanged. By default each tensor has its own norm. With ``parameterwise=False`` all tensors of all groups have one
    joint norm.

    **Guarantees.** Updates whose norm does not grow faster are bitwise unchanged, and directions do not change. A
    non-finite gradient does not change the tracked norm, and its update passes unchanged; a tracked inf would be no
    limit for later updates. Tracking starts at the first gradient that is not all zero. Finite and non-zero are decided
    on the gradients before the first transform, equally on all ranks.

    Args:
        add: The most that the norm may grow by in a step, in units of the metric, >= 0; None for no such limit. A
            setting of the param groups, as are the next three.
        mul: The largest factor by which the norm may grow in a step, > 0; None for no such limit. Without ``add`` and
            ``mul`` updates pass unchanged and no norm is tracked.
        min_value: The smallest norm that ``mul`` multiplies, so that a norm of 0 can grow; None for no floor.
        max_decay: The largest factor by which the tracked norm may shrink in a step, >= 1, so that one small update
            does not limit the updates after it; None for no limit.
        ord: The metric, as in `ClipNorm`.
        parameterwise: Each tensor has a norm of its own. If False, all settings must be the same in all param groups.
        target: What it acts on, see `Transform`.
        name: The name in the chain and in checkpoints; the class name in snake case if None.

    Raises:
        ValueError: For a setting out of range, an unknown ``ord`` or ``target``, or param groups that differ where they
            must not.
        TypeError: For an argument of the wrong type.

    | update | result |
    | --- | --- |
    | norm 0 | unchanged; the tracked norm shrinks by ``max_decay`` |
    | norm 0, with ``min_value=None, max_decay=None`` | unchanged; all later updates become 0 |
    | inf or NaN in the gradient | unchanged; so is the tracked norm |
    | one element with 'std' or 'var' | unchanged |

    Examples:
        >>> import torch
        >>> from torchzero_clip import ClipNormGrowth, Modular
        >>> weight = torch.nn.Parameter(torch.zeros(1))
        >>> optimizer = Modular([weight], ClipNormGrowth())
        >>> for gradient in (5.0, 50.0, 50.0, 0.05, 5.0):
        ...     weight.data = torch.zeros(1)
        ...     weight.grad = torch.tensor([gradient])
        ...     optimizer.step()
        ...     print(round(-weight.item(), 4))
        5.0
        7.5
        11.25
        0.05
        5.0

    Source: Chen et al., [Fira: can we achieve full-rank training of LLMs under low-rank
    constraint?](https://arxiv.org/abs/2410.01623), 2024, whose norm-growth limiter is
    ``ClipNormGrowth(mul=1.01, min_value=1e-8, max_decay=None)``.
    """

    checks = CHECKS
    each_alone = pure = True

    def __init__(
        self,
        add: float | Schedule | None = None,
        mul: float | Schedule | None = 1.5,
        min_value: float | Schedule | None = 1e-4,
        max_decay: float | Schedule | None = 2.0,
        ord: Ord = 2,
        parameterwise: bool = True,
        *,
        target: Target = "update",
        name: str | None = None,
    ) -> None:
        boolean("parameterwise", parameterwise)
        self.parameterwise = parameterwise
        settings = {"add": add, "mul": mul, "min_value": min_value, "max_decay": max_decay}
        super().__init__(settings, ord=ord, joint=not parameterwise, target=target, name=name)

    @override
    def takes_part(self, setting: Setting) -> bool:
        return _limits(setting)

    @override
    def keeps_refused(self, settings: Sequence[Setting]) -> bool:
        """True if no tracking ends."""
        return all(map(_limits, settings))

    @override
    def factors(self, measured: Measured, updates: list[Tensor], step: Step) -> Tensor:
        _end_without_limit(step, "prev", joint=self.joint)
        return super().factors(measured, updates, step)

    @override
    def factors_of(self, tracked: Tracked, updates: list[Tensor]) -> Tensor:
        size, prev = tracked.metric(tracked.norms), tracked["prev"]
        limited, ratio = tracked.limited(size, tracked.limits(tracked.by_setting(_allowed, prev)))
        # prev is 0 before the start
        slowest = tracked.by_setting(lambda setting, prev: prev / (setting["max_decay"] or torch.inf), prev)
        tracked.keep(prev=torch.where(size < slowest, slowest, limited))
        return tracked.root(ratio)


def _limits(setting: Setting) -> bool:
    return setting["add"] is not None or setting["mul"] is not None


def _end_without_limit(step: Step, *keys: str, joint: bool = False) -> None:
    """End the tracking of tensors without a limit, so that it starts anew if they get one again."""
    for setting, span in step.by_setting():
        if not _limits(setting):
            for state in [step.global_state] if joint else step.states[span]:
                for key in ("started", *keys) if state else ():
                    state[key].zero_()


def _allowed(setting: Setting, prev: Tensor) -> Tensor:
    """The largest norm that may follow on ``prev``."""
    by_sum = None if setting["add"] is None else prev + setting["add"]
    if setting["mul"] is None:
        return torch.full_like(prev, torch.inf) if by_sum is None else by_sum
    floor = prev if setting["min_value"] is None else prev.clamp(min=setting["min_value"])
    product = floor * setting["mul"]
    return product if by_sum is None else torch.minimum(by_sum, product)
