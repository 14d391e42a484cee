"""Norms and other metrics of full tensors in float64, safe from overflow and underflow, alike on all ranks.

Each metric is computed as its *root*, which scales with the tensor (for ``'var'`` the standard deviation), so that one
rule serves all metrics: the factor is ``limit_root / root``.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp

from torchzero_clip.checks import boolean
from torchzero_clip.checks import dims as check_dims
from torchzero_clip.compat import any_distributed
from torchzero_clip.functional import blocks, foreach
from torchzero_clip.functional.metric import Metric, parse_ord
from torchzero_clip.functional.processes import device_of, gathered
from torchzero_clip.functional.scratch import Scratch
from torchzero_clip.functional.shards import Part, all_reduce, pack, summed, wholes
from torchzero_clip.functional.shards import part as part_of
from torchzero_clip.functional.shards import replicated as replicated
from torchzero_clip.types import Ord

SQUARABLE = 1e150  # the square of a larger norm, or a sum of such squares, may be infinite

JointNorm: TypeAlias = tuple[Tensor, Tensor | None]  # of all tensors together, and beside it that of each if wanted


def norm(tensor: Tensor, ord: Ord = 2, dim: int | Sequence[int] | None = None, keepdim: bool = False) -> Tensor:
    """Return the norm of one tensor, or of each of its slices, in float64.

    For authors of transforms. In every dtype a finite tensor has a finite norm, and a non-zero tensor a non-zero norm.
    Under FSDP2 it is the norm of the full tensor, equal on every rank. With ``dim`` a rank gets the norms of those
    slices of which it holds a part, each taken over all ranks, like the ``norms`` that a `Scaling` gets.

    Args:
        tensor: A tensor of any shape and floating point dtype.
        ord: The metric, as in `ClipNorm`; for 'var' the root of the variance.
        dim: The dimensions that one slice spans, as in `torch.linalg.vector_norm`; None for all.
        keepdim: Keep the dimensions of a slice, with size 1.

    Raises:
        ValueError: For an unknown ``ord``, or a ``dim`` that the tensor does not have.
        TypeError: For an ``ord`` or ``dim`` of the wrong type.

    Examples:
        >>> import torch
        >>> from torchzero_clip import norm
        >>> norm(torch.full((1000,), 300.0, dtype=torch.float16), "linf")
        tensor(300., dtype=torch.float64)
        >>> norm(torch.tensor([[3.0, 4.0], [6.0, 8.0]]), dim=1, keepdim=True)
        tensor([[ 5.],
                [10.]], dtype=torch.float64)
    """
    metric = parse_ord(ord)
    boolean("keepdim", keepdim)
    check_dims("dim", dim)
    ndim = max(tensor.ndim, 1)
    listed = range(ndim) if dim is None else () if isinstance(dim, str) else (dim,) if isinstance(dim, int) else dim
    named = {d + ndim if d < 0 else d for d in listed}
    if not named or not named <= set(range(ndim)):
        raise ValueError(f"dim must name dimensions of a tensor of shape {tuple(tensor.shape)}, got {dim!r}")
    # a pending sum is carried out first, because a norm is not linear
    own = part_of(summed(tensor), sorted(named))
    (norms,) = slice_metrics([own], metric)
    if not own.size:  # the norm of no elements
        norms = torch.zeros_like(norms)
    if not keepdim or not tensor.ndim:  # a scalar was measured as a vector
        norms = norms.squeeze(own.dims)
    return norms


def rms(tensor: Tensor) -> Tensor:
    """Return the root mean square of one tensor, in float64; 0 for a tensor without elements.

    It is as safe from overflow and underflow as `norm`, and like it the value of the full tensor on every rank.

    Args:
        tensor: A tensor of any shape and floating point dtype.

    Examples:
        >>> import torch
        >>> from torchzero_clip import rms
        >>> rms(torch.tensor([1e30, -1e30]))
        tensor(1.0000e+30, dtype=torch.float64)
    """
    return norm(tensor) / math.sqrt(max(tensor.numel(), 1))


class Moments(NamedTuple):
    """The variance and the mean of every slice, one tensor per part; the variance of a single element is 0."""

    variances: list[Tensor]
    means: list[Tensor]


def moments(parts: Sequence[Part], metric: Metric) -> Moments | None:
    """The moments of slices; None if ``metric`` does not need them, or if they cannot be taken directly in float64."""
    here = all(p.tensor.numel() and not (p.groups or p.spread) for p in parts)
    # the squares of float64 may overflow; those of float32, at most 1e77, do not
    narrow = all(not (p.tensor.is_complex() or p.tensor.dtype == torch.float64) for p in parts)
    if not parts or metric.kind not in ("std", "var") or not (here and narrow):
        return None
    found = [torch.var_mean(p.tensor.double(), p.dims, correction=min(p.size - 1, 1), keepdim=True) for p in parts]
    return Moments([variance for variance, _ in found], [mean for _, mean in found])


def slice_metrics(parts: Sequence[Part], metric: Metric, known: Moments | None = None) -> list[Tensor]:
    """The root of the metric of every slice: one tensor per part, of the part's ``slice_shape``."""
    if metric.is_power:
        return [metric.of_norm(value, p.size) for value, p in zip(p_norms(parts, metric.p), parts, strict=True)]
    known = known or moments(parts, metric)
    if known is not None:
        return foreach.square_roots(known.variances)
    sums = slice_sums(parts)
    if metric.kind == "sum":
        return [value.abs() for value in sums]
    means = [value / p.size for value, p in zip(sums, parts, strict=True)]
    spreads = p_norms(_deviations(parts, means), 2.0)
    rows = zip(spreads, means, parts, strict=True)
    return [_deviation(spread, mean, p.size) for spread, mean, p in rows]


def joint_norm_of_meshes(parts: Sequence[Part], p: float, *, beside: bool = False) -> JointNorm:
    """The p-norm of whole tensors together, and ``beside`` it that of each, by one collective for each mesh."""
    # norms of local parts first, so that a collective has one number for all tensors of a mesh
    local = p_norms([part._replace(groups=()) for part in parts], p)
    indices_of: dict[tuple[ProcessGroup, ...], list[int]] = {}
    for i, part in enumerate(parts):
        indices_of.setdefault(part.groups, []).append(i)
    rows = [Part(pack([local[i] for i in own]), (0,), len(own), groups) for groups, own in indices_of.items()]
    if p == 0:
        return combine(pack(slice_sums(rows)), p), None
    count = len(rows)
    if beside:  # in the same collectives, which changes no bit of the joint norm
        rows += [Part(pack([norm]), (0,), 1, part.groups) for norm, part in zip(local, parts, strict=True)]
    found = p_norms(rows, p)
    return combine(pack(found[:count]), p), pack(found[count:]) if beside else None


def mesh_norm(tensors: Sequence[Tensor], *, beside: bool) -> JointNorm | None:
    """The result of `joint_norm_of_meshes` for the L2 norm of tensors; None if none of them is distributed."""
    return joint_norm_of_meshes(wholes(tensors), 2.0, beside=beside) if any_distributed(tensors) else None


def joint_moments(parts: Sequence[Part], metric: Metric, known: Moments | None = None) -> Tensor:
    """The float64 numbers from which `root_of_moments` finds the metric, no power, of whole tensors as one vector.

    For 'sum' they are the real and the imaginary part of the sum. For 'std' and 'var' they are the number of elements,
    the real and the imaginary part of the mean, and the norm of the deviations from it.
    """
    known = known or moments(parts, metric)
    if known is not None:
        count, mean, spread = _joined_moments(parts, known)
    else:
        count, total = sum(p.size for p in parts), joint_sum(parts)
        if metric.kind == "sum":
            return _as_reals(total)
        mean = total / max(count, 1)
        spreads = p_norms(_deviations(parts, [mean.to(p.tensor.device) for p in parts]), 2.0)
        spread = combine(pack(spreads), 2.0).to(mean.device)
    return torch.cat([torch.full_like(spread, count).view(1), _as_reals(mean), spread.view(1)])


def root_of_moments(metric: Metric, rows: Tensor) -> Tensor:
    """The root of a metric, 0-d, from rows of `joint_moments`, each of other tensors."""
    if metric.kind == "sum":
        return torch.hypot(*rows.sum(dim=0).unbind())
    count, *mean, spread = rows.unbind(dim=1)
    if len(rows) > 1:
        # the spread of all is that of each and the distance of its mean from the joint mean
        total = count.sum().view(1)
        joint = [(count * x).sum().view(1) / total.clamp(min=1) for x in mean]
        apart = count.sqrt() * torch.hypot(*(own - x for own, x in zip(mean, joint, strict=True)))
        count, mean, spread = total, joint, combine(torch.cat([spread, apart]), 2.0).view(1)
    return _deviation(spread, torch.hypot(*mean), count).squeeze(0)


def _as_reals(value: Tensor) -> Tensor:
    """A 0-d number as a vector of its real and its imaginary part."""
    return torch.view_as_real(value) if value.is_complex() else torch.stack([value, torch.zeros_like(value)])


def slice_sums(parts: Sequence[Part]) -> list[Tensor]:
    """The signed sum of every slice, float64 or complex128."""
    sums = [part.tensor.sum(part.dims, keepdim=True, dtype=_wide(part.tensor)) for part in parts]
    return all_reduce(parts, sums, ReduceOp.SUM)


def joint_sum(parts: Sequence[Part]) -> Tensor:
    """The signed sum of all elements of whole tensors: a 0-d tensor on the device of the first."""
    sums = slice_sums(parts)
    if not sums:
        return torch.zeros((), dtype=torch.float64, device="cpu")
    return torch.cat([value.view(1).to(sums[0].device) for value in sums]).sum()


def joint_mean(parts: Sequence[Part], group: ProcessGroup | None = None) -> Tensor:
    """The mean of all elements of whole tensors, also of those that the other processes of a group hold: 0-d."""
    total, count = joint_sum(parts), sum(p.size for p in parts)
    if group is None:
        return total / max(count, 1)
    total = total.to(device_of([p.tensor for p in parts], group))
    numbers = _as_reals(total)
    rows = gathered(torch.cat([numbers, torch.full_like(numbers[:1], count)]), group)
    real, imaginary, _ = (rows.sum(dim=0) / rows.select(1, 2).sum().clamp(min=1)).unbind()
    return torch.complex(real, imaginary) if total.is_complex() else real


def combine(norms: Tensor, p: float) -> Tensor:
    """The p-norm of tensors from the p-norms of each: a 0-d tensor, 0 for none."""
    if p == 0 or not norms.numel():
        return norms.sum()
    if math.isinf(p):
        return norms.amax() if p > 0 else norms.amin()
    scale = _usable_scale(norms.amax() if p > 0 else norms.amin())  # this norm decides the result
    # divided by it, no power overflows, and none that matters underflows
    return scale * torch.linalg.vector_norm(norms / scale, p)


def total_norm(parts: Sequence[Part], norms: Sequence[Tensor], others: Sequence[Tensor], p: float) -> Tensor:
    """The p-norm of all tensors together, from the norms of the slices of ``parts`` and of the ``others``."""
    spread = [i for i, part in enumerate(parts) if part.spread]
    values = list(norms)
    if spread:
        # this process has only some slices of such a tensor
        seen = [Part(pack([norms[i]]), (0,), parts[i].size, parts[i].spread) for i in spread]
        for i, value in zip(spread, slice_sums(seen) if p == 0 else p_norms(seen, p), strict=True):
            values[i] = value
    return combine(pack([*values, *others]), p)


def all_ones(factors: Tensor) -> bool:
    """True if all factors are 1. Always False on CUDA and under compile, where reading would wait for the device."""
    return may_look(factors) and extent(factors) == (1.0, 1.0)


def beyond_float32(factors: Tensor, known: tuple[float, float] | None = None) -> bool:
    """True if float32 cannot hold some factor. Always True on CUDA and under compile, where reading would wait."""
    if known is None and not may_look(factors):
        return True
    smallest, largest = extent(factors) if known is None else known
    # a factor of 0 is exact in float32, so the smallest positive one has to be found
    if smallest <= 0:
        return largest > foreach.MAX32 or bool(((factors > 0) & (factors < foreach.TINY32)).any())
    return smallest < foreach.TINY32 or largest > foreach.MAX32


def extent(vector: Tensor) -> tuple[float, float]:
    """The smallest and the largest number: NaN if one is NaN, and 1 for an empty vector."""
    count = vector.numel()
    if count > 1 and vector.stride(0):
        smallest, largest = vector.aminmax()
        return smallest.item(), largest.item()
    if not count:
        return 1.0, 1.0
    # an expanded number is read once, without a pass over its copies
    number = (vector if count == 1 else vector.select(0, 0)).item()
    return number, number


def whole_norms(tensors: Sequence[Tensor], scratch: Scratch | None) -> Tensor:
    """The L2 norm of each of some plain real tensors of one dtype on one device: a float64 vector."""
    # as by p_norms up to rounding: on CPU short tensors are measured together, on CUDA all in one call
    first, reads = tensors[0], may_look(tensors[0])
    if not reads and first.dtype != torch.float64:
        return torch.stack(foreach.norms(tensors, 2.0, torch.float64))
    if not reads or not foreach.is_real_and_wide(first.dtype):
        return pack(p_norms(wholes(tensors), 2.0))
    if scratch is None:
        return _mended(torch.tensor(blocks.direct_norms(tensors), dtype=torch.float64, device=first.device), tensors)
    return _mended(blocks.block_norms(tensors, scratch), tensors)


def _mended(norms: Tensor, tensors: Sequence[Tensor]) -> Tensor:
    """The norms, where those that are extreme or not finite are taken again."""
    smallest, largest = extent(norms)
    if not (smallest > blocks.SMALLEST and largest < blocks.LARGEST):  # also NaN
        indices = ((norms > blocks.SMALLEST) & (norms < blocks.LARGEST)).logical_not_().nonzero().flatten()
        again = p_norms(wholes([tensors[i] for i in indices.tolist()]), 2.0)
        norms[indices] = pack(again)
    return norms


def whole_maxima(tensors: Sequence[Tensor], scratch: Scratch | None) -> Tensor:
    """The largest magnitude in each of some tensors as in `whole_norms`: a float64 vector."""
    first = tensors[0]
    if not may_look(first):
        return torch.stack(foreach.norms(tensors, math.inf, torch.float64))
    if scratch is None or not foreach.is_real_and_wide(first.dtype):
        return pack(p_norms(wholes(tensors), math.inf))
    return blocks.block_maxima(tensors, scratch)


def each_norm(tensors: Sequence[Tensor], scratch: Scratch | None = None) -> Tensor:
    """The L2 norm of each of some dense tensors, of full tensors under FSDP2: a float64 vector, equal on all ranks."""
    if len(tensors) and foreach.are_plain(tensors):
        return whole_norms(tensors, scratch)
    return pack(p_norms(wholes(tensors), 2.0))


def whole_norm(
    tensors: Sequence[Tensor], scratch: Scratch | None, *, beside: bool = False, moves: blocks.Moves | None = None
) -> JointNorm | None:
    """The L2 norm of all tensors together, 0-d, float64; and ``beside`` it `whole_norms`, which needs scratch memory.

    With ``moves``, tensors move before they are measured.
    """
    # None if each tensor has to be measured, because the total is extreme or not finite, or if that is as fast
    if not may_look(tensors[0]) or not foreach.is_real_and_wide(tensors[0].dtype):
        return None
    if scratch is None:
        total, norms = blocks.direct_joint_norm(tensors), None
    else:
        total, norms = blocks.joint_norm(tensors, scratch, beside=beside, moves=moves)
    if not blocks.SMALLEST < total.item() < blocks.LARGEST:
        return None
    return total, None if norms is None else _mended(norms, tensors)


def whole_sums(tensors: Sequence[Tensor], scratch: Scratch) -> Tensor:
    """The sum of each of some plain real tensors of one dtype on one device: a float64 vector."""
    # as by slice_sums up to the rounding of sums of up to 1024 elements to the dtype
    if not may_look(tensors[0]) or not foreach.is_real_and_wide(tensors[0].dtype):
        return pack(slice_sums(wholes(tensors)))
    sums = blocks.block_sums(tensors, scratch)
    odd = sums.isfinite().logical_not_()
    if bool(odd.any()):
        indices = odd.nonzero().flatten()
        sums[indices] = pack(slice_sums(wholes([tensors[i] for i in indices.tolist()])))
    return sums


def p_norms(parts: Sequence[Part], p: float) -> list[Tensor]:
    """The p-norm of every slice, float64: one tensor per part. Complex numbers count by their magnitude."""
    if any(part.tensor.is_complex() for part in parts):
        parts = [p._replace(tensor=p.tensor.to(_wide(p.tensor)).abs()) if p.tensor.is_complex() else p for p in parts]
    norms = _local_norms(parts, p)
    if any(part.groups for part in parts):
        norms = merged(parts, norms, p)
    if p == 0 or math.isinf(p) or not parts:
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


def _redone(parts: Sequence[Part], norms: list[Tensor], indices: Sequence[int], p: float) -> list[Tensor]:
    """Take some norms again, in float64, of slices divided by their largest magnitude (the smallest if p < 0)."""
    risky = [parts[i] for i in indices]
    extreme = math.copysign(math.inf, p)
    scales = [_usable_scale(n) for n in merged(risky, [_local_norm(part, extreme) for part in risky], extreme)]
    # one after the other, so that only one rescaled copy exists at a time
    found = [_local_norm(x._replace(tensor=x.tensor / scale), p) for x, scale in zip(risky, scales, strict=True)]
    again = merged(risky, found, p)
    result = list(norms)
    for i, scale, value in zip(indices, scales, again, strict=True):
        result[i] = scale * value
    return result


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


def _local_norms(parts: Sequence[Part], p: float) -> list[Tensor]:
    """The norm of every local slice. Whole tensors are measured together where that is as accurate."""
    norms: list[Tensor | None] = [None] * len(parts)
    alike: dict[tuple[torch.dtype, bool], list[int]] = {}
    for i, part in enumerate(parts):
        x = part.tensor
        # on CPU longer tensors are summed in two levels; float64 sums take 17 times as long (156 ms for 16M)
        small = 0 < x.numel() <= blocks.BLOCK or (x.numel() and not x.is_cpu)
        if small and len(part.dims) == x.ndim and p in (1.0, 2.0):
            alike.setdefault((x.dtype, x.is_cpu), []).append(i)
        else:
            norms[i] = _local_norm(part, p)
    for indices in alike.values():
        tensors = [parts[i].tensor for i in indices]
        found = foreach.norms(tensors, p, _accumulation_dtype(tensors[0]))
        for i, x, value in zip(indices, tensors, found, strict=True):
            norms[i] = value.double().view((1,) * x.ndim)
    return [value for value in norms if value is not None]


def _local_norm(part: Part, p: float) -> Tensor:
    x, dims = part.tensor, part.dims
    if not x.numel():
        return x.new_full(part.slice_shape, 0.0 if p >= 0 else math.inf, dtype=torch.float64)
    if p == 0:
        return (x != 0).sum(dims, keepdim=True, dtype=torch.float64)
    # amax and amin take 17 ms for 16M elements, and vector_norm 73
    if p == math.inf:
        return torch.maximum(x.amax(dims, keepdim=True), x.amin(dims, keepdim=True).neg()).double().abs()
    if p == -math.inf:
        return x.abs().amin(dims, keepdim=True).double()
    dtype = _accumulation_dtype(x)
    if dtype == torch.float64:
        return torch.linalg.vector_norm(x, p, dims, keepdim=True, dtype=dtype)
    if len(dims) == x.ndim and x.numel() > blocks.BLOCK and foreach.is_dense(x):
        x, dims = foreach.flat(x), (0,)
    # neighbors in memory first: in 4000 x 4000 elements the norms of rows take 7 ms, those of columns 226
    for d in sorted(dims, key=x.stride):
        x = norm_along(x, p, d)
    return x.view(part.slice_shape)


def norm_along(x: Tensor, p: float, d: int) -> Tensor:
    """The float64 norm along one dimension, in two levels where it is long."""
    length = x.shape[d]
    if x.dtype == torch.float64 or length <= blocks.BLOCK:
        return torch.linalg.vector_norm(x, p, d, keepdim=True, dtype=foreach.wide_dtype(x.dtype)).double()
    even = length - length % blocks.BLOCK
    parts = x.narrow(d, 0, even).unflatten(d, (-1, blocks.BLOCK))
    levels = [torch.linalg.vector_norm(parts, p, d + 1, dtype=torch.float32).double()]
    if even < length:
        levels.append(norm_along(x.narrow(d, even, length - even), p, d))
    return torch.linalg.vector_norm(torch.cat(levels, d), p, d, keepdim=True)


def _joined_moments(parts: Sequence[Part], known: Moments) -> tuple[int, Tensor, Tensor]:
    """The count, the mean, and the norm of the deviations of all slices together, from the moments of each."""
    sizes = [p.size for p in parts]
    count = sum(p.size * p.slice_count for p in parts)
    mean = pack(foreach.times(known.means, sizes)).sum() / count
    between = (pack(known.means) - mean).square_().split([p.slice_count for p in parts])
    squares = [*foreach.times(known.variances, [size - 1 for size in sizes]), *foreach.times(between, sizes)]
    return count, mean, pack(squares).sum().sqrt()


def _deviations(parts: Sequence[Part], means: Sequence[Tensor]) -> list[Part]:
    pairs = zip(parts, means, strict=True)
    return [part._replace(tensor=part.tensor.to(_wide(part.tensor)) - mean) for part, mean in pairs]


def _deviation(spread: Tensor, mean: Tensor, count: Tensor | int) -> Tensor:
    """The standard deviation from the norm of the deviations; 0 where they are only the rounding of the mean."""
    if isinstance(count, Tensor):
        root, degrees = count.sqrt(), (count - 1).clamp(min=1).sqrt()
    else:
        root, degrees = math.sqrt(count), math.sqrt(max(count - 1, 1))
    # the mean has an error of 1e-16 of itself, which is all that the elements of a constant tensor differ by
    return torch.where(spread <= mean.abs() * (root * 1e-15), 0.0, spread) / degrees


def _wide(x: Tensor) -> torch.dtype:
    return torch.complex128 if x.is_complex() else torch.float64


def _usable_scale(largest: Tensor) -> Tensor:
    return torch.where((largest > 0) & largest.isfinite(), largest, 1.0)


def may_look(*tensors: Tensor) -> bool:
    """True if values can be read at no cost. Otherwise reading would wait for the device, or break a graph."""
    return all(tensor.is_cpu for tensor in tensors) and not torch.compiler.is_compiling()


def _accumulation_dtype(x: Tensor) -> torch.dtype:
    """Float64 everywhere but in eager mode on CPU, where it costs ten times as much as float32."""
    return foreach.wide_dtype(x.dtype) if may_look(x) else torch.float64
