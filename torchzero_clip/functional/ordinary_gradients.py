"""The functions for ordinary gradients, those that backward gives to float32 parameters on CPU, in few calls of torch.

They return and change the same as `measure` and `scale_measured_`, which take gradients of every kind.
"""

import math
from collections.abc import Callable, Sequence
from operator import attrgetter

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from torchzero_clip.functional.blocks import joint_norm_once, norms_of_each_once
from torchzero_clip.functional.foreach import MAX32, TINY32, all_contiguous, multiply_plain_
from torchzero_clip.functional.lists import has_repeats
from torchzero_clip.functional.measure import L2, Slicing
from torchzero_clip.functional.ways import LARGEST, SMALLEST

_KINDS = {Tensor, nn.Parameter}
_GRAD, _FACTS = attrgetter("grad"), attrgetter("dtype", "layout", "is_cpu")
_ORDINARY = {(torch.float32, torch.strided, True)}


def ordinary_gradients(params: Sequence[Tensor]) -> list[Tensor] | None:
    """The gradients of plain parameters, if there are any and all are ordinary; else None."""
    if not _KINDS.issuperset(map(type, params)) or torch.compiler.is_compiling():
        return None
    grads = [grad for grad in map(_GRAD, params) if grad is not None]
    if not (_KINDS.issuperset(map(type, grads)) and set(map(_FACTS, grads)) == _ORDINARY and all_contiguous(grads)):
        return None
    return None if any(map(Tensor.is_neg, grads)) or has_repeats(grads) else grads


def scale_ordinary_(
    params: Sequence[Tensor], slicing: Slicing, rule: Callable[[float], float], group: ProcessGroup | None
) -> Tensor | None:
    """Scale ordinary gradients by the factors of their L2 norms, and return their joint norm.

    Return None, with nothing changed, for other gradients, slices or metrics, with a process group, and where a norm
    is extreme or not finite, or float32 cannot hold a factor.
    """
    joint = slicing.dim == "global"
    measures_wholes = slicing.metric == L2 and (joint or slicing.is_whole)
    grads = ordinary_gradients(params) if measures_wholes and group is None else None
    if grads is None or not all(map(Tensor.numel, grads)):
        return None
    norms = [joint_norm_once(grads).item()] if joint else norms_of_each_once(grads)
    if not all(SMALLEST < norm < LARGEST for norm in norms):  # `min` and `max` may pass over a NaN
        return None
    factors = [rule(norm) for norm in norms]
    if not joint and slicing.min_size > 1:
        factors = [f if grad.numel() >= slicing.min_size else 1.0 for f, grad in zip(factors, grads, strict=True)]
    if not all(TINY32 <= factor <= MAX32 for factor in factors if factor):
        return None
    if any(factor != 1 for factor in factors):
        each = None if joint else torch.tensor(factors, dtype=torch.float32, device="cpu").unbind()
        multiply_plain_(grads, each or _number(factors[0]))
    return _number(math.hypot(*norms))


def _number(value: float) -> Tensor:
    return torch.full((), value, dtype=torch.float32, device="cpu")
