"""Norms of the rows of a tensor, and the dtype of their computation."""

import math

import torch
from torch import Tensor

from torchzero_clip.functional.dtypes import is_narrow, moved, power_of_two
from torchzero_clip.functional.foreach import wide_dtype
from torchzero_clip.functional.shards import Part
from torchzero_clip.functional.slices import norms_of_slices

_BLOCK = 4096  # the most elements that are added up in float32: a norm of 38M of them is 0.3% too small
SMALL = 1e-17  # in smaller norms, squares of elements have lost digits in float32
_PIECE = 1 << 23  # elements that are copied to float64 at a time


def wide(*tensors: Tensor) -> list[Tensor]:
    """The tensors in one dtype, float32 or wider. Under autocast an input and its output gradient have two dtypes."""
    if {tensor.dtype for tensor in tensors} == {torch.float32}:
        return list(tensors)
    dtype = wide_dtype(tensors[0].dtype)
    for tensor in tensors[1:]:
        dtype = torch.promote_types(dtype, tensor.dtype)
    return [tensor.to(dtype) for tensor in tensors]


def norms_of_rows(rows: Tensor) -> Tensor:
    """The L2 norm of each row of any shape: (B, ...) -> (B,), in the `widest` dtype of the device.

    For rows of float32 and narrower, it is finite if the row is finite, and 0 only if the row is all zero.
    """
    count, size = rows.shape[0], math.prod(rows.shape[1:])
    ordered = rows if rows.is_contiguous() else rows.permute(memory_order(rows))
    flat = ordered.reshape(count, size)
    if not flat.is_cpu:
        return _rescaled(flat, 1) if is_narrow(flat) else torch.linalg.vector_norm(flat, dim=1, dtype=torch.float64)
    even = size - size % _BLOCK if size > _BLOCK and flat.dtype != torch.float64 else 0
    norms = torch.linalg.vector_norm(flat[:, even:], dim=1).double()
    if even:
        blocks = torch.linalg.vector_norm(flat[:, :even].unflatten(1, (-1, _BLOCK)), dim=2)
        norms = torch.linalg.vector_norm(torch.cat([blocks.double(), norms[:, None]], 1), dim=1)
    if flat.dtype != torch.float64 and (again := odd(norms)):
        for chosen in torch.tensor(again, device=rows.device).split(max(1, _PIECE // max(size, 1))):
            norms[chosen] = torch.linalg.vector_norm(flat[chosen].double(), dim=1)
    return norms


def stacked(norms: list[Tensor]) -> Tensor:
    """The norms of several parameters as rows, (K, B), on the device of the first."""
    device = norms[0].device
    return torch.stack(norms if len({x.device for x in norms}) == 1 else [moved(x, device) for x in norms])


def joint_norms(norms: Tensor) -> Tensor:
    """The L2 norm over the first dimension of norms: (K, B) -> (B,)."""
    return torch.linalg.vector_norm(norms, dim=0) if norms.dtype == torch.float64 else _rescaled(norms, 0)


def norms_of_samples(norms: Tensor, samples: Tensor, count: int) -> Tensor:
    """The joint norm of each of ``count`` samples: (N,) -> (count,). ``samples`` has the sample of each norm."""
    zeros = norms.new_zeros(count)
    if norms.dtype == torch.float64:
        return zeros.index_add_(0, samples, norms.square()).sqrt_()
    largest = zeros.scatter_reduce(0, samples, norms, "amax")
    scale = power_of_two(largest)
    return zeros.index_add_(0, samples, (norms / scale[samples]).square()).sqrt_().mul_(scale)


def memory_order(rows: Tensor) -> list[int]:
    """The dimensions, those after the first in the order of memory, so that rows of another order are not copied."""
    return [0, *sorted(range(1, rows.ndim), key=[-step for step in rows.stride()].__getitem__)]


def odd(norms: Tensor) -> list[int]:
    """The indices of norms whose squares may be outside the range of float32, and which are taken again in float64."""
    if norms.numel():
        low, high = (bound.item() for bound in norms.aminmax())
        if low > SMALL and high < math.inf:  # False for NaN
            return []
    return (norms.isfinite() & (norms > SMALL)).logical_not().nonzero()[:, 0].tolist()


def in_float64(x: Tensor) -> Tensor:
    """A tensor in float64, on the CPU if its device has none."""
    return (x.cpu() if is_narrow(x) else x).double()


def _rescaled(rows: Tensor, dim: int) -> Tensor:
    """The norms along a dimension of a matrix, in float32."""
    return norms_of_slices([Part(rows, (dim,), rows.shape[dim])], 2.0)[0].view(-1)
