"""Operations on lists of tensors; the only file that touches ``torch._foreach_*``.

Lists may hold plain and distributed tensors, several devices and dtypes. Each function works on the local parts:
all operations here are elementwise, and tensors that meet have the same layout. Where it matters, the real and the
imaginary part of a complex number are elements of their own, as in torch's optimizers.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torchzero_clip.functional.shards import distributed_like, local, locals_of

_foreach: Any = torch  # the _foreach functions are not in torch's type stubs


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which factors for tensors of ``dtype`` are kept: float32 or wider."""
    return torch.promote_types(dtype, torch.float32)


def reals(tensor: Tensor) -> Tensor:
    """The local part, in the same memory; complex numbers as pairs of real ones along a last dimension."""
    plain = local(tensor)
    return torch.view_as_real(plain) if plain.is_complex() else plain


def reals_of(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [reals(tensor) for tensor in tensors]


def alike(*tensors: Tensor) -> bool:
    """Whether elements with the same index stand at the same place in memory, without gaps."""
    first, *others = locals_of(tensors)
    if all(tensor.is_contiguous() for tensor in (first, *others)):
        return True
    dense = first.ndim == 4 and first.is_contiguous(memory_format=torch.channels_last)
    return dense and all(_strides(other) == _strides(first) for other in others)


def _strides(tensor: Tensor) -> list[int]:
    """The strides that say anything: those of dimensions of more than one element."""
    return [stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]


def norms(tensors: Sequence[Tensor], p: float, dtype: torch.dtype) -> list[Tensor]:
    """The p-norm of each plain tensor, accumulated in ``dtype``; none may be empty."""
    return list(_foreach._foreach_norm(list(tensors), p, dtype=dtype))


def scale_(tensors: Sequence[Tensor], factors: Sequence[Tensor], *, exact: bool = False) -> None:
    """Multiply each tensor by its factor (of one element, or one per slice), in place.

    ``exact`` multiplies in float64, for factors that float32 cannot hold. A 0-d factor would be rounded to the dtype of
    the tensor first; with a dimension it is not.
    """
    for tensor, factor in zip(locals_of(tensors), factors, strict=True):
        tensor.mul_(_beside(tensor, factor, torch.float64 if exact else wide_dtype(tensor.dtype)))


def subtract_slices_(tensors: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Subtract from each tensor its value (of one element, or one per slice), in place."""
    for tensor, value in zip(locals_of(tensors), values, strict=True):
        tensor.sub_(_beside(tensor, value, wide_dtype(tensor.dtype)))


def subtract_squares(tensors: Sequence[Tensor], others: Sequence[Tensor]) -> list[Tensor]:
    """``tensors - others**2``, as new tensors."""
    parts = reals_of(others)
    return _wrap(_foreach._foreach_addcmul(reals_of(tensors), parts, parts, -1), tensors)


def multiply_(tensors: Sequence[Tensor], number: float | Tensor) -> None:
    """Multiply all tensors by one number, in place."""
    if isinstance(number, Tensor):
        scale_(tensors, [number.reshape(())] * len(tensors))
    else:
        _multiply_(locals_of(tensors), number)


def _multiply_(tensors: Sequence[Tensor], number: float) -> None:
    """Multiply plain tensors by one number, in place."""
    # on CPU the foreach function rounds the number to the dtype: in bfloat16 a decay rate of 0.999 would be 1
    if any(tensor.device.type == "cpu" and tensor.dtype in (torch.float16, torch.bfloat16) for tensor in tensors):
        for tensor in tensors:
            tensor.mul_(number)
    elif tensors:
        _foreach._foreach_mul_(list(tensors), number)


def add_(tensors: Sequence[Tensor], others: Sequence[Tensor], alpha: float = 1) -> None:
    """``tensors += alpha * others``, in place."""
    if tensors:
        _foreach._foreach_add_(locals_of(tensors), locals_of(others), alpha=alpha)


def add_number_(tensors: Sequence[Tensor], number: float) -> None:
    """Add one number to all tensors, in place."""
    _foreach._foreach_add_(reals_of(tensors), number)


def subtract_(tensors: Sequence[Tensor], others: Sequence[Tensor]) -> None:
    """``tensors -= others``, in place."""
    if tensors:
        _foreach._foreach_sub_(locals_of(tensors), locals_of(others))


def subtract(tensors: Sequence[Tensor], others: Sequence[Tensor]) -> list[Tensor]:
    """``tensors - others``, as new tensors."""
    result = clone(tensors)
    subtract_(result, others)
    return result


def copy_(tensors: Sequence[Tensor], others: Sequence[Tensor]) -> None:
    if tensors:
        _foreach._foreach_copy_(locals_of(tensors), locals_of(others))


def clone(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor.clone() for tensor in tensors]


def negative(tensors: Sequence[Tensor]) -> list[Tensor]:
    """``-tensors``, as new tensors."""
    return _wrap(_foreach._foreach_neg(locals_of(tensors)), tensors) if tensors else []


def lerp_(tensors: Sequence[Tensor], ends: Sequence[Tensor], weight: float) -> None:
    """``tensors += weight * (ends - tensors)``, in place."""
    _foreach._foreach_lerp_(locals_of(tensors), locals_of(ends), weight)


def lerp_where_(
    chosen: Sequence[Tensor], tensors: Sequence[Tensor], ends: Sequence[Tensor], weights: Sequence[float]
) -> None:
    """``tensors += weights * (ends - tensors)`` where ``chosen``, in place; other ends may hold anything, NaN too.

    What is chosen is said for each tensor, or for each of its elements.
    """
    for mask, tensor, end, weight in zip(chosen, locals_of(tensors), locals_of(ends), weights, strict=True):
        tensor.lerp_(torch.where(mask.to(tensor.device), end, tensor).to(tensor.dtype), weight)


def decay_squares_(tensors: Sequence[Tensor], values: Sequence[Tensor], beta: float) -> None:
    """``tensors = beta * tensors + (1 - beta) * values**2``, in place."""
    parts, others = reals_of(tensors), reals_of(values)
    _multiply_(parts, beta)
    _foreach._foreach_addcmul_(parts, others, others, 1 - beta)


def maximum_(tensors: Sequence[Tensor], others: Sequence[Tensor]) -> None:
    _foreach._foreach_maximum_(reals_of(tensors), reals_of(others))


def square_roots(tensors: Sequence[Tensor]) -> list[Tensor]:
    """As new tensors."""
    return _wrap(_foreach._foreach_sqrt(reals_of(tensors)), tensors)


def divide(tensors: Sequence[Tensor], others: Sequence[Tensor]) -> list[Tensor]:
    """``tensors / others``, written over ``others`` and returned."""
    for tensor, other in zip(reals_of(tensors), reals_of(others), strict=True):
        torch.div(tensor, other, out=other)
    return list(others)


def clamp_(tensors: Sequence[Tensor], limit: float) -> None:
    """Clamp all elements to [-limit, limit], in place; NaN stays NaN."""
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for tensor in reals_of(tensors):
        by_dtype.setdefault(tensor.dtype, []).append(tensor)
    for dtype, group in by_dtype.items():
        # torch raises for a limit that the dtype cannot represent; nothing finite exceeds it
        bound = limit if limit <= torch.finfo(dtype).max else float("inf")
        _foreach._foreach_clamp_max_(group, bound)
        _foreach._foreach_clamp_min_(group, -bound)


def _beside(tensor: Tensor, value: Tensor, wide: torch.dtype) -> Tensor:
    """A value on the tensor's device, in a shape in which it is not rounded to the tensor's dtype."""
    if tensor.dtype != wide and tensor.ndim and not value.ndim:
        value = value.view(1)
    if value.is_complex() and not tensor.is_complex():
        value = value.real
    return value.to(tensor.device, wide)


def _wrap(parts: Sequence[Tensor], like: Sequence[Tensor]) -> list[Tensor]:
    pairs = zip(parts, like, strict=True)
    whole = [(torch.view_as_complex(p) if t.is_complex() and not p.is_complex() else p, t) for p, t in pairs]
    return [distributed_like(part, tensor) for part, tensor in whole]
