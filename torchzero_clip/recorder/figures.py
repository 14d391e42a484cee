"""Pictures of a record. They need matplotlib."""

from collections.abc import Mapping, Sequence
from io import BytesIO
from typing import Any

from torchzero_clip.recorder import words
from torchzero_clip.recorder.axes import module, printable
from torchzero_clip.recorder.binning import Events, Tiles
from torchzero_clip.recorder.data import Data
from torchzero_clip.recorder.heat import draw_heat
from torchzero_clip.recorder.panels import draw_norm_panel, draw_series_row, draw_thin_panels, thin_panels
from torchzero_clip.recorder.places import not_a_record
from torchzero_clip.recorder.series import Series

MOST_GROUPS = 6


def draw_record(record: Data, path: Any = None) -> Any:
    """Draw the norms, the loss if it is known, and the layers by step; save the figure if there is a path."""
    events, tiles = Events.of(record), Tiles.of(record)
    thin = thin_panels(record, events)
    heights = [3.2, *[0.8] * len(thin), 1.5 + 0.17 * len(tiles.names)]
    figure = _figure(sum(heights) + 0.8)
    norms, *others, heat = figure.subplots(len(heights), 1, height_ratios=heights)
    draw_norm_panel(norms, events)
    draw_thin_panels(others, thin, events)
    draw_heat(figure, heat, tiles, events)
    for axes in (norms, *others):
        axes.tick_params(labelbottom=False)
    _legend(figure, [norms])
    return _saved(figure, path)


def draw_series(series: Mapping[str, Series], limits: Mapping[str, float], path: Any) -> Any:
    """Draw the norms, those that were left out, the spikes and the limit, in a row for each group."""
    shown = list(series)[:MOST_GROUPS]
    figure = _figure(2.6 * len(shown) + 0.7)
    rows = figure.subplots(len(shown), 2, sharey="row", squeeze=False, width_ratios=[3, 1])
    for name, (axes, side) in zip(shown, rows, strict=True):
        spikes = draw_series_row(axes, side, series[name], limits[name])
        group = f"{printable(name, 60)}: " if len(series) > 1 else ""
        title = f"{group}limit {words.number(limits[name])}, {words.counted(spikes, 'spike')}"
        axes.set_title(title, loc="left", fontsize="medium", parse_math=False)
    left_out = len(series) - len(shown)
    more = f" ({left_out} more {'group is' if left_out == 1 else 'groups are'} not drawn)" if left_out else ""
    rows[-1][0].set_xlabel(f"norms in the order of steps{more}")
    rows[-1][1].set_xlabel("how many norms")
    _legend(figure, [row[0] for row in rows])
    return _saved(figure, path)


def png_of(figure: Any) -> bytes:
    file = BytesIO()
    figure.savefig(file, format="png", dpi=130)
    return file.getvalue()


def _figure(height: float) -> Any:
    return module("matplotlib.figure").Figure(figsize=(9, height), layout="constrained")


def _saved(figure: Any, path: Any) -> Any:
    if path is not None:
        not_a_record(path)
        figure.savefig(path, dpi=110)
    return figure


def _legend(figure: Any, rows: Sequence[Any]) -> None:
    """One legend above the panels, with each label once."""
    pairs = [axes.get_legend_handles_labels() for axes in rows]
    found = {label: handle for handles, labels in pairs for handle, label in zip(handles, labels, strict=True)}
    ncols = max(1, min(len(found), 4))
    figure.legend(found.values(), found.keys(), loc="outside upper center", ncols=ncols, fontsize="small")
