"""Train with differential privacy: draw, clip, release, step, and account for what was released.

It needs `pip install ".[private]"`, in an environment of its own because dp-accounting needs an old version of attrs.
"""

import argparse
import math
import random
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing.spawn import start_processes
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from torchzero_clip import AdamW, ClippingResult, ConstantFlatClipper, Modular, PrivateGradientClipper
from torchzero_clip.private import epsilon, noise_multiplier, poisson_loader

SIZE, RATE, DELTA, LIMIT = 4000, 0.05, 1e-5, 1.0


class QuantileLimit:
    """Moves the limit towards a quantile of the norms, which a second release with noise tells.

    The clipper adds more noise to the gradients for it, and counts both releases of a step as one.

    Source: Andrew et al., [Differentially private learning with adaptive
    clipping](https://arxiv.org/abs/1905.03871), 2021.
    """

    def __init__(self, clipper: PrivateGradientClipper, *, count_noise: float, quantile: float = 0.5) -> None:
        clipper.second_noise_multiplier = 2 * count_noise  # a sample changes the count by 1/2
        self._clipper = clipper
        self._count_noise = count_noise
        self._quantile = quantile
        self._count = 0.0

    def add(self, result: ClippingResult) -> None:
        """Count the samples within the limit. A sample counts +1/2 or -1/2, so that one moves the count by 1/2."""
        within = result.norms <= float(self._clipper.norm_clipper.thresholds[0])
        self._count += int(within.sum()) - len(within) / 2

    def step(self) -> None:
        """Release the share of samples within the limit, and move the limit. Call it after `pre_step`."""
        noise = random.SystemRandom().gauss(0.0, self._count_noise)
        share = (self._count + noise) / self._clipper.expected_batch_size + 0.5
        limit = float(self._clipper.norm_clipper.thresholds[0])
        self._clipper.norm_clipper = ConstantFlatClipper(limit * math.exp(0.2 * (self._quantile - share)))
        self._count = 0.0


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(SIZE, 16, generator=generator)
    return x, (x[:, :4].sum(1) + 0.3 * torch.randn(SIZE, generator=generator) > 0).long()


def train(
    steps: int, multiplier: float, quantile: bool = False, sharded: bool = False
) -> tuple[float, PrivateGradientClipper]:
    """Return the accuracy, which is private too because it is computed from the data, and the clipper.

    Several processes hold copies of the model, or shards of it.
    """
    torch.manual_seed(0)
    x, y = data()
    inner = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 2))
    if sharded:
        fully_shard(inner)
    model = DistributedDataParallel(inner) if dist.is_initialized() and not sharded else inner
    optimizer = Modular(inner, AdamW(lr=0.01))
    clipper = PrivateGradientClipper(
        model, ConstantFlatClipper(LIMIT), noise_multiplier=multiplier, expected_batch_size=RATE * SIZE
    )
    limit = QuantileLimit(clipper, count_noise=RATE * SIZE / 20) if quantile else None
    for inputs, targets in poisson_loader(TensorDataset(x, y), sample_rate=RATE, steps=steps):
        result = clipper.backward(F.cross_entropy(model(inputs), targets, reduction="none"))
        clipper.pre_step()
        if limit is not None:
            limit.add(result)
            limit.step()
        optimizer.step()
    with torch.no_grad():
        accuracy = (inner(x).argmax(1) == y).double().mean().item()
    return accuracy, clipper


def process(rank: int, steps: int, multiplier: float, processes: int, folder: str, sharded: bool) -> None:
    """What each process does."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=processes)
    accuracy, clipper = train(steps, multiplier, sharded=sharded)
    torch.save({"accuracy": accuracy, "clipper": clipper.state_dict()}, Path(folder, f"{rank}.pt"))
    dist.barrier()
    dist.destroy_process_group()


def train_in_processes(steps: int, multiplier: float, processes: int, sharded: bool) -> list[dict[str, object]]:
    with tempfile.TemporaryDirectory() as folder:
        arguments = steps, multiplier, processes, folder, sharded
        start_processes(process, arguments, processes, start_method="forkserver")
        return [torch.load(Path(folder, f"{rank}.pt"), weights_only=True) for rank in range(processes)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200, help="training steps (default: %(default)s)")
    parser.add_argument("--epsilon", type=float, default=3.0, help="the target (default: %(default)s)")
    arguments = parser.parse_args()
    steps = max(arguments.steps, 1)
    multiplier = noise_multiplier(epsilon=arguments.epsilon, delta=DELTA, sample_rate=RATE, steps=steps)
    print(f"noise multiplier {multiplier:.3f} for epsilon {arguments.epsilon} at delta {DELTA}")
    for name, quantile in (("one limit:     ", False), ("quantile limit:", True)):
        accuracy, clipper = train(steps, multiplier, quantile)
        spent = epsilon(clipper, delta=DELTA, sample_rate=RATE)
        print(f"{name} accuracy {accuracy:.3f}, epsilon {spent:.3f}, {clipper.norm_clipper}")
    for name, sharded in (("two copies:    ", False), ("two shards:    ", True)):
        found = train_in_processes(steps, multiplier, 2, sharded)
        print(f"{name} accuracy {found[0]['accuracy']:.3f}, the same model: {found[0] == found[1]}")


if __name__ == "__main__":
    main()
