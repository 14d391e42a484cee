"""Metrics of several walks or processes together, from the numbers that each of them has collected."""

from collections.abc import Mapping
from typing import TypeAlias

import torch
from torch import Tensor

from torchzero_clip.core.elementwise import Elementwise
from torchzero_clip.core.kinds import Scaling
from torchzero_clip.core.nodes import Node, Nodes
from torchzero_clip.functional.dtypes import widest
from torchzero_clip.functional.measure import EFFECT, WIDTHS, effect_of, joint_root, no_numbers

SHARE = 2
"""How many numbers describe a share: how many elements have changed, of how many."""
_Measuring: TypeAlias = Scaling | Elementwise


def vector_of(numbers: Mapping[str, Tensor], nodes: Nodes, device: torch.device) -> Tensor:
    """The numbers of all transforms with joint metrics. Its length depends only on the transforms."""
    transforms = measuring(nodes)
    vectors = [numbers[n.path].to(device) if n.path in numbers else _nothing(t, device) for n, t in transforms]
    return torch.cat(vectors) if vectors else torch.zeros(0, dtype=widest(device), device=device)


def joint_metrics(nodes: Nodes, vectors: Tensor) -> dict[str, Tensor]:
    """The metrics by their names, from a matrix with the `vector_of` each walk or process."""
    transforms = measuring(nodes)
    widths = [EFFECT + WIDTHS[t.slicing.metric.kind] if isinstance(t, Scaling) else SHARE for _, t in transforms]
    columns = vectors.split(widths, dim=1)
    metrics: dict[str, Tensor] = {}
    for (node, transform), column in zip(transforms, columns, strict=True):
        metrics |= node.qualified(_metrics_of(transform, column))
    return metrics


def measuring(nodes: Nodes) -> list[tuple[Node, _Measuring]]:
    """The transforms whose metrics cover all parts or processes."""
    every = ((node, node.transform) for node in nodes)
    return [(node, transform) for node, transform in every if isinstance(transform, Scaling | Elementwise)]


def _nothing(transform: _Measuring, device: torch.device) -> Tensor:
    """The numbers of a transform that has not run."""
    if isinstance(transform, Elementwise):
        return torch.zeros(SHARE, dtype=widest(device), device=device)
    effect = torch.zeros(EFFECT, dtype=widest(device), device=device)
    return torch.cat([effect, no_numbers(transform.slicing.metric, device)])


def _metrics_of(transform: _Measuring, numbers: Tensor) -> dict[str, Tensor]:
    if isinstance(transform, Elementwise):
        changed, count = numbers.sum(dim=0).unbind()
        return {"clipped": changed / count.clamp(min=1)}
    metric = transform.slicing.metric
    effect, norms = numbers.split([EFFECT, WIDTHS[metric.kind]], dim=1)
    return effect_of(joint_root(metric, norms) ** metric.degree, effect)


def path_of(name: str) -> str:
    """The path of the transform that has a metric."""
    return name.rpartition("/")[0]
