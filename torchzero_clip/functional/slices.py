"""Norms of slices one by one: of every order and dtype, of distributed tensors, at every magnitude."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from torchzero_clip.functional import foreach
from torchzero_clip.functional.dtypes import is_narrow, power_of_two, widened, widest_of
from torchzero_clip.functional.shards import Part, all_reduce, pack
from torchzero_clip.functional.ways import BLOCK, may_look, power_dtype, sum_dtype


def norms_of_slices(parts: Sequence[Part], p: float) -> list[Tensor]:
    """The p-norm of every slice, float64: one tensor per part. Complex numbers count by their magnitude."""
    if any(part.tensor.is_complex() for part in parts):
        parts = [
            p._replace(tensor=p.tensor.to(sum_dtype(p.tensor)).abs()) if p.tensor.is_complex() else p for p in parts
        ]
    is_power = p != 0 and math.isfinite(p)
    elsewhere = [i for i, part in enumerate(parts) if not part.tensor.is_cpu] if is_power else []
    narrow = {i for i in elsewhere if is_narrow(parts[i].tensor)}
    if narrow:  # a plain norm might be inf or 0, and to look would wait
        of_narrow = iter(_rescaled([parts[i] for i in narrow], p))
        of_others = iter(norms_of_slices([part for i, part in enumerate(parts) if i not in narrow], p))
        return [next(of_narrow if i in narrow else of_others) for i in range(len(parts))]
    norms = _local_norms(parts, p)
    if any(part.groups for part in parts):
        norms = merged(parts, norms, p)
    if not is_power or not parts:
        return norms
    if not may_look(*(part.tensor for part in parts)):
        # |x|**6 of float32's largest number is 1e231 and fits float64; a higher power, or float64 itself, may not
        risky = [i for i, part in enumerate(parts) if part.tensor.dtype == torch.float64 or abs(p) > 6]
        return _redone(parts, norms, risky, p)
    # powers in float32 may overflow or underflow: norms beyond 10^(+-30/p) are taken again on rescaled values
    vector = pack(norms)
    tiny = 10.0 ** max(-30 / abs(p), -300)
    huge = 10.0 ** min(30 / -p, 300) if p < 0 else math.inf
    suspicious = ((vector <= tiny) | (vector >= huge)).split([norm.numel() for norm in norms])
    if not torch.cat(suspicious).any():
        return norms
    return _redone(parts, norms, [i for i, flags in enumerate(suspicious) if flags.any()], p)


def joint_of_norms(norms: Tensor, p: float) -> Tensor:
    """The joint p-norm from a vector of p-norms: a 0-d tensor, 0 for none."""
    if p == 0 or not norms.numel():
        return norms.sum()
    if math.isinf(p):
        return norms.amax() if p > 0 else norms.amin()
    scale = _usable_scale(norms.amax() if p > 0 else norms.amin(), p)  # this norm decides the result
    # divided by it, no power overflows, and none that matters underflows
    shares = norms / scale
    if norms.dtype == torch.float64:
        return scale * torch.linalg.vector_norm(shares, p)
    return enlarged(norm_along(shares, p, 0).squeeze(0), scale)


def merged(parts: Sequence[Part], norms: list[Tensor], p: float) -> list[Tensor]:
    """Combine the norms of local slices with those of the other ranks."""
    if not any(part.groups for part in parts):
        return norms
    if math.isinf(p):
        return all_reduce(parts, norms, ReduceOp.MAX if p > 0 else ReduceOp.MIN)
    if p == 0:
        return all_reduce(parts, norms, ReduceOp.SUM)
    powers = [n**p if part.groups else n for n, part in zip(norms, parts, strict=True)]
    powers = all_reduce(parts, powers, ReduceOp.SUM)
    return [n ** (1 / p) if part.groups else n for n, part in zip(powers, parts, strict=True)]


def _redone(parts: Sequence[Part], norms: list[Tensor], indices: Sequence[int], p: float) -> list[Tensor]:
    """Take some norms again, on rescaled values."""
    result = list(norms)
    for i, norm in zip(indices, _rescaled([parts[i] for i in indices], p), strict=True):
        result[i] = norm
    return result


def _rescaled(parts: Sequence[Part], p: float) -> list[Tensor]:
    """Norms of slices whose powers would leave the range of the dtype.

    Elements are divided by a scale close to the largest magnitude (the smallest if p < 0), and the norm is multiplied
    by it.
    """
    extreme = math.copysign(math.inf, p)
    scales = [_usable_scale(n, p) for n in merged(parts, [local_norm(part, extreme) for part in parts], extreme)]
    # one after the other, so that only one rescaled copy exists at a time
    rescaled = [local_norm(x._replace(tensor=x.tensor / scale), p) for x, scale in zip(parts, scales, strict=True)]
    return list(map(enlarged, merged(parts, rescaled, p), scales))


def _local_norms(parts: Sequence[Part], p: float) -> list[Tensor]:
    """The norm of every local slice. Whole tensors are measured together where that is as accurate."""
    norms: list[Tensor | None] = [None] * len(parts)
    alike: dict[tuple[torch.dtype, bool], list[int]] = {}
    for i, part in enumerate(parts):
        x = part.tensor
        # on CPU longer tensors are summed in two levels; float64 sums take 17 times as long (156 ms for 16M)
        small = 0 < x.numel() <= BLOCK or (x.numel() and not x.is_cpu)
        if small and len(part.dims) == x.ndim and p in (1.0, 2.0):
            alike.setdefault((x.dtype, x.is_cpu), []).append(i)
        else:
            norms[i] = local_norm(part, p)
    for indices in alike.values():
        tensors = [parts[i].tensor for i in indices]
        values = foreach.norms_in_one_call(tensors, p, power_dtype(tensors[0]))
        wide = torch.float64 if tensors[0].is_cpu else widest_of(tensors[0])
        for i, x, value in zip(indices, tensors, values, strict=True):
            norms[i] = value.to(wide).view((1,) * x.ndim)
    return [value for value in norms if value is not None]


def local_norm(part: Part, p: float) -> Tensor:
    """The norm of every local slice of one part, of the part's ``slice_shape``. Powers may overflow or underflow."""
    x, dims = part.tensor, part.dims
    if not x.numel():
        return x.new_full(part.slice_shape, 0.0 if p >= 0 else math.inf, dtype=widest_of(x))
    if p == 0:  # float32 counts to 2**24 only
        return widened((x != 0).sum(dims, keepdim=True, dtype=torch.int64 if is_narrow(x) else torch.float64))
    # amax and amin take 17 ms for 16M elements, and vector_norm 73
    if p == math.inf:
        return widened(torch.maximum(x.amax(dims, keepdim=True), x.amin(dims, keepdim=True).neg())).abs()
    if p == -math.inf:
        return widened(x.abs().amin(dims, keepdim=True))
    dtype = power_dtype(x)
    if dtype == torch.float64:
        return torch.linalg.vector_norm(x, p, dims, keepdim=True, dtype=dtype)
    if len(dims) == x.ndim and x.numel() > BLOCK and foreach.is_dense(x):
        x, dims = foreach.flat(x), (0,)
    # neighbors in memory first: in 4000 x 4000 elements the norms of rows take 7 ms, those of columns 226
    for d in sorted(dims, key=x.stride):
        x = norm_along(x, p, d)
    return x.view(part.slice_shape)


def norm_along(x: Tensor, p: float, d: int) -> Tensor:
    """The norm along one dimension, in two levels where it is long; in as many as it takes without float64."""
    length = x.shape[d]
    if x.dtype == torch.float64 or length <= BLOCK:
        return widened(torch.linalg.vector_norm(x, p, d, keepdim=True, dtype=foreach.wide_dtype(x.dtype)))
    even = length - length % BLOCK
    parts = x.narrow(d, 0, even).unflatten(d, (-1, BLOCK))
    levels = [widened(torch.linalg.vector_norm(parts, p, d + 1, dtype=torch.float32))]
    if even < length:
        levels.append(norm_along(x.narrow(d, even, length - even), p, d))
    return norm_along(torch.cat(levels, d), p, d)


def enlarged(x: Tensor, scale: Tensor | float) -> Tensor:
    """The norm, mean or sum ``x`` of values that were divided by ``scale``, as that of the values themselves.

    In float32, a finite ``x`` gives a finite result: at most the largest number.
    """
    if isinstance(scale, float) and scale == 1.0:
        return x
    if x.is_complex():
        return torch.view_as_complex(enlarged(torch.view_as_real(x), scale))
    product = x * scale
    if product.dtype == torch.float64:
        return product
    return torch.where(x.isinf(), x, product.clamp(-foreach.MAX32, foreach.MAX32))


def _usable_scale(largest: Tensor, p: float) -> Tensor:
    """What values are divided by before their powers of p are added up: their largest magnitude, or close to it."""
    # a subnormal largest magnitude is then at least 2**-23, whose higher powers float32 cannot hold
    if largest.dtype == torch.float32 and abs(p) <= 4:
        return power_of_two(largest)
    return torch.where((largest > 0) & largest.isfinite(), largest, 1.0)
