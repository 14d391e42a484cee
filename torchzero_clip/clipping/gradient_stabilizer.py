"""Updates whose norm is the ratio of an average norm to an average of squares."""

from functools import partial

from torch import Tensor
from typing_extensions import override

from torchzero_clip.checks import decay_rate, non_negative
from torchzero_clip.clipping.statistics import NormStatistics, Tracked, averaged
from torchzero_clip.core.states import zero_numbers
from torchzero_clip.functional.choice import where
from torchzero_clip.functional.dtypes import bias_correction, squarable
from torchzero_clip.types import NewState, Schedule, Setting, Target


class GradientStabilizer(NormStatistics):
    """Scales the update of each tensor to a norm of about 1, or less after a spike.

        m ← beta1 · m + (1 - beta1) · ‖u‖,   v ← beta2 · v + (1 - beta2) · ‖u‖²
        u ← u / ‖u‖ · m̂ / (√v̂ + eps)        (m̂ and v̂ with the bias correction of Adam)

    The norm of the result is about 1 or less for every gradient. So this transform replaces a clip, and removes the
    relative scale of tensors. Use it before Adam, on which a constant scale has no effect, and not before SGD. A spike
    of 100 times the usual norm gets a norm of 0.97. The steps after it are small for long: their norm is 0.08 after 14
    steps, and half of the usual norm after 56.

    **Guarantees.** Directions do not change. A non-finite gradient does not change the averages of its tensor, and its
    update passes unchanged. The averages start at the first gradient that is not all zero.

    If ``beta1`` or ``beta2`` changes in mid-run, the bias correction is wrong for some steps, as it is in Adam.

    Args:
        beta1: The decay rate of the average norm, in [0, 1); a setting of the param groups.
        beta2: The decay rate of the average square, in [0, 1); a setting.
        eps: Added to the root of the average square, >= 0; a setting, in units of the gradient.
        target: What it acts on, see `Transform`.
        name: The name in the chain and in checkpoints; the class name in snake case if None.

    Raises:
        ValueError: For a setting out of range, or an unknown ``target``.
        TypeError: For an argument of the wrong type.

    An update of norm 0 stays 0, and the averages are updated. State: three numbers for each tensor.

    Examples:
        >>> import torch
        >>> from torchzero_clip import GradientStabilizer, Modular
        >>> weight = torch.nn.Parameter(torch.zeros(2))
        >>> optimizer = Modular([weight], GradientStabilizer())
        >>> for scale in (1.0, 1.0, 100.0, 1.0):
        ...     weight.data = torch.zeros(2)
        ...     weight.grad = torch.tensor([3.0, 4.0]) * scale
        ...     optimizer.step()
        ...     print(round(weight.norm().item(), 2))
        1.0
        1.0
        0.76
        0.55

    Source: Huang et al., [GradientStabilizer: fix the norm, not the gradient](https://arxiv.org/abs/2502.17055), 2025.
    Its first version, Stable-SPAM, calls the transform AdaGN.
    """

    checks = {"beta1": decay_rate, "beta2": decay_rate, "eps": non_negative}
    each_alone = pure = True

    def __init__(
        self,
        beta1: float | Schedule = 0.7,
        beta2: float | Schedule = 0.9,
        eps: float | Schedule = 1e-8,
        *,
        target: Target = "update",
        name: str | None = None,
    ) -> None:
        settings = {"beta1": beta1, "beta2": beta2, "eps": eps}
        super().__init__(settings, ord=2, joint=False, target=target, name=name)

    @override
    def possible_state(self, param: Tensor, setting: Setting) -> NewState:
        return zero_numbers("norm", "square", "started", device=param.device)

    @override
    def factors_of(self, tracked: Tracked, updates: list[Tensor]) -> Tensor:
        norms, count = tracked.norms, tracked["started"] + 1
        seen = norms.clamp(max=squarable(norms))
        norm = tracked.by_setting(partial(averaged, key="beta1"), tracked["norm"], seen)
        square = tracked.by_setting(partial(averaged, key="beta2"), tracked["square"], seen.square())
        tracked.keep(norm=norm, square=square, started=count)
        factors = where(norms > 0, tracked.by_setting(_target, norm, square, count) / norms, 1.0)
        return tracked.where_usable(factors)


def _target(setting: Setting, norm: Tensor, square: Tensor, count: Tensor) -> Tensor:
    first, second = (bias_correction(setting[key], count) for key in ("beta1", "beta2"))
    return norm / first / ((square / second).sqrt() + setting["eps"])
