"""Squared norms of the rows of a tensor, and the dtype of their computation."""

import math

import torch
from torch import Tensor

from torchzero_clip.functional.foreach import wide_dtype

BLOCK = 4096  # the most elements that are added up in float32: a norm of 38M of them is 0.3% too small
SMALL = 1e-34  # in smaller sums, squares of elements have lost digits in float32
PIECE = 1 << 23  # elements that are copied to float64 at a time


def wide(*tensors: Tensor) -> list[Tensor]:
    """The tensors in one dtype, float32 or wider. Under autocast an input and its output gradient have two dtypes."""
    if {tensor.dtype for tensor in tensors} == {torch.float32}:
        return list(tensors)
    dtype = wide_dtype(tensors[0].dtype)
    for tensor in tensors[1:]:
        dtype = torch.promote_types(dtype, tensor.dtype)
    return [tensor.to(dtype) for tensor in tensors]


def squared_norms(rows: Tensor) -> Tensor:
    """The squared L2 norm of each row of any shape: (B, ...) -> (B,), float64.

    It is finite if the row is finite, and 0 only if the row is all zero.
    """
    count, size = rows.shape[0], math.prod(rows.shape[1:])
    ordered = rows if rows.is_contiguous() else rows.permute(memory_order(rows))
    flat = ordered.reshape(count, size)
    if flat.dtype == torch.float64 or not flat.is_cpu:
        return _squares(flat)
    even = size - size % BLOCK if size > BLOCK else 0
    norms = _squares(flat[:, even:] if even else flat)
    if even:
        norms += _squares(flat[:, :even].unflatten(1, (-1, BLOCK))).sum(1)
    if again := odd(norms):
        for chosen in torch.tensor(again, device=rows.device).split(max(1, PIECE // max(size, 1))):
            norms[chosen] = _squares(flat[chosen].double())
    return norms


def memory_order(rows: Tensor) -> list[int]:
    """The dimensions, those after the first in the order of memory, so that rows of another order are not copied."""
    return [0, *sorted(range(1, rows.ndim), key=[-step for step in rows.stride()].__getitem__)]


def odd(squares: Tensor) -> list[int]:
    """The indices of sums of squares that may be outside the range of float32, and are taken again in float64."""
    if squares.numel():
        low, high = (bound.item() for bound in squares.aminmax())
        if low > SMALL and high < math.inf:  # False for NaN
            return []
    return (squares.isfinite() & (squares > SMALL)).logical_not().nonzero()[:, 0].tolist()


def _squares(rows: Tensor) -> Tensor:
    dtype = None if rows.is_cpu else torch.float64
    return torch.linalg.vector_norm(rows, dim=-1, dtype=dtype).double().square()
