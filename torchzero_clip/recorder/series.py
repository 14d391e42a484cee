"""Norms in the order of their steps: which are left out, which are spikes, and whether they still change."""

import math
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor, tensor_split

from torchzero_clip.recorder.numbers import median_of

Trend: TypeAlias = Literal["settled", "growing", "falling"]

FEWEST = 20
BLOCKS = 20
SPREAD = 6 * 1.4826  # six standard deviations of a normal distribution, in median distances from the median
TWICE = math.log(2)
LARGEST = 709.0  # the logarithm of the largest number
MOST_DROPPED = 10
CLOSE = 1.25
EQUAL = 1e-5
"""Norms that differ from the largest one by at most this share count as equal to it, because clipping rounds."""


@dataclass(frozen=True)
class Series:
    """Norms in the order of their steps, and which of them are left out or are spikes.

    Args:
        norms: Finite norms above 0.
        dropped: How many of the first blocks are left out because the norms still changed.
        start: The index of the first norm that is not left out.
        spikes: For each norm from ``start`` on, True if it is a spike.
        spike_limit: A norm above this number is a spike.
        trend: Whether the last quarter of the norms is larger or smaller than the quarter before.
    """

    norms: Tensor
    dropped: int
    start: int
    spikes: Tensor
    spike_limit: float
    trend: Trend

    @classmethod
    def of(cls, norms: Tensor) -> "Series":
        """Find the spikes and the trend of at least four norms, which must be finite and above 0."""
        count = len(norms)
        starts = [k * count // BLOCKS for k in range(BLOCKS)]
        usual = median_of(norms[count // 2 :])
        medians = [median_of(block) for block in tensor_split(norms, starts[1:]) if len(block)]
        steady = (k for k, median in enumerate(medians) if 1 / CLOSE <= median / usual <= CLOSE)
        dropped = min(next(steady, MOST_DROPPED), MOST_DROPPED)
        start = starts[dropped]
        logs = norms[start:].log()
        border = _spike_border(logs)
        change = median_of(norms[3 * count // 4 :]) / median_of(norms[count // 2 : 3 * count // 4])
        trend: Trend = "growing" if change > CLOSE else "falling" if change < 1 / CLOSE else "settled"
        return cls(norms, dropped, start, logs > border, math.exp(min(border, LARGEST)), trend)

    @property
    def usual(self) -> Tensor:
        """The norms that are neither left out nor spikes."""
        return self.norms[self.start :][self.spikes.logical_not()]

    def doubts(self, share_clipped: float) -> list[str]:
        """The reasons why a limit found from these norms may be wrong."""
        found: list[str] = []
        count, same = len(self.norms), int((self.norms >= self.norms.max() * (1 - EQUAL)).sum())
        if count * share_clipped < 1:
            found.append(f"{count} norms are too few to find the norm that {100 * share_clipped:.3g}% of them exceed")
        if self.dropped == MOST_DROPPED:
            found.append("the norms still changed in the first half of the run, which was left out")
        if same >= max(2, count / 20):
            largest = float(self.norms.max())
            found.append(
                f"{same} of {count} norms are equal to the largest, {largest:.4g}, "
                "so something else probably clipped them before the recorder measured them"
            )
        return found


def spikes_among(norms: Tensor) -> Tensor:
    """True for each joint norm that is a spike among the others; False for all if too few are finite and above 0."""
    found = torch.zeros(len(norms), dtype=torch.bool, device="cpu")
    usable = (norms.isfinite() & (norms > 0)).nonzero().flatten()
    if len(usable) >= FEWEST:
        series = Series.of(norms[usable])
        found[usable[series.start :][series.spikes]] = True
    return found


def _spike_border(logs: Tensor) -> float:
    """The logarithm above which a norm is a spike.

    It exceeds the median by max(6 · 1.4826 · MAD, ln 2), where MAD is the median distance from the median.
    """
    median = median_of(logs)
    return median + max(SPREAD * median_of((logs - median).abs()), TWICE)
