"""The numbers from which metrics are computed, for one walk, or for several walks or processes together."""

from collections.abc import Mapping
from typing import TypeAlias

import torch
from torch import Tensor

from torchzero_clip.core.elementwise import Elementwise
from torchzero_clip.core.kinds import Scaling
from torchzero_clip.core.nodes import Node, Nodes
from torchzero_clip.functional.measure import effect_of, joint_root, no_numbers

EFFECT = 3  # how many numbers describe the effect of a scaling
_Measuring: TypeAlias = Scaling | Elementwise


def vector_of(numbers: Mapping[str, Tensor], nodes: Nodes, device: torch.device) -> Tensor:
    """The numbers of all transforms with joint metrics. Its length depends only on the transforms."""
    found = [(numbers.get(node.path), transform) for node, transform in measuring(nodes)]
    rows = [_nothing(transform, device) if own is None else own.to(device) for own, transform in found]
    return torch.cat(rows) if rows else torch.zeros(0, dtype=torch.float64, device=device)


def joint_metrics(nodes: Nodes, rows: Tensor) -> dict[str, Tensor]:
    """The metrics by their names, from the `vector_of` of each walk or process."""
    transforms = measuring(nodes)
    columns = rows.split([len(_nothing(transform, rows.device)) for _, transform in transforms], dim=1)
    found: dict[str, Tensor] = {}
    for (node, transform), own in zip(transforms, columns, strict=True):
        found |= node.qualified(_metrics_of(transform, own))
    return found


def measuring(nodes: Nodes) -> list[tuple[Node, _Measuring]]:
    """The transforms whose metrics cover all parts or processes."""
    every = ((node, node.transform) for node in nodes)
    return [(node, transform) for node, transform in every if isinstance(transform, Scaling | Elementwise)]


def _nothing(transform: _Measuring, device: torch.device) -> Tensor:
    """The numbers of a transform that has not run."""
    if isinstance(transform, Elementwise):
        return torch.zeros(2, dtype=torch.float64, device=device)  # how many elements changed, and how many there are
    own = no_numbers(transform.slicing.metric, device)
    return torch.cat([own.new_zeros(EFFECT), own])


def _metrics_of(transform: _Measuring, rows: Tensor) -> dict[str, Tensor]:
    if isinstance(transform, Elementwise):
        changed, count = rows.sum(dim=0).unbind()
        return {"clipped": changed / count.clamp(min=1)}
    metric = transform.slicing.metric
    effect, norms = rows.tensor_split([EFFECT], dim=1)
    return effect_of(joint_root(metric, norms) ** metric.degree, effect)
