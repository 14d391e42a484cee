"""Squared norms of the rows of a tensor, and the dtype they are taken in."""

import math

import torch
from torch import Tensor

from torchzero_clip.functional.foreach import wide_dtype

BLOCK = 4096  # elements that are added up in float32 at most: a plain norm of 38M of them is 0.3% too small


def wide(*tensors: Tensor) -> list[Tensor]:
    """The tensors in one dtype, float32 or wider: autocast gives a layer's input and its output gradient two."""
    dtype = wide_dtype(tensors[0].dtype)
    for tensor in tensors[1:]:
        dtype = torch.promote_types(dtype, tensor.dtype)
    return [tensor.to(dtype) for tensor in tensors]


def squared_norms(rows: Tensor) -> Tensor:
    """The squared L2 norm of each row, whatever its shape: (B, ...) -> (B,), float64."""
    count, size = rows.shape[0], math.prod(rows.shape[1:])
    flat = rows.reshape(count, size)
    if flat.dtype == torch.float64 or size <= BLOCK:
        return _squares(flat)
    even = size - size % BLOCK
    return _squares(flat[:, :even].unflatten(1, (-1, BLOCK))).sum(1) + _squares(flat[:, even:])


def _squares(rows: Tensor) -> Tensor:
    return torch.linalg.vector_norm(rows, dim=-1).double().square()
