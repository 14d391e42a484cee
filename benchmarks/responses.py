"""How adaptive limits respond to noise, to a spike and to a lasting rise: ``python -m benchmarks.responses``.

Each transform gets the random gradients of two tensors with 500 elements in float64. Their joint norm varies by 20%
around 1 (log-normal). Nothing is trained or timed. The program prints the table of docs/adaptive.md.
``--plot responses.png`` also draws the picture.
"""

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor, nn
from tqdm import tqdm

from torchzero_clip import (
    LR,
    AdaGC,
    AutoClip,
    ClipByMaxEMA,
    ClipNorm,
    ClipNormGrowth,
    GradientStabilizer,
    Modular,
    SkipStep,
    SpikeAwareClip,
    Transform,
    ZClip,
)

CHAINS: dict[str, Callable[[], Transform]] = {
    'ClipNorm(1, dim="global")': partial(ClipNorm, 1, dim="global"),
    "ClipNormGrowth(parameterwise=False)": partial(ClipNormGrowth, parameterwise=False),
    "AutoClip()": AutoClip,
    "AutoClip(window=200)": partial(AutoClip, window=200),
    "ZClip(max_norm=None)": partial(ZClip, max_norm=None),
    "AdaGC()": AdaGC,
    "AdaGC(ratio=1.5)": partial(AdaGC, ratio=1.5),
    "GradientStabilizer()": GradientStabilizer,
    "ClipByMaxEMA()": ClipByMaxEMA,
    "SpikeAwareClip()": SpikeAwareClip,
    "Fira's limiter": partial(ClipNormGrowth, mul=1.01, min_value=1e-8, max_decay=None),
    "SkipStep(sigma=6.0)": partial(SkipStep, sigma=6.0),
}
SIZE, RISE, SPIKE, END = 500, 1000, 1500, 7000
AFTER = 20
"""How many steps are averaged after the spike. A limit follows the rise if their average does."""
WINDOWS = ((SPIKE - 20, SPIKE + AFTER), (RISE - 60, RISE + 300))
"""The steps in the picture: around the spike, and around the rise."""


@dataclass(frozen=True)
class Response:
    """The factors by which a transform changes the joint norms of both runs."""

    spiked: list[float]
    risen: list[float]

    def row(self, name: str) -> str:
        """The row of the table."""
        ordinary = self.spiked[RISE - 500 : SPIKE]
        clipped = mean([abs(factor - 1) > 1e-9 for factor in ordinary])
        calm = mean(self.spiked[SPIKE + 1 : SPIKE + AFTER + 1]) / mean(ordinary)
        level = 0.9 * mean(ordinary)
        steady = (
            step
            for step in range(RISE, END - AFTER)
            if self.risen[step] >= level and mean(self.risen[step : step + AFTER]) >= level
        )
        follows = next((f"{step - RISE:,}" for step in steady), "never")
        spike = f"{100 * self.spiked[SPIKE]:.1f}"
        return f"| `{name}` | {clipped:.0%} | {mean(ordinary):.2f} | {spike} | {calm:.1f} | {follows} |"


def factors(make: Callable[[], Transform], norms: Sequence[float]) -> list[float]:
    """The joint norm after the transform divided by that before it, for each step."""
    generator = torch.Generator().manual_seed(0)
    params = [nn.Parameter(torch.zeros(SIZE, dtype=torch.float64)) for _ in range(2)]
    optimizer = Modular(params, make(), LR(1.0))
    shares: list[float] = []
    for norm in norms:
        grads: list[Tensor] = []
        for param in params:
            param.data.zero_()
            grads.append(torch.randn(SIZE, generator=generator, dtype=torch.float64) / math.sqrt(2 * SIZE) * norm)
            param.grad = grads[-1].clone()
        optimizer.step()
        after = torch.cat([param.detach() for param in params]).norm()
        shares.append((after / torch.cat(grads).norm()).item())
    return shares


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def runs() -> tuple[list[float], list[float]]:
    """The joint norms of the run with a spike, and of the run with a rise."""
    generator = torch.Generator().manual_seed(1)
    usual = torch.exp(0.2 * torch.randn(END, generator=generator, dtype=torch.float64)).tolist()
    spiked = [100.0 if step == SPIKE else norm for step, norm in enumerate(usual[: SPIKE + AFTER + 1])]
    return spiked, usual[:RISE] + [3 * norm for norm in usual[RISE:]]


def draw(responses: dict[str, Response], path: str) -> None:
    """Two panels for each transform. The letters are large enough for a phone."""
    figure = Figure(figsize=(5, 10), layout="constrained")
    rows = figure.subplots(len(responses), 2, sharex="col", sharey=True, width_ratios=[1, 1.4])
    for panels, (name, response) in zip(rows, responses.items(), strict=True):
        panels[0].set_title(name, fontsize=9, loc="left", pad=3)
        for axes, norms, shares, window in zip(panels, runs(), (response.spiked, response.risen), WINDOWS, strict=True):
            draw_panel(axes, norms, shares, range(*window))
    for axes, what in zip(rows[-1], ("step, around the spike", "step, around the rise"), strict=True):
        axes.set_xlabel(what, fontsize=9)
    figure.savefig(path, dpi=140)


def draw_panel(axes: Axes, norms: Sequence[float], shares: Sequence[float], steps: range) -> None:
    """The norms before and after a transform. A norm of 0 is a gap."""
    axes.plot(steps, [norms[step] for step in steps], color="0.65", linewidth=1)
    axes.plot(steps, [norms[step] * shares[step] or math.nan for step in steps], color="tab:blue", linewidth=1)
    axes.set_yscale("log")
    axes.set_ylim(0.07, 200)
    axes.set_yticks([1, 10, 100], ["1", "10", "100"])
    axes.minorticks_off()
    middle = SPIKE if SPIKE in steps else RISE
    axes.set_xticks([middle, steps[-1] + 1], [f"{middle:,}", f"{steps[-1] + 1:,}"])
    axes.tick_params(labelsize=9)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plot", help="where to save the picture")
    path: str | None = parser.parse_args().plot
    spiked, risen = runs()
    responses = {
        name: Response(factors(make, spiked), factors(make, risen)) for name, make in tqdm(CHAINS.items(), disable=None)
    }
    print("\n".join(response.row(name) for name, response in responses.items()))
    if path:
        draw(responses, path)


if __name__ == "__main__":
    main()
