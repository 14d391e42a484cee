"""How adaptive limits respond to noise, to a spike and to a lasting rise: ``python -m benchmarks.responses``.

Two tensors of 500 random elements in float64. Their joint norm varies by 20% around 1 (log-normal), and no optimizer
follows. It prints the table of docs/adaptive.md; nothing is timed.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
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
"""So many steps are averaged after the spike, and to tell whether a limit follows the rise."""


def factors(make: Callable[[], Transform], norms: Sequence[float]) -> list[float]:
    """What remains of each joint norm, as a share."""
    generator = torch.Generator().manual_seed(0)
    params = [nn.Parameter(torch.zeros(SIZE, dtype=torch.float64)) for _ in range(2)]
    optimizer = Modular(params, make(), LR(1.0))
    found: list[float] = []
    for norm in norms:
        grads: list[Tensor] = []
        for param in params:
            param.data.zero_()
            grads.append(torch.randn(SIZE, generator=generator, dtype=torch.float64) / math.sqrt(2 * SIZE) * norm)
            param.grad = grads[-1].clone()
        optimizer.step()
        after = torch.cat([param.detach() for param in params]).norm()
        found.append((after / torch.cat(grads).norm()).item())
    return found


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def main() -> None:
    generator = torch.Generator().manual_seed(1)
    usual = torch.exp(0.2 * torch.randn(END, generator=generator, dtype=torch.float64)).tolist()
    spiked = [100.0 if step == SPIKE else norm for step, norm in enumerate(usual[: SPIKE + AFTER + 1])]
    risen = usual[:RISE] + [3 * norm for norm in usual[RISE:]]
    rows: list[str] = []
    for name, make in tqdm(CHAINS.items(), disable=None):
        first, second = factors(make, spiked), factors(make, risen)
        ordinary = first[RISE - 500 : SPIKE]
        clipped = mean([abs(factor - 1) > 1e-9 for factor in ordinary])
        calm = mean(first[SPIKE + 1 : SPIKE + AFTER + 1]) / mean(ordinary)
        level = 0.9 * mean(ordinary)
        starts = range(END - RISE - AFTER)
        follows = next((k for k in starts if mean(second[RISE + k : RISE + k + AFTER]) >= level), "never")
        rows.append(
            f"| `{name}` | {clipped:.0%} | {mean(ordinary):.2f} | {100 * first[SPIKE]:.1f} | {calm:.1f} | {follows} |"
        )
    print("\n".join(rows))


if __name__ == "__main__":
    main()
