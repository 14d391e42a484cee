"""The numbers behind metrics, from which the metrics of several walks or processes together are found."""

from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from torchzero_clip.core.elementwise import Elementwise
from torchzero_clip.core.kinds import Scaling
from torchzero_clip.core.nodes import Node, Nodes
from torchzero_clip.core.step import Step
from torchzero_clip.functional.measure import Measured, effect_numbers, effect_of, joint_root, no_numbers

Measuring: TypeAlias = Scaling | Elementwise
"""The kinds of transforms whose metrics are joint norms and means."""


class Numbers:
    """The numbers behind the metrics of one walk."""

    def __init__(self) -> None:
        self._rows: dict[str, Tensor] = {}

    def add_scaling(self, node: Node, measured: Measured, own: Tensor, factors: Tensor) -> None:
        """Store what a scaling did.

        Args:
            node: The scaling.
            measured: The slices.
            own: The `Measured.numbers` of the updates of this walk.
            factors: The factor of each slice.
        """
        self._rows[node.path] = torch.cat([effect_numbers(measured, factors).to(own.device), own])

    def add_share(self, node: Node, step: Step) -> None:
        """Store the share of elements that a transform has shown."""
        for changed, count in step.shares.values():
            self._rows[node.path] = torch.stack([changed.double(), torch.full_like(changed, count).double()])

    def has(self, path: str) -> bool:
        """True if a transform has run."""
        return path in self._rows

    def row(self, path: str, transform: Measuring, device: torch.device) -> Tensor:
        """The numbers of a transform: a vector, whose length follows from the transform."""
        found = self._rows.get(path)
        return _nothing(transform, device) if found is None else found.to(device)


def measuring(nodes: Nodes) -> list[tuple[Node, Measuring]]:
    """The transforms with joint metrics."""
    every = ((node, node.transform) for node in nodes)
    return [(node, transform) for node, transform in every if isinstance(transform, Scaling | Elementwise)]


def metrics_of(node: Node, transform: Measuring, rows: Tensor) -> dict[str, Tensor]:
    """The metrics of a transform by their names, from a row of numbers for each walk or process."""
    if isinstance(transform, Elementwise):
        changed, count = rows.sum(dim=0).unbind()
        return node.qualified({"clipped": changed / count.clamp(min=1)})
    metric = transform.slicing.metric
    total = joint_root(metric, rows.narrow(1, 3, rows.shape[1] - 3)) ** metric.degree
    return node.qualified(effect_of(total, rows.narrow(1, 0, 3)))


def joint_metrics(nodes: Nodes, walks: Sequence[Numbers], device: torch.device) -> dict[str, Tensor]:
    """The metrics of several walks of one process as one."""
    found: dict[str, Tensor] = {}
    for node, transform in measuring(nodes):
        if any(numbers.has(node.path) for numbers in walks):
            rows = torch.stack([numbers.row(node.path, transform, device) for numbers in walks])
            found |= metrics_of(node, transform, rows)
    return found


def _nothing(transform: Measuring, device: torch.device) -> Tensor:
    """The numbers where a transform has done nothing."""
    zeros = torch.zeros(2 if isinstance(transform, Elementwise) else 3, dtype=torch.float64, device=device)
    return torch.cat([zeros, no_numbers(transform.slicing.metric, device)]) if isinstance(transform, Scaling) else zeros
