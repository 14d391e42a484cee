"""Accelerate shards a model by FSDP2 over two processes, and the chain clips by the norm of all shards.

The optimizer is made before `prepare`, as with any optimizer. Accelerate then puts the sharded parameters in its place.
Each process has a half of every batch. One process trains the same model beside them, and its losses and norms are the
same.
"""

import argparse
import os
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing.spawn import start_processes

from torchzero_clip import AdamW, ClipNorm, Modular
from torchzero_clip.integrations import metrics

PROCESSES = 2


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.rand(32, 2, generator=generator) * 2 - 1
    return x, torch.sin(3 * x[:, :1]) * x[:, 1:]


def train(accelerator: Accelerator, steps: int, rank: int | None) -> tuple[int, list[tuple[float, float]]]:
    """How many numbers of the model this process holds, and the loss and the norm before clipping of each step."""
    model = network()
    optimizer = Modular(model, ClipNorm(0.1, dim="global"), AdamW(lr=1e-2))
    prepared: Any = accelerator.prepare(model, optimizer)
    model, optimizer = prepared
    found: list[tuple[float, float]] = []
    for step in range(steps):
        x, y = batch(step) if rank is None else (rows.chunk(PROCESSES)[rank] for rows in batch(step))
        loss = nn.functional.mse_loss(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        mean: Any = accelerator.reduce(loss.detach(), "mean")
        found.append((mean.item(), metrics(optimizer)["clip_norm/norm"].item()))
    params: list[Any] = list(model.parameters())
    return sum(p.to_local().numel() if isinstance(p, DTensor) else p.numel() for p in params), found


def process(rank: int, steps: int, folder: str) -> None:
    """What each process does; `accelerate launch` would set the environment and start the group."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": PROCESSES, "LOCAL_WORLD_SIZE": PROCESSES}
    os.environ.update({name: str(number) for name, number in numbers.items()})
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=PROCESSES)
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="no_wrap")
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    accelerator.state.distributed_type = DistributedType.FSDP  # on CPU, Accelerate would use DDP
    accelerator.state.fsdp_plugin = plugin
    torch.save(train(accelerator, steps, rank), Path(folder, f"{rank}.pt"))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    steps = max(parser.parse_args().steps, 1)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        start_processes(process, (steps, folder), PROCESSES, start_method="forkserver")
        held, sharded = torch.load(Path(folder, "0.pt"))
    whole, alone = train(Accelerator(cpu=True), steps, None)
    print(f"The first process holds {held:,} of {whole:,} numbers of the model.")
    print(f"{'':6}  {'two processes':>20}  {'one process':>20}")
    print(f"{'step':>6}" + f"  {'loss':>10} {'norm':>9}" * 2)
    for step in [*range(0, steps, max(steps // 6, 1)), steps - 1]:
        print(f"{step:6}" + "".join(f"  {loss:10.6f} {norm:9.6f}" for loss, norm in (sharded[step], alone[step])))


if __name__ == "__main__":
    main()
