"""Clipping by norm."""

from torch import Tensor
from typing_extensions import override

from torchzero_clip.checks import scalar
from torchzero_clip.compat import warn_user
from torchzero_clip.core.kinds import Scaling
from torchzero_clip.core.step import Step
from torchzero_clip.functional.clip import clip_factors
from torchzero_clip.functional.measure import Measured
from torchzero_clip.types import Dim, Ord, Schedule, Setting, Target


class ClipNorm(Scaling):
    """Scales updates so that the norm of each is at most ``max_norm``.

        u ← u · min(1, max_norm / ‖u‖)

    By default each tensor has its own norm. With ``dim="global"`` all tensors of all param groups have one joint norm,
    as in `torch.nn.utils.clip_grad_norm_`. Placed before an optimizer it clips gradients. Placed after one, it clips
    the updates of that optimizer.

    **Guarantees.** Updates within the limit are bitwise unchanged, and directions do not change. The norm of a finite
    update neither overflows nor underflows, whatever its dtype, and no epsilon is added to it. Rounding can leave a
    norm above the limit by a relative 1e-6 in float32 (3e-5 for orders other than 2 and inf), and by half a unit in the
    last place in half precision (4e-3 in bfloat16, 5e-4 in float16).

    Args:
        max_norm: The limit, a setting of the param groups: a number >= 0, or a tensor of one element, which is not read
            on the host: a negative one gives NaN. With ``dim="global"`` all groups share the norm, and each is scaled
            by its own limit.
        ord: The metric: a number p for the p-norm (also 0, inf, -inf and negative numbers), or one of 'l0', 'l1', 'l2',
            'l3', 'l4', 'linf', 'mad' (mean absolute value), 'std', 'var', 'sum' (magnitude of the signed sum).
        dim: The dimensions that one slice spans: None for all, one int or several (negative ones count from the end of
            each tensor), or "global" for all tensors joined. A tensor whose slices span no dimension is left alone.
        inverse_dims: Slices span the dimensions that ``dim`` does not list.
        min_size: Slices of fewer elements are left alone. Not for "global".
        target: What it acts on, see `Transform`.
        name: The name in the chain and in checkpoints; the class name in snake case if None.

    Raises:
        ValueError: For a negative or NaN limit, or an unknown ``ord``, ``dim`` or ``target``.
        TypeError: For an argument of the wrong type.

    | update | result |
    | --- | --- |
    | norm 0 | unchanged |
    | ``max_norm=0`` | zeros, with a warning at construction |
    | ``max_norm=inf`` | unchanged |
    | an inf in the slice | finite elements become 0, infinite ones NaN |
    | a NaN in the slice | all elements become NaN |

    Examples:
        >>> import torch
        >>> from torchzero_clip import ClipNorm, Modular
        >>> weight, bias = torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(1))
        >>> optimizer = Modular([weight, bias], ClipNorm(1.0))
        >>> weight.grad, bias.grad = torch.tensor([3.0, 4.0]), torch.tensor([0.5])
        >>> optimizer.step()
        >>> weight.data, bias.data
        (tensor([-0.6000, -0.8000]), tensor([-0.5000]))

    Source: Pascanu, Mikolov, Bengio, [On the difficulty of training recurrent neural
    networks](https://arxiv.org/abs/1211.5063), 2013.
    """

    checks = {"max_norm": scalar}
    each_alone = pure = True
    limit_setting = "max_norm"

    def __init__(
        self,
        max_norm: float | Tensor | Schedule,
        ord: Ord = 2,
        dim: Dim = None,
        inverse_dims: bool = False,
        min_size: int = 1,
        *,
        target: Target = "update",
        name: str | None = None,
    ) -> None:
        if isinstance(max_norm, int | float) and not isinstance(max_norm, bool) and max_norm == 0:
            text = "a max_norm of 0 makes every update 0, so the model does not learn; for no limit write math.inf"
            warn_user(text)
        settings = {"max_norm": max_norm}
        super().__init__(
            settings, ord=ord, dim=dim, inverse_dims=inverse_dims, min_size=min_size, target=target, name=name
        )

    @override
    def factors(self, measured: Measured, updates: list[Tensor], step: Step) -> Tensor:
        return measured.by_setting(step.settings, lambda norms, s: clip_factors(measured.metric, norms, s["max_norm"]))

    @override
    def factor(self, norm: float, setting: Setting) -> float:
        return min(1.0, setting["max_norm"] / norm)  # as `clip_factors`, for a norm above 0
