"""A loop like torchtitan's: a pipeline of two stages x two shards of FSDP2, clipped by the norm of the whole model.

Four processes on the CPU train the same network in two ways. The first keeps torch's optimizers, one for each part of
the model, and replaces torchtitan's function for clipping by one line. The second has one `Modular` over all parts,
which clips, steps, and shows its norm. In both ways the norm is that of one process that trains the whole model.
"""

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B
from torch.multiprocessing.spawn import start_processes
from torch.optim import Optimizer

from torchzero_clip import AdamW, ClipNorm, Modular, clip_grad_norm_

STAGES, REPLICAS, WIDTH, BATCH, MICRO_BATCHES = 2, 2, 32, 64, 2
LAYERS = ("first", "second", "third", "last")
"""Each is a part of the model. The first process of the pipeline has the first and the third, as in Interleaved1F1B."""
MAX_NORM = 0.3
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def make_part(name: str) -> nn.ModuleDict:
    """A part of the model, with parameters that depend on its name alone."""
    torch.manual_seed(LAYERS.index(name))
    sizes = {"first": (2, WIDTH), "last": (WIDTH, 1)}
    return nn.ModuleDict({name: nn.Linear(*sizes.get(name, (WIDTH, WIDTH)))})


class Part(nn.Module):
    """Some layers of the model."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        for name in names:
            self.add_module(name, make_part(name)[name])

    def forward(self, x: Tensor) -> Tensor:
        """What the last of these layers returns."""
        for name, layer in self.named_children():
            x = layer(x) if name == "last" else layer(x).tanh()
        return x


def joined(parts: Sequence[nn.Module]) -> nn.Module:
    """One module with the layers of all parts, for the functions of torch that take a model and its optimizer."""
    return nn.ModuleDict({name: layer for part in parts for name, layer in part.named_children()})


class Optimizers:
    """The optimizers of all parts of the model on this process as one object, as torchtitan has it.

    Args:
        pairs: Modules, each with the optimizer of its parameters.
    """

    def __init__(self, pairs: Sequence[tuple[nn.Module, Optimizer]]) -> None:
        self.pairs = pairs

    def step(self) -> None:
        """Each optimizer takes a step."""
        for _, optimizer in self.pairs:
            optimizer.step()

    def zero_grad(self) -> None:
        """Remove all gradients."""
        for _, optimizer in self.pairs:
            optimizer.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        """Under flat keys, so that the stages add theirs to one checkpoint."""
        return {k: v for pair in self.pairs for k, v in get_optimizer_state_dict(*pair, options=FLAT).items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned."""
        for pair in self.pairs:
            set_optimizer_state_dict(*pair, state_dict, options=FLAT)


def optimizer_of_each(parts: Sequence[nn.Module]) -> Optimizers:
    """Torch's optimizers, as in torchtitan."""
    return Optimizers([(part, torch.optim.AdamW(part.parameters(), lr=0.01)) for part in parts])


def one_optimizer(parts: Sequence[nn.Module], group: dist.ProcessGroup | None) -> Optimizers:
    """One chain for all parts, because each `Modular` has a joint norm of its own."""
    model = joined(parts)
    chain = [ClipNorm(MAX_NORM, dim="global"), AdamW(lr=0.01)]
    return Optimizers([(model, Modular(model.named_parameters(), chain, process_group=group))])


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Points, and what is to be learned of them."""
    x = torch.rand(BATCH, 2, generator=torch.Generator().manual_seed(step)) * 2 - 1
    return x, torch.sin(3 * x[:, :1]) * x[:, 1:]


class Stages:
    """The parts of the model on this process, under one of torch's schedules."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.group, self.data = mesh["pp"].get_group(), mesh["dp"]
        own = range(self.group.rank(), len(LAYERS), STAGES)
        self.parts = [Part(LAYERS[i]) for i in own]
        for part in self.parts:
            fully_shard(part, mesh=self.data)
        pairs = zip(self.parts, own, strict=True)
        cpu = torch.device("cpu")
        stages = [PipelineStage(part, i, len(LAYERS), cpu, group=self.group) for part, i in pairs]
        self._is_first, self._is_last = stages[0].is_first, stages[-1].is_last
        self._schedule = ScheduleInterleaved1F1B([*stages], MICRO_BATCHES, nn.functional.mse_loss)

    @property
    def params(self) -> list[nn.Parameter]:
        """The parameters of all parts of this process."""
        return [param for part in self.parts for param in part.parameters()]

    def backward(self, step: int) -> Tensor:
        """Leave the gradients, and return the loss, on all processes."""
        x, y = (tensor.chunk(REPLICAS)[self.data.get_local_rank()] for tensor in batch(step))
        losses: list[Tensor] = []
        given = (x,) if self._is_first else ()
        self._schedule.step(*given, target=y if self._is_last else None, losses=losses)
        loss = torch.stack(losses).detach().mean() / REPLICAS if self._is_last else torch.zeros(())
        dist.all_reduce(loss)
        return loss


def train_with_one_line(mesh: DeviceMesh, steps: int) -> list[tuple[float, float]]:
    """The loss and the norm of each step."""
    stages, found = Stages(mesh), []
    optimizers = optimizer_of_each(stages.parts)
    for step in range(steps):
        optimizers.zero_grad()
        loss = stages.backward(step)
        norm = clip_grad_norm_(stages.params, MAX_NORM, dim="global", process_group=stages.group)  # the line
        optimizers.step()
        found.append((loss.item(), norm.item()))
    return found


def train_with_a_chain(stages: Stages, optimizers: Optimizers, steps: range) -> list[tuple[float, float]]:
    """The loss and the norm of each step."""
    found: list[tuple[float, float]] = []
    for step in steps:
        optimizers.zero_grad()
        loss = stages.backward(step)
        optimizers.step()  # clips
        ((_, optimizer),) = optimizers.pairs
        assert isinstance(optimizer, Modular)
        found.append((loss.item(), optimizer.metrics()["clip_norm/norm"].item()))
    return found


def train_and_resume(mesh: DeviceMesh, steps: int, folder: Path) -> tuple[list[tuple[float, float]], bool]:
    """The loss and the norm of each step, and whether a run that was stopped and resumed took the same steps."""
    half = steps // 2
    stages = Stages(mesh)
    optimizers = one_optimizer(stages.parts, stages.group)
    found = train_with_a_chain(stages, optimizers, range(half))
    state_dict_saver.save({"model": joined(stages.parts).state_dict(), "optimizer": optimizers}, checkpoint_id=folder)
    found += train_with_a_chain(stages, optimizers, range(half, steps))

    resumed = Stages(mesh)
    optimizers = one_optimizer(resumed.parts, resumed.group)
    state_dict_loader.load({"model": joined(resumed.parts).state_dict(), "optimizer": optimizers}, checkpoint_id=folder)
    again = train_with_a_chain(resumed, optimizers, range(half, steps))
    return found, again == found[half:]


def train_in_one_process(steps: int) -> list[tuple[float, float]]:
    """The loss and the norm of each step of the whole model."""
    model, found = Part(*LAYERS), []
    ((_, optimizer),) = one_optimizer([model], None).pairs
    assert isinstance(optimizer, Modular)
    for step in range(steps):
        optimizer.zero_grad()
        x, y = batch(step)
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        found.append((loss.item(), optimizer.metrics()["clip_norm/norm"].item()))
    return found


def process(rank: int, steps: int, folder: str) -> None:
    """What each of the four processes does."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=STAGES * REPLICAS)
    mesh = init_device_mesh("cpu", (STAGES, REPLICAS), mesh_dim_names=("pp", "dp"))
    found = train_with_one_line(mesh, steps), *train_and_resume(mesh, steps, Path(folder, "checkpoint"))
    if rank == 0:
        torch.save(found, Path(folder, "found.pt"))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30, help="training steps (default: %(default)s)")
    steps = max(parser.parse_args().steps, 2)
    with tempfile.TemporaryDirectory() as folder:
        start_processes(process, (steps, folder), STAGES * REPLICAS, start_method="forkserver")
        by_line, by_chain, same = torch.load(Path(folder, "found.pt"))
    alone = train_in_one_process(steps)
    print(f"{'':6}  {'torch, and one line':>21}  {'one Modular':>21}  {'one process':>21}")
    print(f"{'step':>6}" + f"  {'loss':>10} {'norm':>10}" * 3)
    for step in [*range(0, steps, max(steps // 8, 1)), steps - 1]:
        shown = "".join(f"  {loss:10.5f} {norm:10.5f}" for loss, norm in (by_line[step], by_chain[step], alone[step]))
        print(f"{step:6}{shown}")
    clipped = sum(norm > MAX_NORM for _, norm in by_chain)
    print(f"\nClipped {clipped} of {steps} steps.")
    print(f"Stopped at step {steps // 2} and resumed: {'the same' if same else 'DIFFERENT'} losses and norms.")


if __name__ == "__main__":
    main()
