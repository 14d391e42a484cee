"""How precisely gradients were computed, and norms of layers divided by what they are judged against."""

from collections.abc import Sequence

import torch
from torch import Tensor

from torchzero_clip.functional.shards import local, pack
from torchzero_clip.recorder.arithmetic import joined_norms

SAMPLE = 2**14  # how many elements of all gradients are looked at
TAIL = 2.0**-20  # of the largest element: smaller ones show no spacing
LOW = 2.0**-7  # the spacing of bfloat16. The noise of bfloat16 was at most a seventh of it times the joint norm
# sums of float32 round in float32 too. Noise was at most 1.2e-6 of the joint norm in sums of a million terms
FLOAT32_ROUNDING = 2.0**-19
DTYPES = {torch.float64: 2.0**-48, torch.float32: FLOAT32_ROUNDING}
PRODUCTS = {"highest": 0.0, "high": 2.0**-10, "medium": LOW}  # of float32 matrices: TensorFloat32 and bfloat16


def precision_of(grads: Sequence[Tensor]) -> Tensor:
    """The precision in which gradients were computed, relative to their joint norm: 0-d, without waiting.

    The dtype of a gradient does not tell, because autocast and sharding cast gradients of bfloat16 to float32. Their
    digits do: the significands of bfloat16 have 128 values, so two unequal gradients often share one. This remains so
    if all are multiplied by a factor, as clipping does, or are sums of a few batches. Among thousands of gradients that
    were computed in float32, about one pair shares a significand by chance.
    """
    values = [torch.view_as_real(g) if g.is_complex() else g for g in map(_dense, grads)]
    samples = [_sample(g, max(SAMPLE // len(values), 1)) for g in values[:SAMPLE]]
    sampled = pack([samples[0].new_zeros(1), *samples]).abs()  # not empty, also if all gradients are
    ordered = torch.where(sampled.isfinite(), sampled, 0.0).sort().values
    # equal gradients have equal digits, and gradients that are rounding only have few digits
    sizes = ordered.narrow(0, 1, len(ordered) - 1)
    is_counted = (ordered.diff() > 0) & (sizes > TAIL * ordered.select(0, -1))
    # what is not counted gets digits of its own, from 2 on, because mantissas are below 1
    unequal = torch.arange(2, len(ordered) + 1, dtype=sizes.dtype, device=sizes.device)
    digits = torch.where(is_counted, torch.frexp(sizes).mantissa, unequal).sort().values
    pairs, count = (digits.diff() == 0).sum(), is_counted.sum().to(sizes.dtype)
    least = max(DTYPES.get(g.dtype, LOW) for g in values)
    if least == FLOAT32_ROUNDING:
        least = max(least, PRODUCTS[torch.get_float32_matmul_precision()])
    # by chance, float32 has about count² / 2²⁴ pairs, and bfloat16 has 2¹⁶ times as many
    return torch.where(pairs > 4 + count.square() / 2**20, max(LOW, least), least).to(sizes.dtype)


def _sample(values: Tensor, most: int) -> Tensor:
    """At most so many values, at equal distances."""
    count = min(values.numel(), most)
    every = values.numel() // count if count else 1
    # indexing needs a device, which a fake tensor does not have
    return values.reshape(-1).narrow(0, 0, count * every).view(count, every).select(1, 0)


def _dense(grad: Tensor) -> Tensor:
    shard = local(grad.detach())
    return shard.coalesce().values() if shard.layout == torch.sparse_coo else shard


def relative(norms: Tensor, usual: Tensor, precision: float) -> Tensor:
    """Norms divided by the usual norms of their layers, or by the rounding of the step if that is larger.

    The rounding is the joint norm of a row times ``precision``. The result is inf for a norm that is not finite, and
    NaN without a gradient or a usual norm, or if rounding alone explains both the norm and the usual norm.
    """
    finite = torch.where(norms.isfinite(), norms, -1.0)
    rounding = precision * joined_norms(finite).unsqueeze(-1).nan_to_num(nan=0.0)
    rounding = rounding.clamp(min=torch.finfo(norms.dtype).tiny)
    explained = (torch.fmax(norms, usual) <= rounding) | (norms < 0)
    ratios = torch.where(explained, torch.nan, norms / torch.maximum(usual, rounding))
    return torch.where(norms.isfinite(), ratios, torch.inf)
