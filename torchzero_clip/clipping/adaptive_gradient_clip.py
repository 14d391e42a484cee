"""Clipping by the size of the weights."""

from dataclasses import replace
from functools import cache

from torch import Tensor
from typing_extensions import override

from torchzero_clip.checks import positive
from torchzero_clip.core.kinds import Scaling
from torchzero_clip.core.step import Step
from torchzero_clip.functional.clip import within
from torchzero_clip.functional.measure import Measured, measured_like
from torchzero_clip.functional.shards import elements_at
from torchzero_clip.types import Schedule, Target


class AdaptiveGradientClip(Scaling):
    """Scales the update of each unit so that its norm is at most a fraction of the norm of its weights (AGC).

        u ← u · min(1, clip_factor · max(‖w‖, eps) / ‖u‖)

    A unit is the part of a tensor with one index in dimension ``unit_dim``. In a linear layer or convolution of torch,
    these are the weights of one output. Vectors and scalars are one unit each.

    Exclude the last layer with ``.without("head.*")``, because it has to learn the scale of the targets. For weights
    that are stored as (in, out), as in the Conv1D of GPT-2 in transformers, use ``unit_dim=1``. The limit of weights
    that start at zero is ``clip_factor * eps``, so with SGD they hardly change in their first steps.

    Args:
        clip_factor: The largest ratio of the norms, > 0; a setting of the param groups.
        eps: A smaller norm of weights counts as ``eps``, > 0; a setting.
        unit_dim: The dimension of the units.
        target: What it acts on, see `Transform`.
        name: The name in the chain and in checkpoints; the class name in snake case if None.

    Raises:
        ValueError: For a setting out of range, an unknown ``target``, or a tensor without dimension ``unit_dim``.
        TypeError: For an argument of the wrong type.

    A tensor with a non-finite gradient passes unchanged. It has no state. Each step reads the weights once.

    Examples:
        >>> import torch
        >>> from torchzero_clip import AdaptiveGradientClip, Modular
        >>> weight = torch.nn.Parameter(torch.tensor([[3.0, 4.0], [0.0, 0.1]]))
        >>> optimizer = Modular([weight], AdaptiveGradientClip(0.5))
        >>> weight.grad = torch.tensor([[6.0, 8.0], [0.0, 0.01]])
        >>> optimizer.step()
        >>> weight.data
        tensor([[1.5000, 2.0000],
                [0.0000, 0.0900]])

    Source: Brock et al., [High-performance large-scale image recognition without
    normalization](https://arxiv.org/abs/2102.06171), 2021.
    """

    checks = {"clip_factor": positive, "eps": positive}
    each_alone = pure = True
    keeps_statistics = True  # a gradient that is not finite leaves the whole tensor unchanged, not only its unit

    def __init__(
        self,
        clip_factor: float | Schedule = 0.01,
        eps: float | Schedule = 1e-3,
        *,
        unit_dim: int = 0,
        target: Target = "update",
        name: str | None = None,
    ) -> None:
        if isinstance(unit_dim, bool) or not isinstance(unit_dim, int):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"unit_dim must be an int, got {unit_dim!r}")
        self.unit_dim = unit_dim
        super().__init__({"clip_factor": clip_factor, "eps": eps}, target=target, name=name)

    @override
    def slice_dims(self, tensor: Tensor) -> tuple[int, ...]:
        dims = _dims(tensor.ndim, self.unit_dim)
        if dims is None:
            raise ValueError(f"unit_dim={self.unit_dim} is no dimension of a tensor of shape {tuple(tensor.shape)}")
        return dims

    @override
    def factors(self, measured: Measured, updates: list[Tensor], step: Step) -> Tensor:
        weights = measured_like(measured, [step.params[i] for i in measured.indices])
        limits = replace(measured, vector=weights).by_setting(
            step.settings, lambda norms, s: s["clip_factor"] * norms.clamp(min=s["eps"])
        )
        finite = measured.of_slices(elements_at(step.finite, measured.indices))
        # on the device of the first gradient, which may be another one
        return within(measured.vector, limits, finite.to(limits.device))


@cache
def _dims(ndim: int, unit_dim: int) -> tuple[int, ...] | None:
    """All dimensions but that of the units; None if there is no such dimension."""
    if ndim < 2:
        return tuple(range(max(ndim, 1)))
    return tuple(d for d in range(ndim) if d != unit_dim % ndim) if -ndim <= unit_dim < ndim else None
