"""A GAN learns a ring of eight Gaussians, with one optimizer, and one limit, for each of its two networks.

Each network clips its own gradients. Points that the generator draws are good if they are
within three standard deviations of a center; a center counts as found if at least one in fifty points is near it.
"""

import argparse
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchzero_clip import Adam, ClipNorm, Modular, Transform

CENTERS = torch.stack([torch.tensor([math.cos(math.tau * i / 8), math.sin(math.tau * i / 8)]) for i in range(8)])
SPREAD, NOISE, BATCH = 0.05, 4, 128


def limits(value: float | None) -> list[Transform]:
    return [] if value is None else [ClipNorm(value, dim="global")]


def network(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, outputs))


def real() -> Tensor:
    return CENTERS[torch.randint(8, (BATCH,))] + SPREAD * torch.randn(BATCH, 2)


def train(limit: float | None, steps: int, seed: int) -> tuple[float, int, float]:
    """Return the share of good points, how many centers were found, and the largest norm of the discriminator."""
    torch.manual_seed(seed)
    generator, discriminator = network(NOISE, 2), network(2, 1)
    of_generator = Modular(generator, *limits(limit), Adam(lr=2e-3, betas=(0.5, 0.999)))
    of_discriminator = Modular(discriminator, *limits(limit), Adam(lr=2e-3, betas=(0.5, 0.999)))
    largest = 0.0
    for _ in range(steps):
        made = generator(torch.randn(BATCH, NOISE))
        of_discriminator.zero_grad()  # the generator's backward has left gradients here
        loss = F.softplus(-discriminator(real())).mean() + F.softplus(discriminator(made.detach())).mean()
        loss.backward()
        norm = torch.nn.utils.get_total_norm([p.grad for p in discriminator.parameters() if p.grad is not None])
        largest = max(largest, norm.item())
        of_discriminator.step()
        of_generator.zero_grad()
        F.softplus(-discriminator(made)).mean().backward()
        of_generator.step()
    with torch.no_grad():
        distance = torch.cdist(generator(torch.randn(4000, NOISE)), CENTERS)
    good = distance.min(dim=1).values < 3 * SPREAD
    nearest = torch.bincount(distance.argmin(dim=1)[good], minlength=8)
    return good.float().mean().item(), int((nearest >= 80).sum()), largest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seeds", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{'':20}{'good points':>12}{'centers':>9}{'largest norm':>14}")
    for name, limit in {"no limit": None, "a limit for each": 0.1}.items():
        runs = torch.tensor([train(limit, args.steps, seed) for seed in range(args.seeds)])
        good, centers, _ = runs.mean(dim=0).tolist()
        print(f"  {name:18}{good:12.1%}{centers:9.1f}{runs[:, 2].max().item():14.1f}")


if __name__ == "__main__":
    main()
