"""Adam."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim.adam import adam
from typing_extensions import override

from torchzero_clip.checks import betas as check_betas
from torchzero_clip.checks import boolean, floating_dtype, non_negative, optional
from torchzero_clip.core.kernels import Fused
from torchzero_clip.core.kinds import TakeStep, UpdateRule
from torchzero_clip.core.learning_rate import LR
from torchzero_clip.core.step import Step
from torchzero_clip.core.transform import Transform
from torchzero_clip.functional import foreach
from torchzero_clip.functional.shards import locals_of, pack
from torchzero_clip.optimizers.weight_decay import WeightDecay
from torchzero_clip.types import Schedule, Setting, State, Target

TORCHS_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.complex64, torch.complex128)
"""Dtypes for which `Adam.fuse` calls torch's own code. Float16 is not among them, because ``eps`` rounds to 0."""

KERNELS_DTYPES = (torch.float32, torch.float64, torch.bfloat16)
"""Dtypes for which torch's fused kernel computes right results."""


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

    With ``amsgrad``, torch's kernel leaves a NaN out of the largest average of squares, and torch's loop
    (``fused=False``) does not: after a NaN in the first gradient it is 0 or NaN. The parameter becomes NaN in both.

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
        self.amsgrad = amsgrad
        self.fused = fused
        self.state_dtype = state_dtype
        self._keys = ("exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if amsgrad else []))

    @override
    def init_state(self, param: Tensor, setting: Setting) -> dict[str, Any]:
        """Averages of zeros, and a step count."""
        dtype = self.state_dtype and (self.state_dtype.to_complex() if param.is_complex() else self.state_dtype)
        averages = {key: torch.zeros_like(param, dtype=dtype) for key in self._keys}
        return {"step": torch.zeros((), dtype=torch.float32, device=param.device), **averages}

    @override
    def apply_tensors(self, updates: list[Tensor], step: Step) -> Sequence[Tensor]:
        """Update the averages and return new tensors."""
        result: list[Tensor] = []
        for setting, own in step.by_setting():
            result += self._adam(updates[own], step.states[own], setting)
        return result

    def _adam(self, tensors: list[Tensor], states: Sequence[State], setting: Setting) -> list[Tensor]:
        beta1, beta2 = setting["betas"]
        averages = [state["exp_avg"] for state in states]
        squares = [state["exp_avg_sq"] for state in states]
        inputs = [t.to(average.dtype) for t, average in zip(tensors, averages, strict=True)]

        foreach.lerp_(averages, inputs, 1 - beta1)
        foreach.decay_squares_(squares, inputs, beta2)
        if self.amsgrad:
            largest = [state["max_exp_avg_sq"] for state in states]
            foreach.maximum_(largest, squares)
            squares = largest

        steps = [state["step"] for state in states]
        foreach.add_number_(steps, 1)
        # in float16 eps rounds to 0, which gives 0 / 0
        denominators = foreach.square_roots([square.to(foreach.wide_dtype(square.dtype)) for square in squares])
        foreach.scale_(denominators, _bias_corrections(steps, beta2, -0.5))
        foreach.add_number_(denominators, setting["eps"])
        updates = foreach.divide(averages, denominators)
        foreach.scale_(updates, _bias_corrections(steps, beta1, -1.0))
        return [update.to(t.dtype) for update, t in zip(updates, tensors, strict=True)]

    def _ends_as_torchs(self, rest: Sequence[Transform]) -> bool:
        """True if this and the rest of the chain are `torch.optim.AdamW`."""
        kinds = [type(transform) for transform in rest]
        only_updates = all(t.target == "update" for t in (self, *rest))
        return only_updates and kinds in ([LR], [WeightDecay, LR])

    @override
    def kernel(self, rest: Sequence[Transform], step: Step) -> Fused | None:
        """Return torch's fused kernel, if it computes this step."""
        if self.fused is False or not self._ends_as_torchs(rest) or step.params[0].dtype not in KERNELS_DTYPES:
            return None
        return Fused(self._kernel, self._keys, ("step",))

    def _kernel(
        self, params: list[Tensor], updates: list[Tensor], state: list[list[Tensor]], setting: Setting, scale: Any
    ) -> None:
        *averages, steps = state
        foreach.fused_adamw_(params, updates, averages, steps, scale=scale, **self._options(setting))

    def _options(self, setting: Setting) -> dict[str, Any]:
        """The settings as torch's functions name them."""
        beta1, beta2 = setting["betas"]
        return {
            "amsgrad": self.amsgrad,
            "beta1": beta1,
            "beta2": beta2,
            "lr": setting["lr"],
            "weight_decay": setting.get("weight_decay", 0.0),
            "eps": setting["eps"],
        }

    @override
    def fuse(self, rest: Sequence[Transform], updates: list[Tensor], step: Step) -> TakeStep | None:
        """Return a step by torch's functions if this and the rest of the chain are `torch.optim.AdamW`; else None."""
        if not self._ends_as_torchs(rest) or torch.compiler.is_compiling():
            return None
        columns = [step.column(key) for key in self._keys]
        rows = list(zip(updates, step.params, *columns, strict=True))
        if not all(self._is_torchs(*row) for row in rows):
            return None
        uses_kernel = [False] * len(rows) if self.fused is False else [self._uses_kernel(*row) for row in rows]
        return partial(self._take_torchs_step, updates, step, uses_kernel)

    def _is_torchs(self, update: Tensor, param: Tensor, *averages: Tensor) -> bool:
        if param.dtype not in TORCHS_DTYPES or any(value.dtype != param.dtype for value in (update, *averages)):
            return False
        # on other devices the step count is there too, and torch's other implementations would wait for it
        if param.is_cpu:
            return True
        return param.device.type == "cuda" and self.fused is not False and self._uses_kernel(update, param, *averages)

    def _uses_kernel(self, *alike: Tensor) -> bool:
        """True if torch's fused kernel can be used. It ignores strides, so tensors must be laid out alike."""
        return not alike[0].is_complex() and foreach.alike(*alike)

    def _take_torchs_step(self, updates: list[Tensor], step: Step, uses_kernel: Sequence[bool]) -> None:
        for setting, own in step.by_setting():
            rows = list(zip(step.params[own], updates[own], step.states[own], uses_kernel[own], strict=True))
            for fused in (True, False):
                chosen = [(param, update, state) for param, update, state, kernel in rows if kernel == fused]
                if chosen:
                    self._torchs_step(chosen, setting, fused=fused)

    def _torchs_step(self, rows: Sequence[tuple[Tensor, Tensor, State]], setting: Setting, *, fused: bool) -> None:
        params, tensors, states = [p for p, _, _ in rows], [t for _, t, _ in rows], [state for _, _, state in rows]
        adam(
            locals_of(params),
            locals_of(tensors),
            locals_of([state["exp_avg"] for state in states]),
            locals_of([state["exp_avg_sq"] for state in states]),
            locals_of([state["max_exp_avg_sq"] for state in states] if self.amsgrad else []),
            [state["step"] for state in states],
            foreach=False,
            fused=fused,
            has_complex=params[0].is_complex(),
            decoupled_weight_decay=True,
            maximize=False,
            **self._options(setting),
        )


def _bias_corrections(steps: Sequence[Tensor], beta: float, power: float) -> list[Tensor]:
    """``(1 - beta**step) ** power`` for every step count, in float64: float32 would lose five digits of 1 - 0.999."""
    return list(((1 - beta ** pack(steps)) ** power).unbind())
