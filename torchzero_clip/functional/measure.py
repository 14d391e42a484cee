"""Measure lists of tensors, slice by slice or joined, and scale what was measured."""

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp

from torchzero_clip.checks import boolean, count, dims
from torchzero_clip.functional import blocks, foreach, short_tensors
from torchzero_clip.functional.dtypes import moved, widest, widest_of
from torchzero_clip.functional.metric import Metric, parse_ord
from torchzero_clip.functional.moments import (
    joint_moments,
    metrics_of_slices,
    moments_of_slices,
    root_of_moments,
    sums_of_slices,
)
from torchzero_clip.functional.norms import JointNorm, joint_norm, joint_norm_of_meshes, norms_of_each
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
from torchzero_clip.functional.slices import joint_of_norms, merged, norms_of_slices
from torchzero_clip.functional.ways import beyond_float32, extent, may_look, way_of
from torchzero_clip.types import Dim, Ord

S = TypeVar("S")
DimsOf: TypeAlias = Callable[[Tensor], tuple[int, ...]]  # the dimensions that a slice of a tensor spans
WIDTHS = {"norm": 1, "mad": 2, "sum": 2, "std": 4, "var": 4}
"""How many `Measured.numbers` each kind of metric has."""
EFFECT = 3
"""How many `effect_numbers` there are."""
NOTHING = -1.0
"""What a process without tensors sends for a negative ``ord``: with 0, the joint norm would be 0, and inf is a norm."""
_ROUNDING = 1e-6
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

    @property
    def is_whole(self) -> bool:
        """True if each tensor is one slice."""
        return self.dim is None and not self.inverse_dims

    @property
    def is_joint_l2(self) -> bool:
        """True if all tensors together are one slice, measured by its L2 norm."""
        return self == Slicing(L2, "global")

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
    _total: Tensor | None
    """The ``total``; None if it is the L2 norm of ``tensor_norms``, which is computed when it is read."""
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
    slices: blocks.Cut | None = None
    """How plain tensors were cut, if their slices were measured together."""
    moments: Tensor | None = None
    """The sums from which ``total`` was computed, as in `joint_moments`; None if ``metric`` is a power."""
    _first: Tensor | None = field(default=None, init=False)  # not that of a copy with another vector

    @property
    def total(self) -> Tensor:
        """The metric of all tensors together, those left alone included: 0-d."""
        norms = self.vector if self.tensor_norms is None else self.tensor_norms
        return torch.linalg.vector_norm(norms) if self._total is None else self._total

    @property
    def first(self) -> Tensor:
        """The norm of the first slice, which is that of all if ``joint``: one vector of one element."""
        if self._first is None:
            self._first = self.vector.narrow(0, 0, 1)
        return self._first

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

    def of_processes(self, numbers: Tensor) -> "Measured":
        """The same with the joint metric of several processes, from a matrix with the `numbers` of one in each row."""
        root = joint_root(self.metric, numbers)
        vector = root.expand(len(self.vector)) if self.joint else self.vector
        return replace(self, _total=root**self.metric.degree, vector=vector)

    def shaped(self, vector: Tensor) -> list[Tensor]:
        """Split a vector with a number per slice into one tensor for each measured one, in the shape of its norms."""
        parts = self.parts
        shapes = [p.slice_shape for p in parts]
        chunks = vector.split(list(map(math.prod, shapes)))
        columns = zip(chunks, shapes, parts, strict=True)
        # the vector is on the device of the first tensor, and tensors may be on several
        return [
            chunk.view(shape) if chunk.device == p.tensor.device else moved(chunk.view(shape), p.tensor.device)
            for chunk, shape, p in columns
        ]

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
        all_measured = len(self.indices) == len(settings)
        shared = by_setting(settings if all_measured else [settings[i] for i in self.indices])
        if len(shared) == 1:
            # all slices share one norm: one operation on one number instead of one on each slice
            if not (self.joint and len(self.vector) > 0):
                return rule(self.vector, shared[0][0])
            return rule(self.vector.narrow(0, 0, 1), shared[0][0]).expand(len(self.vector))
        counts = self.counts
        chunks = self.vector.split([sum(counts[part]) for _, part in shared])
        results = [rule(chunk, setting) for chunk, (setting, _) in zip(chunks, shared, strict=True)]
        return torch.cat(results or [self.vector])


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
    joint = slicing.dim == "global"
    smallest = 1 if joint else max(slicing.min_size, slicing.metric.min_size, 1)
    if joint or (dims_of is None and slicing.is_whole):
        parts = wholes(tensors)
    else:
        dims_of = dims_of or slicing.reduced_dims
        parts = [part(summed(tensor), _checked_dims(tensor, dims_of(tensor))) for tensor in tensors]
    indices = [i for i, p in enumerate(parts) if p.dims and p.size >= smallest]
    return indices, [parts[i] for i in indices]


def _checked_dims(tensor: Tensor, dims: Sequence[int]) -> tuple[int, ...]:
    """Dimensions in order, none of them negative."""
    ndim = max(tensor.ndim, 1)
    ordered = sorted({d + ndim if d < 0 else d for d in dims})
    if any(not 0 <= d < ndim for d in ordered):
        raise ValueError(f"slice_dims returned {tuple(dims)} for a tensor of shape {tuple(tensor.shape)}")
    return tuple(ordered)


class Resources(NamedTuple):
    """What measuring may use, and what it has to find. It changes norms by rounding at most."""

    plain: bool = False
    """All local parts are plain and none is a pending sum, so that norms of whole tensors take few operations."""
    scratch: Scratch | None = None
    """Memory with which norms of plain tensors are taken faster."""
    name: str = ""
    """The name of what is measured, the same in each step, under which ``scratch`` has the plan for slices."""
    beside: bool = False
    """The norm of each tensor is wanted beside the joint norm where that takes less than two passes."""
    each: bool = False
    """The norm of each tensor is wanted in any case."""
    norms: JointNorm | None = None
    """The joint L2 norm and the norm of each tensor, if the tensors are plain and were measured before."""


NONE = Resources()


def measure(
    tensors: Sequence[Tensor], slicing: Slicing, dims_of: DimsOf | None = None, resources: Resources = NONE
) -> Measured:
    """Measure every slice; ``dims_of`` returns the dimensions of one, if they are not those of ``slicing``."""
    if resources.plain and len(tensors) > 0:
        measured = _measure_plain(tensors, slicing, dims_of, resources)
        if measured is not None:
            return measured
    metric, joint = slicing.metric, slicing.dim == "global"
    indices, parts = cut(tensors, slicing, dims_of)
    targets = memories([tensors[i] for i in indices])
    # decided by dimensions, not by what this process holds, because all ranks have to agree
    one_slice_each = len(parts) == len(tensors) and all(len(p.dims) == p.tensor.ndim for p in parts)
    if metric.is_power:
        vector, total, norms = _powers(tensors, slicing, indices, parts, resources)
        tensor_norms = norms if one_slice_each and metric.p > 0 else None
        return Measured(metric, indices, vector, total, targets, joint, tensor_norms, parts)
    moments = moments_of_slices(parts, metric) if joint or len(parts) == len(tensors) else None
    numbers = joint_moments(parts if joint or moments is not None else wholes(tensors), metric, moments)
    root = root_of_moments(metric, numbers.unsqueeze(0))
    vector = root.expand(len(parts)) if joint else pack(metrics_of_slices(parts, metric, moments))
    cut_parts = None if resources.plain and one_slice_each and not joint else parts
    return Measured(metric, indices, vector, root**metric.degree, targets, joint, _parts=cut_parts, moments=numbers)


def measure_over_processes(
    tensors: Sequence[Tensor], slicing: Slicing, group: ProcessGroup | None, judged: Sequence[Tensor] | None = None
) -> Measured:
    """Measure every slice, and find the joint metric of all processes of a group."""
    measured = measure(tensors, slicing, resources=Resources(foreach.are_plain(tensors)))
    # if tensors are judged, a metric of inf or NaN on one process makes it so on all processes of the group and of
    # their meshes: plain tensors beside distributed ones may differ between ranks
    device = measured.total.device
    total = measured.total.view(1)
    # inf and NaN win a maximum, so that all processes find the same factor
    worst = total.new_zeros(0) if judged is None else largest_on_all_ranks(total, judged).to(device)
    if group is not None:
        numbers = measured.numbers(sum(map(Tensor.numel, tensors)))
        of_all = moved(gathered(moved(torch.cat([numbers, worst]), device_of(tensors, group)), group), device)
        measured = measured.of_processes(of_all.narrow(1, 0, len(numbers)))
        worst = of_all.narrow(1, len(numbers), len(worst)).amax(dim=0)
    if judged is None:
        return measured
    worst = worst.squeeze(0)
    return replace(measured, _total=torch.where(worst.isfinite(), measured.total, worst))


def _powers(
    tensors: Sequence[Tensor], slicing: Slicing, indices: list[int], parts: list[Part], resources: Resources
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The metric of each slice of ``parts``, which are the tensors at ``indices``; that of all; and the p-norms."""
    metric, joint, count = slicing.metric, slicing.dim == "global", sum(map(Tensor.numel, tensors))
    if joint and not resources.each and any(p.groups for p in parts):  # those of each need a collective of their own
        total, norms = joint_norm_of_meshes(parts, metric.p, beside=resources.beside)
        total = metric.of_norm(total, count)
        return total.expand(len(parts)), total, norms
    values = norms_of_slices(parts, metric.p)
    vector = norms = pack(values)
    total = joint_of_norms(norms, metric.p) if joint else _joined(tensors, indices, parts, values, metric.p)
    if metric.kind == "mad":
        total = metric.of_norm(total, count)
        vector = pack([metric.of_norm(value, p.size) for value, p in zip(values, parts, strict=True)])
    return total.expand(len(parts)) if joint else vector, total, norms


def _joined(
    tensors: Sequence[Tensor], indices: list[int], parts: list[Part], norms: Sequence[Tensor], p: float
) -> Tensor:
    """The p-norm of all tensors together from the norms of the slices of some; the others are measured here."""
    values, measured = list(norms), set(indices)
    spread = [i for i, part in enumerate(parts) if part.spread]
    if spread:
        # this process has only some slices of such a tensor
        local = [Part(pack([norms[i]]), (0,), parts[i].size, parts[i].spread) for i in spread]
        for i, value in zip(spread, sums_of_slices(local) if p == 0 else norms_of_slices(local, p), strict=True):
            values[i] = value
    # tensors that are left alone are part of the joint norm that users see
    others = wholes([tensor for i, tensor in enumerate(tensors) if i not in measured])
    return joint_of_norms(pack([*values, *norms_of_slices([part for part in others if part.size], p)]), p)


def _measure_plain(
    tensors: Sequence[Tensor], slicing: Slicing, dims_of: DimsOf | None, resources: Resources
) -> Measured | None:
    """L2 or largest norms of tensors whose local parts are plain; None if they have to be measured one by one."""
    metric, joint, scratch = slicing.metric, slicing.dim == "global", resources.scratch
    if metric not in (L2, LINF):
        return None
    if not (joint or (dims_of is None and slicing.is_whole)):
        return _measure_cut(tensors, slicing, dims_of or slicing.reduced_dims, resources)
    # a tensor without elements, or of too few, has no slice: then each tensor is looked at
    if min(map(Tensor.numel, tensors)) < (1 if joint else max(slicing.min_size, 1)):
        return None
    targets, indices = locals_of(tensors), list(range(len(tensors)))
    are_local = all(map(operator.is_, targets, tensors))
    both = resources.norms if metric == L2 and are_local else None
    if joint and not resources.each:
        if not are_local:  # the joint norm takes one collective of one number, those of each one of many
            return None
        if metric == L2 and both is None and targets[0].is_cpu:  # elsewhere each is measured, in one call
            both = joint_norm(targets, scratch, plain=True, beside=resources.beside)
        if both is not None:
            total, norms = both
            return Measured(L2, indices, total.expand(len(targets)), total, targets, True, norms)
    norms = None if both is None else both[1]
    if norms is None:  # also if the joint norm above is extreme or not finite
        norms = norms_of_each(targets, scratch, metric.p, plain=True)
    if not are_local:  # one collective for all tensors of a mesh
        norms = pack(merged(wholes(tensors), list(norms.unbind()), metric.p))
    # the squares of other dtypes are in the range of float64
    fits = metric == L2 and tensors[0].dtype != torch.float64 and norms.dtype == torch.float64
    if not norms.is_cpu and (both is not None or (fits and not joint)):
        total = None if both is None else both[0]
    else:
        total = torch.linalg.vector_norm(norms) if fits else joint_of_norms(norms, metric.p)
    vector = norms if total is None or not joint else total.expand(len(norms))
    return Measured(metric, indices, vector, total, targets, joint, norms)


def _measure_cut(tensors: Sequence[Tensor], slicing: Slicing, dims_of: DimsOf, resources: Resources) -> Measured | None:
    """The L2 norms of slices, measured together; None unless tensors are measured in blocks, and each has slices."""
    scratch = resources.scratch
    if scratch is None or slicing.metric != L2 or not foreach.are_plain(tensors) or way_of(tensors, 2.0) != "blocks":
        return None

    def planned() -> blocks.Cut | None:
        _, parts = cut(tensors, slicing, dims_of)
        are_all = len(parts) == len(tensors)
        return blocks.cut_into_blocks(tensors, parts, scratch) if are_all else None

    dims = [tuple(dims_of(tensor)) for tensor in tensors]
    # compared in each step, because an author's slice_dims may return others at any time
    slices = scratch.plan(f"slices {resources.name}", tensors, planned, (slicing.min_size, *dims))
    if slices is None:
        return None
    norms, tensor_norms = blocks.norms_of_plain_slices(tensors, slices), None
    # without scalars, which are scaled as vectors, plain tensors are their own memory
    targets = list(tensors) if min(map(Tensor.dim, tensors)) else memories(tensors)
    if tensors[0].dtype != torch.float64:  # their squares are in the range of float64
        squares = norms.new_zeros(len(tensors)).index_add_(0, slices.owner, norms.square())
        tensor_norms = squares.sqrt_()
    total, indices = joint_of_norms(norms, 2.0), list(range(len(tensors)))
    return Measured(L2, indices, norms, total, targets, tensor_norms=tensor_norms, slices=slices)


def measured_like(measured: Measured, tensors: Sequence[Tensor]) -> Tensor:
    """The norms of the same slices of other tensors of the same shapes: a vector."""
    slices = measured.slices
    if slices is not None and foreach.kind([*tensors, *measured.targets]) is not None:
        return blocks.norms_of_plain_slices(tensors, slices)
    pairs = zip(tensors, measured.dims, strict=True)
    return pack(metrics_of_slices([part(summed(tensor), dims) for tensor, dims in pairs], measured.metric))


def joint_root(metric: Metric, numbers: Tensor) -> Tensor:
    """The root of the metric of the tensors of several processes, 0-d, from `Measured.numbers` of one in each row."""
    if metric.kind == "norm":
        norms = numbers.select(1, 0)
        if metric.p >= 0:
            return joint_of_norms(norms, metric.p)
        some = norms != NOTHING
        return torch.where(some.any(), joint_of_norms(torch.where(some, norms, math.inf), metric.p), 0.0)
    if metric.kind == "mad":
        total, count = numbers.sum(dim=0).unbind()
        return total / count.clamp(min=1)
    return root_of_moments(metric, numbers)


def no_numbers(metric: Metric, device: torch.device) -> Tensor:
    """The `Measured.numbers` of a process without tensors."""
    none = NOTHING if metric.kind == "norm" and metric.p < 0 else 0.0
    return torch.full((WIDTHS[metric.kind],), none, dtype=widest(device), device=device)


def scale_measured_(
    measured: Measured,
    factors: Tensor,
    scratch: Scratch | None = None,
    *,
    extremes: tuple[float, float] | None = None,
    owner: int | str = 0,
) -> None:
    """Multiply every slice by its factor, in place; with memory this takes few launches, see `short_tensors`.

    ``extremes`` are the smallest and the largest factor, if these were read before, and ``owner`` is as in
    `multiply_short_`.
    """
    if extremes is None and may_look(factors):
        extremes = extent(factors)
    if not measured.targets or extremes == (1.0, 1.0):
        return
    is_beyond = beyond_float32(factors, extremes)
    if measured.is_whole and not (factors.is_cpu and is_beyond):
        if scratch is None or factors.is_cpu or foreach.is_one_number(factors):
            is_mixed = extremes is not None and 1.0 in extremes
            changed = [i for i, factor in enumerate(factors.tolist()) if factor != 1] if is_mixed else None
            foreach.multiply_each_(measured.targets, factors, scratch, changed)
        else:
            short_tensors.multiply_any_length_(measured.targets, factors, scratch, owner=owner)
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
        changed = torch.full_like(factors.select(0, 0), float(not abs(1 - factor) <= _ROUNDING))
        return {"norm": total, "factor": torch.full_like(changed, factor), "clipped": changed}
    factors = factors.narrow(0, 0, 1) if foreach.is_one_number(factors) else factors
    off = 1 - factors
    changed = torch.hardshrink(off, _ROUNDING) != 0  # also True for NaN
    return {"norm": total, "factor": 1 - off.mean(), "clipped": changed.mean(dtype=widest_of(changed))}


class Effect(NamedTuple):
    """What a scaling has done to whole tensors, from which `effects` computes its metrics later."""

    path: str
    """Of the scaling."""
    total: Tensor
    """The joint norm before it: 0-d."""
    factors: Tensor
    """The factor of each tensor, or of all tensors: a vector."""


def effects(of_steps: Sequence[Effect]) -> dict[str, Tensor]:
    """The metrics of `effect`, as vectors with a number for each step of one scaling, in as many launches as of one."""
    off = 1 - torch.stack([factors for _, _, factors in of_steps])
    changed = torch.hardshrink(off, _ROUNDING) != 0
    share = changed.mean(dim=1, dtype=widest_of(changed))
    return {"norm": torch.stack([total for _, total, _ in of_steps]), "factor": 1 - off.mean(dim=1), "clipped": share}


def effect_numbers(measured: Measured, factors: Tensor) -> Tensor:
    """The numbers of this process from which `effect_of` finds the effect of several: a vector of three."""
    # the sum is taken of 1 - factor, so that ranks without slices report a factor of 1
    off = 1 - factors
    columns: Sequence[Tensor] = [off, (torch.hardshrink(off, _ROUNDING) != 0).to(off.dtype), torch.ones_like(factors)]
    if measured.spread:  # other ranks hold the rest of the slices
        parts, counts = measured.parts, measured.counts
        local = [Part(v, (0,), p.size, p.spread) for c in columns for p, v in zip(parts, c.split(counts), strict=True)]
        columns = pack(sums_of_slices(local)).split(len(parts))
    return torch.stack([column.sum() for column in columns])


def effect_of(total: Tensor, numbers: Tensor) -> dict[str, Tensor]:
    """The metrics of a scaling of several processes, from the `effect_numbers` of one in each row."""
    lost, changed, count = numbers.sum(dim=0).unbind()
    count = count.clamp(min=1)
    return {"norm": total, "factor": 1 - lost / count, "clipped": changed / count}


def counted_elements(tensors: Sequence[Tensor], counts: Sequence[Tensor]) -> tuple[Tensor, int]:
    """How many elements were counted over all tensors, a 0-d tensor equal on every rank, and how many there are."""
    # a complex number has two elements
    parts = wholes(tensors)
    elements = sum(p.size * (2 if p.tensor.is_complex() else 1) for p in parts)
    return pack(all_reduce(parts, [count.sum() for count in counts], ReduceOp.SUM)).sum(), elements
