"""Resume a run with another chain: a clip that learns its limit joins after a first phase, and the old clip leaves.

Adam goes on with its averages, and every setting that stays keeps its value from the checkpoint.
"""

import argparse
import io

import torch
from torch import Tensor, nn

from torchzero_clip import Adam, ClipNorm, ClipNormGrowth, Modular, Transform


def batch(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    x = torch.randn(64, 4, generator=generator)
    return x, x.sum(dim=1, keepdim=True).sin()


def train(model: nn.Module, optimizer: Modular, generator: torch.Generator, steps: int) -> None:
    for _ in range(steps):
        x, y = batch(generator)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()


def resumed(model: nn.Module, checkpoint: bytes, *chain: Transform, **changes: list[str]) -> Modular:
    """An optimizer of another chain that goes on from a checkpoint."""
    optimizer = Modular(model, *chain)
    optimizer.load_state_dict(torch.load(io.BytesIO(checkpoint), weights_only=True), **changes)
    return optimizer


def saved(optimizer: Modular) -> bytes:
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    return file.getvalue()


def run(steps: int) -> dict[str, str]:
    """Return what the error of a plain load says, and what the groups and averages hold after each change."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = Modular(model, ClipNorm(0.5), Adam(0.01))
    train(model, optimizer, generator, steps)
    report: dict[str, str] = {}

    grown = ClipNormGrowth(mul=1.1)
    try:
        resumed(model, saved(optimizer), grown, ClipNorm(9.0), Adam())
    except ValueError as error:
        report["a plain load"] = str(error)
    before = next(iter(optimizer.state.values()))["adam/exp_avg"]
    optimizer = resumed(model, saved(optimizer), grown, ClipNorm(9.0), Adam(), new=["clip_norm_growth"])
    kept = torch.equal(next(iter(optimizer.state.values()))["adam/exp_avg"], before)
    report["with new="] = f"max_norm {optimizer.param_groups[0]['max_norm']}, averages kept: {kept}"

    train(model, optimizer, generator, steps)
    optimizer = resumed(model, saved(optimizer), grown, Adam(), dropped=["clip_norm"])
    train(model, optimizer, generator, steps)
    report["with dropped="] = ", ".join(optimizer.transforms)
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    args = parser.parse_args()
    for name, value in run(args.steps).items():
        print(f"{name}:\n    {value}")


if __name__ == "__main__":
    main()
