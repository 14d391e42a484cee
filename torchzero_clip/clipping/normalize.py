"""Normalization."""

from torch import Tensor
from typing_extensions import override

from torchzero_clip.checks import finite
from torchzero_clip.core.kinds import Scaling
from torchzero_clip.core.step import Step
from torchzero_clip.functional.clip import normalize_factors
from torchzero_clip.functional.measure import Measured
from torchzero_clip.types import Dim, Ord, Schedule, Target


class Normalize(Scaling):
    """Scales updates so that the norm of each is ``norm_value``.

        u ← u · norm_value / ‖u‖

    By default each tensor has its own norm. With ``dim="global"`` all tensors of all param groups have one joint norm.
    Only the direction of an update remains, so the learning rate alone sets the length of a step.

    **Guarantees.** Zeros stay zeros, and directions do not change. The norm of a finite update neither overflows nor
    underflows, whatever its dtype. Rounding leaves the norm within a relative 1e-6 of ``norm_value`` in float32 (3e-5
    for orders other than 2 and inf), and within half a unit in the last place of the elements in half precision (4e-3
    in bfloat16, 5e-4 in float16).

    Args:
        norm_value: The norm to scale to, >= 0; a setting of the param groups. With ``dim="global"`` all groups share
            the norm, and each is scaled by its own value.
        ord: The metric, as in `ClipNorm`. Scaling cannot change 'l0', the number of non-zero elements: updates are
            multiplied by ``norm_value`` / l0.
        dim: The dimensions that one slice spans, as in `ClipNorm`.
        inverse_dims: Slices span the dimensions that ``dim`` does not list.
        min_size: Slices of fewer elements are left alone. Not for "global".
        target: What it acts on, see `Transform`.
        name: The name in the chain and in checkpoints; the class name in snake case if None.

    Raises:
        ValueError: For a value that is negative, infinite or NaN, or an unknown ``ord``, ``dim`` or ``target``.
        TypeError: For an argument of the wrong type.

    | update | result |
    | --- | --- |
    | norm 0, or up to 1e-12 | unchanged |
    | ``norm_value=0`` | zeros |
    | one element with 'std' or 'var' | unchanged |
    | an inf in the slice | finite elements become 0, infinite ones NaN |
    | a NaN in the slice | all elements become NaN |

    Examples:
        >>> import torch
        >>> from torchzero_clip import Modular, Normalize
        >>> weight, bias = torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(1))
        >>> optimizer = Modular([weight, bias], Normalize())
        >>> weight.grad, bias.grad = torch.tensor([3.0, 4.0]), torch.tensor([-0.5])
        >>> optimizer.step()
        >>> weight.data, bias.data
        (tensor([-0.6000, -0.8000]), tensor([1.]))

    Source: Hazan, Levy, Shalev-Shwartz, [Beyond convexity: stochastic quasi-convex
    optimization](https://arxiv.org/abs/1507.02030), 2015.
    """

    checks = {"norm_value": finite}
    each_alone = pure = True

    def __init__(
        self,
        norm_value: float | Schedule = 1.0,
        ord: Ord = 2,
        dim: Dim = None,
        inverse_dims: bool = False,
        min_size: int = 1,
        *,
        target: Target = "update",
        name: str | None = None,
    ) -> None:
        settings = {"norm_value": norm_value}
        super().__init__(
            settings, ord=ord, dim=dim, inverse_dims=inverse_dims, min_size=min_size, target=target, name=name
        )

    @override
    def factors(self, measured: Measured, updates: list[Tensor], step: Step) -> Tensor:
        metric = measured.metric
        return measured.by_setting(step.settings, lambda norms, s: normalize_factors(metric, norms, s["norm_value"]))
