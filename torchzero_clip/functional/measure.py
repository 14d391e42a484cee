"""Measure lists of tensors, slice by slice or joined, and scale what was measured."""

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp

from torchzero_clip.checks import boolean, count, dims
from torchzero_clip.functional import foreach, rows
from torchzero_clip.functional.metric import Metric, parse_ord
from torchzero_clip.functional.norms import (
    JointNorm,
    beyond_float32,
    combine,
    extent,
    joint_moments,
    joint_norm_of_meshes,
    may_look,
    merged,
    moments,
    p_norms,
    root_of_moments,
    slice_metrics,
    slice_sums,
    total_norm,
    whole_maxima,
    whole_norm,
    whole_norms,
)
from torchzero_clip.functional.processes import device_of, gathered
from torchzero_clip.functional.scratch import Scratch
from torchzero_clip.functional.shards import (
    Part,
    all_reduce,
    largest_on_all_ranks,
    locals_of,
    memories,
    pack,
    part,
    summed,
    wholes,
)
from torchzero_clip.functional.slices import Slices, plan, sliced_norms
from torchzero_clip.types import Dim, Ord

S = TypeVar("S")
DimsOf: TypeAlias = Callable[[Tensor], tuple[int, ...]]  # the dimensions that a slice of a tensor spans
WIDTHS = {"norm": 1, "mad": 2, "sum": 2, "std": 4, "var": 4}
"""How many `Measured.numbers` each kind of metric has."""
NOTHING = -1.0
"""What a process without tensors sends for a negative ``ord``: with 0, the joint norm would be 0, and inf is a norm."""
ROUNDING = 1e-6
"""A slice whose factor differs from 1 by at most this does not count as changed: it is about 8 times float32's epsilon.
On CPU norms come from float32 sums of 1024 squares, and two norms of equal slices may differ by 2e-7."""
L2, LINF = Metric("norm", 2.0), Metric("norm", math.inf)


class Slicing(NamedTuple):
    """How a transform cuts each tensor: the arguments ``ord``, ``dim``, ``inverse_dims`` and ``min_size``."""

    metric: Metric
    dim: Dim = None
    inverse_dims: bool = False
    min_size: int = 1

    @classmethod
    def checked(cls, ord: Ord, dim: Dim, inverse_dims: bool, min_size: int) -> "Slicing":
        """Check the arguments of a user, and store them."""
        dims("dim", dim)
        boolean("inverse_dims", inverse_dims)
        count("min_size", min_size)
        return cls(parse_ord(ord), dim, inverse_dims, min_size)

    def reduced_dims(self, tensor: Tensor) -> tuple[int, ...]:
        """The dimensions that a slice of ``tensor`` spans; empty if the tensor is to be left alone."""
        ndim = max(tensor.ndim, 1)
        if self.dim is None or isinstance(self.dim, str):
            named = set(range(ndim))
        else:
            listed = (self.dim,) if isinstance(self.dim, int) else self.dim
            named = {d + ndim if d < 0 else d for d in listed} & set(range(ndim))
        return tuple(d for d in range(ndim) if (d in named) != self.inverse_dims)


@dataclass
class Measured:
    """The norms of the slices of a list of tensors.

    Tensors that are left alone have no slices. ``indices``, ``norms`` and ``dims`` have one entry for each of the
    other tensors.
    """

    metric: Metric
    """The metric that ``ord`` names."""
    indices: list[int]
    """The index of each tensor that has slices."""
    vector: Tensor
    """The norm of each slice (for 'var' the standard deviation), of all tensors one after the other: float64."""
    total: Tensor
    """The metric of all tensors together, those left alone included: 0-d."""
    targets: list[Tensor]
    """The memory of the tensors, to be scaled."""
    joint: bool = False
    """All slices have one norm."""
    tensor_norms: Tensor | None = None
    """The p-norm of each tensor, if p > 0, each tensor is one slice, and each was measured; else None. A norm is inf or
    NaN if the tensor is not finite, and 0 if it is all zero."""
    _parts: list[Part] | None = None
    """The tensors that were measured: the same memory, or a copy of distributed tensors with partial placements. None
    if ``slices`` is given, or if each is a plain tensor and one slice."""
    slices: Slices | None = None
    """How plain tensors were cut, if their slices were measured together."""
    moments: Tensor | None = None
    """The sums from which ``total`` was computed, as in `joint_moments`; None if ``metric`` is a power."""

    @property
    def parts(self) -> list[Part]:
        """The tensors that were measured, with their slices."""
        if self.slices is not None:
            return self.slices.parts(self.targets)
        return wholes(self.targets) if self._parts is None else self._parts

    @property
    def counts(self) -> list[int]:
        """How many slices each tensor has."""
        if self.slices is not None:
            return self.slices.counts
        return [1] * len(self.targets) if self._parts is None else [p.slice_count for p in self._parts]

    @property
    def norms(self) -> list[Tensor]:
        """The norms per tensor: dimensions of a slice have size 1.

        Under FSDP2 they are those of the slices of which this process holds a part.
        """
        return self.shaped(self.vector)

    @property
    def dims(self) -> list[tuple[int, ...]]:
        """The dimensions that one slice of each tensor spans."""
        return [p.dims for p in self.parts]

    @property
    def is_whole(self) -> bool:
        """True if each is a plain tensor and one slice."""
        return self._parts is None and self.slices is None

    @property
    def spread(self) -> bool:
        """True if other processes hold other slices."""
        return self._parts is not None and any(p.spread for p in self._parts)

    def with_targets(self, tensors: Sequence[Tensor]) -> "Measured":
        """The same norms, to scale other tensors of the same shapes. Those without slices stay as they are."""
        return replace(self, targets=memories([tensors[i] for i in self.indices]))

    def numbers(self, count: int) -> Tensor:
        """The numbers of this process, with so many elements, from which `joint_root` finds the metric of several."""
        if not count:
            return no_numbers(self.metric, self.total.device)
        if self.moments is not None:
            return self.moments
        total = self.total.view(1)
        if self.metric.kind == "mad":
            # means are joined by their sums
            return torch.cat([total * count, torch.full_like(total, count)])
        return total

    def of_processes(self, rows: Tensor) -> "Measured":
        """The same with the joint metric of several processes, each with a row of `numbers`."""
        root = joint_root(self.metric, rows)
        vector = root.expand(len(self.vector)) if self.joint else self.vector
        return replace(self, total=root**self.metric.degree, vector=vector)

    def shaped(self, vector: Tensor) -> list[Tensor]:
        """Split a vector with a number per slice into one tensor for each measured one, in the shape of its norms."""
        parts = self.parts
        shapes = [p.slice_shape for p in parts]
        chunks = vector.split(list(map(math.prod, shapes)))
        rows = zip(chunks, shapes, parts, strict=True)
        # the vector is on the device of the first tensor, and tensors may be on several
        return [chunk.view(shape).to(p.tensor.device) for chunk, shape, p in rows]

    def of_slices(self, vector: Tensor) -> Tensor:
        """A vector with a number per slice from one with a number per measured tensor."""
        if self.slices is not None:
            return vector.index_select(0, self.slices.owner)
        pairs = zip(vector.unbind(), self.counts, strict=True)
        return torch.cat([number.expand(count) for number, count in pairs] or [vector])

    def joined(self, values: Sequence[Tensor]) -> Tensor:
        """Concatenate ``values``, which are shaped like ``norms``, into one vector with a number per slice."""
        return pack(values)

    def by_norm(self, rule: Callable[[Tensor], Tensor]) -> Tensor:
        """Apply ``rule`` to the norm of every slice. If all slices share one norm, ``rule`` gets only that one."""
        return self.by_setting([None] * len(self.indices), lambda norms, _: rule(norms))

    def by_setting(self, settings: Sequence[S], rule: Callable[[Tensor, S], Tensor]) -> Tensor:
        """Apply ``rule`` to the norms of each setting, and concatenate into one vector with a number per slice.

        Args:
            settings: The setting of every tensor, with slices or without. Neighbours that share one object are passed
                to one call of ``rule``.
            rule: From a vector of norms and a setting to a vector of the same length.
        """
        own = settings if len(self.indices) == len(settings) else [settings[i] for i in self.indices]
        shared = by_setting(own)
        if len(shared) == 1:
            # all slices share one norm: one operation on one number instead of one on each slice
            if not (self.joint and len(self.vector) > 0):
                return rule(self.vector, shared[0][0])
            return rule(self.vector.narrow(0, 0, 1), shared[0][0]).expand(len(self.vector))
        counts = self.counts
        chunks = self.vector.split([sum(counts[part]) for _, part in shared])
        found = [rule(chunk, setting) for chunk, (setting, _) in zip(chunks, shared, strict=True)]
        return torch.cat(found or [self.vector])


def by_setting(settings: Sequence[S]) -> list[tuple[S, slice]]:
    """Each setting with the range of neighbours that share this object, so that one operation serves the range."""
    if not torch.compiler.is_compiling() and len(set(map(id, settings))) == 1:
        return [(settings[0], slice(0, len(settings)))]
    # a plain loop: `itertools.groupby` breaks the graphs of `torch.compile`
    starts = [i for i, setting in enumerate(settings) if i == 0 or setting is not settings[i - 1]]
    ends = [*starts[1:], len(settings)][: len(starts)]
    return [(settings[a], slice(a, b)) for a, b in zip(starts, ends, strict=True)]


def cut(tensors: Sequence[Tensor], slicing: Slicing, dims_of: DimsOf | None = None) -> tuple[list[int], list[Part]]:
    """The indices of the tensors that have slices, and their parts."""
    # a slice without elements has no norm, and a variance needs two elements
    smallest = max(slicing.min_size, slicing.metric.min_size, 1)
    indices: list[int] = []
    parts: list[Part] = []
    for i, tensor in enumerate(tensors):
        dims = slicing.reduced_dims(tensor) if dims_of is None else _checked_dims(tensor, dims_of(tensor))
        p = part(summed(tensor), dims)
        if dims and p.size >= smallest:
            indices.append(i)
            parts.append(p)
    return indices, parts


def _checked_dims(tensor: Tensor, dims: Sequence[int]) -> tuple[int, ...]:
    """Dimensions in order, none of them negative."""
    ndim = max(tensor.ndim, 1)
    found = sorted({d + ndim if d < 0 else d for d in dims})
    if any(not 0 <= d < ndim for d in found):
        raise ValueError(f"slice_dims returned {tuple(dims)} for a tensor of shape {tuple(tensor.shape)}")
    return tuple(found)


class Way(NamedTuple):
    """How tensors are measured. It changes results by rounding at most."""

    plain: bool = False
    """All local parts are plain and none is a pending sum, so that norms of whole tensors take few operations."""
    scratch: Scratch | None = None
    """Memory with which norms of plain tensors are taken faster."""
    name: str = ""
    """The name of what is measured, the same in each step, under which ``scratch`` has the plan for slices."""
    beside: bool = False
    """The norm of each tensor is wanted beside the joint norm where that takes less than two passes."""
    known: JointNorm | None = None
    """The joint L2 norm and the norm of each tensor, if the tensors are plain and were measured before."""


READABLE = Way()


def measure(
    tensors: Sequence[Tensor], slicing: Slicing, dims_of: DimsOf | None = None, way: Way = READABLE, each: bool = False
) -> Measured:
    """Measure every slice; ``dims_of`` returns the dimensions of one, if they are not those of ``slicing``."""
    # each: `Measured.tensor_norms` are computed also where slices are joined
    metric, joint = slicing.metric, slicing.dim == "global"
    whole_tensors = joint or (slicing.dim is None and not slicing.inverse_dims and dims_of is None)
    smallest = 1 if joint else max(slicing.min_size, 1)
    may_be_fast = whole_tensors and metric in (L2, LINF) and len(tensors) > 0
    # a tensor without elements, or of too few, has no slice: then each tensor is looked at
    if way.plain and may_be_fast and min(map(Tensor.numel, tensors)) >= smallest:
        return _measure_plain(tensors, metric, joint, each, way)
    if joint:
        return _measure_jointly(tensors, metric, each, way.beside)
    if way.plain and way.scratch is not None and metric == L2:
        slices = _sliced(tensors, slicing, dims_of or slicing.reduced_dims, way.scratch, way.name)
        if slices is not None:
            return _measure_slices(tensors, slices)
    indices, parts = cut(tensors, slicing, dims_of)
    targets = memories([tensors[i] for i in indices])
    # decided by dimensions, not by what this process holds, because all ranks have to agree
    one_slice_each = len(parts) == len(tensors) and all(len(p.dims) == p.tensor.ndim for p in parts)
    if not metric.is_power:
        known = moments(parts, metric) if len(parts) == len(tensors) else None
        whole_parts = wholes(tensors) if known is None else parts
        rooted = joint_moments(whole_parts, metric, known)
        total = root_of_moments(metric, rooted.unsqueeze(0)) ** metric.degree
        norms, cut_parts = pack(slice_metrics(parts, metric, known)), None if way.plain and one_slice_each else parts
        return Measured(metric, indices, norms, total, targets, _parts=cut_parts, moments=rooted)

    return _measure_powers(tensors, metric, indices, parts, one_slice_each)


def measure_over_processes(
    tensors: Sequence[Tensor], slicing: Slicing, group: ProcessGroup | None, judged: Sequence[Tensor] | None = None
) -> Measured:
    """Measure every slice, and find the joint metric of all processes of a group."""
    measured = measure(tensors, slicing, way=Way(foreach.are_plain(tensors)))
    # if tensors are judged, a metric of inf or NaN on one process makes it so on all processes of the group and of
    # their meshes: plain tensors beside distributed ones may differ between ranks
    device = measured.total.device
    total = measured.total.view(1)
    # inf and NaN win a maximum, so that all processes find the same factor
    worst = total.new_zeros(0) if judged is None else largest_on_all_ranks(total, judged).to(device)
    if group is not None:
        own = measured.numbers(sum(map(Tensor.numel, tensors)))
        rows = gathered(torch.cat([own, worst]).to(device_of(tensors, group)), group).to(device)
        measured = measured.of_processes(rows.narrow(1, 0, len(own)))
        worst = rows.narrow(1, len(own), len(worst)).amax(dim=0)
    if judged is None:
        return measured
    worst = worst.squeeze(0)
    return replace(measured, total=torch.where(worst.isfinite(), measured.total, worst))


def _measure_powers(
    tensors: Sequence[Tensor], metric: Metric, indices: list[int], parts: list[Part], one_slice_each: bool
) -> Measured:
    """The p-norms or mean magnitudes of the slices of ``parts``, which are the tensors at ``indices``, cut."""
    values = p_norms(parts, metric.p)
    kept = set(indices)
    # tensors that are left alone are part of the joint norm that users see
    rest = wholes([tensor for i, tensor in enumerate(tensors) if i not in kept])
    left_alone = p_norms([p for p in rest if p.size], metric.p)
    targets = memories([tensors[i] for i in indices])
    total = metric.of_norm(total_norm(parts, values, left_alone, metric.p), sum(t.numel() for t in tensors))
    rows = zip(values, parts, strict=True)
    norms = pack([metric.of_norm(value, p.size) for value, p in rows] if metric.kind == "mad" else values)
    tensor_norms = (norms if metric.kind == "norm" else pack(values)) if metric.p > 0 and one_slice_each else None
    return Measured(metric, indices, norms, total, targets, tensor_norms=tensor_norms, _parts=parts)


def _measure_plain(tensors: Sequence[Tensor], metric: Metric, joint: bool, each: bool, way: Way) -> Measured:
    """The L2 or largest norms of tensors, each one slice, whose local parts are plain."""
    targets, indices = locals_of(tensors), list(range(len(tensors)))
    are_local = all(map(operator.is_, targets, tensors))
    if metric == L2 and joint and are_local and not each:
        both = way.known or whole_norm(targets, way.scratch, beside=way.beside)
        if both is not None:
            total, norms = both
            return Measured(L2, indices, total.expand(len(targets)), total, targets, True, norms)
    # the joint norm takes one collective of one number, and those of each take one of as many as tensors
    if joint and not are_local and not each:
        return _measure_jointly(tensors, metric, each, way.beside)
    # also if the joint norm above is extreme or not finite, and so None
    norms = way.known[1] if way.known is not None and metric == L2 else None
    if norms is None:
        norms = (whole_norms if metric == L2 else whole_maxima)(targets, way.scratch)
    if not are_local:  # one collective for all tensors of a mesh
        norms = pack(merged(wholes(tensors), list(norms.unbind()), metric.p))
    wide = tensors[0].dtype == torch.float64  # the squares of other dtypes are in the range of float64
    total = torch.linalg.vector_norm(norms) if metric == L2 and not wide else combine(norms, metric.p)
    vector = total.expand(len(norms)) if joint else norms
    return Measured(metric, indices, vector, total, targets, joint, norms)


def _sliced(tensors: Sequence[Tensor], slicing: Slicing, dims_of: DimsOf, scratch: Scratch, name: str) -> Slices | None:
    """How tensors are cut; None unless they are plain, real and wide, on CPU, and each has slices."""
    if not (may_look(tensors[0]) and foreach.are_plain(tensors) and foreach.is_real_and_wide(tensors[0].dtype)):
        return None

    def planned() -> Slices | None:
        checked = [_checked_dims(tensor, own) for tensor, own in zip(tensors, dims, strict=True)]
        shapes = [tensor.shape or (1,) for tensor in tensors]
        sizes = [math.prod(shape[d] for d in own) for shape, own in zip(shapes, checked, strict=True)]
        if not all(checked) or min(sizes) < slicing.min_size:
            return None
        return plan(tensors, checked, scratch)

    dims = [tuple(dims_of(tensor)) for tensor in tensors]
    # compared in each step, because an author's slice_dims may return others at any time
    return scratch.plan(f"slices {name}", tensors, planned, (slicing.min_size, *dims))


def _measure_slices(tensors: Sequence[Tensor], slices: Slices) -> Measured:
    """The L2 norms of slices of plain tensors, measured together."""
    norms = sliced_norms(tensors, slices)
    # without scalars, which are scaled as vectors, plain tensors are their own memory
    targets = list(tensors) if min(map(Tensor.dim, tensors)) else memories(tensors)
    total, tensor_norms = combine(norms, 2.0), None
    if tensors[0].dtype != torch.float64:  # their squares are in the range of float64
        squares = norms.new_zeros(len(tensors)).index_add_(0, slices.owner, norms.square())
        tensor_norms = squares.sqrt_()
    indices = list(range(len(tensors)))
    return Measured(L2, indices, norms, total, targets, tensor_norms=tensor_norms, slices=slices)


def measured_like(measured: Measured, tensors: Sequence[Tensor]) -> Tensor:
    """The norms of the same slices of other tensors of the same shapes: a vector."""
    slices = measured.slices
    if slices is not None and foreach.kind([*tensors, *measured.targets]) is not None:
        return sliced_norms(tensors, slices)
    pairs = zip(tensors, measured.dims, strict=True)
    return pack(slice_metrics([part(summed(tensor), dims) for tensor, dims in pairs], measured.metric))


def _measure_jointly(tensors: Sequence[Tensor], metric: Metric, each: bool, beside: bool) -> Measured:
    parts = wholes(tensors)
    indices = [i for i, p in enumerate(parts) if p.size]
    kept = [parts[i] for i in indices]
    own = norms = None
    if not metric.is_power:
        own = joint_moments(kept, metric)
        root = root_of_moments(metric, own.unsqueeze(0))
    else:
        # without a mesh the norms of each tensor are found anyway; with one they need a collective of their own
        if each or not any(p.groups for p in kept):
            norms = pack(p_norms(kept, metric.p))
            total = combine(norms, metric.p)
        else:
            total, norms = joint_norm_of_meshes(kept, metric.p, beside=beside)
        root = metric.of_norm(total, sum(p.size for p in kept))
    targets = memories([tensors[i] for i in indices])
    tensor_norms = norms if norms is not None and metric.p > 0 and len(kept) == len(parts) else None
    total, vector = root**metric.degree, root.expand(len(kept))
    return Measured(metric, indices, vector, total, targets, True, tensor_norms, kept, moments=own)


def joint_root(metric: Metric, rows: Tensor) -> Tensor:
    """The root of the metric of the tensors of several processes, 0-d, from a row of `Measured.numbers` for each."""
    if metric.kind == "norm":
        norms = rows.select(1, 0)
        if metric.p >= 0:
            return combine(norms, metric.p)
        some = norms != NOTHING
        return torch.where(some.any(), combine(torch.where(some, norms, math.inf), metric.p), 0.0)
    if metric.kind == "mad":
        total, count = rows.sum(dim=0).unbind()
        return total / count.clamp(min=1)
    return root_of_moments(metric, rows)


def no_numbers(metric: Metric, device: torch.device) -> Tensor:
    """The `Measured.numbers` of a process without tensors."""
    none = NOTHING if metric.kind == "norm" and metric.p < 0 else 0.0
    return torch.full((WIDTHS[metric.kind],), none, dtype=torch.float64, device=device)


def scale_(
    measured: Measured,
    factors: Tensor,
    scratch: Scratch | None = None,
    *,
    known: tuple[float, float] | None = None,
    name: str = "",
) -> None:
    """Multiply every slice by its factor, in place; with memory this takes few launches, see `rows.multiply_short_`.

    ``known`` has the smallest and the largest factor, if these were read before.
    """
    if known is None and may_look(factors):
        known = extent(factors)
    if not measured.targets or known == (1.0, 1.0):
        return
    is_beyond = beyond_float32(factors, known)
    if measured.is_whole and not (factors.is_cpu and is_beyond):
        if scratch is None or factors.is_cpu or foreach.is_one_number(factors):
            is_mixed = known is not None and 1.0 in known
            changed = [i for i, factor in enumerate(factors.tolist()) if factor != 1] if is_mixed else None
            foreach.multiply_each_(measured.targets, factors, scratch, changed)
        else:
            rows.multiply_each_(measured.targets, factors, scratch, name=name)
        return
    if measured.slices is not None and not is_beyond:
        measured.slices.scale_(measured.targets, factors)
        return
    targets = memories(measured.targets)  # a scalar is measured as a vector
    foreach.scale_(targets, measured.shaped(factors), exact=is_beyond)


def effect(measured: Measured, factors: Tensor) -> dict[str, Tensor]:
    """The joint norm before a scaling, its mean factor (1 without slices), and the share of slices that changed."""
    total = measured.total
    if measured.spread:
        return effect_of(total, effect_numbers(measured, factors).unsqueeze(0))
    if not factors.numel():
        return {"norm": total, "factor": torch.ones_like(total), "clipped": torch.zeros_like(total)}
    if foreach.is_one_number(factors) and may_look(factors):
        factor = factors.select(0, 0).item()
        # written with `not`, so that a factor of NaN counts as changed
        changed = torch.full_like(factors.select(0, 0), float(not abs(1 - factor) <= ROUNDING))
        return {"norm": total, "factor": torch.full_like(changed, factor), "clipped": changed}
    factors = factors.narrow(0, 0, 1) if foreach.is_one_number(factors) else factors
    off = 1 - factors
    changed = torch.hardshrink(off, ROUNDING) != 0  # also True for NaN
    return {"norm": total, "factor": 1 - off.mean(), "clipped": changed.mean(dtype=torch.float64)}


def effect_numbers(measured: Measured, factors: Tensor) -> Tensor:
    """The numbers of this process from which `effect_of` finds the effect of several: a vector of three."""
    # the sum is taken of 1 - factor, so that ranks without slices report a factor of 1
    off = 1 - factors
    columns: Sequence[Tensor] = [off, (torch.hardshrink(off, ROUNDING) != 0).double(), torch.ones_like(factors)]
    if measured.spread:  # other ranks hold the rest of the slices
        parts, counts = measured.parts, measured.counts
        own = [Part(v, (0,), p.size, p.spread) for c in columns for p, v in zip(parts, c.split(counts), strict=True)]
        columns = pack(slice_sums(own)).split(len(parts))
    return torch.stack([column.sum() for column in columns])


def effect_of(total: Tensor, rows: Tensor) -> dict[str, Tensor]:
    """The metrics of a scaling of several processes, from a row of `effect_numbers` for each."""
    lost, changed, count = rows.sum(dim=0).unbind()
    count = count.clamp(min=1)
    return {"norm": total, "factor": 1 - lost / count, "clipped": changed / count}


def counted(tensors: Sequence[Tensor], counts: Sequence[Tensor]) -> tuple[Tensor, int]:
    """How many elements were counted over all tensors, a 0-d tensor equal on every rank, and how many there are."""
    # a complex number has two elements
    parts = wholes(tensors)
    elements = sum(p.size * (2 if p.tensor.is_complex() else 1) for p in parts)
    return pack(all_reduce(parts, [count.sum() for count in counts], ReduceOp.SUM)).sum(), elements
