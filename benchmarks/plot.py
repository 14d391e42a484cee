"""Time of a step by the number of parameters, and by the number of tensors."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.cases import CLIP_AND_FOREACH, CLIP_AND_FUSED, GLOBAL_CLIP, step_cases
from benchmarks.progress import progress
from benchmarks.sets import Shapes, equal
from benchmarks.timing import Case, measure, spread, turns

TENSORS, PARAMETERS = 50, 1_000_000
SIZES = [round(10 ** (k / 2)) for k in range(8, 17)]  # 1e4 to 1e8
COUNTS = [10, 30, 100, 300, 1000, 3000, 10_000]
COLORS = ["black", "tab:gray", "tab:blue", "tab:orange", "tab:green", "tab:red", "tab:purple"]
MARKERS = "osD^vP*"


class Point(NamedTuple):
    """The time of a step in milliseconds at a number of parameters or of tensors."""

    x: int
    median: float
    p10: float
    p90: float


Lines = dict[str, list[Point]]


class Part(NamedTuple):
    """The rows of one point of a panel."""

    panel: str
    x: int
    shapes: Shapes
    cases: list[Case]
    rounds: int


def parts_of(cases: Sequence[Case], rounds: int) -> list[Part]:
    sizes = [("parameters", size, equal(size, TENSORS)) for size in SIZES]
    counts = [("tensors", count, equal(PARAMETERS, count)) for count in COUNTS]
    parts: list[Part] = []
    for panel, x, shapes in sizes + counts:
        able = [case for case in cases if case.most_tensors is None or len(shapes) <= case.most_tensors]
        is_large = len(shapes) * math.prod(shapes[0]) > 3e7 or len(shapes) > 1000
        parts.append(Part(panel, x, shapes, able, max(1, rounds // 3) if is_large else rounds))
    return parts


def sweep(peers: Sequence[Case], rounds: int, device: str) -> dict[str, Lines]:
    """The lines of both panels."""
    shown = (CLIP_AND_FUSED, CLIP_AND_FOREACH, GLOBAL_CLIP)
    cases = [case for case in step_cases() if case.name in shown] + list(peers)
    cases = [Case(case.name, case.make, (CLIP_AND_FUSED,), case.most_tensors) for case in cases]
    parts = parts_of(cases, rounds)
    panels: dict[str, Lines] = {part.panel: {case.name: [] for case in cases} for part in parts}
    with progress(sum(turns(part.cases, part.shapes, part.rounds) for part in parts)) as tick:
        for part in parts:
            for name, measured in measure(part.cases, part.shapes, part.rounds, device, tick).items():
                times = spread([seconds * 1000 for seconds in measured.seconds])
                panels[part.panel][name].append(Point(part.x, *times))
    return panels


def label(name: str, by_tensors: Sequence[Point]) -> str:
    most = by_tensors[-1].x
    whose = "torchzero_clip: " if name == GLOBAL_CLIP else ""
    return f"{whose}{name}" if most == COUNTS[-1] else f"{whose}{name} (up to {most:,} tensors)"


def draw(panels: Mapping[str, Lines], path: Path, title: str) -> None:
    import matplotlib.pyplot as plt  # only plots need it

    plt.switch_backend("agg")
    figure: Any
    figure, axes = plt.subplots(2, 1, figsize=(5, 9), sharey=True, layout="constrained")  # fits a narrow screen
    xlabels = {
        "parameters": f"number of parameters, in {TENSORS} tensors",
        "tensors": f"number of tensors, {PARAMETERS:,} parameters in all",
    }
    for axis, (panel, lines) in zip(axes, panels.items(), strict=True):
        for (name, points), color, marker in zip(lines.items(), COLORS, MARKERS, strict=False):
            x, median, low, high = zip(*points, strict=True)
            axis.plot(x, median, color=color, marker=marker, markersize=5, label=label(name, panels["tensors"][name]))
            axis.fill_between(x, low, high, color=color, alpha=0.15, linewidth=0)
        axis.set(xscale="log", yscale="log", xlabel=xlabels[panel])
        axis.grid(alpha=0.3)
        axis.set_ylabel("time of a step in milliseconds")
    figure.suptitle(title, fontsize=9)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", fontsize=9, frameon=False)
    figure.savefig(path, dpi=140)
    plt.close(figure)
