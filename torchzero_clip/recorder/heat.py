"""The heat map of layers by steps."""

import math
from typing import Any

import torch

from torchzero_clip.recorder.axes import module, printable, say, set_steps
from torchzero_clip.recorder.binning import Events, Tiles


def draw_heat(figure: Any, axes: Any, tiles: Tiles, events: Events) -> None:
    set_steps(axes, events)
    axes.set_xlabel("step")
    some = f"{len(tiles.names)} of {tiles.count:,} layers that stood out most: "
    title = f"{some if tiles.count > len(tiles.names) > 0 else ''}largest norm / median norm of the run"
    axes.set_title(title, loc="left", fontsize="medium")
    if not tiles.names:
        axes.set_yticks([])
        say(axes, "the norms of layers were not recorded")
        return
    _draw_tiles(figure, axes, tiles)
    axes.set_ylim(len(tiles.names) - 0.5, -0.5)
    names = [printable(name, 40) for name in tiles.names]
    axes.set_yticks(range(len(names)), names, fontsize="x-small", parse_math=False)
    _explain(axes, tiles)


def _draw_tiles(figure: Any, axes: Any, tiles: Tiles) -> None:
    """The tiles and their colour bar, on a log scale with white at 1."""
    finite = tiles.ratios[tiles.ratios.isfinite()]
    most = float(finite.max()) if len(finite) else 1.0
    high = next((bound for bound in (3.0, 10.0, 100.0) if most <= bound), 1000.0)
    low = 1 / 3 if high == 3 else 0.1
    shades = torch.where(tiles.ratios.isinf(), 10 * high, tiles.ratios.clamp(low, high)).log10().tolist()
    colors = module("matplotlib").colormaps["RdBu_r"].with_extremes(over="black", bad="0.8")
    scale = module("matplotlib.colors").TwoSlopeNorm(0, math.log10(low), math.log10(high))
    edges = [k - 0.5 for k in range(len(tiles.names) + 1)]
    mesh = axes.pcolormesh(tiles.edges, edges, shades, cmap=colors, norm=scale, rasterized=True)
    bar = figure.colorbar(mesh, ax=axes, orientation="horizontal", shrink=0.6, aspect=40)
    ticks = [low, *(tick for tick in (1.0, 10.0, 100.0) if tick < high), high]
    labels = [f"{tick:.3g}x" for tick in ticks[:-1]] + [f"{high:,.0f}x{' or more' if most > high else ''}"]
    bar.set_ticks([math.log10(tick) for tick in ticks], labels=labels, fontsize="small")
    bar.minorticks_off()


def _explain(axes: Any, tiles: Tiles) -> None:
    """A legend of the colors that are not on the color bar."""
    patch = module("matplotlib.patches").Patch
    shades = [
        ("black", "inf or NaN", tiles.ratios.isinf()),
        ("0.8", "no gradient, 0, or not recorded", tiles.ratios.isnan()),
    ]
    handles = [patch(color=color, label=label) for color, label, where in shades if bool(where.any())]
    if handles:
        place = {"loc": "lower right", "bbox_to_anchor": (1, 1.01), "borderaxespad": 0}
        axes.legend(handles=handles, ncols=2, fontsize="x-small", frameon=False, **place)
