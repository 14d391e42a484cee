"""Subtract from each gradient its mean before SGD: gradient centralization.

`Centralize(dim=0, inverse_dims=True)` gives the incoming weights of each unit a gradient with a mean of 0, as in the
paper (Yong et al., https://arxiv.org/abs/2004.01461). It acts on matrices only. A network learns 200 of the digits of
scikit-learn.
"""

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

from torchzero_clip import SGD, Centralize, ClipNorm, Modular, Transform

CHAINS: dict[str, list[Transform]] = {
    "SGD": [],
    "Centralize, SGD": [Centralize(dim=0, inverse_dims=True).only(lambda p: p.ndim >= 2)],
}


def train(chain: list[Transform], steps: int, seed: int) -> float:
    """Return the accuracy on digits that were held out."""
    torch.manual_seed(seed)
    pixels, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels))
    images, targets = torch.tensor(pixels, dtype=torch.float32)[order] / 16, torch.tensor(labels)[order]
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = Modular(model, chain, ClipNorm(1, dim="global"), SGD(0.1, momentum=0.9))
    for _ in range(steps):
        batch = torch.randint(200, (32,))
        optimizer.zero_grad()
        F.cross_entropy(model(images[batch]), targets[batch]).backward()
        optimizer.step()
    with torch.no_grad():
        return (model(images[200:]).argmax(dim=1) == targets[200:]).float().mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=6)
    args = parser.parse_args()
    torch.set_num_threads(1)
    found = {
        name: torch.tensor([train(chain, args.steps, seed) for seed in range(args.seeds)])
        for name, chain in CHAINS.items()
    }
    print(f"{'accuracy on held-out digits':28} {'mean':>7} {'worst':>7} {'best':>7}")
    for name, values in found.items():
        print(f"  {name:26} {values.mean():7.2%} {values.min():7.2%} {values.max():7.2%}")


if __name__ == "__main__":
    main()
