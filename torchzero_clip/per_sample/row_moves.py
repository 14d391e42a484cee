"""What operations do with rows: the labels of the output of an operation that autograd has recorded.

The names and attributes are those of the nodes of the graph, which are private to torch.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias, cast

import torch
from torch import Tensor

from torchzero_clip.per_sample.labels import LOST, Known, Labels, aligned, padded, placed, viewed, wider
from torchzero_clip.per_sample.operations import Part, unmoved


class Step(NamedTuple):
    """An operation: its node, which of its outputs is asked for, the shape of it, and the number of samples."""

    node: Any
    number: int
    shape: tuple[int, ...]
    batch_size: int


def after(step: Step, parts: Sequence[Part]) -> Labels:
    """The labels of the output of an operation with these inputs that need gradients."""
    kind = type(step.node).__name__.partition("Backward")[0]
    found = [part for part in parts if part.labels is not None]
    if not found:
        return None
    labels, before, _ = found[0]
    if kind in JOINS or kind in MOVES:
        if any(part.labels is LOST for part in found):
            return LOST
        return JOINS[kind](step, parts) if kind in JOINS else MOVES[kind](step, cast(Known, labels), before)
    return unmoved(kind.lower(), found, step.shape, step.batch_size, _dims(step, before))


def _view(step: Step, labels: Known, before: Sequence[int]) -> Known:
    return viewed(labels, before, step.shape, step.batch_size)


def _permuted(step: Step, labels: Known, before: Sequence[int]) -> Known:
    node, dims = step.node, list(range(len(before)))
    if hasattr(node, "_saved_dims"):
        dims = [_signed(dim, len(before)) for dim in node._saved_dims]
    else:
        pair = (node._saved_dim0, node._saved_dim1) if hasattr(node, "_saved_dim0") else (0, 1)
        if len(before) > 1:
            i, j = (_signed(dim, len(before)) for dim in pair)
            dims[i], dims[j] = dims[j], dims[i]
    return labels.permute(dims) if isinstance(labels, Tensor) else dims.index(labels)


def _slice(step: Step, labels: Known, before: Sequence[int]) -> Known:
    dim, start = _signed(step.node._saved_dim, len(before)), step.node._saved_start
    if isinstance(labels, int) and (labels != dim or step.shape[dim] == step.batch_size):
        return labels
    labels = wider(labels, len(before), step.batch_size)
    if labels.shape[dim] == 1:
        return labels
    start = max(0, min(_signed(start, before[dim]) if start is not None else 0, before[dim]))
    index = torch.arange(step.shape[dim], device=labels.device) * step.node._saved_step + start
    return labels.index_select(dim, index)


def _selected(step: Step, labels: Known, before: Sequence[int]) -> Known:
    """One of the entries along a dimension, which is removed: select and unbind."""
    node = step.node
    dim = _signed(node._saved_dim, len(before))
    if isinstance(labels, int) and labels != dim:
        return labels - (dim < labels)
    labels = wider(labels, len(before), step.batch_size)
    place = _signed(node._saved_index, before[dim]) if hasattr(node, "_saved_index") else step.number
    return labels.select(dim, place if labels.shape[dim] > 1 else 0)


def _split(step: Step, labels: Known, before: Sequence[int]) -> Known:
    node = step.node
    dim = _signed(node._saved_dim, len(before))
    labels = labels if isinstance(labels, int) and labels != dim else wider(labels, len(before), step.batch_size)
    if isinstance(labels, int) or labels.shape[dim] == 1:
        return labels
    if hasattr(node, "_saved_split_sizes"):
        start = sum(node._saved_split_sizes[: step.number])
    else:
        start = node._saved_split_size * step.number
    return labels.narrow(dim, start, step.shape[dim])


def _unsqueezed(step: Step, labels: Known, before: Sequence[int]) -> Known:
    dim = _signed(step.node._saved_dim, len(step.shape))
    return labels.unsqueeze(dim) if isinstance(labels, Tensor) else labels + (dim <= labels)


def _expanded(step: Step, labels: Known, before: Sequence[int]) -> Known:
    return aligned(labels, len(before), len(step.shape))


def _repeated(step: Step, labels: Known, before: Sequence[int]) -> Known:
    labels = wider(aligned(labels, len(before), len(step.shape)), len(step.shape), step.batch_size)
    repeats = zip(step.node._saved_repeats, labels.shape, strict=True)
    return labels.repeat([n if size > 1 else 1 for n, size in repeats])


def _indexed(step: Step, labels: Known, before: Sequence[int]) -> Known:
    index = _index(step.node)
    if index is None:
        return LOST
    given = [i for i, x in enumerate(index) if x is not None]
    apart = given[-1] - given[0] >= len(given)  # then the indexed dimensions come first
    if isinstance(labels, int) and labels < given[0] and not apart:
        return labels
    labels = wider(labels, len(before), step.batch_size)
    taken = sum(x.ndim if x is not None and x.dtype in (torch.bool, torch.uint8) else 1 for x in index)
    full = labels.expand(*before[:taken], *labels.shape[taken:])
    return full[tuple(slice(None) if x is None else x.to(full.device) for x in index)]


def _index_selected(step: Step, labels: Known, before: Sequence[int]) -> Known:
    dim, index = _signed(step.node._saved_dim, len(before)), _saved(step.node, "index")
    if isinstance(labels, int) and labels != dim:
        return labels
    labels = wider(labels, len(before), step.batch_size)
    if labels.shape[dim] == 1:
        return labels
    return LOST if index is None else labels.index_select(dim, index.to(labels.device))


def _turned(step: Step, labels: Known, before: Sequence[int]) -> Known:
    """Roll and flip."""
    node, dims = step.node, [_signed(dim, len(before)) for dim in step.node._saved_dims]
    if dims and isinstance(labels, int) and labels not in dims:
        return labels
    labels = wider(labels, len(before), step.batch_size)
    if not hasattr(node, "_saved_shifts"):
        return labels.flip(dims)
    return (labels if dims else labels.expand(before)).roll([_signed(shift, 0) for shift in node._saved_shifts], dims)


def _strided(step: Step, labels: Known, before: Sequence[int]) -> Known:
    """A view of a tensor that was changed in place, or the strides that torch gives to averages of images.

    The tensor is taken for contiguous. Other uses of strides are not followed.
    """
    size, stride = step.node._saved_size, step.node._saved_stride
    start = step.node._saved_storage_offset or 0
    last = start + sum((n - 1) * along for n, along in zip(size, stride, strict=True))
    of = type(step.node.next_functions[0][0]).__name__
    if last >= math.prod(before) or not of.startswith(("CopySlices", "Mean")):
        return LOST
    full = wider(labels, len(before), step.batch_size).expand(before).contiguous()
    return full.as_strided(size, stride, start)


def _padded(step: Step, labels: Known, before: Sequence[int]) -> Known:
    """Padding with a value, which belongs to no sample. Negative padding cuts."""
    return padded(labels, before, [_signed(number, 0) for number in step.node._saved_pad], step.batch_size)


def _packed(step: Step, labels: Known, before: Sequence[int]) -> Known:
    sizes = _saved(step.node, "result1")
    if sizes is None:
        return LOST
    labels = wider(labels, len(before), step.batch_size)
    labels = labels.transpose(0, 1) if step.node._saved_batch_first else labels
    first = (before[1], before[0]) if step.node._saved_batch_first else before[:2]
    labels = labels.expand(*first, *labels.shape[2:])
    return torch.cat([labels[time, :size] for time, size in enumerate(sizes.tolist())])


def _joined(step: Step, parts: Sequence[Part]) -> Labels:
    """Cat and stack."""
    dim = _signed(step.node._saved_dim, len(step.shape))
    if type(step.node).__name__.startswith("Stack"):
        below = [_unsqueezed(step, part.labels, part.shape) if part.labels is not None else None for part in parts]
        parts = [Part(x, (*p.shape[:dim], 1, *p.shape[dim:])) for x, p in zip(below, parts, strict=True)]
    known = [part.labels for part in parts if part.labels is not None]
    if all(isinstance(x, int) and x == known[0] != dim for x in known):
        return known[0]
    if len(parts) < len(step.node.next_functions):
        return LOST  # a part has no graph, so that its size is unknown
    full = [wider(part.labels, len(step.shape), step.batch_size) for part in parts]
    sizes = torch.broadcast_shapes(*((*x.shape[:dim], 1, *x.shape[dim + 1 :]) for x in full))
    full = [
        x.to(known_device(full)).expand(*sizes[:dim], part.shape[dim], *sizes[dim + 1 :])
        for x, part in zip(full, parts, strict=True)
    ]
    return torch.cat(full, dim)


def known_device(tensors: Sequence[Tensor]) -> torch.device:
    """The device of labels that were made on one, which those of samples in order are not."""
    return next((x.device for x in tensors if not x.is_cpu), torch.device("cpu"))


def _put(step: Step, parts: Sequence[Part]) -> Labels:
    """Rows put into a tensor, or added to it: those of the values, where the tensor has none."""
    node, into = step.node, None if step.node.next_functions[0][0] is None else parts[0].labels
    labels, before, _ = parts[-1]
    if isinstance(into, int):
        plain = labels is None or (
            isinstance(labels, int) and labels == into != _signed(getattr(node, "_saved_dim", into), len(step.shape))
        )
        if plain or len(parts) == 1:
            return into
        into = wider(into, len(step.shape), step.batch_size)
    by_dim = hasattr(node, "_saved_dim")
    if by_dim and isinstance(labels, int) and labels != _signed(node._saved_dim, len(step.shape)):
        return labels if into is None and step.shape[labels] == step.batch_size else LOST
    labels = wider(labels, len(before), step.batch_size).expand(before)
    index = _saved(node, "index") if by_dim else _index(node)
    if index is None:
        return LOST
    if isinstance(index, Tensor):
        dim = _signed(node._saved_dim, len(step.shape))
        result = placed(labels, dim, index, step.shape)
    else:
        result = labels.new_full(step.shape, -1)
        where = tuple(slice(None) if x is None else x.to(labels.device) for x in index)
        labels = labels.expand(result[where].shape)
        result[where] = labels
        result = result if torch.equal(result[where], labels) else None
    if result is None or into is None:
        return LOST if result is None else result
    known, into = result >= 0, into.to(result.device)
    apart = known & (into >= 0) & (result != into)
    return LOST if bool(apart.any()) else torch.where(known, result, into)


def _written(step: Step, parts: Sequence[Part]) -> Labels:
    """A part of a tensor was overwritten. Which one is not known."""
    base = parts[0].labels if step.node.next_functions[0][0] is not None else None
    values = [part.labels for part in (parts if base is None else parts[1:]) if part.labels is not None]
    if base is not None and (not values or step.batch_size == 1):
        return base
    # only one dimension can have the samples, both in the tensor and in what is written into it
    where = [dim for dim, size in enumerate(step.shape) if size == step.batch_size]
    plain = len(where) == 1 and all(isinstance(labels, int) and labels is not LOST for labels in values)
    return where[0] if plain and base in (None, where[0]) else LOST


def _passed_on(step: Step, parts: Sequence[Part]) -> Labels:
    """The inputs of a module after `fully_shard`: one function passes on all inputs that have a graph."""
    return parts[step.number].labels


Move: TypeAlias = Callable[[Step, Known, Sequence[int]], Known]
MOVES: dict[str, Move] = {
    **dict.fromkeys(("View", "UnsafeView", "ReshapeAlias", "Squeeze", "ReshapeCopy"), _view),
    **dict.fromkeys(("Permute", "Transpose", "T"), _permuted),
    **dict.fromkeys(("Select", "Unbind"), _selected),
    **dict.fromkeys(("Split", "SplitWithSizes"), _split),
    **dict.fromkeys(("Roll", "Flip"), _turned),
    "Slice": _slice,
    "Unsqueeze": _unsqueezed,
    "Expand": _expanded,
    "Repeat": _repeated,
    "AsStrided": _strided,
    "ConstantPadNd": _padded,
    "Index": _indexed,
    "IndexSelect": _index_selected,
    "PackPaddedSequence": _packed,
}
JOINS: dict[str, Callable[[Step, Sequence[Part]], Labels]] = {
    **dict.fromkeys(("Cat", "Stack"), _joined),
    **dict.fromkeys(("IndexAdd", "IndexCopy", "IndexPut", "Scatter", "ScatterAdd", "ScatterReduce"), _put),
    "CopySlices": _written,
    "RegisterPost": _passed_on,  # RegisterPostBackwardFunction
}


def _dims(step: Step, before: Sequence[int]) -> set[int]:
    """The dimensions along which an operation works; none if it works along all."""
    dims = getattr(step.node, "_saved_dim", ())
    return {_signed(dim, len(before)) for dim in ((dims,) if isinstance(dims, int) else dims or ())}


def _saved(node: Any, name: str) -> Tensor | None:
    """A tensor that a node has saved; None if a hook has changed it, as in a checkpoint, which would run again."""
    value = getattr(node, f"_raw_saved_{name}").data
    return value if isinstance(value, Tensor) else None


def _index(node: Any) -> list[Tensor | None] | None:
    """The index of a node, with None for full slices; None if a hook has changed it."""
    index = [None if x is None else x.data for x in node._raw_saved_indices]
    return index if all(x is None or isinstance(x, Tensor) for x in index) else None


def _signed(number: int, size: int) -> int:
    """A dimension or place from an attribute of a node, where negative numbers have no sign."""
    number = number - (1 << 64) if number >= 1 << 63 else number
    return number + size if number < 0 else number
