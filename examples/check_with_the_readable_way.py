"""Check a transform of your own: train with the fast way and with the readable way, and compare each step.

The transform treats each element on its own. It is a formula, with a faster form named `change`. The fast way runs
`change` and torch's fused kernel piece by piece. The readable way applies the formula to one whole tensor after the
other. If both ways agree up to rounding, the fast way is not the cause of a surprising result.
"""

import argparse
import math
import time
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from torchzero_clip import AdamW, ClipNorm, Elementwise, Modular
from torchzero_clip.checks import positive, unit_interval
from torchzero_clip.core.elements import Elements
from torchzero_clip.types import Setting


class ClipToUsual(Elementwise):
    """Clips each element to ``factor`` times the average of its magnitudes. The first update passes unchanged."""

    checks = {"factor": positive, "beta": unit_interval}
    keeps_finite = True
    keys = ("average",)

    def __init__(self, factor: float = 3.0, beta: float = 0.99) -> None:
        super().__init__({"factor": factor, "beta": beta})

    def start(self, x: Tensor, setting: Setting) -> Sequence[Tensor]:
        """The first averages."""
        return (x.abs(),)

    def formula(self, x: Tensor, state: Sequence[Tensor], setting: Setting) -> tuple[Tensor, Sequence[Tensor]]:
        """Move the averages towards the magnitudes, and clip the elements."""
        average = state[0].lerp(x.abs(), 1 - setting["beta"])
        limit = setting["factor"] * average
        return x.clamp(-limit, limit), (average,)

    def change(self, x: Tensor, result: Tensor, state: Sequence[Tensor], setting: Setting, at: Elements) -> Tensor:
        """Do the same with fewer passes over memory."""
        (average,) = state
        size = torch.abs(x, out=at.memory("size", x))
        at = at.only_finite(size)
        at.begin_(average, size)
        at.lerp_(average, size, 1 - setting["beta"])
        limit = torch.mul(average, setting["factor"], out=at.memory("limit", x))
        at.fill_new_(limit, torch.inf)
        count = at.count(at.compare(torch.gt, size, limit, size))
        at.clamp(x, torch.neg(limit, out=size), limit, result)
        return count


class Run:
    """A model, its optimizer, and the time that its steps took."""

    def __init__(self, *, fast: bool) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(32, 384), nn.Tanh(), nn.Linear(384, 384), nn.Tanh(), nn.Linear(384, 1))
        chain = (ClipNorm(1.0, dim="global"), ClipToUsual(), AdamW(1e-3))
        self.optimizer = Modular(self.model, *chain, fast=fast)
        self.seconds = 0.0

    def numbers(self) -> list[Tensor]:
        """The parameters, their state and the metrics."""
        states = [x for state in self.optimizer.state.values() for x in state.values() if isinstance(x, Tensor)]
        return [*self.model.parameters(), *states, *self.optimizer.metrics().values()]

    def step(self, inputs: Tensor, target: Tensor, *, with_inf: bool) -> float:
        """Take a step, and return the loss."""
        loss = nn.functional.mse_loss(self.model(inputs), target)
        self.optimizer.zero_grad()
        loss.backward()
        if with_inf:
            for param in self.model[0].parameters():
                param.grad = torch.full_like(param, torch.inf)
        start = time.perf_counter()
        self.optimizer.step()
        self.seconds += time.perf_counter() - start
        return loss.item()


def largest_difference(a: Tensor, b: Tensor) -> float:
    """The largest difference of finite numbers; inf if other numbers are finite."""
    if not torch.equal(a.isfinite(), b.isfinite()):
        return math.inf
    return torch.where(a.isfinite(), (a - b).abs(), 0.0).max().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    steps = parser.parse_args().steps
    fast, readable = Run(fast=True), Run(fast=False)
    for step in range(steps):
        inputs = torch.randn(64, 32)
        target = inputs[:, :4].prod(dim=1, keepdim=True).tanh()
        # copied before each step, because a difference in rounding would grow from step to step
        readable.model.load_state_dict(fast.model.state_dict())
        readable.optimizer.load_state_dict(fast.optimizer.state_dict())
        is_last = step == steps - 1  # an inf, which ends the training, takes other paths
        loss = fast.step(inputs, target, with_inf=is_last)
        readable.step(inputs, target, with_inf=is_last)
        pairs = zip(fast.numbers(), readable.numbers(), strict=True)
        difference = max(largest_difference(a, b) for a, b in pairs)
        if difference > 1e-5:
            raise SystemExit(f"step {step}: the ways differ by {difference:.1e}")
        if step % 50 == 0:
            clipped = fast.optimizer.metrics()["clip_to_usual/clipped"].item()
            print(f"step {step:3}: loss {loss:.4f}, clipped {clipped:6.2%}, the ways differ by {difference:.1e}")
    print(f"time of a step, readable / fast: {readable.seconds / fast.seconds:.1f}")


if __name__ == "__main__":
    main()
