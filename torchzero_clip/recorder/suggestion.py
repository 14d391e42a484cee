"""A limit that is found from the norms of a run."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from torch import Tensor

from torchzero_clip.clipping.clip_norm import ClipNorm
from torchzero_clip.core.chain import Chain
from torchzero_clip.core.transform import Transform
from torchzero_clip.recorder.figures import draw_series
from torchzero_clip.recorder.numbers import quantile
from torchzero_clip.recorder.series import FEWEST, Series, Trend

Scope: TypeAlias = Literal["joint", "parameter", "group"]
Confidence: TypeAlias = Literal["high", "low"]


@dataclass(frozen=True)
class Suggestion:
    """A limit for `ClipNorm`, found from a record. Print it to read how it was found.

    Args:
        limit: The limit. For scope "group", a dict with one limit for each group, by the name of the group.
        spikes: How many norms were spikes.
        trend: Compares the median norm of the last quarter of the run with that of the quarter before. "growing" if it
            is more than 1.25 times as large, "falling" if less than 0.8 times, else "settled". With several groups,
            "growing" if a group grows, else "falling" if a group falls.
        confidence: "low" if there is a reason to doubt the limit, else "high".
        reason: The reasons for low confidence; empty if there are none.
        scope: What the limit is for: "joint", "parameter" or "group".
        share_clipped: The share of usual norms that the limit clips.
        series: The norms that the limit was found from, by the names of groups, or under the name of the scope.

    Examples:
        >>> import torch
        >>> from torchzero_clip import ClipNorm, Modular, Recorder
        >>> weight = torch.nn.Parameter(torch.zeros(1))
        >>> optimizer = Modular([weight], ClipNorm(1.0))
        >>> recorder = Recorder(optimizer)
        >>> for step in range(100):
        ...     weight.grad = torch.full((1,), 50.0 if step == 80 else 1.0 + step % 5 / 10)
        ...     optimizer.step()
        >>> suggestion = recorder.suggest_max_norm()
        >>> round(suggestion.limit, 3), suggestion.spikes, suggestion.trend, suggestion.confidence
        (1.4, 1, 'settled', 'high')
        >>> suggestion.transform()
        ClipNorm(1.399999976158142, dim='global')
    """

    limit: float | dict[str, float]
    spikes: int
    trend: Trend
    confidence: Confidence
    reason: str
    scope: Scope
    share_clipped: float
    series: Mapping[str, Series] = field(repr=False)

    @property
    def limits(self) -> dict[str, float]:
        """The limits by the names of groups. For the other scopes, one limit under the name of the scope."""
        return self.limit if isinstance(self.limit, dict) else {self.scope: self.limit}

    def transform(self) -> Transform:
        """Return a `ClipNorm` with this limit, or for several groups a chain with one `ClipNorm` for each group.

        With scope "parameter", each tensor is clipped on its own. With scope "joint", all gradients are clipped
        together. With scope "group", the gradients of each group are clipped together.
        """
        if len(self.limits) > 1:
            return Chain(*(ClipNorm(x, dim="global").only(groups=name) for name, x in self.limits.items()))
        (limit,) = self.limits.values()
        return ClipNorm(limit) if self.scope == "parameter" else ClipNorm(limit, dim="global")

    def plot(self, path: Any = None) -> Any:
        """Draw the norms, the limit and the spikes, and save the picture.

        Args:
            path: Where to save the picture, for example ``"limit.png"``. None if it should not be saved.

        Returns:
            The `matplotlib.figure.Figure`.

        Raises:
            ModuleNotFoundError: Without matplotlib.
        """
        return draw_series(self.series, self.limits, path)

    def __str__(self) -> str:
        lines = [_sentences(name, s, self.limits[name], self) for name, s in self.series.items()]
        if self.reason:
            lines.append(f"Confidence: low, because {self.reason}.")
        else:
            lines.append("Confidence: high.")
        return "\n".join(lines)


def suggested(norms: Mapping[str, Tensor], share_clipped: float, scope: Scope) -> Suggestion:
    """Find a limit for each series of norms.

    Args:
        norms: The norms in the order of their steps: an entry for each group, or one under the name of the scope.
        share_clipped: The share of usual norms that the limit clips.
        scope: What the norms belong to.
    """
    if isinstance(share_clipped, bool) or not isinstance(share_clipped, int | float):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"share_clipped must be a number, got {share_clipped!r}")
    if not 0 < share_clipped < 1:
        raise ValueError(f"share_clipped must be above 0 and below 1, got {share_clipped!r}")
    series: dict[str, Series] = {}
    for name, values in norms.items():
        usable = values[values.isfinite() & (values > 0)]
        if len(usable) < FEWEST:
            raise ValueError(
                f"a limit needs at least {FEWEST} norms that are finite and above 0, got {len(usable)}"
                f"{f' of group {name!r}' if scope == 'group' else ''}: record more steps"
            )
        series[name] = Series.of(usable)
    limits = {name: quantile(s.usual, 1 - share_clipped) for name, s in series.items()}
    doubts = [
        f"{f'in {name!r} ' if len(series) > 1 else ''}{doubt}"
        for name, s in series.items()
        for doubt in s.doubts(share_clipped)
    ]
    trends = [s.trend for s in series.values()]
    trend: Trend = "growing" if "growing" in trends else "falling" if "falling" in trends else "settled"
    spikes = sum(int(s.spikes.sum()) for s in series.values())
    limit = limits if scope == "group" else limits[scope]
    confidence: Confidence = "low" if doubts else "high"
    return Suggestion(limit, spikes, trend, confidence, "; ".join(doubts), scope, share_clipped, series)


def _clip(limit: float, scope: str) -> str:
    return f"ClipNorm({limit:.4g})" if scope == "parameter" else f'ClipNorm({limit:.4g}, dim="global")'


def _sentences(name: str, series: Series, limit: float, suggestion: Suggestion) -> str:
    share, usual = suggestion.share_clipped, series.usual
    what = "norms of tensors, whose median" if suggestion.scope == "parameter" else "steps, whose median norm"
    where = f"Group {name!r}: " if suggestion.scope == "group" else ""
    text = [
        f"{where}{_clip(limit, suggestion.scope)} would have clipped {100 * share:.3g}% of the {len(usual):,} usual "
        f"{what} is {quantile(usual, 0.5):.4g}."
    ]
    if series.dropped:
        text.append(
            f"The first {series.start:,} of {len(series.norms):,} norms are left out because they were still changing."
        )
    count = int(series.spikes.sum())
    if count:
        largest = float(series.norms[series.start :].max())
        norms = f"a norm above {series.spike_limit:.4g}, which is {largest:.4g}"
        if count > 1:
            norms = f"norms above {series.spike_limit:.4g}, of which the largest is {largest:.4g}"
        text.append(f"The limit would also have clipped {_counted(count, 'spike')}: {norms}.")
    else:
        text.append("There were no spikes.")
    if series.trend == "settled":
        text.append("The norms have settled.")
    else:
        text.append(
            f"The norms are {series.trend}, so a fixed limit will soon be too "
            f"{'low' if series.trend == 'growing' else 'high'}. Use a limit that adapts, such as ZClip(max_norm=None)."
        )
    return " ".join(text)


def _counted(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"
