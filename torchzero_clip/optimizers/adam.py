"""Adam."""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor
from typing_extensions import override

from torchzero_clip.checks import betas as check_betas
from torchzero_clip.checks import boolean, floating_dtype, non_negative, optional
from torchzero_clip.compat import has_fused_kernels
from torchzero_clip.core.kinds import Fused, UpdateRule
from torchzero_clip.core.learning_rate import LR
from torchzero_clip.core.step import Step
from torchzero_clip.core.transform import Transform
from torchzero_clip.functional import foreach
from torchzero_clip.functional.dtypes import bias_correction
from torchzero_clip.functional.shards import pack
from torchzero_clip.optimizers.weight_decay import WeightDecay
from torchzero_clip.types import NewState, Schedule, Setting, Target

# dtypes for which torch's own code computes the step; float16 is not among them, because `eps` rounds to 0
TORCHS_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.complex64, torch.complex128)
KERNELS_DTYPES = (torch.float32, torch.float64, torch.bfloat16)  # torch's fused kernel computes right results for them


class Adam(UpdateRule):
    """Turns gradients into Adam's updates, as `torch.optim.Adam` computes them.

        m ← β₁ m + (1 - β₁) u
        v ← β₂ v + (1 - β₂) u²
        u ← (m / (1 - β₁ᵗ)) / (√(v / (1 - β₂ᵗ)) + eps)

    The learning rate is applied at the end of the chain, or where an `LR` stands. Weight decay is a transform of its
    own: `WeightDecay` before Adam is L2 regularization, after it AdamW's.

    Args:
        lr: The learning rate of the chain: a number >= 0 or a tensor of one element. None for torch's default, 1e-3.
        betas: Decay rates of the two averages, each in [0, 1); a setting of the param groups.
        eps: Added to the denominator after the bias correction, in units of the gradient; a setting.
        amsgrad: Divide by the largest of all past averages of squares.
        fused: None or True allows torch's fused kernel, which makes one pass over memory. It is used if the rest of the
            chain is at most `WeightDecay` and `LR`, parameters are float32, float64 or bfloat16, and averages are laid
            out like them and have their dtype. With False it is never used. Results differ by rounding.
        state_dtype: The dtype of the averages; for complex parameters that of their parts. If None, that of the
            parameter.
        target: What it acts on, see `Transform`.
        name: The name in the chain and in checkpoints; the class name in snake case if None.

    Raises:
        ValueError: For a setting out of range.
        TypeError: For an argument of the wrong type.

    Non-finite and all-zero gradients enter the averages, as in torch. For float16 parameters pass
    ``state_dtype=torch.float32``: squares of gradients below 2e-4 are zero in float16.

    With ``amsgrad``, a NaN in a gradient enters the largest average of squares in torch's loop (``fused=False``), but
    not in torch's kernel. The parameter becomes NaN in both.

    Examples:
        >>> import torch
        >>> from torchzero_clip import Adam, Modular
        >>> weight = torch.nn.Parameter(torch.zeros(2))
        >>> optimizer = Modular([weight], Adam(lr=0.1))
        >>> weight.grad = torch.tensor([3.0, -0.004])
        >>> optimizer.step()
        >>> weight.data
        tensor([-0.1000,  0.1000])

    Source: Kingma, Ba, [Adam: a method for stochastic optimization](https://arxiv.org/abs/1412.6980), 2014; Reddi,
    Kale, Kumar, [On the convergence of Adam and beyond](https://arxiv.org/abs/1904.09237), 2018, for ``amsgrad``.
    """

    checks = {"betas": check_betas, "eps": non_negative}
    each_alone = pure = True
    default_lr = 1e-3

    def __init__(
        self,
        lr: float | Tensor | Schedule | None = None,
        betas: tuple[float, float] | Schedule = (0.9, 0.999),
        *,
        eps: float | Schedule = 1e-8,
        amsgrad: bool = False,
        fused: bool | None = None,
        state_dtype: torch.dtype | None = None,
        target: Target = "update",
        name: str | None = None,
    ) -> None:
        boolean("amsgrad", amsgrad)
        optional(boolean)("fused", fused)
        if state_dtype is not None:
            floating_dtype("state_dtype", state_dtype)
        super().__init__({"betas": betas, "eps": eps}, lr=lr, target=target, name=name)
        self.amsgrad, self.fused, self.state_dtype = amsgrad, fused, state_dtype
        self._keys = ("exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if amsgrad else []))

    @override
    def init_state(self, param: Tensor, setting: Setting) -> NewState:
        dtype = self.state_dtype and (self.state_dtype.to_complex() if param.is_complex() else self.state_dtype)
        averages = {key: torch.zeros_like(param, dtype=dtype) for key in self._keys}
        return {"step": torch.zeros((), dtype=torch.float32, device=param.device), **averages}

    @override
    def apply_tensors(self, updates: list[Tensor], step: Step) -> Sequence[Tensor]:
        columns = [step.column(key) for key in (*self._keys, "step")]
        result: list[Tensor] = []
        for setting, span in step.by_setting():
            result += self._adam(updates[span], [column[span] for column in columns], setting)
        return result

    def _adam(self, tensors: list[Tensor], state: Sequence[list[Tensor]], setting: Setting) -> list[Tensor]:
        beta1, beta2 = setting["betas"]
        averages, squares, *largest, steps = state
        inputs = foreach.cast(tensors, averages)

        foreach.lerp_(averages, inputs, 1 - beta1)
        foreach.decay_squares_(squares, inputs, beta2)
        if self.amsgrad:
            foreach.maximum_(largest[0], squares)
            squares = largest[0]

        foreach.add_number_(steps, 1)
        # in float16 eps rounds to 0, which gives 0 / 0
        denominators = foreach.square_roots(foreach.at_least_float32(squares))
        counts = pack(steps)
        foreach.scale_(denominators, (bias_correction(beta2, counts) ** -0.5).unbind())
        foreach.add_number_(denominators, setting["eps"])
        updates = foreach.divide(averages, denominators)
        foreach.scale_(updates, (bias_correction(beta1, counts) ** -1.0).unbind())
        return foreach.cast(updates, tensors)

    @override
    def kernel(self, rest: Sequence[Transform], step: Step) -> Fused | None:
        """Return torch's fused kernel and its loop, if this and the rest of the chain are `torch.optim.AdamW`."""
        # exact types, because a class derived from them may do more than the kernel
        dtype, kinds = step.params[0].dtype, [type(transform) for transform in rest]
        is_adamw = kinds in ([LR], [WeightDecay, LR]) and all(t.target == "update" for t in (self, *rest))
        if not is_adamw or dtype not in TORCHS_DTYPES:
            return None
        may_fuse = self.fused is not False and dtype in KERNELS_DTYPES and has_fused_kernels(step.params[0])
        kernel = partial(foreach.adamw_, fused=True) if may_fuse else None
        return Fused(self._keys, kernel, partial(foreach.adamw_, fused=False), ("step",), may_fuse)
