"""Read the frequency of a noisy wave with a convolutional network, while five in a hundred targets are wildly wrong.

A limit on the gradient of the whole batch cannot tell good samples from bad ones. A limit on the gradient of each
sample bounds what a bad one can do. There is still one backward, for all samples together.
"""

import argparse
import time

import torch
from torch import Tensor, nn

from torchzero_clip import Adam, ClipNorm, ConstantFlatClipper, Modular, PerSampleGradientClipper, check_per_sample

LIMIT = 1.0


def waves(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Waves of 64 points and their frequencies, between 1 and 6."""
    frequency = 1 + 5 * torch.rand(count, 1, generator=generator)
    phase = 6.3 * torch.rand(count, 1, generator=generator)
    noise = 0.3 * torch.randn(count, 64, generator=generator)
    wave = torch.sin(6.3 * frequency * torch.linspace(0, 1, 64) + phase) + noise
    return wave[:, None], frequency


def spoiled(frequency: Tensor, generator: torch.Generator) -> Tensor:
    """The same with five in a hundred far off, all to the same side."""
    wrong = torch.rand(frequency.shape, generator=generator) < 0.05
    return torch.where(wrong, frequency + 50, frequency)


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv1d(1, 16, 7, stride=2, padding=3),
        nn.GroupNorm(4, 16),
        nn.ReLU(),
        nn.Conv1d(16, 32, 5, stride=2, padding=2),
        nn.GroupNorm(4, 32),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(512, 1),
    )


def losses_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return (model(batch[0]) - batch[1]).square().squeeze(1)


def train(method: str, steps: int) -> tuple[float, float, float]:
    """Return the error on clean data, the share of samples that were clipped, and the seconds for a step."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    model = network()
    optimizer = Modular(model, [ClipNorm(LIMIT, dim="global")] if method == "batch" else [], Adam(lr=0.003))
    clipper = PerSampleGradientClipper(model, ConstantFlatClipper(LIMIT)) if method == "sample" else None
    clipped, start = 0.0, time.perf_counter()
    for _ in range(steps):
        x, frequency = waves(64, generator)
        optimizer.zero_grad()
        losses = losses_of(model, (x, spoiled(frequency, generator)))
        if clipper is None:
            losses.mean().backward()
        else:
            result = clipper.backward(losses)
            clipped += (result.norms > LIMIT).float().mean().item() / steps
        optimizer.step()
    seconds = (time.perf_counter() - start) / steps
    with torch.no_grad():
        error = losses_of(model, waves(1000, generator)).mean().sqrt().item()
    return error, clipped, seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400)
    args = parser.parse_args()
    torch.set_num_threads(1)
    norms = check_per_sample(network(), waves(4, torch.Generator().manual_seed(1)), losses_of)
    print(f"checked against one backward per sample: {len(norms)} parameters agree\n")
    print(f"{'clipped':16} {'error on clean data':>20} {'samples clipped':>16} {'ms a step':>10}")
    for method, name in (("none", "nothing"), ("batch", "the batch"), ("sample", "each sample")):
        error, share, seconds = train(method, args.steps)
        print(f"  {name:14} {error:20.3f} {share:16.0%} {seconds * 1e3:10.1f}")


if __name__ == "__main__":
    main()
