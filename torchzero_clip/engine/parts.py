"""A step that is taken in parts: what was updated, and the metrics of all parts together."""

import math
from collections.abc import Callable, Iterable, Sequence, Set
from typing import NamedTuple

import torch
from torch import Tensor

from torchzero_clip.compat import any_distributed
from torchzero_clip.core.chain import Chain
from torchzero_clip.core.elementwise import Elementwise
from torchzero_clip.core.kinds import Scaling
from torchzero_clip.core.nodes import Node, Nodes
from torchzero_clip.core.scope import NamedParam
from torchzero_clip.core.step import Step
from torchzero_clip.functional import foreach
from torchzero_clip.functional.measure import Measured, effect, summary
from torchzero_clip.functional.metric import Metric
from torchzero_clip.functional.norms import combine, joint_sum
from torchzero_clip.functional.shards import Part, locals_of, pack, wholes


class _Moments(NamedTuple):
    """The elements of one part, for metrics that the norms of slices do not determine."""

    elements: int
    total: Tensor
    """Their sum."""
    squares: Tensor
    """The sum of the squared distances from the mean."""


class _Scaled(NamedTuple):
    """What a scaling measured and decided in one part."""

    params: list[Tensor]
    """The parameter of each measured tensor."""
    counts: list[int]
    """How many slices each of them has."""
    metric: Metric
    norms: Tensor
    factors: Tensor
    total: Tensor
    elements: int
    is_plain: bool
    """`measure` has measured whole tensors together."""
    takes_all: bool
    """Each update has slices."""
    is_wide: bool
    """Updates are float64."""
    shards: list[Part]
    """The parts of distributed tensors, without their memory; empty for plain ones."""
    moments: _Moments | None


class PartOfStep:
    """The numbers from which the metrics of one part come.

    Args:
        apart: The paths of the transforms that measure updates one by one, see `Parts.plan`.
        apart_state: The paths of those that measure state one by one.
    """

    def __init__(self, apart: Set[str], apart_state: Set[str]) -> None:
        self.apart = apart
        self.apart_state = apart_state
        self.scaled: dict[str, _Scaled] = {}
        self.elements: dict[str, int] = {}
        """How many elements each transform with metrics acted on, by path."""
        self.metrics: dict[str, Tensor] = {}

    def add_scaling(
        self,
        node: Node,
        measured: Measured,
        norms: Tensor,
        factors: Tensor,
        updates: Sequence[Tensor],
        params: Sequence[Tensor],
    ) -> None:
        """Store what a scaling found, without references to the memory of the updates."""
        shards: list[Part] = []
        if any_distributed(updates):  # a tensor of one number has the shape that slices are counted by
            shards = [p._replace(tensor=p.tensor.new_zeros(()).expand(p.tensor.shape)) for p in measured.parts]
        has_moments = measured.metric.kind in ("std", "var", "sum")
        self.scaled[node.path] = _Scaled(
            params=[params[i] for i in measured.indices],
            counts=measured.counts,
            metric=measured.metric,
            norms=norms,
            factors=factors,
            total=measured.total,
            elements=sum(map(Tensor.numel, updates)),
            is_plain=measured.is_whole,
            takes_all=len(measured.indices) == len(updates),
            is_wide=updates[0].dtype == torch.float64,
            shards=shards,
            moments=_moments(measured, updates) if has_moments else None,
        )

    def add(self, node: Node, step: Step) -> None:
        """Store the metrics of a transform."""
        if step.metrics:
            self.elements[node.path] = sum(p.numel() * (2 if p.is_complex() else 1) for p in step.params)
            self.metrics.update(node.qualified(step.metrics))


class Parts:
    """The parts of one step, which `Modular.step` ends.

    Args:
        attach: Called when parameters were added to the optimizer.
    """

    def __init__(self, attach: Callable[[], None]) -> None:
        self.attach = attach
        self.updated: dict[int, Tensor] = {}
        """The parameters that were updated, in order, by id."""
        self.has_layout = True
        """All trainable parameters together have the layout that the fast way needs."""
        self._apart: tuple[set[str], set[str]] = set(), set()
        self._parts: list[PartOfStep] = []

    def plan(self, nodes: Nodes, params: Sequence[NamedParam], *, has_layout: bool) -> None:
        """Decide from all trainable parameters what the ordinary step decides from them, to get the same bits.

        The fast way measures lists of tensors together if all of them allow it. A part may allow it where all
        parameters together do not.
        """
        self.has_layout = has_layout
        self._apart = set(), set()
        for node in nodes:
            transform = node.transform
            if isinstance(transform, Scaling) and all(isinstance(outer, Chain) for outer in node.outer):
                own = [named.param for named in params if node.scope.has(named)]
                for paths, dtype_of in zip(self._apart, (_dtype, _dtype_of_state), strict=True):
                    if own and not _are_together(transform, own, dtype_of):
                        paths.add(node.path)

    def begin(self) -> PartOfStep:
        """A part without numbers."""
        return PartOfStep(*self._apart)

    def add(self, part: PartOfStep, params: Iterable[Tensor]) -> None:
        """Note that parameters were updated."""
        self._parts.append(part)
        self.updated.update({id(param): param for param in params})

    def refuse_second(self, params: Iterable[Tensor]) -> None:
        """Raise if a parameter was updated already."""
        if any(id(param) in self.updated for param in params):
            raise second_gradient()

    def end(self, nodes: Nodes, params: Iterable[Tensor]) -> dict[str, Tensor]:
        """Forget the parts. Return the metrics of all of them, as of one step.

        Args:
            nodes: The transforms.
            params: All parameters of the optimizer, in order.
        """
        parts, self._parts, self.updated = self._parts, [], {}
        order = {id(param): n for n, param in enumerate(params)}
        metrics: dict[str, Tensor] = {}
        for node in nodes:
            scaled = [part.scaled[node.path] for part in parts if node.path in part.scaled]
            if scaled:
                metrics.update(node.qualified(_of_scaling(scaled, order)))
            metrics.update(_of_elements(node, [part for part in parts if node.path in part.elements]))
        return metrics


def _dtype(param: Tensor) -> torch.dtype:
    return param.dtype


def _dtype_of_state(param: Tensor) -> torch.dtype:
    return foreach.wide_dtype(param.dtype)


def _are_together(transform: Scaling, own: Sequence[Tensor], dtype_of: Callable[[Tensor], torch.dtype]) -> bool:
    """False if `measure` could not measure tensors like all the parameters together."""
    slicing, cuts = transform.slicing, type(transform).slice_dims is not Scaling.slice_dims
    alike = len({(dtype_of(param), param.device) for param in own}) == 1
    kinds = [[param for param in own if param.dtype == dtype] for dtype in {param.dtype for param in own}]
    if not alike or not all(foreach.are_plain(locals_of(kind), 0) for kind in kinds):
        return False
    if slicing.dim is None and not slicing.inverse_dims and not cuts:
        return min(map(Tensor.numel, own)) >= max(slicing.min_size, 1)
    dims = [transform.slice_dims(param) for param in own]
    shaped = zip([tuple(param.shape) or (1,) for param in own], dims, strict=True)
    return all(d and math.prod(shape[k] for k in d) >= slicing.min_size for shape, d in shaped)


def second_gradient() -> RuntimeError:
    """The error for a parameter that was updated already, and got another gradient in the same step."""
    return RuntimeError(
        "a parameter got a second gradient before optimizer.step(), and the backward has applied the first: call "
        "optimizer.step() after each backward. To accumulate gradients, take ordinary steps"
    )


def _of_elements(node: Node, parts: Sequence[PartOfStep]) -> dict[str, Tensor]:
    """The metrics that a transform set by itself: means over elements."""
    found: dict[str, Tensor] = {}
    counts = [part.elements[node.path] for part in parts]
    for key in dict.fromkeys(key for part in parts for key in part.metrics if key.rpartition("/")[0] == node.path):
        own = [(part.metrics[key].double(), n) for part, n in zip(parts, counts, strict=True) if key in part.metrics]
        amounts = torch.stack([(value * n).to(own[0][0].device) for value, n in own])
        if isinstance(node.transform, Elementwise):  # counts of elements, which the division has rounded
            amounts = amounts.round()
        found[key] = amounts.sum() / max(sum(n for _, n in own), 1)
    return found


def _of_scaling(scaled: Sequence[_Scaled], order: dict[int, int]) -> dict[str, Tensor]:
    """The metrics of a scaling, from the norms and the factors of all parts in the order of the parameters."""
    norms, factors, shards = scaled[0].norms, scaled[0].factors, scaled[0].shards
    if len(scaled) > 1:
        places = [order[id(param)] for own in scaled for param in own.params]
        sorted_rows = sorted(range(len(places)), key=places.__getitem__)
        counts = [count for own in scaled for count in own.counts]
        norms = _in_order([own.norms for own in scaled], counts, sorted_rows)
        factors = _in_order([own.factors for own in scaled], counts, sorted_rows)
        parts = [part for own in scaled for part in own.shards or _as_parts(own.counts)]
        shards = [parts[i] for i in sorted_rows] if any(own.shards for own in scaled) else []
    total = scaled[0].total if len(scaled) == 1 else _total(scaled, norms)
    targets = [norms] if len(norms) > 0 or shards else []
    together = Measured(scaled[0].metric, [], norms, total, targets, _parts=shards or None)
    return summary(together, effect(together, factors))


def _as_parts(counts: Sequence[int]) -> list[Part]:
    """Plain tensors with so many slices."""
    return [Part(torch.zeros((), device="cpu").expand(n, 1), (1,), 1) for n in counts]


def _in_order(vectors: Sequence[Tensor], counts: Sequence[int], order: Sequence[int]) -> Tensor:
    """The numbers of tensors in another order; the first tensor has the first of ``counts`` numbers, and so on."""
    joined = pack(vectors)
    if max(counts, default=1) == 1:
        indices = torch.tensor(order, dtype=torch.int64).to(joined.device, non_blocking=True)
        return joined.index_select(0, indices)
    chunks = joined.split(list(counts))
    return torch.cat([chunks[i] for i in order])


def _total(scaled: Sequence[_Scaled], norms: Tensor) -> Tensor:
    """The metric of all updates together."""
    metric = scaled[0].metric
    known = [own.moments for own in scaled if own.moments is not None]
    if known:
        return _of_moments(metric, known)
    if metric.kind == "norm" and all(own.takes_all and not any(p.spread for p in own.shards) for own in scaled):
        squares_fit = metric.p == 2 and all(own.is_plain and not own.is_wide for own in scaled)
        return torch.linalg.vector_norm(norms) if squares_fit else combine(norms, metric.p)
    totals = pack([own.total for own in scaled])
    if metric.kind == "mad":
        counts = [own.elements for own in scaled]
        sums = [total * count for total, count in zip(totals.unbind(), counts, strict=True)]
        return torch.stack(sums).sum() / max(sum(counts), 1)
    return combine(totals, metric.p)


def _moments(measured: Measured, updates: Sequence[Tensor]) -> _Moments:
    count = sum(update.numel() for update in updates)
    total = measured.total if measured.metric.kind == "var" else measured.total.square()
    return _Moments(count, joint_sum(wholes(updates)), total * max(count - 1, 0))


def _of_moments(metric: Metric, parts: Sequence[_Moments]) -> Tensor:
    """The sum of all elements, their variance or its root."""
    device = parts[0].total.device
    sums, count = torch.stack([part.total.to(device) for part in parts]), sum(part.elements for part in parts)
    if metric.kind == "sum":
        return sums.sum().abs()
    counts = torch.tensor([part.elements for part in parts], dtype=torch.float64).to(device, non_blocking=True)
    between = (sums / counts.clamp(min=1) - sums.sum() / max(count, 1)).abs().square() * counts
    squares = torch.stack([part.squares.to(device) for part in parts]) + between
    variance = squares.sum() / max(count - 1, 1)
    return variance if metric.kind == "var" else variance.sqrt()
