"""Operations on lists of tensors; the only file that touches ``torch._foreach_*``.

Lists may hold plain and distributed tensors, several devices and dtypes. Functions work on the local parts, which is
right because all operations here are elementwise, and tensors of one operation have the same layout. Where it matters,
the real and the imaginary part of a complex number are separate elements, as in torch's optimizers.
"""

from collections.abc import Callable, Sequence
from itertools import compress
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adam import adam
from torch.optim.sgd import sgd

from torchzero_clip.compat import FakeTensor, any_distributed
from torchzero_clip.functional.choice import clamped
from torchzero_clip.functional.dtypes import widest_of
from torchzero_clip.functional.scratch import Scratch
from torchzero_clip.functional.shards import distributed_like, local, locals_of
from torchzero_clip.types import Columns, Setting

PLAIN = {Tensor, nn.Parameter, FakeTensor}
"""Types of tensors without a structure beyond their memory. Fake tensors stand for such ones."""

TINY32, MAX32 = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max
"""The smallest and the largest number that float32 holds with full precision."""

WIDE = {torch.float32, torch.float64}
"""Real dtypes of tensors whose statistics have the same dtype, not a wider one."""

_DTYPE = attrgetter("dtype")
_DTYPE_AND_PLACE = attrgetter("dtype", "is_cpu")

_foreach: Any = torch  # the _foreach and _fused functions are not in torch's type stubs


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of factors and statistics for tensors of ``dtype``: float32 or wider."""
    return torch.promote_types(dtype, torch.float32)


def reals(tensor: Tensor) -> Tensor:
    """The local part, in the same memory; complex numbers as pairs of real ones along a last dimension."""
    plain = local(tensor)
    return torch.view_as_real(plain) if plain.is_complex() else plain


def reals_of(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Each tensor as `reals`."""
    return [torch.view_as_real(t) if t.is_complex() else t for t in locals_of(tensors)]


def laid_out_alike(*tensors: Tensor) -> bool:
    """True if elements with the same index are at the same place in memory, without gaps."""
    first, *others = locals_of(tensors)
    if all(tensor.is_contiguous() for tensor in (first, *others)):
        return True
    dense = first.ndim == 4 and first.is_contiguous(memory_format=torch.channels_last)
    return dense and all(_strides(other) == _strides(first) for other in others)


def fit_kernels(columns: Sequence[Sequence[Tensor]]) -> bool:
    """True if tensors are plain, of one dtype and device, and in each row of one shape and laid out alike."""
    # torch's fused kernels ignore strides
    kinds = {kind(column) for column in columns}
    if len(kinds) != 1 or None in kinds:
        return False
    shapes = [[tensor.shape for tensor in column] for column in columns]
    if any(column != shapes[0] for column in shapes):
        return False
    if all(all_contiguous(column) for column in columns):
        return True
    return all(laid_out_alike(*row) for row in zip(*columns, strict=True))


def adamw_(
    params: list[Tensor],
    updates: list[Tensor],
    state: Columns,
    setting: Setting,
    scale: Tensor | None,
    *,
    fused: bool,
    found_inf: Tensor | None = None,
) -> None:
    """Take a step of AdamW by torch's fused kernel, which divides updates by ``scale`` in place, or by its loop.

    The kernel changes nothing if ``found_inf`` is 1. The loop takes tensors of any layout, and neither of the two. The
    last list of ``state`` has step counts with this step.
    """
    first, second, *largest, steps = state
    beta1, beta2 = setting["betas"]
    rates: dict[str, Any] = {"beta1": beta1, "beta2": beta2, "eps": setting["eps"], "amsgrad": len(largest) > 0}
    rates |= {"weight_decay": setting.get("weight_decay", 0.0), "maximize": False}
    lists = (params, updates, first, second, largest[0] if largest else [])
    if fused:
        lr = _beside_params(setting["lr"], params)
        _foreach._fused_adamw_(*lists, steps, lr=lr, grad_scale=scale, found_inf=found_inf, **rates)
        return
    before = [step - 1 for step in steps]  # torch counts this step itself
    rates |= {"has_complex": params[0].is_complex(), "decoupled_weight_decay": True}
    adam(*lists, before, lr=setting["lr"], foreach=False, fused=False, **rates)


def sgd_(
    params: list[Tensor],
    updates: list[Tensor],
    state: Columns,
    setting: Setting,
    scale: Tensor | None,
    *,
    fused: bool,
    nesterov: bool,
    found_inf: Tensor | None = None,
) -> None:
    """Take a step of SGD, as in `adamw_`. Without state there is no momentum."""
    rates: dict[str, Any] = {key: setting[key] for key in ("momentum", "dampening")}
    rates |= {"nesterov": nesterov, "weight_decay": 0.0, "maximize": False}
    buffers = state[0] if state else []
    if fused:
        # in a first step the kernel would write the gradients over the buffers, which exist already
        rates |= {"is_first_step": False, "lr": _beside_params(setting["lr"], params)}
        _foreach._fused_sgd_(params, updates, buffers, grad_scale=scale, found_inf=found_inf, **rates)
        return
    sgd(params, updates, [*buffers] or [None] * len(params), lr=setting["lr"], foreach=False, fused=False, **rates)


def _beside_params(lr: float | Tensor, params: Sequence[Tensor]) -> float | Tensor:
    """A learning rate on a device where the kernels accept it: CPU, or that of the parameters."""
    return lr.to(params[0].device) if isinstance(lr, Tensor) and not lr.is_cpu else lr


def is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill one run of memory, in whatever order."""
    expected = 1
    for stride, n in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if n != 1 and stride != expected:
            return False
        expected *= n
    return True


def flat(tensor: Tensor) -> Tensor:
    """All elements as a vector in the order of memory: a view, or a copy if they do not fill one run of it."""
    if tensor.is_contiguous() or not is_dense(tensor):
        return tensor.reshape(-1)
    return tensor.as_strided((tensor.numel(),), (1,))


def _strides(tensor: Tensor) -> list[int]:
    """The strides that matter: those of dimensions of more than one element."""
    return [stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]


def are_plain(tensors: Sequence[Tensor], min_size: int = 1) -> bool:
    """True if tensors have a `kind`, and ``min_size`` elements each."""
    # always False under compile, which combines operations by itself
    if torch.compiler.is_compiling():
        return False
    return len(tensors) > 0 and kind(tensors) is not None and min(map(Tensor.numel, tensors)) >= min_size


def kind(tensors: Sequence[Tensor]) -> tuple[torch.dtype, bool, torch.device] | None:
    """The dtype and the device of plain real tensors, if all have the same, and the negation of none is pending."""
    if not PLAIN.issuperset(map(type, tensors)) or len(set(map(_DTYPE_AND_PLACE, tensors))) != 1:
        return None
    if any(map(Tensor.is_neg, tensors)):  # torch has no kernels on lists for these
        return None
    first = tensors[0]
    # there is one CPU, and to ask 400 tensors for their devices takes 50 us
    one_device = first.is_cpu or len({tensor.device for tensor in tensors}) == 1
    return (first.dtype, first.is_cpu, first.device) if one_device and first.is_floating_point() else None


def all_contiguous(tensors: Sequence[Tensor]) -> bool:
    """Whether all are contiguous."""
    return all(map(Tensor.is_contiguous, tensors))


def times(tensors: Sequence[Tensor], numbers: Sequence[float]) -> list[Tensor]:
    """Each tensor times its number: new plain tensors."""
    return list(_foreach._foreach_mul(list(tensors), list(numbers)))


def norms_in_one_call(tensors: Sequence[Tensor], p: float, dtype: torch.dtype) -> list[Tensor]:
    """The p-norm of each plain tensor, accumulated in ``dtype``; none may be empty."""
    return list(_foreach._foreach_norm(list(tensors), p, dtype=dtype))


def scale_(tensors: Sequence[Tensor], factors: Sequence[Tensor], *, exact: bool = False) -> None:
    """Multiply each tensor by its factor (of one element, or one per slice), in place."""
    # exact: in float64 where the device has it, for factors that float32 cannot hold
    dtypes = {tensor.dtype for tensor in tensors}
    # torch.compile cannot trace `to_real`
    wide = {d: wide_dtype(d.to_real() if d.is_complex else d) for d in dtypes}
    for tensor, factor in zip(locals_of(tensors), factors, strict=True):
        dtype = widest_of(tensor) if exact else wide[tensor.dtype]
        if tensor.is_complex():  # a complex inf times a real number is NaN, because it has the product inf * 0
            tensor, factor = torch.view_as_real(tensor), factor.unsqueeze(-1) if factor.ndim else factor
        tensor.mul_(_beside(tensor, factor, dtype))


def multiply_each_(
    tensors: Sequence[Tensor], factors: Tensor, scratch: Scratch | None = None, chosen: Sequence[int] | None = None
) -> None:
    """Multiply plain tensors of one dtype, all or those ``chosen``, by the elements of a float64 vector, in place."""
    wide = wide_dtype(tensors[0].dtype)
    if chosen is None and is_one_number(factors) and tensors[0].dtype == wide:
        # for 400 tensors one 0-d tensor takes 0.23 ms, a list of them 0.25 and one Python number 0.87
        _foreach._foreach_mul_(tensors, as_factors(factors.select(0, 0), wide))
        return
    factors = as_factors(factors, wide)
    values = factors.unbind() if scratch is None else scratch.elements(factors)
    if chosen is not None and len(chosen) < len(tensors):
        tensors, values = ([column[i] for i in chosen] for column in (tensors, values))
    if tensors[0].dtype != wide:
        values = [v.view(1) if t.ndim else v for v, t in zip(values, tensors, strict=True)]  # see `_beside`
    _foreach._foreach_mul_(tensors, values)


def as_factors(factors: Tensor, dtype: torch.dtype) -> Tensor:
    """Factors in a dtype, clamped to its range, because on CUDA a check of the range would synchronize with the GPU."""
    return factors.to(dtype) if dtype == torch.float64 else clamped(factors, torch.finfo(dtype).max, dtype)


def is_one_number(vector: Tensor) -> bool:
    """Whether a vector was expanded from a single number, as the factors of a joint clip are.

    It reads strides only, because reading numbers would synchronize with the GPU.
    """
    return vector.numel() == 1 or vector.stride() == (0,)


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


def add_number_(tensors: Sequence[Tensor], number: float | Tensor) -> None:
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


multiply_plain_: Callable[[Sequence[Tensor], Sequence[Tensor] | Tensor], None] = _foreach._foreach_mul_
"""Multiply each plain tensor by its own tensor, or all by one 0-d tensor, in place."""

subtract_plain_: Callable[[Sequence[Tensor], Sequence[Tensor]], None] = _foreach._foreach_sub_
"""Subtract a 0-d tensor from each of some plain tensors, in place."""

zero_plain_: Callable[[Sequence[Tensor]], None] = _foreach._foreach_zero_
"""Set plain tensors to 0."""

copy_plain_: Callable[[Sequence[Tensor], Sequence[Tensor]], None] = _foreach._foreach_copy_
"""Copy plain tensors."""


def copy_(tensors: Sequence[Tensor], others: Sequence[Tensor]) -> None:
    if tensors:
        _foreach._foreach_copy_(locals_of(tensors), locals_of(others))


def clone(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor.clone() for tensor in tensors]


def at_least_float32(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Each tensor in float32 or wider: itself if it is."""
    wide = {dtype: wide_dtype(dtype) for dtype in {tensor.dtype for tensor in tensors}}
    return [tensor.to(wide[tensor.dtype]) for tensor in tensors]


def cast(tensors: Sequence[Tensor], like: Sequence[Tensor]) -> list[Tensor]:
    """Each tensor in the dtype of another one."""
    return [tensor.to(other.dtype) for tensor, other in zip(tensors, like, strict=True)]


def lerp_(tensors: Sequence[Tensor], ends: Sequence[Tensor], weight: float) -> None:
    """``tensors += weight * (ends - tensors)``, in place."""
    _foreach._foreach_lerp_(locals_of(tensors), locals_of(ends), weight)


def lerp_chosen_(chosen: Tensor, tensors: Sequence[Tensor], ends: Sequence[Tensor], weight: float) -> None:
    """``tensors += weight * (ends - tensors)`` for ``chosen`` tensors, in place; other ends may hold anything."""
    if not (chosen.is_cpu and not torch.compiler.is_compiling()):
        # reading the flags would synchronize with the GPU, so all tensors are computed
        for flag, tensor, end in zip(chosen.unbind(), locals_of(tensors), locals_of(ends), strict=True):
            lerp_where_(flag.to(tensor.device), tensor, end, weight)
        return
    flags, tensors, ends = chosen.tolist(), locals_of(tensors), locals_of(ends)
    if not all(flags):
        tensors, ends = [list(compress(column, flags)) for column in (tensors, ends)]
    if list(map(_DTYPE, tensors)) != list(map(_DTYPE, ends)):
        # torch refuses ends of another dtype
        ends = cast(ends, tensors)
    if tensors:
        _foreach._foreach_lerp_(tensors, ends, weight)


def lerp_where_(chosen: Tensor, tensor: Tensor, end: Tensor, weight: float) -> None:
    """``tensor += weight * (end - tensor)`` where ``chosen``, in place; other elements of ``end`` may be anything."""
    local(tensor).lerp_(torch.where(chosen, local(end), local(tensor)).to(tensor.dtype), weight)


def decay_squares_(tensors: Sequence[Tensor], values: Sequence[Tensor], beta: float) -> None:
    """``tensors = beta * tensors + (1 - beta) * values**2``, in place."""
    parts, others = reals_of(tensors), reals_of(values)
    _multiply_(parts, beta)
    _foreach._foreach_addcmul_(parts, others, others, 1 - beta)


def maximum_(tensors: Sequence[Tensor], others: Sequence[Tensor]) -> None:
    _foreach._foreach_maximum_(reals_of(tensors), reals_of(others))


def square_roots(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The square root of each element, as new tensors."""
    return _wrap(_foreach._foreach_sqrt(reals_of(tensors)), tensors)


def divide(tensors: Sequence[Tensor], others: Sequence[Tensor]) -> list[Tensor]:
    """``tensors / others``, written over ``others`` and returned."""
    for tensor, other in zip(reals_of(tensors), reals_of(others), strict=True):
        # over memory that exists: new memory page-faults, 96 ms against 33 for 64M elements
        torch.div(tensor, other, out=other)
    return list(others)


def clamp_(tensors: Sequence[Tensor], limit: float) -> None:
    """Clamp all elements to [-limit, limit], in place; NaN stays NaN."""
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for tensor in reals_of(tensors):
        by_dtype.setdefault(tensor.dtype, []).append(tensor)
    for group in by_dtype.values():
        clamp_plain_(group, limit)


def clamp_plain_(tensors: Sequence[Tensor], limit: float) -> None:
    """Clamp all elements of plain tensors of one dtype as `clamp_` does."""
    # two operations, because torch has no clamp on lists; maximum and minimum pass NaN on
    bound = usable_limit(limit, tensors[0].dtype)
    _foreach._foreach_clamp_max_(tensors, bound)
    _foreach._foreach_clamp_min_(tensors, -bound)


def usable_limit(limit: float, dtype: torch.dtype) -> float:
    """A limit that torch accepts for a dtype. A limit beyond its range becomes infinite and clips the same elements."""
    return limit if abs(limit) <= torch.finfo(dtype).max else limit * torch.inf


def _beside(tensor: Tensor, value: Tensor, wide: torch.dtype) -> Tensor:
    """A value on the tensor's device, in a shape in which it is not rounded to the tensor's dtype."""
    # a 0-d tensor does not take part in type promotion, one of a dimension does
    if tensor.dtype != wide and tensor.ndim and not value.ndim:
        value = value.view(1)
    if value.is_complex() and not tensor.is_complex():
        value = value.real
    return value.to(tensor.device, wide)


def _wrap(parts: Sequence[Tensor], like: Sequence[Tensor]) -> list[Tensor]:
    """The inverse of `reals_of`: tensors that are complex and distributed like others."""
    pairs = zip(parts, like, strict=True)
    whole = [torch.view_as_complex(p) if t.is_complex() and not p.is_complex() else p for p, t in pairs]
    if not any_distributed(like):
        return whole
    return [distributed_like(part, tensor) for part, tensor in zip(whole, like, strict=True)]
