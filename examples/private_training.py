"""Train with differential privacy: draw, clip, release, step, and account for what was released.

Each sample is drawn with the same probability in each step, by random numbers of the operating system. The clipper
releases the gradient with noise. A library, dp-accounting, computes epsilon, and the noise for a target epsilon.
Install it by `pip install ".[private]"` in an environment of its own, because it needs an old version of attrs.
"""

import argparse
import math
import os
import random
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.spawn import start_processes
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from torchzero_clip import AdamW, ClippingResult, ConstantFlatClipper, Modular, PrivateGradientClipper

try:
    from dp_accounting import calibrate_dp_mechanism, dp_event  # pyright: ignore[reportMissingImports]
    from dp_accounting.pld import pld_privacy_accountant as pld  # pyright: ignore[reportMissingImports]
except ModuleNotFoundError as error:
    raise SystemExit('Install dp-accounting, in an environment of its own: pip install ".[private]"') from error

SIZE, RATE, DELTA, LIMIT = 4000, 0.05, 1e-5, 1.0


def draw(size: int, rate: float) -> Tensor:
    """The indices of the samples of this process, in a draw of all processes together (Poisson sampling)."""
    words = torch.frombuffer(bytearray(os.urandom(8 * size)), dtype=torch.int64)
    mask = (words & (2**53 - 1)).double() * 2.0**-53 < rate
    if not dist.is_initialized():
        return mask.nonzero()[:, 0]
    dist.broadcast(mask, 0)  # one draw: separate draws of shares would need a rate for each share
    return mask.nonzero()[dist.get_rank() :: dist.get_world_size(), 0]


def steps_of(releases: dict[float, int], rate: float) -> Any:
    """What was released, for an accountant: with each noise multiplier, a number of steps."""
    each = [
        dp_event.SelfComposedDpEvent(dp_event.PoissonSampledDpEvent(rate, dp_event.GaussianDpEvent(multiplier)), steps)
        for multiplier, steps in releases.items()
    ]
    return dp_event.ComposedDpEvent(each)


def epsilon(releases: dict[float, int], rate: float, delta: float) -> float:
    """The epsilon at delta, for add or remove one sample."""
    return pld.PLDAccountant().compose(steps_of(releases, rate)).get_epsilon(delta)


def calibrated(target: float, rate: float, steps: int, delta: float) -> float:
    """The noise multiplier with which so many steps have the target epsilon at most."""

    def event(multiplier: float) -> Any:
        return steps_of({multiplier: steps}, rate)

    return calibrate_dp_mechanism(pld.PLDAccountant, event, target, delta, tol=1e-4)


class QuantileLimit:
    """Moves the limit towards a quantile of the norms, which a second release with noise tells.

    Both releases of a step together are one with `noise_multiplier`: account for that, not for `clipper.releases`.

    Source: Andrew et al., [Differentially private learning with adaptive
    clipping](https://arxiv.org/abs/1905.03871), 2021.
    """

    def __init__(
        self, clipper: PrivateGradientClipper, noise_multiplier: float, *, count_noise: float, quantile: float = 0.5
    ) -> None:
        rest = noise_multiplier**-2 - (2 * count_noise) ** -2
        if not rest > 0:
            raise ValueError(f"count_noise must be above {noise_multiplier / 2}, got {count_noise}")
        clipper.noise_multiplier = rest**-0.5
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


def train(steps: int, noise_multiplier: float, quantile: bool = False) -> tuple[float, PrivateGradientClipper]:
    """Return the accuracy, which is private too because it is computed from the data, and the clipper."""
    torch.manual_seed(0)
    x, y = data()
    inner = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 2))
    model = DistributedDataParallel(inner) if dist.is_initialized() else inner
    optimizer = Modular(inner, AdamW(lr=0.01))
    clipper = PrivateGradientClipper(
        model, ConstantFlatClipper(LIMIT), noise_multiplier=noise_multiplier, expected_batch_size=RATE * SIZE
    )
    limit = QuantileLimit(clipper, noise_multiplier, count_noise=RATE * SIZE / 20) if quantile else None
    for _ in range(steps):
        drawn = draw(SIZE, RATE)
        result = clipper.backward(F.cross_entropy(model(x[drawn]), y[drawn], reduction="none"))
        clipper.pre_step()
        if limit is not None:
            limit.add(result)
            limit.step()
        optimizer.step()
    with torch.no_grad():
        accuracy = (inner(x).argmax(1) == y).double().mean().item()
    return accuracy, clipper


def process(rank: int, steps: int, noise_multiplier: float, processes: int, folder: str) -> None:
    """What each process does."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=processes)
    accuracy, clipper = train(steps, noise_multiplier)
    torch.save({"accuracy": accuracy, "clipper": clipper.state_dict()}, Path(folder, f"{rank}.pt"))
    dist.barrier()
    dist.destroy_process_group()


def train_in_processes(steps: int, noise_multiplier: float, processes: int) -> list[dict[str, object]]:
    with tempfile.TemporaryDirectory() as folder:
        arguments = steps, noise_multiplier, processes, folder
        start_processes(process, arguments, processes, start_method="forkserver")
        return [torch.load(Path(folder, f"{rank}.pt"), weights_only=True) for rank in range(processes)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200, help="training steps (default: %(default)s)")
    parser.add_argument("--epsilon", type=float, default=3.0, help="the target (default: %(default)s)")
    arguments = parser.parse_args()
    steps = max(arguments.steps, 1)
    noise_multiplier = calibrated(arguments.epsilon, RATE, steps, DELTA)
    print(f"noise multiplier {noise_multiplier:.3f} for epsilon {arguments.epsilon} at delta {DELTA}")
    accuracy, clipper = train(steps, noise_multiplier)
    print(f"one limit:      accuracy {accuracy:.3f}, epsilon {epsilon(clipper.releases, RATE, DELTA):.3f}")
    accuracy, clipper = train(steps, noise_multiplier, quantile=True)
    spent = epsilon({noise_multiplier: sum(clipper.releases.values())}, RATE, DELTA)
    print(f"quantile limit: accuracy {accuracy:.3f}, epsilon {spent:.3f}, {clipper.norm_clipper}")
    found = train_in_processes(steps, noise_multiplier, 2)
    print(f"two processes:  accuracy {found[0]['accuracy']:.3f}, the same model: {found[0] == found[1]}")


if __name__ == "__main__":
    main()
