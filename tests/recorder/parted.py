"""Trainings of a small transformer in one process and in two, with faults, whose records are compared."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from ranks import run
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from torchzero_clip import Recorder

STEPS, SAMPLES, WORDS, WIDTH = 12, 8, 20, 16
BEGINS = 5
"""The first step with a fault."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.query, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.ModuleDict({"up": nn.Linear(WIDTH, 2 * WIDTH), "down": nn.Linear(2 * WIDTH, WIDTH)})

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.query(self.norm(x)).chunk(3, dim=-1)  # the bias of k gets rounding only
        x = x + self.out(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True))
        return x + self.mlp["down"](nn.functional.gelu(self.mlp["up"](self.norm(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, x: Tensor) -> Tensor:
        x = self.words(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def train(
    path: str,
    way: str = "alone",
    *,
    dtype: torch.dtype = torch.float32,
    options: dict[str, bool] | None = None,
    parts: int = 1,
    fault: str = "",
) -> None:
    """Train for a few steps, and write the record. ``way`` is how processes share the work."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model: nn.Module = Model().to(dtype)
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if way != "alone" else (0, 1)
    if way == "ddp":
        model = DistributedDataParallel(model)
    elif way == "sharded":
        mesh = init_device_mesh("cpu", (ranks,))
        for block in [*model.blocks, model]:
            fully_shard(block, mesh=mesh)
    elif way == "tensor":
        mesh = init_device_mesh("cpu", (ranks,))
        for block in model.blocks:
            parallelize_module(block.mlp, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, **(options or {}))
    recorder = Recorder(optimizer, model=model, path=path)
    shares = 1 if way in ("alone", "tensor") else ranks
    generator = torch.Generator().manual_seed(1)
    for step in range(STEPS):
        words = torch.randint(0, WORDS, (SAMPLES, 10), generator=generator)
        own = words[rank % shares :: shares]
        faulty = fault if step >= BEGINS else ""
        if faulty == "other data" and rank == 1:
            own = own.flip(1).roll(3, 1)
        for part in own.chunk(parts):
            losses = nn.functional.cross_entropy(model(part).flatten(0, 1).float(), part.roll(1, 1).flatten())
            (losses / parts).backward()
        if way == "by hand":
            exchange(model, faulty)
        report(recorder, model, way, faulty)
        optimizer.step()
        optimizer.zero_grad()
    recorder.close()


def exchange(model: nn.Module, fault: str) -> None:
    """Average the gradients of the processes, as DistributedDataParallel does, or wrongly."""
    named = dict(model.named_parameters())
    if fault == "clipped before":
        nn.utils.clip_grad_norm_(named.values(), 0.1)
    for name, param in named.items():
        assert param.grad is not None
        if not (fault == "left out" and name == "blocks.1.mlp.up.weight"):
            dist.all_reduce(param.grad)
            param.grad /= 1 if fault == "a sum" else dist.get_world_size()
        if fault == "wrong group" and ".mlp." in name:
            param.grad /= 2
        if fault == "scaled":
            param.grad *= 1024.0


def report(recorder: Recorder, model: nn.Module, way: str, fault: str) -> None:
    """Report the norm that a trainer would compute from the parts of gradients that each process has."""
    if way not in ("tensor", "sharded"):
        return
    total = torch.zeros(())
    for param in model.parameters():
        grad = param.grad
        assert grad is not None
        square = (grad.to_local() if isinstance(grad, DTensor) else grad).float().square().sum()
        is_whole = not isinstance(grad, DTensor) or grad.placements[0].is_replicate()
        if fault != "a shard":
            if is_whole and fault != "counted twice":
                square = square / dist.get_world_size()
            dist.all_reduce(square)
        total += square
    recorder.report_norm(total.sqrt())


DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
WAYS: dict[str, Callable[..., None]] = {
    "alone": train,
    "alone, fused": partial(train, options={"fused": True}),
    "alone, foreach": partial(train, options={"foreach": True}),
    "alone, accumulated": partial(train, parts=4),
    "ddp": partial(train, way="ddp"),
    "ddp, accumulated": partial(train, way="ddp", parts=4),
    "sharded": partial(train, way="sharded"),
    "sharded, fused": partial(train, way="sharded", options={"fused": True}),
    "sharded, accumulated": partial(train, way="sharded", parts=2),
    "tensor": partial(train, way="tensor"),
    "by hand": partial(train, way="by hand"),
}
FAULTS = {
    "a shard": "sharded",
    "counted twice": "tensor",
    "wrong group": "by hand",
    "a sum": "by hand",
    "left out": "by hand",
    "clipped before": "by hand",
    "scaled": "by hand",
    "other data": "by hand",
}


def all_of(folder: str, *, alone: bool) -> None:
    """Write the records of all ways, of one process or of two, in each dtype, and of all faults."""
    for dtype_name, dtype in DTYPES.items():
        for name, way in WAYS.items():
            if name.startswith("alone") == alone:
                way(str(Path(folder, f"{name} {dtype_name}.jsonl")), dtype=dtype)
        if not alone:
            for fault, way in FAULTS.items():
                train(str(Path(folder, f"{fault} {dtype_name}.jsonl")), way, dtype=dtype, fault=fault)


def written(folder: Path) -> None:
    """Write all records."""
    all_of(str(folder), alone=True)
    run(all_of, 2, str(folder), alone=False)
