"""Clip, normalize and centralize lists of tensors, for the transforms and for the in-place functions."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from torchzero_clip.checks import as_number, non_negative, scalar
from torchzero_clip.functional import foreach
from torchzero_clip.functional.choice import at_most_one, where
from torchzero_clip.functional.dtypes import widened
from torchzero_clip.functional.measure import Slicing, cut
from torchzero_clip.functional.metric import Metric
from torchzero_clip.functional.moments import joint_mean, means_of_slices
from torchzero_clip.functional.shards import wholes
from torchzero_clip.functional.ways import all_ones, beyond_float32, may_look

TINY = 1e-12  # slices with a norm up to this are not normalized, because only noise is left of them


def read_limit(name: str, value: float | Tensor) -> float | Tensor:
    """The limit as a number; as an unread tensor, if reading would synchronize with the GPU or break a graph."""
    value = as_number(value)
    scalar(name, value)
    if not isinstance(value, Tensor) or not may_look(value):
        return value
    number = value.item()
    non_negative(name, number)
    return number


def clip_by_(tensors: Sequence[Tensor], limit: float | Tensor, norm: Tensor) -> None:
    """Scale all tensors by the factor that brings ``norm``, a 0-d tensor, to at most ``limit``, in place."""
    factor = clip_factors(Metric("norm"), widened(norm), limit)
    if not all_ones(factor):
        foreach.scale_(tensors, [factor] * len(tensors), exact=beyond_float32(factor))


def centralize_(tensors: Sequence[Tensor], slicing: Slicing, group: ProcessGroup | None = None) -> None:
    """Subtract from every slice its mean, in place; a scalar has no slices. A joint mean is that of all processes."""
    # tensors must not hold pending sums, because the mean would be subtracted from every summand
    if slicing.dim == "global":
        parts = [p for p in wholes(tensors) if p.size]
        mean = joint_mean(parts, group)
        foreach.subtract_slices_([p.tensor for p in parts], [mean] * len(parts))
        return
    _, parts = cut([tensor for tensor in tensors if tensor.ndim], slicing)
    foreach.subtract_slices_([p.tensor for p in parts], means_of_slices(parts))


def unread_limit(limit: Tensor, like: Tensor) -> Tensor:
    """The limit as a 0-d tensor with the dtype and the device of ``like``.

    A negative one becomes NaN, because a check would synchronize with the GPU.
    """
    return where(limit >= 0, limit, math.nan).to(like).reshape(())


def clip_factors(metric: Metric, norms: Tensor, limit: float | Tensor, floor: float = 0.0) -> Tensor:
    """The factors min(1, limit / norm), and floor / norm for norms between 0 and ``floor``.

    They bring metrics to at most ``limit``, and those that are not 0 to at least ``floor``.
    """
    # norms are the roots of metrics, as for 'var'; limit and floor are in units of the metric
    low = metric.root(floor) if floor else 0.0
    if isinstance(limit, Tensor):
        high = unread_limit(limit, norms)
        high = high if metric.degree == 1 else high.pow(1 / metric.degree)
    elif (high := metric.root(limit)) == math.inf and not low:
        return torch.ones_like(norms)
    elif norms.is_cpu and norms.numel() == 1 and may_look(norms):
        return torch.full_like(norms, clip_factor(norms.item(), high, low))
    elif 0 < high < math.inf and not (low or torch.compiler.is_compiling()):
        # torch divides a number by a tensor by multiplying with the inverse, which is inf for the smallest numbers. A
        # 0-d tensor on the CPU takes no operation on another device
        return torch.div(torch.full((), high, dtype=norms.dtype, device="cpu"), norms).clamp_(max=1.0)
    bound = high if isinstance(high, Tensor) else torch.full_like(norms, high)
    factor = torch.where(norms <= bound, 1.0, bound / norms)
    return torch.where((norms > 0) & (norms < low), torch.full_like(norms, low) / norms, factor) if low else factor


def within(norms: Tensor, limits: Tensor, usable: Tensor | None = None) -> Tensor:
    """The factors that bring norms to at most their limits, for statistics.

    They are 1 where a norm or a limit is NaN, and where ``usable`` is false.
    """
    ratios = limits / norms
    return at_most_one(ratios if usable is None else where(usable, ratios, 1.0))


def clip_factor(norm: float, high: float, low: float) -> float:
    """The factor of `clip_factors` for one norm. The limits are of norms, not of metrics.

    A number takes a fifth of the time of a tensor.
    """
    return low / norm if 0 < norm < low else 1.0 if norm <= high else high / norm


def normalize_factors(metric: Metric, norms: Tensor, value: float) -> Tensor:
    """The factors that bring metrics to ``value``; 1 where the norm is (almost) 0."""
    return where(norms <= TINY, 1.0, metric.root(value) / norms)


def normalize_factor(norm: float, value: float) -> float:
    """The factor of one norm, in the units of the norm."""
    return 1.0 if norm <= TINY else value / norm


def inverse(factors: Tensor | float) -> Tensor:
    """The numbers that kernels of torch divide by, in float32: inf for a factor of 0, so that the quotient is 0.

    On a GPU, a factor so small that its inverse overflows counts as 0: in float64, below 6e-309.
    """
    if not isinstance(factors, Tensor) or (factors.is_cpu and not factors.ndim):
        factor = float(factors)
        exact = min(max(1 / factor, -foreach.MAX32), foreach.MAX32) if factor else torch.inf
        return torch.full((), exact, dtype=torch.float32, device="cpu")
    exact, tiny = factors.reciprocal(), torch.finfo(factors.dtype).tiny
    usable = exact.clamp(min=-foreach.MAX32, max=foreach.MAX32)
    # tiny * exact changes no bit of what is usable, and is inf where a factor is 0: masks would take more launches
    return torch.add(usable, exact, alpha=tiny, out=torch.empty_like(usable, dtype=torch.float32))
