"""Clip the gradient of every sample in two processes, which have different numbers of samples.

Each process passes the losses of its own samples to the clipper. The clipped gradients are added up over the processes.
One process trains the same model on all samples beside them, and gets the same losses and norms.
"""

import argparse
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.spawn import start_processes
from torch.nn.parallel import DistributedDataParallel

from torchzero_clip import AdamW, ConstantFlatClipper, Modular, PerSampleGradientClipper

PROCESSES, BATCH, LIMIT = 2, 32, 0.5


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 1))


def batch(step: int) -> tuple[Tensor, Tensor]:
    """The samples of all processes. Five in a hundred targets are wrong."""
    generator = torch.Generator().manual_seed(step)
    x = torch.rand(BATCH, 2, generator=generator) * 2 - 1
    wrong = torch.rand(BATCH, 1, generator=generator) < 0.05
    return x, torch.sin(3 * x[:, :1]) * x[:, 1:] + 10 * wrong


def share(rows: Tensor, step: int, rank: int) -> Tensor:
    """The rows of one process: the first one has none in every fifth step, and always less than half of them."""
    first = step % 5 * BATCH // 10
    return rows[:first] if rank == 0 else rows[first:]


def train(model: nn.Module, steps: int, rank: int | None) -> list[tuple[float, float]]:
    """The mean loss and the largest norm of a sample in each step, over the samples of this process."""
    optimizer = Modular(model, AdamW(lr=0.01))
    clipper = PerSampleGradientClipper(model, ConstantFlatClipper(LIMIT))
    found: list[tuple[float, float]] = []
    for step in range(steps):
        x, y = (rows if rank is None else share(rows, step, rank) for rows in batch(step))
        optimizer.zero_grad()
        losses = (model(x) - y).square().squeeze(1)
        norms = clipper.backward(losses).norms
        optimizer.step()
        found.append((losses.sum().item() / BATCH, max(norms.tolist(), default=0.0)))
    return found


def process(rank: int, steps: int, folder: str) -> None:
    """What each process does."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=PROCESSES)
    torch.save(train(DistributedDataParallel(network()), steps, rank), Path(folder, f"{rank}.pt"))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40, help="training steps (default: %(default)s)")
    steps = max(parser.parse_args().steps, 1)
    with tempfile.TemporaryDirectory() as folder:
        start_processes(process, (steps, folder), PROCESSES, start_method="forkserver")
        several = [torch.load(Path(folder, f"{rank}.pt")) for rank in range(PROCESSES)]
    alone = train(network(), steps, None)
    print(f"{'':6}  {'two processes':>24}  {'one process':>24}")
    print(f"{'step':>6}" + f"  {'mean loss':>11} {'largest norm':>12}" * 2)
    for step in [*range(0, steps, max(steps // 8, 1)), steps - 1]:
        losses, norms = zip(*(found[step] for found in several), strict=True)
        together = sum(losses), max(norms)
        print(f"{step:6}" + "".join(f"  {loss:11.6f} {norm:12.6f}" for loss, norm in (together, alone[step])))


if __name__ == "__main__":
    main()
