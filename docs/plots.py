"""Draws the pictures of the documentation: ``python docs/plots.py``."""

import argparse
import json
import math
import re
import runpy
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

from torchzero_clip import (
    LR,
    AdaGC,
    AdaptiveGradientClip,
    AutoClip,
    Centralize,
    ClipNorm,
    ClipNormByEMA,
    ClipNormGrowth,
    ClipValue,
    ClipValueByEMA,
    ClipValueGrowth,
    Modular,
    Normalize,
    NormalizeByEMA,
    SkipStep,
    Transform,
    ZClip,
)

IMAGES = Path(__file__).parent / "img"
GREY: dict[str, Any] = {"color": "0.75", "linestyle": "--", "linewidth": 1}


def applied(
    transforms: Transform | list[Transform],
    steps: Sequence[Sequence[Tensor]],
    norm: float = 0.0,
) -> list[list[Tensor]]:
    """What the transforms make of the gradients of each step, if the weights of each tensor have this norm."""
    weights = [torch.full_like(x, norm * x.numel() ** -0.5) for x in steps[0]]
    params = [nn.Parameter(weight.clone()) for weight in weights]
    optimizer = Modular(params, transforms, LR(1.0))
    results: list[list[Tensor]] = []
    for gradients in steps:
        for param, weight, gradient in zip(params, weights, gradients, strict=True):
            param.data = weight.clone()
            param.grad = gradient.clone()
        optimizer.step()
        results.append(
            [w - param.detach() for w, param in zip(weights, params, strict=True)]
        )
    return results


def draw_curve(name: str, transform: Transform, values: Tensor, what: str) -> None:
    """What becomes of tensors of one element each."""
    (after,) = applied(transform, [[value.reshape(1) for value in values]])
    figure = Figure(figsize=(4.5, 3), layout="constrained")
    axes = figure.subplots()
    axes.plot(values, values, label="unchanged", **GREY)
    axes.plot(values, torch.cat(after), label=repr(transform))
    axes.set_xlabel(f"{what} before")
    axes.set_ylabel(f"{what} after")
    axes.legend()
    figure.savefig(IMAGES / name, dpi=110)


def draw_run(
    name: str, transforms: Sequence[Transform], steps: Sequence[Tensor], what: str
) -> None:
    """The norms of one tensor over a run."""
    figure = Figure(figsize=(5, 2.9), layout="constrained")
    axes = figure.subplots()
    axes.plot([gradient.norm().item() for gradient in steps], label="before", **GREY)
    for transform in transforms:
        after = applied(transform, [[gradient] for gradient in steps])
        axes.plot([update.norm().item() for (update,) in after], label=repr(transform))
    axes.set_yscale("log")
    axes.set_xlabel("step")
    axes.set_ylabel(what)
    figure.legend(loc="outside upper center", ncols=2 if len(transforms) == 1 else 1)
    figure.savefig(IMAGES / name, dpi=140)


# The rows of the table in transforms/choose.md, with settings that show what they do in 60 steps.
SMALL: dict[str, list[Transform]] = {
    "clip_norm": [ClipNorm(1, dim="global")],
    "clip_value": [ClipValue(0.25)],
    "clip_norm_growth": [ClipNormGrowth(parameterwise=False)],
    "auto_clip": [AutoClip(50)],
    "z_clip": [ZClip(max_norm=None, warmup_steps=10)],
    "adagc": [AdaGC(warmup_steps=5)],
    "adaptive_gradient_clip": [AdaptiveGradientClip(0.2)],
    "skip_step": [SkipStep(max_ratio=10.0)],
    "normalize": [Normalize(1, dim="global")],
    "centralize": [Centralize(dim="global")],
    "clip_norm_by_ema": [ClipNormByEMA(0.9)],
    "clip_value_growth": [ClipValueGrowth()],
}


def draw_small(name: str, transforms: list[Transform]) -> None:
    """The norms of a run before and after, without words, for the row of a table. A step of norm 0 is a gap."""
    run = gradients(50, {20: 30.0, 45: 30.0})
    updates = applied(transforms, [[gradient] for gradient in run], norm=1.0)
    after = [norm_after(update) for (update,) in updates]
    figure = Figure(figsize=(1.6, 0.6))
    axes = figure.add_axes((0.02, 0.05, 0.96, 0.9))
    axes.plot([gradient.norm().item() for gradient in run], color="0.6", linewidth=1)
    # a blue that is seen on white and on a dark page
    axes.plot(after, color="#3d8fe0", linewidth=1.5)
    axes.set_yscale("log")
    axes.set_ylim(0.05, 40)
    axes.set_axis_off()
    figure.savefig(IMAGES / "small" / f"{name}.png", dpi=110, transparent=True)


def norm_after(update: Tensor) -> float:
    norm = update.norm().item()
    return norm if norm > 0 else math.nan


def draw_centralize(name: str) -> None:
    """The elements of two rows, before and after."""
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(2, 12, generator=generator) * 0.5 + torch.tensor([[1.5], [-1.0]])
    ((after,),) = applied(Centralize(dim=0, inverse_dims=True), [[rows]])
    figure = Figure(figsize=(5, 2.8), layout="constrained")
    axes = figure.subplots()
    for i, color in enumerate(("tab:blue", "tab:orange")):
        axes.plot(rows[i], "o", color=color, alpha=0.3, label=f"row {i} before")
        axes.plot(after[i], "o", color=color, label=f"row {i} after")
    axes.axhline(0, **GREY)
    axes.set_xlabel("element")
    figure.legend(loc="outside upper center", ncols=2)
    figure.savefig(IMAGES / name, dpi=140)


def gradients(size: int, spikes: dict[int, float], steps: int = 60) -> list[Tensor]:
    """Random gradients around one direction, of norm about 1, that slowly fall; some are much larger."""
    generator = torch.Generator().manual_seed(0)
    direction = torch.ones(size) / size**0.5
    noise = [
        torch.randn(size, generator=generator) / size**0.5 * 0.5 for _ in range(steps)
    ]
    return [(direction + noise[k]) * 0.98**k * spikes.get(k, 1.0) for k in range(steps)]


def draw_per_sample(name: str) -> None:
    """Time and memory of per-sample clipping, as ``python -m benchmarks.per_sample --json`` wrote them."""
    results = json.loads(
        (Path(__file__).parents[1] / "benchmarks" / "per_sample.json").read_text()
    )["results"]
    figure = Figure(figsize=(8, 4), layout="constrained")
    left, *_ = panels = figure.subplots(1, len(results))
    for axes, (model, rows) in zip(panels, results.items(), strict=True):
        plain = next(iter(rows.values()))["peak"]
        for i, (method, row) in enumerate(rows.items()):
            axes.plot(
                row["time"], row["peak"] / plain, "o" if i < 4 else "s", label=method
            )
        axes.set_title(model)
        axes.set_xlabel("time, x plain training")
        for set_scale, set_ticks, (_, most) in (
            (axes.set_xscale, axes.set_xticks, axes.get_xlim()),
            (axes.set_yscale, axes.set_yticks, axes.get_ylim()),
        ):
            set_scale("log")
            few = (1, 3, 10, 30, 100) if most > 9 else (1, 1.5, 2, 3, 4)
            ticks = [tick for tick in few if tick <= most]
            set_ticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.minorticks_off()
    left.set_ylabel("peak memory, x plain training")
    handles, labels = left.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3)
    figure.savefig(IMAGES / name, dpi=110)


def draw_muon_clip(name: str, steps: int) -> None:
    """The largest logits of the runs of `examples/muon_clip.py`."""
    path = Path(__file__).parents[1] / "examples" / "muon_clip.py"
    names = runpy.run_path(str(path))
    figure = Figure(figsize=(5, 2.9), layout="constrained")
    axes = figure.subplots()
    for tau, label in ((None, "Muon and AdamW"), (10.0, "with QKClip(10)")):
        logits, _ = names["train"](tau, steps)
        axes.plot(logits, label=label)
    axes.axhline(10, **GREY)
    axes.set_yscale("log")
    axes.set_xlabel("step")
    axes.set_ylabel("largest logit of attention")
    axes.legend()
    figure.savefig(IMAGES / name, dpi=140)


def draw_skipping(name: str) -> None:
    """The losses on clean data of the runs of `examples/skip_bad_steps.py`."""
    path = Path(__file__).parents[1] / "examples" / "skip_bad_steps.py"
    names = runpy.run_path(str(path))
    figure = Figure(figsize=(5, 2.9), layout="constrained")
    axes = figure.subplots()
    for label, (chain, skip) in names["CHAINS"].items():
        losses, _ = names["train"](chain, skip, 1000)
        width = 5 if math.isnan(losses[-1]) else 1.5  # it ends early, under another line
        axes.plot(range(10, 1001, 10), losses, label=label, linewidth=width)
    axes.set_yscale("log")
    axes.set_xlabel("step")
    axes.set_ylabel("loss on clean data")
    figure.legend(loc="outside upper center", ncols=2)
    figure.savefig(IMAGES / name, dpi=140)


def draw_norms(steps: int) -> None:
    """The record of the first run of `examples/find_the_spike.py`, its limit, and a form for narrow screens."""
    path = Path(__file__).parents[1] / "examples" / "find_the_spike.py"
    with TemporaryDirectory() as folder:
        run = runpy.run_path(str(path))["train"](
            "norms.png", steps, Path(folder, "run.jsonl"), []
        )
    run.suggestion.plot(IMAGES / "limit.png")
    figure = run.record.plot(IMAGES / "norms.png")
    narrow(figure)
    figure.savefig(IMAGES / "norms_narrow.png", dpi=170)


def narrow(figure: Figure) -> None:
    """Shorten the words of a picture of a record, so that it fits a narrow screen."""
    norms, _, layers, colors = figure.axes
    for step in list(norms.texts):
        step.remove()
    layers.set_title("norm / median norm of the run", loc="left", fontsize="medium")
    names = [label.get_text() for label in layers.get_yticklabels()]
    short = [re.sub(r"^b(locks)?\.(layers\.)?", "", name) for name in names]
    layers.set_yticks(layers.get_yticks(), short, fontsize=7)
    sizes = [label.get_text().split()[0] for label in colors.get_xticklabels()]
    colors.set_xticks(colors.get_xticks(), sizes, fontsize=6)
    figure.set_size_inches(4.2, 8)


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw the pictures of the pages.")
    parser.add_argument(
        "--steps",
        type=int,
        default=300,
        help="steps of the training runs in muon_clip.png; those in norms.png take four times as many",
    )
    steps: int = parser.parse_args().steps
    draw_norms(max(4 * steps, 60))
    draw_muon_clip("muon_clip.png", steps)
    draw_per_sample("per_sample.png")
    draw_curve("clip_norm.png", ClipNorm(1), torch.linspace(0, 3, 61), "norm")
    draw_curve("clip_value.png", ClipValue(1), torch.linspace(-3, 3, 121), "element")
    draw_curve("normalize.png", Normalize(1), torch.linspace(0, 3, 61), "norm")
    draw_centralize("centralize.png")
    draw_skipping("skipping.png")

    (IMAGES / "small").mkdir(exist_ok=True)
    for name, transforms in SMALL.items():
        draw_small(name, transforms)

    run = gradients(50, {20: 30.0, 45: 30.0})
    draw_run(
        "clip_norm_by_ema.png",
        [ClipNormByEMA(0.9), ClipNormByEMA(0.9, ema_init="update")],
        run,
        "norm",
    )
    draw_run(
        "normalize_by_ema.png", [NormalizeByEMA(0.9, ema_init="update")], run, "norm"
    )
    draw_run(
        "clip_norm_growth.png", [ClipNormGrowth(), ClipNormGrowth(mul=1.05)], run, "norm"
    )

    element = gradients(1, {20: 30.0, 45: 30.0})
    draw_run(
        "clip_value_by_ema.png",
        [ClipValueByEMA(0.9, "update")],
        element,
        "magnitude of one element",
    )
    draw_run(
        "clip_value_growth.png", [ClipValueGrowth()], element, "magnitude of one element"
    )


if __name__ == "__main__":
    main()
