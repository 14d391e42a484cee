"""The norms of full tensors in float64, safe from overflow and underflow, alike on all ranks.

| function | measures | way |
| --- | --- | --- |
| `norm`, `rms` | one tensor, or each of its slices, by any metric | slices |
| `slices.norms_of_slices` | each slice of parts, of any p, dtype and layout | slices |
| `moments.metrics_of_slices` | each slice of parts, by any metric | slices |
| `blocks.norms_of_plain_slices` | each slice of plain tensors, L2 | blocks |
| `norms_of_each` | each whole tensor, L2 or the largest magnitude | as `way_of` chooses |
| `joint_norm` | all tensors together, L2, if one pass is enough | blocks, or slices for several ranks |
| `joint_norm_of_meshes` | all parts together, of any p | slices, one collective for each mesh |
| `slices.joint_of_norms` | all together, from the norms of each | |

A whole tensor is a slice that spans all dimensions. `ways.way_of` chooses between three ways:

* *slices* (`slices.py`): each part by itself. It takes everything, and the other ways leave extreme norms to it.
* *blocks* (`blocks.py`): float32 and float64 on CPU, where 400 calls of torch would take longer than the arithmetic, so
  short tensors are copied together. With scratch memory a step reuses its plan; a single call needs none.
* *lists* (`foreach.norms_in_one_call`): other devices, where one call measures all tensors and nothing may be read.

`ways.power_dtype` is the dtype in which powers are added up.
"""

import math
from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from torchzero_clip.checks import boolean
from torchzero_clip.checks import dims as check_dims
from torchzero_clip.compat import any_distributed
from torchzero_clip.functional import blocks, foreach
from torchzero_clip.functional.metric import parse_ord
from torchzero_clip.functional.moments import metrics_of_slices, sums_of_slices
from torchzero_clip.functional.scratch import Scratch
from torchzero_clip.functional.shards import Part, pack, summed, wholes
from torchzero_clip.functional.shards import part as part_of
from torchzero_clip.functional.slices import joint_of_norms, norms_of_slices
from torchzero_clip.functional.ways import LARGEST, SMALLEST, power_dtype, way_of
from torchzero_clip.types import Ord

JointNorm: TypeAlias = tuple[Tensor, Tensor | None]  # of all tensors together, and beside it that of each if wanted


def norm(tensor: Tensor, ord: Ord = 2, dim: int | Sequence[int] | None = None, keepdim: bool = False) -> Tensor:
    """Return the norm of one tensor, or of each of its slices, in float64.

    For authors of transforms. In every dtype a finite tensor has a finite norm, and a non-zero tensor a non-zero norm.
    Under FSDP2 it is the norm of the full tensor, equal on every rank. With ``dim`` a rank gets the norms of those
    slices of which it holds a part, each taken over all ranks, like the ``norms`` that a `Scaling` gets.

    Args:
        tensor: A tensor of any shape and floating point dtype.
        ord: The metric, as in `ClipNorm`; for 'var' the root of the variance.
        dim: The dimensions that one slice spans, as in `torch.linalg.vector_norm`; None for all.
        keepdim: Keep the dimensions of a slice, with size 1.

    Raises:
        ValueError: For an unknown ``ord``, or a ``dim`` that the tensor does not have.
        TypeError: For an ``ord`` or ``dim`` of the wrong type.

    Examples:
        >>> import torch
        >>> from torchzero_clip import norm
        >>> norm(torch.full((1000,), 300.0, dtype=torch.float16), "linf")
        tensor(300., dtype=torch.float64)
        >>> norm(torch.tensor([[3.0, 4.0], [6.0, 8.0]]), dim=1, keepdim=True)
        tensor([[ 5.],
                [10.]], dtype=torch.float64)
    """
    metric = parse_ord(ord)
    boolean("keepdim", keepdim)
    check_dims("dim", dim)
    ndim = max(tensor.ndim, 1)
    listed = range(ndim) if dim is None else () if isinstance(dim, str) else (dim,) if isinstance(dim, int) else dim
    named = {d + ndim if d < 0 else d for d in listed}
    if not named or not named <= set(range(ndim)):
        raise ValueError(f"dim must name dimensions of a tensor of shape {tuple(tensor.shape)}, got {dim!r}")
    # a pending sum is carried out first, because a norm is not linear
    part = part_of(summed(tensor), sorted(named))
    (norms,) = metrics_of_slices([part], metric)
    if not part.size:  # the norm of no elements
        norms = torch.zeros_like(norms)
    if not keepdim or not tensor.ndim:  # a scalar was measured as a vector
        norms = norms.squeeze(part.dims)
    return norms


def rms(tensor: Tensor) -> Tensor:
    """Return the root mean square of one tensor, in float64; 0 for a tensor without elements.

    It is as safe from overflow and underflow as `norm`, and like it the value of the full tensor on every rank.

    Args:
        tensor: A tensor of any shape and floating point dtype.

    Examples:
        >>> import torch
        >>> from torchzero_clip import rms
        >>> rms(torch.tensor([1e30, -1e30]))
        tensor(1.0000e+30, dtype=torch.float64)
    """
    return norm(tensor) / math.sqrt(max(tensor.numel(), 1))


def joint_norm_of_meshes(parts: Sequence[Part], p: float, *, beside: bool = False) -> JointNorm:
    """The p-norm of whole tensors together, and ``beside`` it that of each, by one collective for each mesh."""
    # norms of local parts first, so that a collective has one number for all tensors of a mesh
    local = norms_of_slices([part._replace(groups=()) for part in parts], p)
    indices_of: dict[tuple[ProcessGroup, ...], list[int]] = {}
    for i, part in enumerate(parts):
        indices_of.setdefault(part.groups, []).append(i)
    meshes = [Part(pack([local[i] for i in indices]), (0,), len(indices), key) for key, indices in indices_of.items()]
    if p == 0:
        return joint_of_norms(pack(sums_of_slices(meshes)), p), None
    # in the same collectives, which changes no bit of the joint norm
    pairs = zip(local, parts, strict=True) if beside else ()
    norms = norms_of_slices([*meshes, *(Part(pack([norm]), (0,), 1, part.groups) for norm, part in pairs)], p)
    return joint_of_norms(pack(norms[: len(meshes)]), p), pack(norms[len(meshes) :]) if beside else None


def joint_norm(
    tensors: Sequence[Tensor],
    scratch: Scratch | None = None,
    *,
    plain: bool = False,
    beside: bool = False,
    lerp: blocks.Lerp | None = None,
) -> JointNorm | None:
    """The L2 norm of all dense tensors together: a 0-d float64 tensor, with ``beside`` also the norm of each.

    Return None if the norm is very large, very small or not finite, and for devices and dtypes without a faster way
    than `norms_of_each`. ``beside`` and ``lerp`` need ``scratch``. ``plain`` says that all tensors are known to be
    plain.
    """
    if not (plain or foreach.are_plain(tensors)):
        return joint_norm_of_meshes(wholes(tensors), 2.0, beside=beside) if any_distributed(tensors) else None
    if way_of(tensors, 2.0) != "blocks":
        return None
    if scratch is not None:
        return blocks.joint_norm_with_scratch(tensors, scratch, beside=beside, lerp=lerp)
    total = blocks.joint_norm_once(tensors)
    return (total, None) if SMALLEST < total.item() < LARGEST else None


def norms_of_each(
    tensors: Sequence[Tensor], scratch: Scratch | None = None, p: float = 2.0, *, plain: bool = False
) -> Tensor:
    """The L2 norm, or the largest magnitude for p=inf, of each dense tensor: a float64 vector, equal on all ranks."""
    way = way_of(tensors, p) if plain or foreach.are_plain(tensors) else "slices"
    if way == "lists":
        return torch.stack(foreach.norms_in_one_call(tensors, p, power_dtype(tensors[0])))
    if way == "blocks" and scratch is not None:
        return blocks.norms_of_each_with_scratch(tensors, scratch, p)
    if way == "blocks" and p == 2:
        numbers = torch.tensor(blocks.norms_of_each_once(tensors), dtype=torch.float64, device=tensors[0].device)
        return blocks.mended(numbers, tensors)
    return pack(norms_of_slices(wholes(tensors), p))
