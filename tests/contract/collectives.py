"""The collectives of a step in a fake group of 256 processes: 4 pipeline stages x 32 shards x 2 tensor parallel."""

from collections import Counter
from collections.abc import Callable
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from table import chain
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from torchzero_clip import Modular, clip_grad_norm_, get_total_norm

JUDGED = {"error_if_nonfinite": True}
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "clip_grad_norm_": lambda params, **k: clip_grad_norm_(params, 1.0, dim="global", **k),
    "clip_grad_norm_, judged": lambda params, **k: clip_grad_norm_(params, 1.0, dim="global", **JUDGED, **k),
    "get_total_norm": lambda params, **k: get_total_norm([p.grad for p in params], **k),
    "get_total_norm, judged": lambda params, **k: get_total_norm([p.grad for p in params], **JUDGED, **k),
}
"""In-place functions, also with ``error_if_nonfinite=True``."""


class Collectives(TorchDispatchMode):
    """Counts collectives, whoever calls them."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counter[str]()

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # what it does with plain tensors comes here
        if func.namespace in ("c10d", "_c10d_functional") and "wait" not in func.__name__:
            self.counts[func.__name__.partition(".")[0]] += 1
        return func(*args, **(kwargs or {}))


Counts = dict[tuple[str, int, bool], dict[str, int]]
"""Of each collective in the third step, by chain or function, number of tensors, and whether there is a group."""


def counts(numbers: tuple[int, ...], chains: list[str]) -> Counts:
    """The counts of chains in `table.LINKS` and of functions. Runs in one process."""
    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=256)
    mesh = init_device_mesh("cpu", (4, 32, 2), mesh_dim_names=("pp", "dp", "tp"))
    own, found = mesh["dp", "tp"], {}
    for number in numbers:
        tensors = [
            DTensor.from_local(torch.ones(2, 3), own, [Shard(0), Shard(1)], run_check=False) for _ in range(number)
        ]
        params = list(map(nn.Parameter, tensors))
        for param in params:
            param.grad = torch.ones_like(param)
        for name, group in product(chains, (None, mesh["pp"].get_group())):
            optimizer = Modular(params, *chain(name), process_group=group)
            for _ in range(3):
                with Collectives() as collectives:
                    optimizer.step()
            found[name, number, group is not None] = dict(collectives.counts)
        for (name, call), group in product(FUNCTIONS.items(), (None, mesh["pp"].get_group())):
            with Collectives() as collectives:
                call(params, process_group=group)
            found[name, number, group is not None] = dict(collectives.counts)
    return found
