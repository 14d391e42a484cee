"""A limit of each tensor's elements that follows its largest element."""

from collections.abc import Sequence

import torch
from torch import Tensor
from typing_extensions import override

from torchzero_clip.checks import decay_rate
from torchzero_clip.clipping.statistics import Tracked, averaged
from torchzero_clip.core.elements import Elements, Flags
from torchzero_clip.core.elementwise import Elementwise
from torchzero_clip.core.states import zero_numbers
from torchzero_clip.core.step import Step
from torchzero_clip.functional.clip import within
from torchzero_clip.functional.dtypes import bias_correction
from torchzero_clip.functional.measure import LINF, Slicing
from torchzero_clip.types import NewState, Schedule, Setting, Target

_LARGEST = Slicing(LINF)


class ClipByMaxEMA(Elementwise):
    """Scales down the elements of an update that exceed an average of the largest elements of all steps so far.

        m     ← beta · m + (1 - beta) · max |u|
        limit = m̂                                (m with the bias correction of Adam)
        uₑ    ← uₑ · limit / max |u|              for the elements with |uₑ| > limit

    The current update enters the average before the comparison. The largest element becomes equal to the limit. Other
    elements above the limit are multiplied by the same factor, so they become smaller than the limit.

    **Guarantees.** Elements within the limit are bitwise unchanged. A non-finite gradient does not change the average
    of its tensor, and its update passes unchanged. The average starts at the first gradient that is not all zero.

    Args:
        beta: The decay rate of the average, in [0, 1); a setting of the param groups.
        target: What it acts on, see `Transform`.
        name: The name in the chain and in checkpoints; the class name in snake case if None.

    Raises:
        ValueError: For a ``beta`` out of range, or an unknown ``target``.
        TypeError: For an argument of the wrong type.

    The real and the imaginary part of a complex number are two elements. If ``beta`` changes in mid-run, the bias
    correction is wrong for some steps, as it is in Adam.

    It has one metric, ``clipped``: the share of elements that changed. State: two numbers for each tensor.

    Examples:
        >>> import torch
        >>> from torchzero_clip import ClipByMaxEMA, Modular
        >>> weight = torch.nn.Parameter(torch.zeros(2))
        >>> optimizer = Modular([weight], ClipByMaxEMA(beta=0.5))
        >>> for gradient in ([1.0, -0.5], [10.0, -6.0]):
        ...     weight.data = torch.zeros(2)
        ...     weight.grad = torch.tensor(gradient)
        ...     optimizer.step()
        ...     print([-x for x in weight.tolist()])
        [1.0, -0.5]
        [7.0, -6.0]

    Source: Huang et al., [Stable-SPAM: how to train in 4-bit more stably than 16-bit
    Adam](https://arxiv.org/abs/2502.17055), 2025, where it is called AdaClip. The reference resets the count of steps
    but not the average, so after a reset its limit is far too high for many steps.
    """

    checks = {"beta": decay_rate}
    each_alone = pure = True
    keeps_statistics = True
    reads_tensors = True
    keeps_finite = True

    def __init__(self, beta: float | Schedule = 0.999, *, target: Target = "update", name: str | None = None) -> None:
        super().__init__({"beta": beta}, target=target, name=name)

    @override
    def init_state(self, param: Tensor, setting: Setting) -> NewState:
        """The average of the largest elements, and how many entered it."""
        return zero_numbers("largest", "started", device=param.device)

    @override
    def rows_of(self, step: Step) -> list[int] | None:
        """Tensors without elements have no largest one."""
        rows = [i for i, param in enumerate(step.params) if param.numel()]
        return None if len(rows) == len(step.params) else rows

    @override
    def flags(self, updates: Sequence[Tensor], step: Step, rows: Sequence[int] | None) -> Flags:
        """The limit of each tensor, and its ratio to the largest element, after moving the averages."""
        updates = [torch.view_as_real(x) if x.is_complex() else x for x in updates]
        tracked = Tracked(step.tools.measure(updates, _LARGEST), step, False, lambda _: True)
        count = tracked["started"] + 1
        average = tracked.by_setting(averaged, tracked["largest"], tracked.norms)
        tracked.keep(largest=average, started=count)
        limits = tracked.by_setting(_limit, average, count)
        ratios = within(tracked.norms, limits, tracked.usable)
        return Flags(numbers=(limits, ratios))

    @override
    def formula(self, x: Tensor, state: Sequence[Tensor], setting: Setting) -> tuple[Tensor, Sequence[Tensor]]:
        limit, ratio = state
        return torch.where(x.abs() > limit, x * ratio, x), ()

    @override
    def change(self, x: Tensor, result: Tensor, state: Sequence[Tensor], setting: Setting, at: Elements) -> Tensor:
        limit, ratio = state
        factor = torch.abs(x, out=at.memory("factor", x))
        within = torch.le(factor, limit, out=factor)  # writing numbers is several times faster than booleans
        torch.maximum(within, ratio, out=factor)
        torch.mul(x, factor, out=result)
        return at.count(at.compare(torch.lt, factor, 1, factor))


def _limit(setting: Setting, average: Tensor, count: Tensor) -> Tensor:
    return average / bias_correction(setting["beta"], count)
