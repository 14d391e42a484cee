"""Time of one optimizer step against torch's clip + AdamW(fused=True), interleaved in one run.

Prints, for each set of parameters, the median over rounds of the ratio to torch; below 1 is faster. Gradients are
refilled before every step and every step clips. Use the ratios; absolute times on a shared machine drift.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from torchzero_clip import (
    Adam,
    Centralize,
    ClipNorm,
    ClipNormByEMA,
    ClipNormGrowth,
    ClipValue,
    ClipValueByEMA,
    ClipValueGrowth,
    Modular,
    Normalize,
    Transform,
    WeightDecay,
)

Shapes = list[tuple[int, ...]]


def resnet_like() -> Shapes:
    """400 small tensors, 1.0M parameters."""
    channels = [16, 24, 32, 40]
    blocks = [[(c, c, 3, 3), (c,), (c,)] for c in (channels[i % 4] for i in range(133))]
    return [shape for block in blocks for shape in block] + [(10, 40)]


def gpt_like() -> Shapes:
    """100 tensors of GPT-2's shapes, 51.5M parameters."""
    d = 512
    block: Shapes = [(d,), (d,), (3 * d, d), (3 * d,), (d, d), (d,), (d,), (d,), (4 * d, d), (4 * d,), (d, 4 * d), (d,)]
    return [(50257, d), (1024, d), *block * 8, (d,), (d,)]


SETS: dict[str, Callable[[], Shapes]] = {"small": resnet_like, "gpt": gpt_like}


def torch_step(params: list[nn.Parameter], *, fused: bool) -> Callable[[], object]:
    optimizer = torch.optim.AdamW(params, fused=fused, foreach=not fused)

    def step() -> None:
        torch.nn.utils.clip_grad_norm_(params, 1.0)
        optimizer.step()

    return step


def ours(*transforms: Transform, fused: bool = False) -> Callable[[list[nn.Parameter]], Callable[[], object]]:
    return lambda params: Modular(params, *transforms, Adam(fused=fused), WeightDecay(0.01)).step


STEPS: dict[str, Callable[[list[nn.Parameter]], Callable[[], object]]] = {
    "torch clip + AdamW(fused=True)": lambda p: torch_step(p, fused=True),
    "torch clip + AdamW(foreach=True)": lambda p: torch_step(p, fused=False),
    'ClipNorm(1, dim="global"), AdamW(fused=True)': ours(ClipNorm(1, dim="global"), fused=True),
    'ClipNorm(1, dim="global"), AdamW': ours(ClipNorm(1, dim="global")),
    "ClipNorm(1), AdamW": ours(ClipNorm(1)),
    "ClipValue(1e-3), AdamW": ours(ClipValue(1e-3)),
    "Normalize(), AdamW": ours(Normalize()),
    "Centralize(), AdamW": ours(Centralize()),
    "ClipNormByEMA(), AdamW": ours(ClipNormByEMA()),
    "ClipNormGrowth(), AdamW": ours(ClipNormGrowth()),
    "ClipValueByEMA(), AdamW": ours(ClipValueByEMA()),
    "ClipValueGrowth(), AdamW": ours(ClipValueGrowth()),
}


def measure(shapes: Shapes, rounds: int) -> dict[str, list[float]]:
    generator = torch.Generator().manual_seed(0)
    source = [torch.randn(shape, generator=generator) * 0.01 for shape in shapes]
    params = {name: [nn.Parameter(torch.randn(shape) * 0.02) for shape in shapes] for name in STEPS}
    steps = {name: make(params[name]) for name, make in STEPS.items()}
    times: dict[str, list[float]] = {name: [] for name in STEPS}
    for round_number in range(rounds + 2):
        for name, step in steps.items():
            for param, grad in zip(params[name], source, strict=True):
                param.grad = grad.clone() if param.grad is None else param.grad.copy_(grad)
            start = time.perf_counter()
            step()
            if round_number >= 2:  # after state is made and caches are warm
                times[name].append(time.perf_counter() - start)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", nargs="+", choices=SETS, default=list(SETS))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", type=Path, help="where to save the ratios")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)

    ratios: dict[str, dict[str, float]] = {}
    for name in args.sets:
        times = measure(SETS[name](), args.rounds)
        base = times[next(iter(STEPS))]
        ratios[name] = {
            step: statistics.median(t / b for t, b in zip(own, base, strict=True)) for step, own in times.items()
        }
    print(
        f"time of a step / time of torch's, torch {torch.__version__}, {args.threads} threads, {args.rounds} rounds\n"
    )
    print(f"{'':46}" + "".join(f"{name:>9}" for name in ratios))
    for step in STEPS:
        print(f"{step:46}" + "".join(f"{ratios[name][step]:9.2f}" for name in ratios))
    if args.json:
        args.json.write_text(json.dumps(ratios, indent=2))


if __name__ == "__main__":
    main()
