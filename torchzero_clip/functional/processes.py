"""Groups of processes with different tensors. Each process gets the numbers of all, and combines them in one way."""

from collections.abc import Sequence
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from torchzero_clip.compat import is_distributed


def check_group(group: object, tensors: Sequence[Tensor]) -> None:
    """Raise unless the argument ``process_group`` is None, or its other processes hold no part of these parameters."""
    if group is None:
        return
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError("this process is not in process_group: pass the group that it is in, such as mesh.get_group()")
    if not isinstance(group, ProcessGroup):
        way_out = ': pass the group of one dimension, mesh["pp"].get_group()' if isinstance(group, DeviceMesh) else ""
        kind = type(group).__name__
        raise TypeError(f"process_group must be a torch.distributed.ProcessGroup or None, got {kind}{way_out}")
    others = {*dist.get_process_group_ranks(group)} - {dist.get_rank()}
    meshes = {tensor.device_mesh for tensor in tensors if is_distributed(tensor)}
    shared = sorted({rank for mesh in meshes for rank in mesh.mesh.flatten().tolist()} & others)
    if shared:
        few = ", ".join(map(str, shared[:8]))
        raise ValueError(
            f"process_group has the processes {few}{', ...' if len(shared) > 8 else ''}, which hold parts or copies of "
            "the same parameters. It is for processes that hold other parameters, such as the stages of a pipeline: "
            'mesh["pp"].get_group()'
        )


class SharedGroup:
    """A process group as an attribute of an optimizer. Copies share it. Pickles lose it, and say so by ``is_lost``."""

    def __init__(self, group: ProcessGroup | None, is_lost: bool = False) -> None:
        self.group, self.is_lost = group, is_lost

    def refuse(self) -> NoReturn:
        raise RuntimeError(
            "the optimizer was unpickled without its process_group: set optimizer.process_group to the group, or None"
        )

    def __deepcopy__(self, memo: dict[int, object]) -> "SharedGroup":
        return self

    def __reduce__(self) -> tuple[type["SharedGroup"], tuple[None, bool]]:
        return SharedGroup, (None, self.is_lost or self.group is not None)


def device_of(tensors: Sequence[Tensor], group: ProcessGroup | None = None) -> torch.device:
    """The device of the first tensor; without tensors, a device from which the group can send."""
    if tensors:
        return tensors[0].device
    if group is not None and dist.get_backend(group) == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def gathered(numbers: Tensor, group: ProcessGroup | None) -> Tensor:
    """The vectors of all processes of a group, as rows, to the last bit the same on all; one row without a group."""
    if group is None:
        return numbers.unsqueeze(0)
    rows = numbers.new_empty((group.size(), len(numbers)))
    dist.all_gather(list(rows.unbind()), numbers.contiguous(), group=group)
    return rows


def gathered_texts(text: str, group: ProcessGroup, device: torch.device) -> list[str]:
    """The texts of all processes of a group."""
    # all_gather_object of torch would send from the current device, which several processes may share
    encoded = torch.tensor(list(text.encode()), dtype=torch.uint8, device=device)
    lengths = gathered(torch.tensor([len(encoded)], device=device), group).flatten().tolist()
    padded = gathered(torch.cat([encoded, encoded.new_zeros(max(lengths) - len(encoded))]), group).cpu()
    return [bytes(row[:length].tolist()).decode() for row, length in zip(padded, lengths, strict=True)]
