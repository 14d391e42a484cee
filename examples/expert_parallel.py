"""Experts on processes of their own: dense layers and experts are sharded on two meshes, and clipped by one norm.

Four processes on the CPU train a small mixture of four experts. FSDP2 shards the dense layers over all four. Each pair
of processes has two of the experts, and each of these is sharded over the two pairs. A `Modular` needs no argument for
this, because the meshes of the parameters say which process holds what. One process trains the same model beside it.
"""

import argparse
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives  # torchtitan uses these too
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.multiprocessing.spawn import start_processes

from torchzero_clip import AdamW, ClipNorm, Modular

PROCESSES, HOLDERS, EXPERTS, WIDTH, BATCH = 4, 2, 4, 16, 64
"""Two neighbours hold all experts together; the other two processes hold the same experts."""


class Experts(nn.Module):
    """Perceptrons, each with one hidden layer; a router chooses one for each row.

    A process that holds some of the experts applies them to the rows of its neighbours too.
    """

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Parameter(torch.randn(EXPERTS, WIDTH, 2 * WIDTH) / WIDTH**0.5)
        self.out = nn.Parameter(torch.randn(EXPERTS, 2 * WIDTH, WIDTH) / WIDTH**0.5)

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        """The sum of what the experts return, each times its weight, which is 0 for those that were not chosen."""
        into, out = self.into, self.out
        if not isinstance(into, DTensor) or not isinstance(out, DTensor):
            return torch.einsum("ebw,be->bw", (x @ into).relu() @ out, weights)
        group = into.device_mesh.get_group()
        own = slice(group.rank() * (EXPERTS // HOLDERS), (group.rank() + 1) * (EXPERTS // HOLDERS))
        x, weights = (collectives.all_gather_tensor_autograd(rows, 0, group) for rows in (x, weights))
        into, out = into.to_local(), out.to_local()
        own_part = torch.einsum("ebw,be->bw", (x @ into).relu() @ out, weights[:, own])
        return collectives.reduce_scatter_tensor_autograd(own_part, "sum", 0, group)


class Model(nn.Module):
    """Dense layers around the experts."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.router, self.last = nn.Linear(2, WIDTH), nn.Linear(WIDTH, EXPERTS), nn.Linear(WIDTH, 1)
        self.experts = Experts()

    def forward(self, x: Tensor) -> Tensor:
        """One number for each row."""
        x = self.first(x).tanh()
        probabilities = self.router(x).softmax(dim=1)
        best = nn.functional.one_hot(probabilities.argmax(dim=1), EXPERTS)
        return self.last(x + self.experts(x, probabilities * best))


def shard(model: Model) -> None:
    """Shard the experts over neighbours, each expert over the others that hold it, and all else over all processes."""
    everyone = init_device_mesh("cpu", (PROCESSES,), mesh_dim_names=("dp",))
    mesh = init_device_mesh("cpu", (PROCESSES // HOLDERS, HOLDERS), mesh_dim_names=("dp_of_experts", "ep"))
    experts = model.experts
    for name, param in list(experts.named_parameters()):
        setattr(experts, name, nn.Parameter(distribute_tensor(param.detach(), mesh["ep"], [Shard(0)])))
    sharded = fully_shard(experts, mesh=mesh["dp_of_experts"], shard_placement_fn=lambda _: Shard(1))
    sharded.set_gradient_divide_factor(PROCESSES)  # the loss is the mean over all processes
    sharded.set_force_sum_reduction_for_comms(True)  # gloo cannot divide
    fully_shard(model, mesh=everyone)  # but for the experts


def train(model: Model, steps: int, rank: int, ranks: int) -> list[tuple[float, float, float]]:
    """The loss, the norm and the factor of clipping in each step."""
    optimizer = Modular(model, ClipNorm(0.25, dim="global"), AdamW(lr=0.01), nonfinite="skip")
    found: list[tuple[float, float, float]] = []
    for step in range(steps):
        optimizer.zero_grad()
        x = torch.rand(BATCH, 2, generator=torch.Generator().manual_seed(step)) * 2 - 1
        x = x.chunk(ranks)[rank]
        loss = nn.functional.mse_loss(model(x), torch.sin(3 * x[:, :1]) * x[:, 1:])
        loss.backward()
        optimizer.step()
        whole = loss.detach() / ranks
        if ranks > 1:
            dist.all_reduce(whole)
        metrics = optimizer.metrics()
        found.append((whole.item(), metrics["clip_norm/norm"].item(), metrics["clip_norm/factor"].item()))
    return found


def layouts(model: Model) -> dict[str, str]:
    """How each kind of parameter is spread."""
    return {
        name: f"{param.device_mesh.mesh.tolist()}, {param.placements}"
        for name, param in model.named_parameters()
        if isinstance(param, DTensor) and name in ("first.weight", "experts.into")
    }


def process(rank: int, steps: int, folder: str) -> None:
    """What each of the four processes does."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=PROCESSES)
    model = Model()
    shard(model)
    found = train(model, steps, rank, PROCESSES)
    if rank == 0:
        torch.save((found, layouts(model)), Path(folder, "found.pt"))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30, help="training steps (default: %(default)s)")
    steps = max(parser.parse_args().steps, 1)
    with tempfile.TemporaryDirectory() as folder:
        start_processes(process, (steps, folder), PROCESSES, start_method="forkserver")
        several, spread = torch.load(Path(folder, "found.pt"))
    alone = train(Model(), steps, 0, 1)
    for name, layout in spread.items():
        print(f"{name}: mesh {layout}")
    print(f"\n{'':6}  {'four processes':>32}  {'one process':>32}")
    print(f"{'step':>6}" + f"  {'loss':>10} {'norm':>10} {'factor':>10}" * 2)
    for step in [*range(0, steps, max(steps // 8, 1)), steps - 1]:
        shown = (f"  {loss:10.5f} {norm:10.5f} {factor:10.5f}" for loss, norm, factor in (several[step], alone[step]))
        print(f"{step:6}" + "".join(shown))


if __name__ == "__main__":
    main()
