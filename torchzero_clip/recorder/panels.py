"""The panels of pictures, their axes and texts. Matplotlib is imported when the first picture is drawn."""

import importlib
import math
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from torchzero_clip.recorder.arithmetic import median_of
from torchzero_clip.recorder.binning import HUGE, Events, column_size, in_columns, largest, means, medians_of_columns
from torchzero_clip.recorder.data import Data
from torchzero_clip.recorder.series import Series
from torchzero_clip.recorder.words import number_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis

MOST_LABELS = 6  # of marks in a panel
_FEW = 60  # fewer norms are drawn as larger dots
BARS = 60  # of a histogram
NEAR = 0.14  # labels of marks that are closer, as a share of the panel, would overlap
LOST_AT = 0.95  # where in the panel norms that are not finite are marked
Style: TypeAlias = dict[str, Any]
DOUBLE: Style = {"dtype": torch.float64, "device": "cpu"}
LIMIT: Style = {"color": "black", "linestyle": "--", "linewidth": 1.2}
SPIKE: Style = {"color": "tab:red", "marker": "^", "markersize": 8, "fillstyle": "none", "linestyle": "none"}
_SKIPPED: Style = {"color": "black", "marker": "x", "markersize": 6, "linestyle": "none"}
SIGN: Style = {"color": "tab:brown", "marker": "D", "markersize": 6, "fillstyle": "none", "linestyle": "none"}
_LOST: Style = {"color": "tab:purple", "marker": "v", "markersize": 7, "linestyle": "none"}
FIRST: Style = {"color": "black", "markerfacecolor": "gold", "marker": "D", "markersize": 5, "linestyle": "none"}
LABEL: Style = {"xycoords": "axes fraction", "textcoords": "offset points", "ha": "center", "fontsize": "small"}


def draw_norm_panel(axes: "Axes", events: Events) -> None:
    axes.set_yscale("log")
    axes.set_ylabel("norm of all gradients")
    set_steps(axes, events)
    if len(events.steps):
        _curve(axes, events.steps, events.norm, "steps")
    if not bool(events.norm.isfinite().any()):
        say(axes, "all norms are 0, inf or NaN, or missing")
    _limits(axes, events)
    _marks(axes, events)
    _labels(axes, events)


def _limits(axes: "Axes", events: Events) -> None:
    limits = events.limits[events.limits.isfinite()]
    if len(limits):
        size = column_size(len(events.steps))
        heights = in_columns(events.limits, size, medians_of_columns).tolist()
        label = f"limit: {'' if limits.min() == limits.max() else 'median '}{number_text(median_of(limits))}"
        axes.stairs(heights, _edges(events, size), baseline=None, label=label, zorder=3, **LIMIT)


def _edges(events: Events, size: int) -> list[float]:
    return [*(events.steps[::size] - 0.5).tolist(), float(events.steps[-1]) + 0.5]


def _curve(axes: "Axes", x: Tensor, norms: Tensor, what: str) -> None:
    """A line of norms, or for many norms, lines of their medians and largest values."""
    size = column_size(len(norms))
    middle, highest = in_columns(norms, size, medians_of_columns).tolist(), in_columns(norms, size, largest).tolist()
    place = in_columns(x, size, means).tolist()
    if size == 1:
        dots = 2 if len(norms) > _FEW else 6
        axes.plot(place, middle, color="tab:blue", linewidth=0.8, marker=".", markersize=dots, label="norm")
        return
    axes.fill_between(place, middle, highest, color="tab:blue", alpha=0.35, linewidth=0)
    axes.plot(place, highest, color="tab:blue", alpha=0.6, linewidth=0.6, label=f"largest of {size:,} {what}")
    axes.plot(place, middle, color="tab:blue", linewidth=1.2, label=f"median of {size:,} {what}")


def _marks(axes: "Axes", events: Events) -> None:
    """Mark spikes and skipped steps; those whose norm is not finite are at the upper edge."""
    has_norm = events.norm.isfinite()
    for where, style, label in (
        (events.spikes & has_norm, SPIKE, "spikes: {:,}"),
        (events.spikes & ~has_norm, _LOST, "inf or NaN: {:,}"),
        (events.signs & has_norm, SIGN, "early signs: {:,}"),
        (events.skipped, _SKIPPED, "skipped: {:,} steps"),
    ):
        if bool(where.any()):
            finite, lost = where & has_norm, events.steps[where & ~has_norm].tolist()
            label = label.format(int(where.sum()))
            axes.plot(events.steps[finite].tolist(), events.norm[finite].tolist(), label=label, zorder=4, **style)
            axes.plot(lost, [LOST_AT] * len(lost), transform=axes.get_xaxis_transform(), zorder=4, **style)


def _labels(axes: "Axes", events: Events) -> None:
    """Write the numbers of the worst steps beside their marks, if there is space."""
    low, high = axes.get_ylim()
    high = high * (high / low) ** 0.18
    axes.set_ylim(low, high)
    set_log_ticks(axes.yaxis, low, high)
    left, right = axes.get_xlim()
    labeled: list[float] = []
    lost, others = events.worst()
    for i in [*list(lost)[: MOST_LABELS // 2], *others]:
        x, norm = float(events.steps[i]), float(events.norm[i])
        place = min(max((x - left) / (right - left), NEAR / 2), 1 - NEAR / 2)
        if len(labeled) == MOST_LABELS or any(abs(place - other) < NEAR for other in labeled):
            continue
        labeled.append(place)
        has_norm = math.isfinite(norm)
        height = math.log(norm / low) / math.log(high / low) if has_norm else LOST_AT
        axes.annotate(f"step {x:,.0f}", (place, height), (0, 7 if has_norm else -14), **LABEL)


def thin_panels(record: Data, events: Events) -> dict[str, Tensor]:
    """The values of the panels below the norms, by the labels of the panels."""
    panels: dict[str, Tensor] = {}
    if bool(events.clipped.isfinite().any()):
        panels["% clipped"] = 100 * events.clipped
    if bool(record.loss.isfinite().any()):
        panels["loss"] = record.loss
    return panels


def draw_thin_panels(axes_of_panels: Sequence["Axes"], panels: Mapping[str, Tensor], events: Events) -> None:
    for axes, (label, values) in zip(axes_of_panels, panels.items(), strict=True):
        size = column_size(len(values))
        place = in_columns(events.steps, size, means).tolist()
        axes.set_ylabel(label)
        set_steps(axes, events)
        if label == "loss":
            losses = torch.where(values.isfinite(), values.clamp(-HUGE, HUGE), torch.nan)
            axes.plot(place, in_columns(losses, size, medians_of_columns).tolist(), color="0.35", linewidth=0.8)
            if size > 1:
                axes.plot(place, in_columns(losses, size, largest).tolist(), color="0.35", linewidth=0.4)
            if bool((losses > 0).any()) and float(losses[losses > 0].max() / losses[losses > 0].min()) > 100:
                axes.set_yscale("log")
        else:
            shares = in_columns(values, size, means).tolist()
            axes.stairs(shares, _edges(events, size), fill=True, color="tab:orange")
            axes.set_ylim(0, 105)


def draw_series_row(axes: "Axes", side: "Axes", series: Series, limit: float) -> int:
    """Draw the norms in their order, and beside them how often each was seen; return how many are spikes."""
    axes.set_yscale("log")
    axes.set_ylabel("norm")
    count = len(series.norms)
    norms = series.norms.clamp(1 / HUGE, HUGE)
    _curve(axes, torch.arange(count, **DOUBLE), norms, "norms")
    if series.start:
        axes.axvspan(-0.5, series.start - 0.5, color="0.85", hatch="//", ec="0.7", label="left out: still changing")
    spikes = series.spikes.nonzero().flatten() + series.start
    if len(spikes):
        axes.plot(spikes.tolist(), norms[spikes].tolist(), label="spikes", **SPIKE)
    axes.set_xlim(-0.5, count - 0.5)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    kept = norms[series.start :]
    edges = torch.logspace(float(kept.min().log10()) - 0.01, float(kept.max().log10()) + 0.01, BARS + 1, **DOUBLE)
    counts, *_ = side.hist(kept.tolist(), edges.tolist(), orientation="horizontal", color="tab:blue", alpha=0.6)
    for panel in (axes, side):
        panel.axhline(min(max(limit, 1 / HUGE), HUGE), label="limit", **LIMIT)
    set_log_ticks(axes.yaxis, float(norms.min()), float(norms.max()))
    side.set_xscale("log")
    side.set_xlim(0.7, float(max(counts)) * 2)
    side.tick_params(labelleft=False)
    return len(spikes)


def matplotlib() -> ModuleType:
    try:
        importlib.import_module("matplotlib.figure")  # it imports colors, patches and ticker
        return importlib.import_module("matplotlib")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("drawing a record needs matplotlib: pip install matplotlib") from error


def printable(name: str, most: int) -> str:
    """A name for a picture, in characters that fonts have. A long one is cut, as in "t.l.0.mlp.up.weight"."""
    parts = "".join(c if c.isprintable() and ord(c) < 0x250 else "?" for c in name).split(".")
    for i, part in enumerate(parts[:-1]):
        if len(".".join(parts)) <= most:
            break
        parts[i] = part if part.isdigit() else part[:1]
    short = ".".join(parts)
    return short if len(short) <= most else f"{short[: most // 4]}…{short[most // 4 + 1 - most :]}"


def set_steps(axes: "Axes", events: Events) -> None:
    if len(events.steps):
        axes.set_xlim(float(events.steps[0]) - 0.5, float(events.steps[-1]) + 0.5)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    locator: Any = axes.xaxis.get_major_locator()  # matplotlib declares none of its settings
    locator.set_params(integer=True, min_n_ticks=1, nbins=8)


def set_log_ticks(axis: "Axis", low: float, high: float) -> None:
    """Write 1, 2, 5, 10 beside a log axis that is too short for powers of 10 alone."""
    if high / low < 1e3:
        subs = (1, 2, 5) if high / low > 10 else (1, 1.5, 2, 3, 4, 5, 6, 8)
        axis.set_major_locator(matplotlib().ticker.LogLocator(subs=subs))
        axis.set_major_formatter("{x:,g}")
        axis.set_minor_formatter("")


def say(axes: "Axes", text: str) -> None:
    axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center", color="0.35")
