"""The parts of a distributed tensor: the local one, and the process groups that hold the others."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp

from torchzero_clip.compat import any_distributed, dtensors, is_distributed
from torchzero_clip.functional.dtypes import moved, widest_of


class Part(NamedTuple):
    """The part of a tensor that this process holds, cut into slices, which span the dimensions ``dims``."""

    tensor: Tensor
    dims: tuple[int, ...]
    size: int  # elements of one whole slice, over all processes
    groups: tuple[ProcessGroup, ...] = ()
    """The processes that hold the rest of each slice; none if the tensor is not sharded."""
    spread: tuple[ProcessGroup, ...] = ()  # the processes that hold other slices

    @property
    def slice_shape(self) -> list[int]:
        """The shape of one number per slice, with dimensions kept."""
        return [1 if d in self.dims else n for d, n in enumerate(self.tensor.shape)]

    @property
    def slice_count(self) -> int:
        """How many slices this process holds a part of."""
        return math.prod(self.slice_shape)


def local(tensor: Tensor) -> Tensor:
    """The plain tensor under a distributed one, sharing its memory."""
    return tensor.to_local() if is_distributed(tensor) else tensor


def locals_of(tensors: Sequence[Tensor]) -> list[Tensor]:
    return list(map(local, tensors)) if any_distributed(tensors) else list(tensors)


def distributed_like(part: Tensor, like: Tensor) -> Tensor:
    """The inverse of `local`: a distributed tensor around ``part``, laid out as ``like``."""
    if not is_distributed(like):
        return part
    laid_out = {"shape": like.shape, "stride": like.stride(), "run_check": False}
    return dtensors().DTensor.from_local(part, like.device_mesh, like.placements, **laid_out)


def aligned(grad: Tensor, param: Tensor) -> Tensor:
    """A gradient laid out like its parameter, after carrying out pending sums, conjugations and negations."""
    if is_distributed(grad) and is_distributed(param) and grad.placements != param.placements:
        return grad.redistribute(param.device_mesh, param.placements)
    if torch.compiler.is_compiling():  # which cannot ask for pending negations
        return grad.resolve_conj() if grad.is_complex() else grad
    return grad.resolve_conj().resolve_neg() if grad.is_conj() or grad.is_neg() else grad


def is_partial(tensor: Tensor) -> bool:
    """Whether a tensor holds pending sums."""
    return is_distributed(tensor) and any(placement.is_partial() for placement in tensor.placements)


def summed(tensor: Tensor) -> Tensor:
    """The same tensor after carrying out pending sums, which a norm needs because it is not linear."""
    if is_distributed(tensor) and is_partial(tensor):
        whole = [dtensors().Replicate() if placement.is_partial() else placement for placement in tensor.placements]
        return tensor.redistribute(placements=whole)
    return tensor


def replicated(value: Tensor) -> Tensor:
    """Return the result of a reduction as a plain tensor, with the full value on every rank.

    For authors of transforms that reduce a tensor by another function than `norm` and `rms`. The result for a
    distributed tensor may be a pending sum; ``.item()``, and formatting it, silently give the value of one rank.

    Args:
        value: The result of a reduction of a plain or a distributed tensor.

    Examples:
        >>> import torch
        >>> from torchzero_clip import replicated
        >>> replicated(torch.tensor([1.0, 2.0]).mean())
        tensor(1.5000)
    """
    return value.full_tensor() if is_distributed(value) else value


def laid_out_as(whole: Tensor, like: Tensor) -> Tensor:
    """A plain tensor with the full value on every rank, laid out like another one, without communication."""
    if not is_distributed(like):
        return whole
    mesh = like.device_mesh
    replicas = dtensors().DTensor.from_local(whole, mesh, [dtensors().Replicate()] * mesh.ndim, run_check=False)
    return replicas.redistribute(mesh, like.placements)


def memories(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The local part of each tensor, to be written to; a scalar as a vector of one element."""
    return [data if data.ndim else data.view(1) for data in locals_of(tensors)]


def wholes(tensors: Sequence[Tensor]) -> list[Part]:
    """The local part of each tensor as one slice."""
    if any_distributed(tensors):
        return [part(summed(tensor), range(max(tensor.ndim, 1))) for tensor in tensors]
    return [Part(tensor, tuple(range(tensor.ndim)), tensor.numel()) for tensor in memories(tensors)]


def part(tensor: Tensor, dims: Sequence[int]) -> Part:
    """The local part of ``tensor``, cut into slices along ``dims``; a scalar counts as a vector of one element."""
    shape = tuple(tensor.shape) or (1,)
    size = math.prod([shape[d] for d in dims])
    groups: list[ProcessGroup] = []
    spread: list[ProcessGroup] = []
    if is_distributed(tensor):
        for mesh_dim, placement in enumerate(tensor.placements):
            # Shard and the strided shards of FSDP + TP have no common base class; both name their dimension.
            sharded = getattr(placement, "dim", None)
            if sharded is not None:
                (groups if sharded in dims else spread).append(tensor.device_mesh.get_group(mesh_dim))
    data = local(tensor)
    return Part(data if data.ndim else data.view(1), tuple(dims), size, tuple(groups), tuple(spread))


def pack(values: Sequence[Tensor]) -> Tensor:
    """All values in one vector of the `widest` dtype, on the device of the first."""
    if not values:
        return torch.zeros(0, dtype=torch.float64, device="cpu")
    device, dtype = values[0].device, values[0].dtype
    wide = torch.float64 if values[0].is_cpu else widest_of(values[0])
    if all(value.device == device and value.dtype == dtype for value in values):
        return torch.cat([value.reshape(-1) for value in values]).to(wide)  # one cast instead of one for each value
    is_meta = [value.is_meta for value in values]
    if True in is_meta and False in is_meta:
        raise RuntimeError("some gradients are on the meta device, where they have no values, and others are not")
    return torch.cat([moved(value.reshape(-1), device).to(wide) for value in values])


def elements_at(vector: Tensor, indices: Sequence[int]) -> Tensor:
    """The elements of a vector at some indices, in order, without a tensor of indices on the device."""
    if len(indices) == vector.numel():
        return vector  # the same object: statistics then skip a check
    if not indices:
        return vector.narrow(0, 0, 0)
    return torch.stack([vector.select(0, i) for i in indices])


def all_reduce(parts: Sequence[Part], values: list[Tensor], op: ReduceOp.RedOpType) -> list[Tensor]:
    """Combine one value per slice with the processes that hold the rest of it: one collective per process group."""
    indices_of: dict[ProcessGroup, list[int]] = {}
    for i, p in enumerate(parts):
        for group in p.groups:
            indices_of.setdefault(group, []).append(i)
    for group, indices in indices_of.items():
        chosen = [torch.view_as_real(values[i]) if values[i].is_complex() else values[i] for i in indices]
        vector = _all_reduced(pack(chosen), op, group)
        for i, value, chunk in zip(indices, chosen, vector.split([value.numel() for value in chosen]), strict=True):
            shaped = chunk.view(value.shape)
            values[i] = torch.view_as_complex(shaped) if values[i].is_complex() else shaped
    return values


def without_gradient(params: Sequence[Tensor], *, zeros_count: bool) -> list[Tensor]:
    """The distributed parameters that get zeros as their gradient here, because other processes may have one.

    With ``zeros_count``, these are only those for which another process of the mesh does have one.
    """
    # all processes call it, and only those where a gradient is missing wait for the result
    distributed = [param for param in params if param.requires_grad and is_distributed(param)]
    missing: list[Tensor] = [param for param in distributed if param.grad is None]
    if not zeros_count:
        return missing
    parts: list[Part] = []
    flags: list[Tensor] = []
    for param in distributed:
        mesh = param.device_mesh
        groups = tuple(mesh.get_group(k) for k in range(mesh.ndim))
        flag = torch.full((1,), float(param.grad is not None), dtype=widest_of(param), device=param.device)
        parts.append(Part(flag, (0,), 1, groups))
        flags.append(flag)
    counts = all_reduce(parts, flags, ReduceOp.SUM)
    if not missing:
        return []
    pairs = zip(distributed, counts, strict=True)
    return [param for param, count in pairs if param.grad is None and count.item() > 0]


def largest_on_all_ranks(values: Tensor, tensors: Sequence[Tensor]) -> Tensor:
    """The largest of each value on all processes of the meshes of distributed tensors; NaN if one is NaN."""
    for group, device in mesh_groups(tensors).items():
        values = _all_reduced(values.to(device), ReduceOp.MAX, group)
    return values


def mesh_groups(tensors: Sequence[Tensor]) -> dict[ProcessGroup, torch.device]:
    """The process groups of the meshes of distributed tensors, and the device of each."""
    groups: dict[ProcessGroup, torch.device] = {}
    for tensor in tensors if any_distributed(tensors) else ():
        if is_distributed(tensor):
            for mesh_dim in range(tensor.device_mesh.ndim):
                groups[tensor.device_mesh.get_group(mesh_dim)] = tensor.device
    return groups


def _all_reduced(vector: Tensor, op: ReduceOp.RedOpType, group: ProcessGroup) -> Tensor:
    if op == ReduceOp.SUM:
        dist.all_reduce(vector, op, group=group)
        return vector
    # MAX and MIN of a NaN and a number depend on their order, which differs between ranks: NaNs are sent beside them
    neutral = -math.inf if op == ReduceOp.MAX else math.inf
    missing = vector.isnan()
    both = torch.cat([torch.where(missing, neutral, vector), torch.where(missing, -neutral, neutral)])
    dist.all_reduce(both, op, group=group)
    extreme, flag = both.chunk(2)
    return torch.where(flag == neutral, extreme, math.nan)
