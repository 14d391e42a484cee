"""Train a new head on a frozen body, then unfreeze the body with a smaller learning rate.

The body has learned the digits 0 to 4, and the new head learns 5 to 9. While the body is frozen, its parameters have no
gradient and no state, and do not count in the joint norm. `add_param_group` gives the unfrozen body a learning rate of
its own. The head goes on with its averages.
"""

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

from torchzero_clip import AdamW, ClipNorm, Modular


def digits(first: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Images and labels of five digits: for training, and held out."""
    pixels, labels = load_digits(return_X_y=True)
    images, targets = torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(labels) - first
    own = (targets >= 0) & (targets < 5)
    images, targets = images[own], targets[own]
    return images[:600], targets[:600], images[600:], targets[600:]


def train(model: nn.Module, optimizer: Modular, steps: int, first: int) -> float:
    """Train, and return the accuracy on digits that were held out."""
    images, targets, held_out, truth = digits(first)
    for _ in range(steps):
        batch = torch.randint(len(images), (32,))
        optimizer.zero_grad()
        F.cross_entropy(model(images[batch]), targets[batch]).backward()
        optimizer.step()
    with torch.no_grad():
        return (model(held_out).argmax(dim=1) == truth).float().mean().item()


def run(steps: int) -> list[tuple[str, float, list[float]]]:
    """The accuracy and the learning rates of each phase."""
    torch.manual_seed(0)
    body = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 16), nn.ReLU())
    report: list[tuple[str, float, list[float]]] = []

    def note(name: str, accuracy: float, optimizer: Modular) -> None:
        report.append((name, accuracy, [group["lr"] for group in optimizer.param_groups]))

    model = nn.Sequential(body, nn.Linear(16, 5))
    optimizer = Modular(model, ClipNorm(1, dim="global"), AdamW(lr=3e-3))
    note("the body learns 0 to 4", train(model, optimizer, steps, 0), optimizer)

    model[1] = nn.Linear(16, 5)
    body.requires_grad_(False)
    optimizer = Modular(model[1].parameters(), ClipNorm(1, dim="global"), AdamW(lr=3e-3))
    note("a new head learns 5 to 9", train(model, optimizer, steps, 5), optimizer)

    body.requires_grad_(True)
    optimizer.add_param_group({"params": body.parameters(), "lr": 1e-3})
    note("the body is unfrozen", train(model, optimizer, steps, 5), optimizer)
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200, help="steps of each phase (default: %(default)s)")
    torch.set_num_threads(1)
    for name, accuracy, rates in run(parser.parse_args().steps):
        print(f"{name:26} accuracy {accuracy:.1%}, learning rates {rates}")


if __name__ == "__main__":
    main()
