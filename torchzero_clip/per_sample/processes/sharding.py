"""Parameters of `fully_shard`, which shows them in full while their module runs; the optimizer has the shards."""

from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.distributed import ProcessGroup

from torchzero_clip.compat import any_distributed, fully_sharded, is_distributed, is_functorch_wrapped_tensor
from torchzero_clip.functional.shards import local

WORKS = "per-sample clipping works with fully_shard on a mesh of one dimension"


def stands_for(current: object, param: object) -> bool:
    """True for a parameter itself, and for what `fully_shard` puts in its place."""
    if current is param:
        return True
    if not (is_distributed(param) and isinstance(current, nn.Parameter) and current.shape == param.shape):
        return False
    # with reshard_after_forward=2, it is a shard on a smaller mesh between forward and backward
    return not is_distributed(current) or current.device_mesh != param.device_mesh


def group_of_shards(model: nn.Module, params: Mapping[str, nn.Parameter]) -> ProcessGroup | None:
    """The processes that hold the shards of a model, as `fully_shard` makes them; None without shards.

    Of the parameters, those outside of sharded modules are plain, with a copy on each process.
    """
    held = {id(param): param for root in fully_sharded(model) for param in root.parameters() if is_distributed(param)}
    if not params or not (held or any_distributed(list(params.values()))):
        return None
    for name, param in params.items():
        if not is_distributed(param):
            continue
        if param.device_mesh.ndim != 1:
            raise ValueError(
                f"{name!r} is a DTensor on a mesh of {param.device_mesh.ndim} dimensions, as with HSDP and with "
                f"tensor parallelism: {WORKS}"
            )
        if id(param) not in held or not param.placements[0].is_shard():
            raise ValueError(f"{name!r} is a DTensor, but not one of fully_shard, as with tensor parallelism: {WORKS}")
    groups = {param.device_mesh.get_group() for param in held.values() if param.device_mesh.ndim == 1}
    if len(groups) != 1:
        raise ValueError(f"the parameters are sharded over {len(groups)} groups of processes: {WORKS}")
    return groups.pop()


def reshard(model: nn.Module) -> None:
    """Let the modules hold the shards, as they do before a forward."""
    for module in fully_sharded(model):
        module.reshard()


@contextmanager
def shown_as_before(model: nn.Module) -> Generator[None]:
    """A block for backwards in a backward, which goes on with the parameters that it was shown in full.

    Each module hides its parameters at the end of its backward, and shows them again only if its backward starts again.
    """
    shown = [module for module in fully_sharded(model) if not any_distributed(_own(module))]
    yield
    for module in shown:
        module.unshard()


def _own(module: nn.Module) -> list[nn.Parameter]:
    """The parameters of a module, except those of modules in it that are sharded by themselves."""
    inner = {id(param) for part in fully_sharded(module) if part is not module for param in part.parameters()}
    return [param for param in module.parameters() if id(param) not in inner]


def slots(model: nn.Module, params: Mapping[str, nn.Parameter]) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Where each parameter is registered: its name in the model, and a dict of parameters with the name in it."""
    for name in params:
        owner, _, key = name.rpartition(".")
        yield name, model.get_submodule(owner)._parameters, key


def storages_of(tensors: Iterable[Tensor]) -> set[int]:
    """The addresses of the memory of tensors, views or not."""
    plain = map(local, tensors)
    return {
        x.untyped_storage().data_ptr()
        for x in plain
        if not (x.is_nested or x.is_sparse) and x.numel() and not is_functorch_wrapped_tensor(x)
    }
