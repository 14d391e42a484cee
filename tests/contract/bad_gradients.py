"""Gradients that are not finite on one of four processes: 2 stages with layers of equal names x 2 ranks of a mesh."""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from torchzero_clip import SGD, Modular, clip_grad_norm_, get_total_norm

Named = list[tuple[str, nn.Parameter]]


def meshes() -> tuple[DeviceMesh, ProcessGroup]:
    """The mesh of this stage, and the group of both stages."""
    both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    return both["dp"], both["pp"].get_group()


def shard(mesh: DeviceMesh, value: float) -> DTensor:
    return DTensor.from_local(torch.full((1,), value, dtype=torch.float64), mesh, [Shard(0)], run_check=False)


def stage(mesh: DeviceMesh) -> Named:
    """Two plain parameters and a sharded one, with gradients of ones."""
    plain = [nn.Parameter(torch.zeros(n, dtype=torch.float64)) for n in (2, 3)]
    params = [*plain, nn.Parameter(shard(mesh, 0.0))]
    for param in params:
        param.grad = torch.ones_like(param)
    return list(zip(("weight", "bias", "sharded"), params, strict=True))


def grads(named: Named) -> list[tuple[str, Tensor]]:
    return [(name, param.grad) for name, param in named if param.grad is not None]


def said(call: Callable[[], Any]) -> str:
    """The error of a call; empty if there was none."""
    try:
        call()
    except RuntimeError as error:
        return str(error)
    return ""


def calls(named: Named, group: ProcessGroup | None) -> list[str]:
    """What the functions say of the gradients."""
    unnamed = [param for _, param in named]
    options: dict[str, Any] = {"error_if_nonfinite": True, "process_group": group}
    return [
        said(lambda: clip_grad_norm_(named, 1.0, dim="global", **options)),
        said(lambda: clip_grad_norm_(named, 1.0, "std", **options)),
        said(lambda: get_total_norm(grads(named), **options)),
        said(lambda: clip_grad_norm_(unnamed, 1.0, **options)),
    ]


def of_one_rank(bad: float) -> list[Any]:
    """The first plain gradient is bad on one rank, which is each in turn. With the group and without."""
    (mesh, group), found = meshes(), []
    for rank in range(4):
        named = stage(mesh)
        if dist.get_rank() == rank:
            named[0][1].grad[0] = bad
        found.append([calls(named, group), calls(named, None)])
    return found


def alone() -> list[str]:
    """No process has another gradient than one plain NaN on one rank."""
    (mesh, group), found = meshes(), []
    for rank in range(4):
        named = stage(mesh)
        for _, param in named:
            param.grad = None
        if dist.get_rank() == rank:
            named[0][1].grad = torch.full((2,), math.nan, dtype=torch.float64)
        options: dict[str, Any] = {"error_if_nonfinite": True, "process_group": group}
        for order in ("std", -1):
            found.append(said(lambda p=named, o=order, k=options: clip_grad_norm_(p, 1.0, o, **k)))
    return found


def of_optimizer(missing: bool) -> list[Any]:
    """The bad gradients of an optimizer with the group.

    The first plain gradient is bad on one rank. Or it is missing there, and the sharded one is bad.
    """
    (mesh, group), found = meshes(), []
    for rank in range(4):
        named = stage(mesh)
        optimizer = Modular(named, SGD(0.1), nonfinite="skip", process_group=group)
        if dist.get_rank() == rank:
            if missing:
                named[0][1].grad, named[2][1].grad = None, shard(mesh, math.nan)
            else:
                named[0][1].grad[0] = math.nan
        optimizer.step()
        found.append([optimizer.bad_gradients, calls(named, group) if missing else []])
    return found
