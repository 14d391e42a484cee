"""Pictures of a record. They need matplotlib."""

import math
from collections.abc import Mapping, Sequence
from io import BytesIO
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from torchzero_clip.recorder import panels, words
from torchzero_clip.recorder.binning import HUGE, MOST_NAMES, Events, Tiles
from torchzero_clip.recorder.data import Data
from torchzero_clip.recorder.files import FilePath, not_a_record
from torchzero_clip.recorder.series import Series

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_GROUPS = 6


def draw_record(record: Data, path: FilePath | None = None) -> "Figure":
    """Draw the norms, the loss if it is known, and the layers by step; save the figure if there is a path."""
    events = Events.of(record)
    tiles = Tiles.of(record, events)
    thin = panels.thin_panels(record, events)
    heights = [3.2, *[0.8] * len(thin), 1.5 + 0.17 * len(tiles.names)]
    figure = _figure(sum(heights) + 0.8)
    norms, *others, heat = figure.subplots(len(heights), 1, height_ratios=heights)
    panels.draw_norm_panel(norms, events)
    panels.draw_thin_panels(others, thin, events)
    _draw_heat(figure, heat, tiles, events)
    for axes in (norms, *others):
        axes.tick_params(labelbottom=False)
    _legend(figure, [norms])
    return _saved(figure, path)


def draw_series(series: Mapping[str, Series], limits: Mapping[str, float], path: FilePath | None) -> "Figure":
    """Draw the norms, those that were left out, the spikes and the limit, in a row for each group."""
    shown = list(series)[:MOST_GROUPS]
    figure = _figure(2.6 * len(shown) + 0.7)
    rows = figure.subplots(len(shown), 2, sharey="row", squeeze=False, width_ratios=[3, 1])
    for name, (axes, side) in zip(shown, rows, strict=True):
        spikes = panels.draw_series_row(axes, side, series[name], limits[name])
        group = f"{panels.printable(name, 60)}: " if len(series) > 1 else ""
        title = f"{group}limit {words.number_text(limits[name])}, {words.counted(spikes, 'spike')}"
        axes.set_title(title, loc="left", fontsize="medium", parse_math=False)
    left_out = len(series) - len(shown)
    more = f" ({left_out} more {'group is' if left_out == 1 else 'groups are'} not drawn)" if left_out else ""
    rows[-1][0].set_xlabel(f"norms in the order of steps{more}")
    rows[-1][1].set_xlabel("how many norms")
    _legend(figure, [row[0] for row in rows])
    return _saved(figure, path)


def draw_ratios(names: list[str], ratios: Mapping[int, Tensor], path: FilePath | None) -> "Figure":
    """Draw the ratios of the layers that differ most, by step; save the figure if there is a path."""
    if not ratios:
        raise ValueError("the records have no step in common for which both have the norms of layers")
    figure = _figure(2.5 + 0.17 * min(len(names), MOST_NAMES))
    axes, table = figure.subplots(), torch.stack(list(ratios.values()), dim=1)
    far = torch.where(table > 0, table.log().abs(), 0.0).nan_to_num(posinf=HUGE).amax(dim=1)
    shown = sorted(far.argsort(descending=True, stable=True)[:MOST_NAMES].tolist())
    steps = [float(step) for step in ratios]
    edges = [steps[0] - 0.5, *((a + b) / 2 for a, b in pairwise(steps)), steps[-1] + 0.5]
    tiles = Tiles([names[i] for i in shown], len(names), edges, table[shown])
    axes.set_title(f"{len(shown)} of {len(names):,} layers: norm in the second run / norm in the first", loc="left")
    axes.set_xlabel("step")
    _draw_tiles(figure, axes, tiles)
    return _saved(figure, path)


def png_of(figure: "Figure") -> bytes:
    file = BytesIO()
    figure.savefig(file, format="png", dpi=130)
    return file.getvalue()


def _figure(height: float) -> "Figure":
    return panels.matplotlib().figure.Figure(figsize=(9, height), layout="constrained")


def _saved(figure: "Figure", path: FilePath | None) -> "Figure":
    if path is not None:
        not_a_record(path)
        figure.savefig(path, dpi=110)
    return figure


def _legend(figure: "Figure", panels_of_norms: Sequence["Axes"]) -> None:
    pairs = [axes.get_legend_handles_labels() for axes in panels_of_norms]
    by_label = {label: handle for handles, labels in pairs for handle, label in zip(handles, labels, strict=True)}
    ncols = max(1, min(len(by_label), 4))
    figure.legend(by_label.values(), by_label.keys(), loc="outside upper center", ncols=ncols, fontsize="small")


def _draw_heat(figure: "Figure", axes: "Axes", tiles: Tiles, events: Events) -> None:
    panels.set_steps(axes, events)
    axes.set_xlabel("step")
    some = f"{len(tiles.names)} of {tiles.count:,} layers that stood out most: "
    title = f"{some if tiles.count > len(tiles.names) > 0 else ''}largest norm / median norm of the run"
    axes.set_title(title, loc="left", fontsize="medium")
    if not tiles.names:
        axes.set_yticks([])
        panels.say(axes, "the norms of layers were not recorded")
        return
    _draw_tiles(figure, axes, tiles)
    _explain(figure, axes, tiles)


def _draw_tiles(figure: "Figure", axes: "Axes", tiles: Tiles) -> None:
    """The tiles, with the names of their rows, and the colour bar, on a log scale with white at 1."""
    finite = tiles.ratios[tiles.ratios.isfinite()]
    most = float(finite.max()) if len(finite) else 1.0
    high = next((bound for bound in (3.0, 10.0, 100.0) if most <= bound), 1000.0)
    low = 1 / 3 if high == 3 else 0.1
    shades = torch.where(tiles.ratios.isinf(), 10 * high, tiles.ratios.clamp(low, high)).log10().tolist()
    colors = panels.matplotlib().colormaps["RdBu_r"].with_extremes(over="black", bad="0.8")
    scale = panels.matplotlib().colors.TwoSlopeNorm(0, math.log10(low), math.log10(high))
    edges = [k - 0.5 for k in range(len(tiles.names) + 1)]
    mesh = axes.pcolormesh(tiles.edges, edges, shades, cmap=colors, norm=scale, rasterized=True)
    axes.set_ylim(len(tiles.names) - 0.5, -0.5)
    names = [panels.printable(name, 40) for name in tiles.names]
    axes.set_yticks(range(len(names)), names, fontsize="small", parse_math=False)
    bar = figure.colorbar(mesh, ax=axes, orientation="horizontal", shrink=0.6, aspect=40)
    ticks = [low, *(tick for tick in (1.0, 10.0, 100.0) if tick < high), high]
    labels = [f"{tick:.3g}x" for tick in ticks[:-1]] + [f"{high:,.0f}x{' or more' if most > high else ''}"]
    bar.set_ticks([math.log10(tick) for tick in ticks], labels=labels, fontsize="small")
    bar.minorticks_off()


def _explain(figure: "Figure", axes: "Axes", tiles: Tiles) -> None:
    """Mark layers, with a legend of the marks and of the colors that are not on the color bar."""
    patch = panels.matplotlib().patches.Patch
    shades = [
        ("black", "inf or NaN", tiles.ratios.isinf()),
        ("0.8", "no gradient, rounding only, or not recorded", tiles.ratios.isnan()),
    ]
    handles = [patch(color=color, label=label) for color, label, where in shades if bool(where.any())]
    if tiles.marks:
        steps, rows = zip(*tiles.marks, strict=True)
        handles += axes.plot(steps, rows, label="first layer of worst(step)", **panels.FIRST)
    if handles:
        figure.legend(handles=handles, loc="outside lower center", ncols=3, fontsize="small", frameon=False)
