"""Draws the pictures of the documentation: ``python docs/plots.py``."""

from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import nn

from torchzero_clip import ClipNorm, ClipValue, Modular, Transform

IMAGES = Path(__file__).parent / "img"


def applied(transform: Transform, values: torch.Tensor) -> torch.Tensor:
    """What the transform makes of each value, as the gradient of a parameter of its own."""
    params = [nn.Parameter(torch.zeros(1)) for _ in values]
    for param, value in zip(params, values, strict=True):
        param.grad = value.reshape(1).clone()
    Modular(params, transform).step()
    return torch.stack([-param.detach() for param in params]).flatten()


def draw(name: str, transform: Transform, values: torch.Tensor, what: str) -> None:
    figure = Figure(figsize=(4.5, 3), layout="constrained")
    axes = figure.subplots()
    axes.plot(values, values, color="0.75", linestyle="--", linewidth=1, label="unchanged")
    axes.plot(values, applied(transform, values), label=repr(transform))
    axes.set_xlabel(f"{what} before")
    axes.set_ylabel(f"{what} after")
    axes.legend()
    figure.savefig(IMAGES / name, dpi=110)


def main() -> None:
    draw("clip_norm.png", ClipNorm(1), torch.linspace(0, 3, 61), "norm")
    draw("clip_value.png", ClipValue(1), torch.linspace(-3, 3, 121), "element")


if __name__ == "__main__":
    main()
