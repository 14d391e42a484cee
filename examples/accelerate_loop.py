"""A loop with Accelerate: accumulation, a scheduler, the metrics of the chain, and a resume with the same bits.

The chain clips within `optimizer.step()`, after the last micro-batch, so `accelerator.clip_grad_norm_` is not called.
`metrics(optimizer)` finds the chain under the wrapper that `accelerator.prepare` puts around it.
"""

import argparse
import tempfile
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from torchzero_clip import AdamW, ClipNorm, ClipNormGrowth, Modular
from torchzero_clip.integrations import metrics

MICRO_BATCHES = 4


class Run:
    """A model, its optimizer, and what Accelerate makes of them."""

    def __init__(self, steps: int) -> None:
        torch.manual_seed(0)
        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=MICRO_BATCHES)
        model = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
        optimizer = Modular(model, ClipNorm(1, dim="global"), ClipNormGrowth(), AdamW(lr=1e-2))
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        prepared: Any = self.accelerator.prepare(model, optimizer, schedule)
        self.model, self.optimizer, self.schedule = prepared

    def train(self, first: int, end: int) -> list[float]:
        """The norms before clipping of the steps from ``first`` to before ``end``."""
        norms: list[float] = []
        for micro_step in range(first * MICRO_BATCHES, end * MICRO_BATCHES):
            x, y = batch(micro_step)
            with self.accelerator.accumulate(self.model):
                self.accelerator.backward(nn.functional.mse_loss(self.model(x), y))
                self.optimizer.step()
                self.schedule.step()
                self.optimizer.zero_grad()
            if self.accelerator.sync_gradients:
                norms.append(metrics(self.optimizer)["clip_norm/norm"].item())
        return norms

    def loss(self) -> float:
        """The error on points without noise."""
        x = torch.rand(2000, 2, generator=torch.Generator().manual_seed(1)) * 2 - 1
        with torch.no_grad():
            return nn.functional.mse_loss(self.model(x), wave(x)).item()


def wave(x: Tensor) -> Tensor:
    return torch.sin(3 * x[:, :1]) * x[:, 1:]


def batch(number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    x = torch.rand(16, 2, generator=generator) * 2 - 1
    return x, wave(x) + 0.3 * torch.randn(16, 1, generator=generator)


def run(steps: int) -> tuple[float, list[float], bool]:
    """The loss and the norms of an uninterrupted run, and whether an interrupted one ends with the same bits."""
    half = max(steps // 2, 1)
    whole, first, second = Run(steps), Run(steps), Run(steps)
    norms = whole.train(0, steps)
    first.train(0, half)
    with tempfile.TemporaryDirectory() as folder:
        first.accelerator.save_state(folder)
        second.accelerator.load_state(folder)
    second.train(half, steps)
    same = all(torch.equal(a, b) for a, b in zip(whole.model.parameters(), second.model.parameters(), strict=True))
    return whole.loss(), norms, same


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200, help="training steps (default: %(default)s)")
    steps = max(parser.parse_args().steps, 2)
    loss, norms, same = run(steps)
    clipped = sum(norm > 1 for norm in norms) / len(norms)
    print(f"loss {loss:.4f}; {clipped:.0%} of {len(norms)} steps were clipped")
    print(f"Stopped at step {steps // 2} and resumed: the parameters are {'the same bits' if same else 'DIFFERENT'}.")


if __name__ == "__main__":
    main()
