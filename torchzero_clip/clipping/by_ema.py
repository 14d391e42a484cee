"""Limits that follow an exponential moving average of past updates."""

from collections.abc import Sequence
from typing import ClassVar, Literal

import torch
from torch import Tensor
from typing_extensions import override

from torchzero_clip.checks import boolean, non_negative, one_of, optional, positive, unit_interval
from torchzero_clip.clipping.statistics import NormStatistics, Tracked
from torchzero_clip.core.chain import Chain, Composite, Transforms
from torchzero_clip.core.elements import Elements
from torchzero_clip.core.elementwise import Elementwise
from torchzero_clip.core.kinds import UpdateRule
from torchzero_clip.core.step import Step
from torchzero_clip.functional import foreach
from torchzero_clip.functional.choice import where
from torchzero_clip.functional.clip import within
from torchzero_clip.functional.foreach import reals, wide_dtype
from torchzero_clip.functional.measure import Measured, counted_elements, scale_measured_
from torchzero_clip.types import NewState, Ord, Schedule, Setting, Target

EMAInit = Literal["zeros", "update"]
EMA_INITS = ("zeros", "update")
SMALLEST_GROWN = 1e-6  # an average of norm 0 may grow to this, whatever max_ema_growth


class ClipNormByEMA(NormStatistics):
    """Scales updates so that the norm of each is at most the norm of the average of past updates.

        ema ← ema + (1 - beta) · (u - ema)          (first ema = 0, or u with ema_init="update")
        ema ← ema · min(1, allowed / ‖ema‖)         (from the second step on:
                                                     allowed = max(growth · ‖ema of the step before‖, 1e-6))
        u   ← u / max(1, ‖u‖ / max(‖ema‖, eps))

    The average is one of vectors, not of norms. Updates that change their direction cancel in it and are clipped.
    Updates that keep their direction pass. The current update enters the average before the two are compared. A limit
    on the growth of the average keeps one spike from raising the limit of all later steps.

    By default each tensor has its own norm. With ``tensorwise=False`` all tensors of all groups have one joint norm.

    **Guarantees.** The average takes updates as they are before the clip. A non-finite gradient does not change the
    average, and its update passes unchanged. The average starts at the first gradient that is not all zero; until then
    updates pass unchanged. Finite and non-zero are decided on the gradients before the first transform, for each
    tensor, or jointly with ``tensorwise=False``, and equally on all ranks.

    Args:
        beta: The decay rate of the average, in [0, 1]; a setting of the param groups.
        ord: The metric, as in `ClipNorm`.
        eps: The smallest limit, in units of the metric, >= 0; a setting.
        tensorwise: Each tensor has a norm and a limit of its own. If False, ``eps`` and ``max_ema_growth`` must be the
            same in all param groups.
        max_ema_growth: The factor by which the norm of the average may grow from step to step, > 0; None for no limit;
            a setting.
        ema_init: Start the average at "zeros", which cuts the first update to (1 - beta) of its size, or at the first
            "update", which then passes unchanged.
        target: What it acts on, see `Transform`.
        name: The name in the chain and in checkpoints; the class name in snake case if None.

    Raises:
        ValueError: For a setting out of range, an unknown ``ord``, ``ema_init`` or ``target``, or param groups that
            differ where they must not.
        TypeError: For an argument of the wrong type.

    | update | result |
    | --- | --- |
    | norm 0 | unchanged |
    | all gradients so far were 0 | unchanged; so is the average |
    | inf or NaN in the gradient | unchanged; so is the average |
    | ``beta=1`` with ``ema_init="zeros"`` | norm at most ``eps``, because the average stays 0 |
    | one element with 'std' or 'var' | unchanged |

    For half-precision parameters the average is float32. In bfloat16 an average with ``beta=0.99`` of a constant would
    stop at 0.8 of it.

    Examples:
        >>> import torch
        >>> from torchzero_clip import ClipNormByEMA, Modular
        >>> weight = torch.nn.Parameter(torch.zeros(2))
        >>> optimizer = Modular([weight], ClipNormByEMA(beta=0.5))
        >>> for _ in range(3):
        ...     weight.data = torch.zeros(2)
        ...     weight.grad = torch.tensor([3.0, 4.0])
        ...     optimizer.step()
        ...     print([round(-x, 3) for x in weight.tolist()])
        [1.5, 2.0]
        [2.25, 3.0]
        [2.625, 3.5]

    Source: not published. Related: Wang et al., [AdaGC: improving training stability for large language model
    pretraining](https://arxiv.org/abs/2502.11034), 2025, which averages norms instead of vectors.
    """

    NORMALIZE: ClassVar[bool] = False  # True to scale smaller updates up to the limit too
    common = ("eps", "max_ema_growth")
    checks = {"beta": unit_interval, "eps": non_negative, "max_ema_growth": optional(positive)}
    each_alone = pure = True

    def __init__(
        self,
        beta: float | Schedule = 0.99,
        ord: Ord = 2,
        eps: float | Schedule = 1e-6,
        tensorwise: bool = True,
        max_ema_growth: float | Schedule | None = 1.5,
        ema_init: EMAInit = "zeros",
        *,
        target: Target = "update",
        name: str | None = None,
    ) -> None:
        boolean("tensorwise", tensorwise)
        one_of("ema_init", ema_init, EMA_INITS)
        self.tensorwise = tensorwise
        self.ema_init: EMAInit = ema_init
        settings = {"beta": beta, "eps": eps, "max_ema_growth": max_ema_growth}
        super().__init__(settings, ord=ord, joint=not tensorwise, target=target, name=name)

    @override
    def possible_state(self, param: Tensor, setting: Setting) -> NewState:
        """The average, float32 or wider, and its norm in the step before."""
        ema = torch.zeros_like(param, dtype=wide_dtype(param.dtype))
        return {"ema": ema} | super().possible_state(param, setting)

    @override
    def factors_of(self, tracked: Tracked, updates: list[Tensor]) -> Tensor:
        of_tracked = [updates[i] for i in tracked.indices]
        averages, measured = tracked.averaged("ema", of_tracked, self.slicing, from_update=self.ema_init == "update")
        size = self._grown(averages, measured, tracked)

        limits = tracked.root(tracked.by_setting(lambda s, x: x.clamp(min=s["eps"]), size))
        if not self.NORMALIZE:
            return tracked.where_usable(within(tracked.norms, limits))
        root, ratios = self.slicing.metric.root, tracked.norms / limits
        least = tracked.by_setting(lambda s, x: x.clamp(min=root(s["eps"])), ratios)
        return tracked.where_usable(where(tracked.norms > 0, least.reciprocal(), 1.0))

    def _grown(self, averages: Sequence[Tensor], measured: Measured, tracked: Tracked) -> Tensor:
        """Keep the averages from growing too fast, and return their norms."""
        size = tracked.metric(tracked.of(measured))
        if any(setting["max_ema_growth"] is not None for setting, _ in tracked.shared):
            largest = tracked.limits(tracked.by_setting(_largest, tracked["prev"]))
            shrink = tracked.root(within(size, largest))
            scratch = tracked.step.tools.scratch_for(averages)
            # the name has the id, because a chain may have two of these transforms
            scale_measured_(measured, tracked.factors(shrink), scratch, owner=f"averages {id(self)}")
            size = torch.minimum(size, largest)
        tracked.keep(prev=size)
        return size


class NormalizeByEMA(ClipNormByEMA):
    """Scales updates so that the norm of each is the norm of the average of past updates.

        u ← u · min(max(‖ema‖, eps) / ‖u‖, 1 / eps)

    The average and its rules are those of `ClipNormByEMA`. Here smaller updates are scaled up too. Zeros stay zeros.
    The length of a step does not jump with single gradients, but follows their size over time.

    Args:
        beta: The decay rate of the average, in [0, 1]; a setting of the param groups.
        ord: The metric, as in `ClipNorm`.
        eps: The smallest norm to scale to, in units of the metric, >= 0, and the inverse of the largest factor; a
            setting.
        tensorwise: As in `ClipNormByEMA`.
        max_ema_growth: As in `ClipNormByEMA`; a setting.
        ema_init: Start the average at "zeros", which makes the first steps small, or at the first "update".
        target: What it acts on, see `Transform`.
        name: The name in the chain and in checkpoints; the class name in snake case if None.

    Raises:
        ValueError: For a setting out of range, an unknown ``ord``, ``ema_init`` or ``target``, or param groups that
            differ where they must not.
        TypeError: For an argument of the wrong type.

    Examples:
        >>> import torch
        >>> from torchzero_clip import Modular, NormalizeByEMA
        >>> weight = torch.nn.Parameter(torch.zeros(2))
        >>> optimizer = Modular([weight], NormalizeByEMA(beta=0.9, ema_init="update"))
        >>> for scale in (1.0, 0.01):  # the second gradient is a hundred times smaller
        ...     weight.data = torch.zeros(2)
        ...     weight.grad = torch.tensor([3.0, 4.0]) * scale
        ...     optimizer.step()
        ...     print([round(-x, 4) for x in weight.tolist()])
        [3.0, 4.0]
        [2.703, 3.604]

    Source: not published; see `ClipNormByEMA`.
    """

    NORMALIZE = True


class ClipValueByEMA(Elementwise, Composite):
    """Clips every element of the updates to the average of its past magnitudes.

        ema ← ema + (1 - beta) · (|u| - ema)        (first ema = 0, or |u| with ema_init="update")
        u   ← min(max(u, -ema), ema)

    Each element has its own limit: the average, in which the current update is included. If gradients are random and
    steady, about two elements in five exceed their average. An ``ema_tfm`` that multiplies the average lets them pass.

    **Guarantees.** The average takes updates as they are before the clip. A non-finite gradient does not change the
    average of its tensor, and its update passes unchanged. The average starts at the first gradient that is not all
    zero; until then updates pass unchanged. Finite and non-zero are decided on the gradients before the first
    transform, equally on all ranks. No finite element exceeds its limit, as rounded to the dtype of the update.

    Args:
        beta: The decay rate of the average, in [0, 1]; a setting of the param groups.
        ema_init: Start the average at "zeros", which cuts the first update to (1 - beta) of its size, or at the first
            "update", which then passes unchanged.
        ema_tfm: A transform, or a list of them, that is applied to a copy of the average; the magnitude of the result
            is the limit. It has its own state, and its settings have qualified names. The average itself does not
            change.
        target: What it acts on, see `Transform`.
        name: The name in the chain and in checkpoints; the class name in snake case if None.

    Raises:
        ValueError: For a ``beta`` out of range, an unknown ``ema_init`` or ``target``, or an ``ema_tfm`` that acts on
            gradients or parameters or has a learning rate.
        TypeError: For an argument of the wrong type.

    | element | result |
    | --- | --- |
    | all gradients of the tensor so far were 0 | unchanged; so is the average |
    | inf or NaN anywhere in the gradient of the tensor | unchanged; so is the average |
    | complex | the real and the imaginary part are clipped separately |

    Examples:
        >>> import torch
        >>> from torchzero_clip import ClipValueByEMA, Modular
        >>> weight = torch.nn.Parameter(torch.zeros(2))
        >>> optimizer = Modular([weight], ClipValueByEMA(beta=0.5, ema_init="update"))
        >>> for gradient in ([1.0, -1.0], [9.0, -0.5]):
        ...     weight.data = torch.zeros(2)
        ...     weight.grad = torch.tensor(gradient)
        ...     optimizer.step()
        ...     print([-x for x in weight.tolist()])
        [1.0, -1.0]
        [5.0, -0.5]

    Source: not published. Related: Huang et al., [Stable-SPAM: how to train in 4-bit more stably than 16-bit
    Adam](https://arxiv.org/abs/2502.17055), 2025, which follows the largest magnitude of each tensor.
    """

    checks = {"beta": unit_interval}
    each_alone = pure = True
    keys = ("ema",)
    keeps_finite = True

    def __init__(
        self,
        beta: float | Schedule = 0.99,
        ema_init: EMAInit = "zeros",
        ema_tfm: "Transforms | None" = None,
        *,
        target: Target = "update",
        name: str | None = None,
    ) -> None:
        one_of("ema_init", ema_init, EMA_INITS)
        self.ema_init: EMAInit = ema_init
        self.ema_tfm = ema_tfm
        chain = {} if ema_tfm is None else {"ema_tfm": Chain(ema_tfm)}
        super().__init__({"beta": beta}, chain, target=target, name=name)
        for node in self.nodes():
            transform = node.transform
            if transform.target not in ("update", "update_difference"):
                raise ValueError(f"ema_tfm acts on the average: {transform!r} cannot have target={transform.target!r}")
            if "lr" in transform.defaults or (isinstance(transform, UpdateRule) and transform.lr is not None):
                raise ValueError(f"ema_tfm has no learning rate, which is the chain's: {transform!r} cannot be in it")

    @override
    def apply_tensors(self, updates: list[Tensor], step: Step) -> Sequence[Tensor]:
        if step.apply_child is None:
            return super().apply_tensors(updates, step)
        averages, flags = step.column("ema"), self.flags(updates, step, None)
        followed: list[tuple[Tensor, Elements]] = []
        for i, (update, average) in enumerate(zip(updates, averages, strict=True)):
            x, ema, at = reals(update), reals(average), flags.elements(i, update.device)
            followed.append((x, self._follow(x.abs().to(ema.dtype), ema, step.settings[i], at)))
        bounds = step.apply_child("ema_tfm", foreach.clone(averages))
        counts: list[Tensor] = []
        for (x, at), bound in zip(followed, bounds, strict=True):
            limit = reals(bound).abs().nan_to_num_(nan=torch.inf, posinf=torch.inf)
            counts.append(at.count(x.abs() > limit))
            at.clamp(x, -limit, limit, x)
        step.show_share("clipped", *counted_elements(updates, counts))
        return updates

    @override
    def formula(self, x: Tensor, state: Sequence[Tensor], setting: Setting) -> tuple[Tensor, Sequence[Tensor]]:
        ema = state[0].lerp(x.abs(), 1 - setting["beta"])
        return x.clamp(-ema, ema), (ema,)

    @override
    def start(self, x: Tensor, setting: Setting) -> Sequence[Tensor] | None:
        return (x.abs(),) if self.ema_init == "update" else None

    @override
    def change(self, x: Tensor, result: Tensor, state: Sequence[Tensor], setting: Setting, at: Elements) -> Tensor:
        (ema,) = state
        size = torch.abs(x, out=at.memory("size", ema))
        at = self._follow(size, ema, setting, at)
        count = at.count(at.compare(torch.gt, size, ema, size))
        at.clamp(x, torch.neg(ema, out=size), ema, result)
        return count

    def _follow(self, size: Tensor, ema: Tensor, setting: Setting, at: Elements) -> Elements:
        """Move averages towards the magnitudes of updates. Return the elements that are finite."""
        finite = at.only_finite(size)
        if self.ema_init == "update":
            finite.begin_(ema, size)
        finite.lerp_(ema, size, 1 - setting["beta"])
        return finite


def _largest(setting: Setting, prev: Tensor) -> Tensor:
    """The largest norm of an average that may follow on ``prev``."""
    growth = setting["max_ema_growth"]
    return torch.full_like(prev, torch.inf) if growth is None else (prev * growth).clamp(min=SMALLEST_GROWN)
