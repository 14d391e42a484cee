"""Axes and texts that all pictures share. Matplotlib is imported when the first picture is drawn."""

import importlib
from typing import Any

from torchzero_clip.recorder.binning import Events


def module(name: str) -> Any:
    try:
        return importlib.import_module(name)
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


def set_steps(axes: Any, events: Events) -> None:
    if len(events.steps):
        axes.set_xlim(float(events.steps[0]) - 0.5, float(events.steps[-1]) + 0.5)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1, nbins=8)


def set_log_ticks(axis: Any, low: float, high: float) -> None:
    """Write 1, 2, 5, 10 beside a log axis that is too short for powers of 10 alone."""
    if high / low < 1e3:
        subs = (1, 2, 5) if high / low > 10 else (1, 1.5, 2, 3, 4, 5, 6, 8)
        axis.set_major_locator(module("matplotlib.ticker").LogLocator(subs=subs))
        axis.set_major_formatter("{x:,g}")
        axis.set_minor_formatter("")


def say(axes: Any, text: str) -> None:
    axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center", color="0.35")
