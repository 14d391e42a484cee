"""Muon."""

import math
from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import Tensor
from typing_extensions import override

from torchzero_clip.checks import boolean, count, non_negative, number, one_of, positive
from torchzero_clip.compat import warn_user, without_autocast
from torchzero_clip.core.kinds import Scaling, UpdateRule
from torchzero_clip.core.step import Step
from torchzero_clip.core.transform import Transform
from torchzero_clip.functional import foreach
from torchzero_clip.functional.shards import laid_out_as, replicated
from torchzero_clip.types import NewState, Schedule, Setting, Target

AdjustLR = Literal["original", "match_rms_adamw", "spectral_unclamped"]


class Muon(UpdateRule):
    """Turns gradients of matrices into orthogonalized momentum, as `torch.optim.Muon` computes it.

        b ← momentum · b + (1 - momentum) · u
        u ← momentum · b + (1 - momentum) · u      (b without Nesterov)
        u ← orthogonalized(u) · √max(1, rows / columns)

    It is for the matrices of hidden layers. Limit it to them with `only`, and use another optimizer of the same chain
    for the rest (embeddings, heads, vectors). Weight decay is a transform of its own: `WeightDecay` after Muon.

    Clip before Muon, not after it, because the norms of its updates depend on their shapes alone.

    Args:
        lr: The learning rate of the chain: a number >= 0 or a tensor of one element. None for torch's default, 1e-3.
        momentum: The decay rate of the buffer, >= 0; a setting of the param groups.
        nesterov: Look ahead by one step.
        ns_coefficients: The three coefficients of the Newton-Schulz iteration.
        ns_steps: The number of iterations.
        eps: The smallest norm that the iteration divides by.
        adjust_lr_fn: "original" (or None) scales by √max(1, rows / columns), "match_rms_adamw" by
            0.2 · √max(rows, columns), so that learning rates of AdamW fit, and "spectral_unclamped" by
            √(rows / columns), below 1 too. torch has the last one since 2.14.
        target: What it acts on, see `Transform`.
        name: The name in the chain and in checkpoints; the class name in snake case if None.

    Raises:
        ValueError: For a setting out of range, or in `Modular` for a parameter in its scope that is not a real matrix.
        TypeError: For an argument of the wrong type.

    The iteration runs in bfloat16. Under FSDP2 every rank gathers the matrices one by one and orthogonalizes them all.

    Examples:
        >>> from torch import nn
        >>> from torchzero_clip import Adam, Modular, Muon
        >>> model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 1))
        >>> def hidden(p):
        ...     return p.ndim == 2 and min(p.shape) > 1
        >>> optimizer = Modular(model, Muon(lr=0.02).only(hidden), Adam().without(hidden))

    Source: Jordan, [Muon: an optimizer for hidden layers in neural
    networks](https://kellerjordan.github.io/posts/muon/), 2024; Liu et al., [Muon is scalable for LLM
    training](https://arxiv.org/abs/2502.16982), 2025, for "match_rms_adamw"; Bernstein, [Deriving
    Muon](https://jeremybernste.in/writing/deriving-muon), 2025, for "spectral_unclamped".
    """

    checks = {"momentum": non_negative}
    each_alone = pure = True
    default_lr = 1e-3

    def __init__(
        self,
        lr: float | Tensor | Schedule | None = None,
        momentum: float | Schedule = 0.95,
        *,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315),
        ns_steps: int = 5,
        eps: float = 1e-7,
        adjust_lr_fn: AdjustLR | None = None,
        target: Target = "update",
        name: str | None = None,
    ) -> None:
        boolean("nesterov", nesterov)
        count("ns_steps", ns_steps)
        positive("eps", eps)
        one_of("adjust_lr_fn", adjust_lr_fn, (None, *get_args(AdjustLR)))
        if len(ns_coefficients) != 3:
            raise ValueError(f"ns_coefficients must be three numbers, got {ns_coefficients!r}")
        for i, coefficient in enumerate(ns_coefficients):
            number(f"ns_coefficients[{i}]", coefficient)
        super().__init__({"momentum": momentum}, lr=lr, target=target, name=name)
        self.nesterov = nesterov
        self.ns_coefficients, self.ns_steps, self.eps = ns_coefficients, ns_steps, eps
        self.adjust_lr_fn: AdjustLR | None = adjust_lr_fn

    @override
    def check_parameter(self, name: str, param: Tensor) -> None:
        if param.ndim != 2 or param.is_complex():
            raise ValueError(
                f"Muon takes real matrices, got {name} of shape {tuple(param.shape)} and {param.dtype}: limit it, for "
                "example Muon().only(lambda p: p.ndim == 2)"
            )

    @override
    def check_chain(self, before: Sequence[Transform], after: Sequence[Transform]) -> None:
        later = next((other for other in after if isinstance(other, Scaling)), None)
        if later is not None:
            warn_user(
                f"{later!r} comes after {self!r}, whose updates have norms that depend on their shape alone. "
                "There it acts on large matrices, not on large gradients. Put it before"
            )

    @override
    def init_state(self, param: Tensor, setting: Setting) -> NewState:
        return {"momentum_buffer": torch.zeros_like(param)}

    @override
    def apply_tensors(self, updates: list[Tensor], step: Step) -> Sequence[Tensor]:
        result: list[Tensor] = []
        for setting, span in step.by_setting():
            tensors = updates[span]
            buffers = [state["momentum_buffer"] for state in step.states[span]]
            inputs = foreach.cast(tensors, buffers)
            foreach.lerp_(buffers, inputs, 1 - setting["momentum"])
            ahead = buffers
            if self.nesterov:
                ahead = foreach.clone(inputs)
                foreach.lerp_(ahead, buffers, setting["momentum"])
            # one by one, so that only one matrix of the iteration is in memory
            for momentum, tensor in zip(ahead, tensors, strict=True):
                update = _orthogonalized(momentum, self.ns_coefficients, self.ns_steps, self.eps)
                result.append(update.to(tensor.dtype))
        for update in result:
            foreach.multiply_([update], self._scale(*update.shape))
        return result

    def _scale(self, rows: int, columns: int) -> float:
        if self.adjust_lr_fn == "match_rms_adamw":
            return 0.2 * math.sqrt(max(rows, columns))
        ratio = math.sqrt(rows / max(columns, 1))
        return ratio if self.adjust_lr_fn == "spectral_unclamped" else max(1.0, ratio)


def _orthogonalized(matrix: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """A matrix with the singular vectors of ``matrix`` and singular values near 1, in bfloat16, laid out alike."""
    # The quintic iteration X <- a X + (b A + c A^2) X with A = X X^T, from X scaled to a norm of at most 1. With the
    # coefficients of Muon singular values end between 0.5 and 1.5, which works as well for Muon as exactly 1.
    a, b, c = coefficients
    x = replicated(matrix).bfloat16()
    if not x.numel():
        return laid_out_as(x, matrix)
    tall = x.size(0) > x.size(1)
    if tall:
        x = x.T
    # scaling by a power of 2 is exact; after it, squares neither overflow nor underflow
    exponent = torch.frexp(x.abs().amax().float()).exponent
    x = torch.ldexp(x, -exponent)
    smallest = torch.ldexp(torch.full_like(x.select(0, 0).select(0, 0), eps), -exponent)
    x = x / torch.maximum(x.norm(), smallest)
    with without_autocast(x):
        for _ in range(steps):
            gram = x @ x.T
            x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return laid_out_as(x.T if tall else x, matrix)
