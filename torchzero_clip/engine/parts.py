"""A step that is taken in parts: what was updated, and the metrics of all parts together."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torchzero_clip.core.elementwise import Elementwise
from torchzero_clip.core.nodes import Node, Nodes
from torchzero_clip.core.step import Step
from torchzero_clip.functional.measure import Measured, effect, summary
from torchzero_clip.functional.metric import Metric
from torchzero_clip.functional.norms import combine, joint_sum
from torchzero_clip.functional.shards import Part, wholes


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
    measured: Measured
    """Without the memory of the updates."""
    factors: Tensor
    elements: int
    takes_all: bool
    """Each update has slices."""
    is_wide: bool
    """Updates are float64."""
    moments: _Moments | None


class PartOfStep:
    """The numbers from which the metrics of one part come."""

    def __init__(self) -> None:
        self.scaled: dict[str, _Scaled] = {}
        self.elements: dict[str, int] = {}
        """How many elements each transform acted on, by path."""
        self.metrics: dict[str, Tensor] = {}

    def add_scaling(
        self, node: Node, measured: Measured, factors: Tensor, updates: Sequence[Tensor], params: Sequence[Tensor]
    ) -> None:
        """Store what a scaling found, without references to the memory of the updates."""
        moments = None
        if measured.metric.kind in ("std", "var", "sum"):
            moments = _moments(measured, updates)
        # a tensor without memory of its own has the shape that the slices are counted by
        parts = [part._replace(tensor=part.tensor.new_zeros(()).expand(part.tensor.shape)) for part in measured.parts]
        kept = Measured(
            measured.metric, measured.indices, measured.vector, measured.total, [p.tensor for p in parts], _parts=parts
        )
        self.scaled[node.path] = _Scaled(
            [params[i] for i in measured.indices],
            measured.counts,
            kept,
            factors,
            sum(update.numel() for update in updates),
            len(measured.indices) == len(updates),
            updates[0].dtype == torch.float64,
            moments,
        )

    def add(self, node: Node, step: Step) -> None:
        """Store the metrics of a transform."""
        self.elements[node.path] = sum(p.numel() * (2 if p.is_complex() else 1) for p in step.params)
        self.metrics.update(node.qualified(step.metrics))


class Parts:
    """The parts of one step, which `Modular.step` ends."""

    def __init__(self) -> None:
        self.updated: dict[Tensor, None] = {}
        """The parameters that were updated, in order."""
        self._parts: list[PartOfStep] = []

    def add(self, part: PartOfStep, params: Iterable[Tensor]) -> None:
        """Note that parameters were updated."""
        self._parts.append(part)
        self.updated.update(dict.fromkeys(params))

    def refuse_second(self, params: Iterable[Tensor]) -> None:
        """Raise if a parameter was updated already."""
        if any(param in self.updated for param in params):
            raise second_gradient()

    def end(self, nodes: Nodes, params: Iterable[Tensor]) -> dict[str, Tensor]:
        """Forget the parts. Return the metrics of all of them, as of one step.

        Args:
            nodes: The transforms.
            params: All parameters of the optimizer, in order.
        """
        parts, self._parts, self.updated = self._parts, [], {}
        order = {param: n for n, param in reversed(list(enumerate(params)))}
        metrics: dict[str, Tensor] = {}
        for node in nodes:
            scaled = [part.scaled[node.path] for part in parts if node.path in part.scaled]
            if scaled:
                metrics.update(node.qualified(_of_scaling(scaled, order)))
            metrics.update(_of_elements(node, [part for part in parts if node.path in part.elements]))
        return metrics


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


def _of_scaling(scaled: Sequence[_Scaled], order: dict[Tensor, int]) -> dict[str, Tensor]:
    """The metrics of a scaling, from the norms and the factors of all parts in the order of the parameters."""
    first = scaled[0].measured
    rows: list[tuple[int, Tensor, Tensor, Part]] = []
    for own in scaled:
        places, norms = [order[param] for param in own.params], own.measured.vector.split(own.counts)
        rows += zip(places, norms, own.factors.split(own.counts), own.measured.parts, strict=True)
    rows.sort(key=lambda row: row[0])
    parts, device = [part for *_, part in rows], first.vector.device
    vector = torch.cat([norms.to(device) for _, norms, _, _ in rows] or [first.vector])
    factors = torch.cat([own.to(device) for _, _, own, _ in rows] or [first.vector])
    total = scaled[0].measured.total if len(scaled) == 1 else _total(scaled, vector)
    together = Measured(first.metric, list(range(len(rows))), vector, total, [p.tensor for p in parts], _parts=parts)
    return summary(together, effect(together, factors))


def _total(scaled: Sequence[_Scaled], vector: Tensor) -> Tensor:
    """The metric of all updates together."""
    metric = scaled[0].measured.metric
    known = [own.moments for own in scaled if own.moments is not None]
    if known:
        return _of_moments(metric, known)
    is_local = not any(own.measured.spread for own in scaled)
    if metric.kind == "norm" and is_local and all(own.takes_all for own in scaled):
        wide = any(own.is_wide for own in scaled)
        return torch.linalg.vector_norm(vector) if metric.p == 2 and not wide else combine(vector, metric.p)
    totals = torch.stack([own.measured.total.to(vector.device) for own in scaled])
    if metric.kind == "mad":
        counts = [own.elements for own in scaled]
        return combine(totals * totals.new_tensor(counts), metric.p) / max(sum(counts), 1)
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
