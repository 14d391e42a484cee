"""Fit a function with a high learning rate, with a limit on gradient norms that is constant or grows from a small one.

The first gradients of a fresh model are large and say little, and with a high learning rate they do lasting harm. A
small limit keeps them from it, but slows the rest of the run down as well. A limit that grows does only the first: it
ends near the best fixed limit, which one would have to search for.
"""

import argparse
from collections.abc import Callable

import torch
from torch import Tensor, nn

from torchzero_clip import SGD, ClipNorm, Modular, as_lr

SMALL, LARGE = 0.05, 5.0


def target(x: Tensor) -> Tensor:
    """What is to be learned."""
    return torch.sin(3 * x[:, :1]) * x[:, 1:]


def growing(steps: int) -> Callable[[int], float]:
    """A limit that goes from small to large in a number of steps."""
    return lambda step: SMALL + (LARGE - SMALL) * min(1.0, step / steps)


def train(limit: float | Callable[[int], float], steps: int, seed: int, warm_up: int = 0) -> float:
    """Return the loss at the end; ``warm_up`` lets a scheduler of torch change the limit instead."""
    torch.manual_seed(seed)
    layers = [nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1)]
    model = nn.Sequential(*layers)
    for param in model.parameters():
        nn.init.normal_(param, std=0.5)
    optimizer = Modular(model, ClipNorm(limit, dim="global"), SGD(lr=0.3, momentum=0.9))
    scheduler = None
    if warm_up:
        limits = as_lr(optimizer, "max_norm")
        scheduler = torch.optim.lr_scheduler.LinearLR(limits, SMALL / LARGE, total_iters=warm_up)
    x = torch.rand(1000, 2) * 2 - 1
    for _ in range(steps):
        batch = torch.rand(64, 2) * 2 - 1
        optimizer.zero_grad()
        nn.functional.mse_loss(model(batch), target(batch)).backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
    with torch.no_grad():
        return nn.functional.mse_loss(model(x), target(x)).item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400)
    steps: int = parser.parse_args().steps
    runs: dict[str, Callable[[int], float]] = {
        f"ClipNorm({SMALL})": lambda seed: train(SMALL, steps, seed),
        f"ClipNorm({LARGE})": lambda seed: train(LARGE, steps, seed),
        "ClipNorm(1.0)": lambda seed: train(1.0, steps, seed),
        f"a function, {SMALL} to {LARGE}": lambda seed: train(growing(steps // 2), steps, seed),
        f"LinearLR, {SMALL} to {LARGE}": lambda seed: train(LARGE, steps, seed, warm_up=steps // 2),
    }
    print(f"{'median loss at the end, 3 seeds':34}")
    for name, run in runs.items():
        print(f"  {name:32} {torch.tensor([run(seed) for seed in range(3)]).median().item():9.4f}")


if __name__ == "__main__":
    main()
