"""The numbers from which metrics are computed, for one walk, or for several walks or processes together."""

from typing import TypeAlias

import torch
from torch import Tensor

from torchzero_clip.core.elementwise import Elementwise
from torchzero_clip.core.kinds import Scaling
from torchzero_clip.core.nodes import Node, Nodes
from torchzero_clip.core.step import Step
from torchzero_clip.functional.measure import WIDTHS, Measured, effect_numbers, effect_of, joint_root, no_numbers

EFFECT, SHARE = 3, 2
"""How many numbers describe the effect of a scaling, and how many describe a share."""
_Measuring: TypeAlias = Scaling | Elementwise


class Numbers:
    """The numbers behind the metrics of one walk."""

    def __init__(self) -> None:
        self._rows: dict[str, Tensor] = {}

    def add_scaling(self, node: Node, measured: Measured, own: Tensor, factors: Tensor) -> None:
        """Store what a scaling did; ``own`` are the `Measured.numbers` of the updates of this walk."""
        self._rows[node.path] = torch.cat([effect_numbers(measured, factors).to(own.device), own])

    def add_share(self, node: Node, step: Step) -> None:
        """Store the share of changed elements that a transform has shown."""
        for changed, count in step.shares.values():
            self._rows[node.path] = torch.stack([changed.double(), torch.full_like(changed, count).double()])

    @property
    def paths(self) -> set[str]:
        """The paths of the transforms that have run."""
        return set(self._rows)

    def vector(self, nodes: Nodes, device: torch.device) -> Tensor:
        """The numbers of all transforms with joint metrics. Its length depends only on the transforms."""
        found = [(self._rows.get(node.path), transform) for node, transform in measuring(nodes)]
        rows = [_nothing(transform, device) if own is None else own.to(device) for own, transform in found]
        return torch.cat(rows) if rows else torch.zeros(0, dtype=torch.float64, device=device)


def joint_metrics(nodes: Nodes, rows: Tensor) -> dict[str, Tensor]:
    """The metrics by their names, from a `Numbers.vector` for each walk or process."""
    transforms = measuring(nodes)
    columns = rows.split([_width(transform) for _, transform in transforms], dim=1)
    found: dict[str, Tensor] = {}
    for (node, transform), own in zip(transforms, columns, strict=True):
        found |= node.qualified(_metrics_of(transform, own))
    return found


def measuring(nodes: Nodes) -> list[tuple[Node, _Measuring]]:
    """The transforms whose metrics cover all parts or processes."""
    every = ((node, node.transform) for node in nodes)
    return [(node, transform) for node, transform in every if isinstance(transform, Scaling | Elementwise)]


def _width(transform: _Measuring) -> int:
    return EFFECT + WIDTHS[transform.slicing.metric.kind] if isinstance(transform, Scaling) else SHARE


def _nothing(transform: _Measuring, device: torch.device) -> Tensor:
    """The numbers of a transform that has not run."""
    own = no_numbers(transform.slicing.metric, device) if isinstance(transform, Scaling) else None
    zeros = torch.zeros(SHARE if own is None else EFFECT, dtype=torch.float64, device=device)
    return zeros if own is None else torch.cat([zeros, own])


def _metrics_of(transform: _Measuring, rows: Tensor) -> dict[str, Tensor]:
    if isinstance(transform, Elementwise):
        changed, count = rows.sum(dim=0).unbind()
        return {"clipped": changed / count.clamp(min=1)}
    metric = transform.slicing.metric
    effect, norms = rows.split([EFFECT, WIDTHS[metric.kind]], dim=1)
    return effect_of(joint_root(metric, norms) ** metric.degree, effect)
