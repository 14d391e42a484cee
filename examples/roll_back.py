"""Skip bad steps, and go back to a checkpoint if too many come in a row.

The data comes in files, and one of them is broken: its values are in other units. `SkipStep` leaves out a step whose
norm is ten times the usual one, and raises when the sixth step in a row is bad. The loop then loads the last checkpoint
of model and optimizer, and goes on with the next file.
"""

import argparse
import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from torchzero_clip import AdamW, ClipNorm, Modular, SkipStep

FILES, BROKEN = 8, 5


def target(x: Tensor) -> Tensor:
    """What is to be learned."""
    return torch.sin(3 * x[:, :1]) + x[:, 1:] ** 2


def batches(file: int, count: int) -> Iterator[tuple[Tensor, Tensor]]:
    """The batches of a file."""
    generator = torch.Generator().manual_seed(file)
    for _ in range(count):
        x = torch.rand(64, 2, generator=generator) * 2 - 1
        yield x, target(x) * (1000 if file == BROKEN else 1)


def train(guarded: bool, steps: int) -> tuple[float, list[str]]:
    """Return the loss on clean data at the end, and what happened."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 1))
    gates = [SkipStep(max_ratio=10.0)] if guarded else []
    limit = 5 if guarded else None
    optimizer = Modular(model, gates, ClipNorm(1, dim="global"), AdamW(lr=0.01), max_consecutive_skips=limit)
    checkpoint: dict[str, Any] = {}
    events: list[str] = []
    for file in range(FILES):
        checkpoint = copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
        try:
            for x, y in batches(file, steps // FILES):
                optimizer.zero_grad()
                nn.functional.mse_loss(model(x), y).backward()
                optimizer.step()
        except RuntimeError as error:
            if "in a row" not in str(error):
                raise
            model.load_state_dict(checkpoint["model"])
            optimizer.load_state_dict(checkpoint["optimizer"])
            events.append(f"file {file}: {str(error).split('.')[0]}")
    x = torch.rand(1000, 2) * 2 - 1
    with torch.no_grad():
        return nn.functional.mse_loss(model(x), target(x)).item(), events


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=800)
    steps = parser.parse_args().steps
    torch.set_num_threads(1)
    for name, guarded in (("ClipNorm alone", False), ("SkipStep and going back", True)):
        loss, events = train(guarded, steps)
        print(f"{name:24} loss on clean data {loss:.4f}")
        for event in events:
            print(f"  {event}")


if __name__ == "__main__":
    main()
