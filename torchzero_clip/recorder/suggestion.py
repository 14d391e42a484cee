"""A limit that is found from the norms of a run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

from torch import Tensor

from torchzero_clip.checks import number
from torchzero_clip.clipping.clip_norm import ClipNorm
from torchzero_clip.core.chain import Chain
from torchzero_clip.core.transform import Transform
from torchzero_clip.recorder.arithmetic import median_of, quantile, share_range
from torchzero_clip.recorder.figures import draw_series
from torchzero_clip.recorder.files import FilePath
from torchzero_clip.recorder.series import ADAPTS, FEWEST, Answer, Doubt, Series
from torchzero_clip.recorder.words import as_percent, counted

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LimitScope: TypeAlias = Literal["joint", "parameter", "group"]
Confidence: TypeAlias = Literal["high", "medium", "low"]

SHARES = (0.01, 0.1, 0.5)
ANSWERS: Mapping[Answer, str] = {"drifting": "norms that drift", "too few": "too few norms", "enough": "enough norms"}


class Choice(NamedTuple):
    """One of several limits, with the share of usual norms that it clips."""

    name: str  # the name of the group, or of the scope
    limit: float
    share: float  # of the recorded usual norms, above the limit
    low: float  # if the norms keep their distribution, the future share is with 95% probability between low and high
    high: float

    @classmethod
    def of(cls, name: str, series: Series, share_clipped: float) -> "Choice":
        usual, limit = series.usual, quantile(series.usual, 1 - share_clipped)
        above = int((usual > limit).sum())
        return cls(name, limit, above / len(usual), *share_range(above, len(usual), series.independent))

    def __str__(self) -> str:
        return f"{self.limit:.4g} clips {as_percent(self.share)} ({as_percent(self.low)} to {as_percent(self.high)})"


@dataclass(frozen=True)
class Suggestion:
    """A limit for `ClipNorm`, found from a record. Print it to read how it was found.

    Args:
        limit: The limit. For scope "group", a dict with one limit for each group, by the name of the group.
        spikes: How many norms were spikes.
        answer: "enough" if the share of later norms above the limit is within a factor of two of ``share_clipped`` with
            a probability of 95%. "drifting" if this probability is at most 5%, if large norms become more frequent, or
            if the norms still changed in the first half of the run: a limit that adapts is better. "too few" if more
            steps should be recorded. With several groups, "drifting" if a group drifts, else "too few" if a group has
            too few norms.
        confidence: How well the record determines the limit, not whether training with it is better: "high" if there is
            no reason to doubt it, "medium" for one reason that is not serious, "low" for a serious one or several.
        reason: The reasons; empty if there are none.
        scope: "joint" for a limit of all gradients together, "parameter" for one of each tensor, or "group".
        share_clipped: The share of usual norms that the limit clips.
        series: The norms from which the limit was found, by the names of groups, or under the name of the scope.
        choices: The limits that clip 1%, 10% and half of the usual norms, and this limit, each with its ``share``
            and the range from ``low`` to ``high`` of this share in the future.
        note: Which steps were skipped; empty if none were.

    Examples:
        >>> import torch
        >>> from torchzero_clip import ClipNorm, Modular, Recorder
        >>> weight = torch.nn.Parameter(torch.zeros(1))
        >>> optimizer = Modular([weight], ClipNorm(1.0))
        >>> recorder = Recorder(optimizer)
        >>> for step in range(1000):
        ...     weight.grad = torch.full((1,), 50.0 if step == 800 else 1.0 + 0.7 * step % 1)
        ...     optimizer.step()
        >>> suggestion = recorder.suggest_max_norm(share_clipped=0.2)
        >>> round(suggestion.limit, 3), suggestion.spikes, suggestion.answer, suggestion.confidence
        (1.8, 1, 'enough', 'high')
        >>> suggestion.transform()
        ClipNorm(1.7999999523162842, dim='global')
    """

    limit: float | dict[str, float]
    spikes: int
    answer: Answer
    confidence: Confidence
    reason: str
    scope: LimitScope
    share_clipped: float
    series: Mapping[str, Series] = field(repr=False)
    choices: tuple[Choice, ...] = ()
    note: str = ""

    @property
    def limits(self) -> dict[str, float]:
        """The limits by the names of groups. For the other scopes, one limit under the name of the scope."""
        return self.limit if isinstance(self.limit, dict) else {self.scope: self.limit}

    def transform(self) -> Transform:
        """Return a `ClipNorm` with this limit and scope, or for several groups a chain with one `ClipNorm` for each."""
        if len(self.limits) > 1:
            return Chain(*(ClipNorm(x, dim="global").only(groups=name) for name, x in self.limits.items()))
        (limit,) = self.limits.values()
        return ClipNorm(limit) if self.scope == "parameter" else ClipNorm(limit, dim="global")

    def plot(self, path: FilePath | None = None) -> "Figure":
        """Draw the norms, the limit and the spikes, and return the `matplotlib.figure.Figure`.

        Args:
            path: Where to save the picture, for example ``"limit.png"``. None if it should not be saved.
        """
        return draw_series(self.series, self.limits, path)

    def __str__(self) -> str:
        lines: list[str] = []
        for name, series in self.series.items():
            where = f"Group {name!r}: " if self.scope == "group" else ""
            lines.append(where + " ".join(_sentences(series, self.limits[name], self.scope)))
            shown = ", ".join(str(choice) for choice in self.choices if choice.name == name)
            lines.append(
                f"{where}Side by side: {shown} of the usual norms. If the norms keep their distribution, the share of "
                "later norms is in the range in brackets with a probability of 95%."
            )
        if self.note:
            lines.append(f"{self.note}. Their norms count.")
        because = f", because {self.reason}" if self.reason else ""
        advice = f" {ADAPTS}" if self.answer == "drifting" else ""
        lines.append(
            f"Confidence: {self.confidence} ({ANSWERS[self.answer]}){because}.{advice} The confidence says how well "
            "the record determines the limit, not whether training with it is better."
        )
        return "\n".join(lines)


def suggested(
    norms: Mapping[str, Tensor], share_clipped: float, scope: LimitScope, doubts: Sequence[Doubt] = (), note: str = ""
) -> Suggestion:
    """Find a limit for the norms of each group, or for those under the name of the scope; -1 is no gradient.

    ``doubts`` and ``note`` are about the run.
    """
    number("share_clipped", share_clipped)
    if not 0 < share_clipped < 1:
        raise ValueError(f"share_clipped must be above 0 and below 1, got {share_clipped!r}")
    series = {
        name: _series_of(values, f" of group {name!r}" if scope == "group" else "") for name, values in norms.items()
    }
    limits = {name: quantile(s.usual, 1 - share_clipped) for name, s in series.items()}
    answers = {name: s.answer(share_clipped) for name, s in series.items()}
    found = [*doubts]
    for name, s in series.items():
        of_series = [*answers[name][1], *s.doubts(limits[name])]
        found += [d._replace(why=f"in {name!r} {d.why}") if len(series) > 1 else d for d in of_series]
    shares = sorted({*SHARES, share_clipped})
    choices = tuple(Choice.of(name, s, share) for name, s in series.items() for share in shares)
    given = {of_series for of_series, _ in answers.values()}
    answer: Answer = "drifting" if "drifting" in given else "too few" if "too few" in given else "enough"
    spikes = sum(int(s.spikes.sum()) for s in series.values())
    low = len(found) > 1 or any(doubt.is_serious for doubt in found)
    confidence: Confidence = "low" if low else "medium" if found else "high"
    reason = "; ".join(doubt.why for doubt in found)
    limit = limits if scope == "group" else limits[scope]
    return Suggestion(limit, spikes, answer, confidence, reason, scope, share_clipped, series, choices, note)


def _series_of(norms: Tensor, of_group: str) -> Series:
    usable = int((norms.isfinite() & (norms > 0)).sum())
    if usable < FEWEST:
        needed = f"a limit needs at least {FEWEST} norms that are finite and above 0"
        raise ValueError(f"{needed}, got {usable}{of_group}: record more steps")
    return Series.of(norms)


def _sentences(series: Series, limit: float, scope: LimitScope) -> list[str]:
    usual, share = series.usual, float((series.usual > limit).double().mean())
    clip = f"ClipNorm({limit:.4g})" if scope == "parameter" else f'ClipNorm({limit:.4g}, dim="global")'
    what = "norms of tensors, whose median" if scope == "parameter" else "steps, whose median norm"
    clipped = f"{as_percent(share)} of the {len(usual):,} usual {what} is {median_of(usual):.4g}"
    text = [f"{clip} would have clipped {clipped}."]
    others = [f"{what} ({count:,})" for what, count in (("0", series.zeros), ("inf or NaN", series.bad)) if count]
    if others:
        text.append(f"Norms that are {' or '.join(others)} are left out.")
    if series.dropped:
        left_out = f"{series.start:,} of {len(series.norms):,} norms"
        text.append(f"The first {left_out} are left out because they were still changing.")
    spikes = series.norms[series.start :][series.spikes]
    if len(spikes):
        above = f"{counted(len(spikes), 'spike')} above {series.spike_limit:.4g}"
        text.append(f"The limit would also have clipped {above}, of which the largest is {float(spikes.max()):.4g}.")
        if (times := series.after_spikes()) > 1.25:
            text.append(
                f"The median of the usual norms after the first spike is {times:.3g} times the median before. If the "
                "spikes have damaged the run, this limit is too high. Train with this limit, and get a new suggestion "
                "from the new run."
            )
    else:
        text.append("There were no spikes among the others." if series.dropped else "There were no spikes.")
    return text
