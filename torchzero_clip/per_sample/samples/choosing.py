"""Lets NaN through functions that choose by values, so that it shows where other values could let a gradient pass.

``where``, masks and ``relu`` give zeros to what they do not choose, also if NaN arrives, and so do functions that save
an index. So where the gradient of an output is NaN, the gradient of the input is set to NaN at the same place. In a
function that moves rows, it is set to NaN along the dimensions of the index.
"""

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from torchzero_clip.per_sample.samples.graph import Graph
from torchzero_clip.per_sample.samples.graph_nodes import NODE_KINDS

Grads: TypeAlias = Sequence[Tensor | None]


def let_through(graph: Graph, *, sites: bool) -> list[RemovableHandle]:
    """Let NaN through, until the handles are removed. With ``sites``, also along dimensions in which rows are moved."""
    handles: list[RemovableHandle] = []
    for node in graph.nodes:
        kind = NODE_KINDS.get(type(node))
        if kind is None or not kind.saves or not graph.can_read(node, kind):
            continue
        if kind.moves_anywhere is not None and kind.moves_anywhere(node):
            continue
        if kind.inputs is None:
            handles.append(node.register_hook(_in_place))
        elif sites:
            handles.append(node.register_hook(_along(kind.inputs(node))))
    return handles


def _in_place(grads: Grads, outputs: Grads) -> tuple[Tensor | None, ...]:
    """The gradients, with NaN where NaN has arrived."""
    return tuple(None if grad is None else _marked(grad, outputs) for grad in grads)


def _marked(grad: Tensor, outputs: Grads) -> Tensor:
    for output in outputs:
        if output is None or not (_is_plain(grad) and _is_plain(output)) or output.ndim < grad.ndim:
            continue
        lost = output.isnan()
        extra = lost.ndim - grad.ndim
        sizes = list(zip(lost.shape[extra:], grad.shape, strict=True))
        if any(one != other and other != 1 for one, other in sizes):
            continue
        dims = [*range(extra), *(extra + i for i, (one, other) in enumerate(sizes) if one != other)]
        if dims:
            lost = lost.sum(dims, keepdim=True) > 0
        grad = grad.masked_fill(lost.view(grad.shape), torch.nan)
    return grad


def _along(dims: Sequence[int]) -> Callable[[Grads, Grads], tuple[Tensor | None, ...]]:
    """Puts NaN into all entries along dimensions that have one."""

    def spread(grads: Grads, _: Grads) -> tuple[Tensor | None, ...]:
        return tuple(None if grad is None else _spread(grad, dims) for grad in grads)

    return spread


def _spread(grad: Tensor, dims: Sequence[int]) -> Tensor:
    if not dims or not _is_plain(grad) or any(not -grad.ndim <= dim < grad.ndim for dim in dims):
        return grad
    return grad.masked_fill(grad.isnan().sum(list(dims), keepdim=True) > 0, torch.nan)


def _is_plain(x: Tensor) -> bool:
    return x.layout == torch.strided and (x.is_floating_point() or x.is_complex())
