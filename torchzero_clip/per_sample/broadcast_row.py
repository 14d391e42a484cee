"""Outputs with one row for all samples, such as embeddings of positions."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from typing_extensions import override

from torchzero_clip.compat import DisableTorchFunctionSubclass

ARITHMETIC = {f"{side}{name}" for name in ("add", "sub", "mul", "div", "truediv") for side in ("", "r", "i")}
EXPANSIONS = {"expand", "expand_as", "broadcast_to"}
CONVERSIONS = {"to", "type", "float", "double", "half", "bfloat16"}


class BroadcastRow(Tensor):
    """One row for all samples, which arithmetic with a tensor of the batch replaces by one row for each sample.

    So the gradient has a row for each sample. Any other use would sum it over samples, and raises in the backward.
    """

    _each: Tensor
    _dim: int
    _version_then: int

    @classmethod
    @override
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        kind = name.strip("_")
        with DisableTorchFunctionSubclass():
            if kind in ARITHMETIC and any(_goes_with(x, args) for x in args):
                in_place = name.endswith("_") and (not name.startswith("__") or kind.startswith("i"))
                first = args[:1] if in_place else (each(args[0]),)
                return func(*first, *map(each, args[1:]), **kwargs)
            output = func(*args, **kwargs)
            row = args[0] if args else None
            if (
                not isinstance(row, BroadcastRow)
                or output is row
                or not isinstance(output, Tensor)
                or not _unchanged(row)
            ):
                return output
            if kind in EXPANSIONS and output.ndim == row.ndim and output.shape[row._dim] == row._each.shape[row._dim]:
                return func(row._each, *args[1:], **kwargs)
            alone = not any(isinstance(x, Tensor) for x in args[1:])
            if kind in CONVERSIONS or (kind in ARITHMETIC and alone and not name.endswith("_")):
                return _as_row(output, func(row._each, *args[1:], **kwargs), row._dim)
            return output


def each(value: Any) -> Any:
    """One row for each sample if the value is one row for all; any other value as it is."""
    return value._each if isinstance(value, BroadcastRow) and _unchanged(value) else value


def is_shared(value: Any) -> bool:
    """True if the value is one row for all samples."""
    return isinstance(value, BroadcastRow) and _unchanged(value)


def shared(output: Any, dim: Callable[[int], int], refuse: Callable[[], None]) -> Any:
    """Return the output of a layer that ran for each sample as one row, the output for its real input.

    Args:
        output: The output of the layer: tensors in any structure.
        dim: Returns the batch dimension of the tensor at an index.
        refuse: Raises, if a backward reaches the row itself.
    """
    leaves, structure = pytree.tree_flatten(output)
    rows = [
        _as_row(_Row.apply(anchor(), [x.detach().narrow(dim(i), 0, 1).clone()], refuse), x, dim(i))
        if isinstance(x, Tensor)
        else x
        for i, x in enumerate(leaves)
    ]
    return pytree.tree_unflatten(rows, structure)


def _as_row(row: Any, each: Tensor, dim: int) -> BroadcastRow:
    result = row.as_subclass(BroadcastRow)
    result._each, result._dim, result._version_then = each, dim, result._version
    return result


def _unchanged(row: BroadcastRow) -> bool:
    return row._version == row._version_then


def _goes_with(row: Any, args: tuple[Any, ...]) -> bool:
    """True if an operation on these arguments turns the row into one row for each sample."""
    if not isinstance(row, BroadcastRow) or not _unchanged(row):
        return False
    count = row._each.shape[row._dim]
    others = [x for x in args if isinstance(x, Tensor) and not isinstance(x, BroadcastRow)]
    return any(x.ndim == row.ndim and x.shape[row._dim] == count for x in others)


def anchor() -> Tensor:
    """A tensor without elements that requires a gradient, so that a graph is recorded."""
    return torch.empty(0, requires_grad=True)


class _Row(torch.autograd.Function):
    """A row whose gradient would be summed over all samples, so its backward raises."""

    @staticmethod
    @override
    def forward(ctx: Any, anchor: Tensor, row: list[Tensor], refuse: Callable[[], None]) -> Tensor:
        ctx.refuse = refuse
        return row[0]

    @staticmethod
    @override
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, None]:
        ctx.refuse()
        return None, None, None
