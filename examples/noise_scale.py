"""Measure the gradient noise scale from the norms of single samples, and compare it with the whole training set.

The gradient noise scale says how large a batch is useful. It is the trace of the covariance of the samples' gradients,
divided by the squared norm of their mean. In a batch much smaller than it, the noise is larger than the gradient. In a
batch much larger than it, more samples change little. One backward of `PerSampleGradientClipper` without a limit gives
what is needed: the norms n of B samples, and the norm of their mean gradient g.

    trace  = (mean n^2 - |g|^2) B / (B - 1)
    square = (B |g|^2 - mean n^2) / (B - 1)

Both are right on average, but not in one batch, so that each is averaged over batches before one is divided by the
other. Without norms of samples, the batch is split into micro-batches, whose gradients take the place of n.

The program trains three networks on the digits that ship inside scikit-learn. It then stops, draws batches with
replacement, and prints three noise scales: that of all samples, the one by norms, and the one by four micro-batches.
It takes a minute on one core. A quick run is ``--batches 20 --seeds 1``, whose values are far off.
"""

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

from torchzero_clip import ConstantFlatClipper, PerSampleGradientClipper

BATCH, PARTS = 64, 4


class Attention(nn.Module):
    """A transformer layer over the rows of an image."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.head = nn.Linear(8, 32), nn.Linear(8 * 32, 10)
        self.layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        """Return the scores of the digits."""
        return self.head(self.layer(self.rows(x.squeeze(1))).flatten(1))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def cnn() -> nn.Module:
    layers = nn.Conv2d(1, 16, 3), nn.GroupNorm(4, 16), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.ReLU(), nn.Flatten()
    return nn.Sequential(*layers, nn.Linear(16 * 4 * 4, 10))


MODELS: dict[str, Callable[[], nn.Module]] = {"mlp": mlp, "cnn": cnn, "transformer": Attention}


@dataclass
class NoiseScale:
    """Averages of the two parts over batches.

    Args:
        count: The number of gradients whose norms are given in each batch.
    """

    count: int
    trace: float = 0.0
    square: float = 0.0

    def add(self, norms: Tensor, mean: Tensor) -> None:
        """Add a batch, from the norms of its samples, or of its parts, and the norm of the mean gradient."""
        squares, joint, count = norms.double().square().mean().item(), mean.double().square().item(), self.count
        self.trace += (squares - joint) * count / (count - 1)
        self.square += (count * joint - squares) / (count - 1)

    @property
    def value(self) -> float:
        """In gradients whose norms were given; nan if the average gradient cannot be told from the noise."""
        return self.trace / self.square if self.square > 0 else math.nan


def gradients(clipper: PerSampleGradientClipper, model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    """Set `.grad` to the mean gradient, and return the norms of the samples."""
    model.zero_grad()
    return clipper.backward(F.cross_entropy(model(images), labels, reduction="none")).norms


def norm_of_mean(model: nn.Module) -> Tensor:
    return nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])


def measure(name: str, steps: int, batches: int, seed: int) -> dict[str, float]:
    """The noise scale after some steps of training, in samples, by each method."""
    torch.manual_seed(seed)
    pixels, digits = load_digits(return_X_y=True)
    images, labels = torch.tensor(pixels, dtype=torch.float32).view(-1, 1, 8, 8) / 16, torch.tensor(digits)
    model = MODELS[name]()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    clipper = PerSampleGradientClipper(model, ConstantFlatClipper(math.inf))
    for _ in range(steps):
        batch = torch.randint(len(labels), (BATCH,))
        gradients(clipper, model, images[batch], labels[batch])
        optimizer.step()

    norms = gradients(clipper, model, images, labels).double()
    joint = norm_of_mean(model).double().square().item()
    found = {"all samples": norms.square().mean().item() / joint - 1}
    by_norms, by_parts = NoiseScale(BATCH), NoiseScale(PARTS)
    for _ in range(batches):
        batch = torch.randint(len(labels), (BATCH,))
        parts: list[Tensor] = []
        for part in batch.split(BATCH // PARTS):
            gradients(clipper, model, images[part], labels[part])
            parts.append(norm_of_mean(model))
        norms = gradients(clipper, model, images[batch], labels[batch])
        by_norms.add(norms, norm_of_mean(model))
        by_parts.add(torch.stack(parts), norm_of_mean(model))
    return {**found, "norms": by_norms.value, "four micro-batches": by_parts.value * BATCH / PARTS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100, help="training steps (default: %(default)s)")
    parser.add_argument("--batches", type=int, default=200, help="batches to average over (default: %(default)s)")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each network (default: %(default)s)")
    args = parser.parse_args()
    torch.set_num_threads(1)  # so small a model gains nothing from more
    print(f"Gradient noise scale after {args.steps} steps, from {args.batches} batches of {BATCH} samples\n")
    print(f"{'network':12} {'seed':>4} {'all samples':>12} {'norms':>12} {'four micro-batches':>20}")
    for name in MODELS:
        for seed in range(args.seeds):
            found = measure(name, args.steps, args.batches, seed)
            values = zip(found.values(), (12, 12, 20), strict=True)
            print(f"{name:12} {seed:4} " + " ".join(f"{value:{width}.0f}" for value, width in values))


if __name__ == "__main__":
    main()
