"""Fit a function while one batch in fifty is corrupted, with fixed limits and with limits that follow the gradients.

A fixed limit has to be found: without one the corrupted batches ruin the model, and with one that is far too small it
hardly learns. The growth transforms, with their defaults, end close to the best fixed limit.
"""

import argparse

import torch
from torch import Tensor, nn

from torchzero_clip import (
    SGD,
    ClipNorm,
    ClipNormByEMA,
    ClipNormGrowth,
    ClipValueByEMA,
    ClipValueGrowth,
    Modular,
    NormalizeByEMA,
    Transform,
)

CHAINS: dict[str, list[Transform]] = {
    "no clipping": [],
    "ClipNorm(10)": [ClipNorm(10)],
    "ClipNorm(1)": [ClipNorm(1)],
    "ClipNorm(0.01)": [ClipNorm(0.01)],
    "ClipNormGrowth()": [ClipNormGrowth()],
    "ClipValueGrowth()": [ClipValueGrowth()],
    "ClipValueByEMA(0.9)": [ClipValueByEMA(0.9)],
    "ClipNormByEMA(0.9)": [ClipNormByEMA(0.9)],
    "NormalizeByEMA(0.9)": [NormalizeByEMA(0.9)],
}


def target(x: Tensor) -> Tensor:
    """What is to be learned."""
    return 10 * torch.sin(3 * x[:, :1]) + 5 * x[:, 1:] ** 2


def train(chain: list[Transform], steps: int) -> tuple[float, float]:
    """Return the loss on clean data, halfway and at the end."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = Modular(model, chain, SGD(0.01, momentum=0.9))
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    held_out = torch.rand(1000, 2) * 2 - 1
    losses: list[float] = []
    for step in range(1, steps + 1):
        x = torch.rand(64, 2) * 2 - 1
        y = target(x)
        if step % 50 == 0:
            y = y[torch.randperm(len(y))] * 30  # the labels of other examples, in other units
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        scheduler.step()
        if step in (steps // 2, steps):
            with torch.no_grad():
                losses.append(nn.functional.mse_loss(model(held_out), target(held_out)).item())
    return losses[0], losses[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000)
    args = parser.parse_args()
    print(f"{'loss on clean data':22} {'halfway':>9} {'at the end':>11}")
    for name, chain in CHAINS.items():
        halfway, end = train(chain, args.steps)
        print(f"  {name:20} {halfway:9.3f} {end:11.3f}")


if __name__ == "__main__":
    main()
