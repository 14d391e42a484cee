"""Pictures of a record. They need matplotlib."""

from collections.abc import Mapping, Sequence
from io import BytesIO
from typing import Any

from torchzero_clip.recorder import words
from torchzero_clip.recorder.axes import WIDE, module, printable
from torchzero_clip.recorder.binning import Events, Tiles
from torchzero_clip.recorder.data import Data
from torchzero_clip.recorder.heat import draw_heat, heat_height
from torchzero_clip.recorder.panels import draw_bars, draw_norm_panel, draw_series_row, draw_thin_panels, thin_panels
from torchzero_clip.recorder.series import Series

MOST_GROUPS = 6


def draw_record(record: Data, path: Any) -> Any:
    """Draw the norms, the layers and how often each norm was seen in one figure; save it if there is a path."""
    events, tiles = Events.of(record).drawn(), Tiles.of(record, width=WIDE)
    thin = thin_panels(record, events)
    heights = [3.2, *[0.8] * len(thin), heat_height(tiles), 2.4]
    figure = _figure(WIDE, sum(heights) + 0.8)
    norms, *others, heat, bars = figure.subplots(len(heights), 1, height_ratios=heights)
    draw_norm_panel(norms, events, WIDE)
    draw_thin_panels(others, thin, events, WIDE)
    draw_heat(figure, heat, tiles, events, WIDE)
    for axes in (norms, *others):
        axes.tick_params(labelbottom=False)
    draw_bars(bars, events)
    _legend(figure, [norms], WIDE)
    return _saved(figure, path)


def draw_norms(
    record: Data, events: Events | None = None, *, width: float = WIDE, suggested: float | None = None
) -> Any:
    """The joint norms by step, with limits, spikes, clipped and skipped steps, and the loss if it is known.

    Here and below, ``events`` are the events of the record, if the caller already has them.
    """
    events = (events or Events.of(record)).drawn()
    thin = thin_panels(record, events)
    heights = [3.2, *[0.8] * len(thin)]
    figure = _figure(width, sum(heights) + (0.9 if width >= WIDE else 1.5))
    norms, *others = figure.subplots(len(heights), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    draw_norm_panel(norms, events, width, suggested)
    draw_thin_panels(others, thin, events, width)
    (others[-1] if others else norms).set_xlabel("step")
    _legend(figure, [norms], width)
    return figure


def draw_layers(record: Data, events: Events | None = None, *, width: float = WIDE) -> Any:
    """The norms of the layers relative to their usual norms, by step."""
    tiles = Tiles.of(record, width=width)
    figure = _figure(width, heat_height(tiles) + 0.2)
    draw_heat(figure, figure.subplots(), tiles, (events or Events.of(record)).drawn(), width)
    return figure


def draw_histogram(
    record: Data, events: Events | None = None, *, width: float = WIDE, suggested: float | None = None
) -> Any:
    """How often each joint norm was seen, with the limit."""
    figure = _figure(width, 3.0)
    draw_bars(figure.subplots(), (events or Events.of(record)).drawn(), suggested)
    return figure


def draw_series(series: Mapping[str, Series], limits: Mapping[str, float], path: Any) -> Any:
    """Draw the norms, those that were left out, the spikes and the limit, in a row for each group."""
    shown = list(series)[:MOST_GROUPS]
    figure = _figure(WIDE, 2.6 * len(shown) + 0.7)
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
    _legend(figure, [row[0] for row in rows], WIDE)
    return _saved(figure, path)


def png_of(figure: Any) -> bytes:
    """A figure as the bytes of a PNG file."""
    file = BytesIO()
    figure.savefig(file, format="png", dpi=130)
    return file.getvalue()


def _figure(width: float, height: float) -> Any:
    return module("matplotlib.figure").Figure(figsize=(width, height), layout="constrained")


def _saved(figure: Any, path: Any) -> Any:
    if path is not None:
        figure.savefig(path, dpi=110)
    return figure


def _legend(figure: Any, rows: Sequence[Any], width: float) -> None:
    """One legend above the panels, with each label once."""
    pairs = [axes.get_legend_handles_labels() for axes in rows]
    found = {label: handle for handles, labels in pairs for handle, label in zip(handles, labels, strict=True)}
    ncols = max(1, min(len(found), 4 if width >= WIDE else 2))
    figure.legend(found.values(), found.keys(), loc="outside upper center", ncols=ncols, fontsize="small")
