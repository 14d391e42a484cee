"""Fit a function while one batch in fifty is corrupted and one in seventy overflows, with bad steps skipped or not.

Clipping bounds what a corrupted batch does, but takes a step in its direction all the same. Skipping takes none. What
overflows cannot be clipped at all.
"""

import argparse
import math

import torch
from torch import Tensor, nn

from torchzero_clip import Adam, ClipNorm, Modular, SkipStep, Transform

CHAINS: dict[str, tuple[list[Transform], bool]] = {
    "ClipNorm(1)": ([ClipNorm(1, dim="global")], False),
    'ClipNorm(1), nonfinite="skip"': ([ClipNorm(1, dim="global")], True),
    "SkipStep(max_ratio=10)": ([SkipStep(max_ratio=10.0)], False),
}
CLEAN = torch.rand(1000, 2, generator=torch.Generator().manual_seed(1)) * 2 - 1


def target(x: Tensor) -> Tensor:
    """What is to be learned."""
    return torch.sin(3 * x[:, :1]) + x[:, 1:] ** 2


def train(chain: list[Transform], skip: bool, steps: int) -> tuple[list[float], int]:
    """Return the losses on clean data, every ten steps and at the end, and how many steps were skipped."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = Modular(model, chain, Adam(lr=0.01), nonfinite="skip" if skip else "propagate")
    losses: list[float] = []
    for step in range(1, steps + 1):
        x = torch.rand(64, 2) * 2 - 1
        y = target(x)
        if step % 50 == 0:
            y = y[torch.randperm(len(y))] * 1000
        if step % 70 == 0:
            x = x / 0.0
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        if step % 10 == 0 or step == steps:
            with torch.no_grad():
                losses.append(nn.functional.mse_loss(model(CLEAN), target(CLEAN)).item())
    skipped = optimizer.metrics().get("skipped_steps", torch.tensor(0))
    return losses, int(skipped.item())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000)
    args = parser.parse_args()
    print(f"{'':32} {'loss on clean data':>19} {'skipped steps':>14}")
    for name, (chain, skip) in CHAINS.items():
        losses, skipped = train(chain, skip, args.steps)
        shown = "the model is NaN" if math.isnan(losses[-1]) else f"{losses[-1]:.4f}"
        print(f"  {name:30} {shown:>19} {skipped:14}")


if __name__ == "__main__":
    main()
