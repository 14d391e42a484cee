"""The numbers from which metrics are computed, for one walk, or for several walks or processes together."""

from collections.abc import Mapping
from typing import TypeAlias

import torch
from torch import Tensor

from torchzero_clip.core.elementwise import Elementwise
from torchzero_clip.core.kinds import Scaling
from torchzero_clip.core.nodes import Node, Nodes
from torchzero_clip.functional.dtypes import widest
from torchzero_clip.functional.measure import WIDTHS, effect_of, joint_root, no_numbers

EFFECT, SHARE = 3, 2
"""How many numbers describe the effect of a scaling, and how many describe a share."""
_Measuring: TypeAlias = Scaling | Elementwise


def vector_of(numbers: Mapping[str, Tensor], nodes: Nodes, device: torch.device) -> Tensor:
    """The numbers of all transforms with joint metrics. Its length depends only on the transforms."""
    found = [(numbers.get(node.path), transform) for node, transform in measuring(nodes)]
    rows = [_nothing(transform, device) if own is None else own.to(device) for own, transform in found]
    return torch.cat(rows) if rows else torch.zeros(0, dtype=widest(device), device=device)


def joint_metrics(nodes: Nodes, rows: Tensor) -> dict[str, Tensor]:
    """The metrics by their names, from the `vector_of` of each walk or process."""
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
    zeros = torch.zeros(SHARE if own is None else EFFECT, dtype=widest(device), device=device)
    return zeros if own is None else torch.cat([zeros, own])


def _metrics_of(transform: _Measuring, rows: Tensor) -> dict[str, Tensor]:
    if isinstance(transform, Elementwise):
        changed, count = rows.sum(dim=0).unbind()
        return {"clipped": changed / count.clamp(min=1)}
    metric = transform.slicing.metric
    effect, norms = rows.split([EFFECT, WIDTHS[metric.kind]], dim=1)
    return effect_of(joint_root(metric, norms) ** metric.degree, effect)


def path_of(name: str) -> str:
    """The path of the transform that has a metric."""
    return name.rpartition("/")[0]
