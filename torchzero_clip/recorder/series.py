"""Norms in the order of their steps: what is usual among them, what is a spike, and what makes a limit doubtful."""

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor, tensor_split

from torchzero_clip.recorder.arithmetic import chance_between, effective_count, joined_norms, median_of, quantile
from torchzero_clip.recorder.words import as_percent

Answer: TypeAlias = Literal["enough", "too few", "drifting"]


class Doubt(NamedTuple):
    """A reason why a limit may be wrong."""

    why: str
    is_serious: bool


FEWEST = 20  # norms from which spikes are found
FEWEST_INDEPENDENT = 30  # the estimate has an error of a third, and 20 are too few
COUNTS = [FEWEST_INDEPENDENT / 2 * 1.05**k for k in range(1, 1000)]  # of norms in half a run
FACTOR = 2  # the share of later norms above the limit is within this factor of what was asked, if there are enough
SURE = 0.95  # the probability of it
ADAPTS = "A limit that adapts follows such norms: ZClip(max_norm=None)."
BLOCKS = 20  # equal parts of a run, by which drifts are found
DEVIATION = 1.4826  # the standard deviation of a normal distribution, in median distances from the median
SPREAD = 6 * DEVIATION  # in median distances: an update ratio above it is far from the usual ones
TWICE = math.log(2)
_LARGEST = 709.0  # the logarithm of the largest number
MOST_DROPPED = 10  # blocks at the start of a run that are left out, at most
CLOSE = 1.25  # a block whose usual norm is within this factor of the later ones is like them
_FEW = 10  # fewer norms say nothing of a part of a run
_AROUND = 100  # norms around one that are usual for it
# quantiles of the normal distribution, for the error of a slope
NORMAL = (torch.arange(1, 42, 2, dtype=torch.float64, device="cpu") / 21 - 1).erfinv() * 2**0.5
NUMERALS = ("no", "one", "two", "three", "four")
EQUAL = 1e-5  # norms this close to the largest one count as equal to it, because clipping rounds
FEWEST_RATIOS = 8  # with five earlier ratios, one of 28 steps of noise was an early sign; with eight, one of 150
LATEST = 20  # steps beside one, with which it is compared
JUST_BEFORE = 3  # the last of them, in which ratios must be smaller than half
JUMP = 10.0  # of 31 clean runs, one had a norm ten times above the last twenty but one; with five times, seven had


@dataclass(frozen=True)
class Series:
    """Norms in the order of their steps, and which of them are left out or are spikes."""

    norms: Tensor  # those that are finite and above 0
    dropped: int  # how many of the first blocks are left out because the norms still changed
    start: int  # the index of the first norm that is not left out
    spikes: Tensor  # for each norm from ``start`` on, True if it is a spike
    spike_limit: float
    zeros: int
    bad: int  # how many other norms were inf or NaN
    ending: int  # how many of the last norms in a row are spikes, inf or NaN

    @classmethod
    def of(cls, values: Tensor) -> "Series":
        """Find the spikes. At least four norms must be finite and above 0; those below 0 do not count."""
        values = values[~(values < 0)]
        usable = values.isfinite() & (values > 0)
        norms = values[usable]
        unit = 2.0 ** (math.frexp(median_of(norms))[1] - 1)  # a power of 2, so that the scale makes no difference
        logs = (norms / unit).clamp(math.exp(-_LARGEST), math.exp(_LARGEST)).log()
        starts = [k * len(norms) // BLOCKS for k in range(BLOCKS)]
        dropped = _unsteady(logs, starts)
        start = starts[dropped]
        border = median_of(logs[start:]) + max(6 * _spread(logs[start:]), TWICE)
        spikes = logs[start:] > border
        wild = ~values.isfinite()
        wild[usable.nonzero().flatten()[start:]] = spikes
        calm = (~wild).nonzero().flatten().tolist()
        ending = len(values) - 1 - calm[-1] if calm else len(values)
        bad, zeros = int((~values.isfinite()).sum()), int((values == 0).sum())
        spike_limit = math.exp(min(border, _LARGEST)) * unit
        return cls(norms, dropped, start, spikes, spike_limit, zeros, bad, ending)

    @cached_property
    def usual(self) -> Tensor:
        """The norms that are neither left out nor spikes."""
        return self.norms[self.start :][~self.spikes]

    @cached_property
    def halves(self) -> "list[Trend]":
        """The halves of the run that have usual norms; the last one tells what comes."""
        is_usual = torch.cat([torch.zeros(self.start, dtype=torch.bool, device="cpu"), ~self.spikes])
        places, middle = is_usual.nonzero().flatten(), len(self.norms) // 2
        parts = [part for part in (places[places < middle], places[places >= middle]) if len(part) >= _FEW]
        return [Trend.of(part.double() / (len(self.norms) / 4), self.norms[part].log()) for part in parts or [places]]

    @cached_property
    def _rest(self) -> Tensor:
        return torch.cat([half.rest for half in self.halves])

    @cached_property
    def independent(self) -> float:
        """How many independent norms tell as much as the usual ones, apart from slow trends."""
        return len(self.usual) * effective_count(self._rest) / len(self._rest)

    def answer(self, share: float) -> tuple[Answer, list[Doubt]]:
        """Whether about ``share`` of the later norms will be above the limit that this share exceeds, and why not."""
        if drift := self._drift(share):
            return "drifting", [Doubt(drift, is_serious=True)]
        chance = self.chance(share)
        if chance >= SURE and self.independent >= FEWEST_INDEPENDENT:
            return "enough", []
        return "too few", [self._few(share, chance)]

    def _drift(self, share: float) -> str:
        """How the norms drift; empty if they do not, or if chance may explain it."""
        if self.dropped == MOST_DROPPED:
            return "the norms still changed in the first half of the run, which was left out"
        if _spreads(self._rest):
            return "large norms become more frequent"
        half = self.halves[-1]
        share = max(share, min(_FEW / len(half.rest), 0.5))  # fewer than ten norms would show chance
        if self.chance(share) > 1 - SURE:
            return ""
        limit = quantile(self.usual, 1 - share)
        following = as_percent(half.share_above(math.log(limit), 1.5 * half.slope))
        then = f"{following} of the next {len(self.norms) // 4:,} norms exceed {limit:.4g}"
        return f"if the norms go on as in the second half, {then}, and {as_percent(share)} of the usual norms did"

    def chance(self, share: float) -> float:
        """The probability that the share of the next norms above the limit is within a factor of two of ``share``.

        They are a quarter as many as these, and follow the line of the second half.
        """
        half, limit = self.halves[-1], quantile(self.usual, 1 - share)
        recorded = float((self.usual > limit).double().mean())  # less than asked if norms are equal to the limit
        low, high = recorded / FACTOR, FACTOR * max(recorded, share)
        return half.chance(low, high, math.log(limit), self._independent_in_half, len(self.norms) / 4)

    @property
    def _independent_in_half(self) -> float:
        return self.independent * len(self.halves[-1].rest) / len(self.usual)

    def _few(self, share: float, chance: float) -> Doubt:
        """How many more norms would be enough, if they neither rose nor fell."""
        count, independent = len(self.usual), self.independent
        times = _enough(share) / min(self._independent_in_half, independent / 2)
        if times <= 1:
            near = f"from {as_percent(share / FACTOR)} to {as_percent(min(share * FACTOR, 1))}"
            limit = f"{quantile(self.usual, 1 - share):.4g}"
            later = f"with a probability of {as_percent(chance)}, the share of later norms above {limit} is {near}"
            why = f"if the norms go on as in the second half, {later}: record about {len(self.norms):,} more steps"
            return Doubt(why, is_serious=False)
        as_much = f", which tell as much as about {independent:,.0f} independent ones," if independent < count else ""
        more = float(f"{len(self.norms) * (times - 1):.1g}")
        text = f"{count:,} norms{as_much} are too few to find the norm that {as_percent(share)} of them exceed"
        is_serious = independent < max(1 / share, FEWEST_INDEPENDENT)
        return Doubt(f"{text}: record about {more:,.0f} more steps", is_serious)

    def after_spikes(self) -> float:
        """The median of the usual norms after the first spike, divided by that before; 1 with few norms on a side."""
        kept, first = self.norms[self.start :], int(self.spikes.int().argmax())
        before, after = kept[:first], kept[first:][~self.spikes[first:]]
        return median_of(after) / median_of(before) if min(len(before), len(after)) >= _FEW else 1.0

    def doubts(self, limit: float) -> Iterator[Doubt]:
        """The reasons why a limit found from these norms may be wrong."""
        kept, every = self.norms[self.start :], len(self.norms) + self.zeros + self.bad
        others = ((self.bad, every, 100, "inf or NaN"), (self.zeros, every, 20, "0"))
        for count, total, border, what in (*others, (int(self.spikes.sum()), len(kept), 20, "spikes")):
            if count > total / border:
                yield Doubt(f"{count:,} of {total:,} norms are {what}", count > total / 10)
        if self.ending >= _FEW:
            yield Doubt(f"the last {self.ending:,} norms are all spikes, inf or NaN", is_serious=True)
        if several := levels(kept):
            first, *others = (f"{100 * share:.2g}% are near {level:.4g}" for level, share in several)
            rest = ", ".join([*others[:-1], f"and {others[-1]}"]).replace("are ", "")
            yield Doubt(f"the norms have {NUMERALS[len(several)]} levels: {first}, {rest}", is_serious=True)
        times = float((kept / limit).mean())
        if times > 10:
            why = f"the mean norm is {times:.3g} times the limit, so a few large norms outweigh all others"
            yield Doubt(why, is_serious=True)
        same = _equal_largest(self.norms)
        if same >= 3:
            largest = f"{same:,} of {len(self.norms):,} norms are equal to the largest, {float(self.norms.max()):.4g}"
            clipped = "so clip_grad_norm_ or a setting of a trainer probably clipped the gradients before"
            yield Doubt(f"{largest}, {clipped}", same >= len(self.norms) / 20)
        if not bool((self.usual > limit).any()):
            yield Doubt("the limit is as large as the largest usual norm", is_serious=False)


@dataclass(frozen=True)
class Trend:
    """A line through numbers, such as the logarithms of the norms of half a run, and their distances from it."""

    middle: float  # the mean
    slope: float  # for one unit of the places
    rest: Tensor
    error: float  # the standard error of the slope, times the root of the number of independent norms

    @classmethod
    def of(cls, places: Tensor, numbers: Tensor) -> "Trend":
        """The line through numbers at some places, which are in quarters of the run for logarithms of norms."""
        place, middle = places - places.mean(), float(numbers.mean())
        slope = float((place * numbers).sum() / place.square().sum())
        rest = numbers - middle - slope * place
        return cls(middle, slope, rest, float((rest.square().sum() / place.square().sum()).sqrt()))

    def share_above(self, border: float, moved: float) -> float:
        """The share above a border, if all distances were taken from ``middle + moved``."""
        return float((self.middle + moved + self.rest > border + EQUAL).double().mean())

    def chance(self, low: float, high: float, border: float, independent: float, later: float) -> float:
        """The probability that of so many later norms, a share from ``low`` to ``high`` is above the border.

        ``independent`` is the number of independent norms in this half, which have chance in their slope and share.
        """
        moves = (1.5 * (self.slope + self.error / independent**0.5 * NORMAL)).tolist()
        above = torch.tensor([self.share_above(border, move) for move in moves], dtype=torch.float64, device="cpu")
        count = len(self.rest)
        return chance_between(low, high, above * count, count, independent / (1 + count / later))


def _enough(share: float) -> float:
    """How many independent norms in the second half are enough, if their logarithms are normal, around a level line."""
    border = torch.tensor(1 - share, dtype=torch.float64, device="cpu").mul(2).sub(1).erfinv() * 2**0.5

    def chance(count: float) -> float:
        # the standard error of a slope is that of a mean times the root of 3, because the half is two quarters long
        above = torch.special.ndtr(1.5 * (3 / count) ** 0.5 * NORMAL - border)
        return chance_between(share / FACTOR, share * FACTOR, above * count, round(count), count / 3)

    return COUNTS[bisect_left(COUNTS, SURE, key=chance)]


def spikes_among(norms: Tensor) -> Tensor:
    """True for each joint norm that is a spike among the others; False for all if too few are finite and above 0."""
    is_spike = torch.zeros(len(norms), dtype=torch.bool, device="cpu")
    usable = (norms.isfinite() & (norms > 0)).nonzero().flatten()
    if len(usable) >= FEWEST:
        series = Series.of(norms[usable])
        is_spike[usable[series.start :][series.spikes]] = True
        is_spike[usable[: series.start][_early_spikes(series.norms, series.start)]] = True
    return is_spike


def _early_spikes(norms: Tensor, start: int) -> Tensor:
    """True for each norm before ``start`` that is far above the norms around it, which may still be changing.

    The first norms change most. One of them must be ten times all but one of the twenty before and after it.
    """
    logs, first = norms.log(), max(len(norms) // BLOCKS, _FEW)
    width = min(2 * first, _AROUND, len(norms) - 1) + 1
    places = (torch.arange(start, device="cpu") - width // 2).clamp(0, len(norms) - width)
    around = logs.unfold(0, width, 1)[places]
    middle = around.median(dim=1).values
    spread = DEVIATION * (around - middle[:, None]).abs().median(dim=1).values
    is_spike = logs[:start] > middle + (6 * spread).clamp(min=2 * TWICE)
    is_spike[:first] = logs[: min(first, start)] > middle[:first] + math.log(JUMP)
    for i in is_spike[:first].nonzero().flatten().tolist():
        others = torch.cat([norms[max(i - LATEST, 0) : i], norms[i + 1 : i + 1 + LATEST]])
        is_spike[i] = norms[i] > JUMP * others.topk(2).values[1]
    return is_spike


def _unsteady(logs: Tensor, starts: list[int]) -> int:
    """How many blocks are left out: those before the first one whose median is close to that of the second half."""
    half = logs[len(logs) // 2 :]
    # the standard deviation is taken from the first and the last decile, so that it contains two levels
    usual, spread = median_of(half), (quantile(half, 0.9) - quantile(half, 0.1)) / 2.563
    blocks = [block for block in tensor_split(logs, starts[1:]) if len(block)]
    borders = [max(math.log(CLOSE), 3 * 1.2533 * spread / len(block) ** 0.5) for block in blocks]
    steady = (k for k, block in enumerate(blocks) if abs(median_of(block) - usual) <= borders[k])
    return min(next(steady, MOST_DROPPED), MOST_DROPPED)


def _spreads(logs: Tensor) -> bool:
    """True if large norms become more frequent: more of the largest tenth of them are late in the run."""
    shares = torch.stack([part.mean() for part in tensor_split((logs > quantile(logs, 0.9)).double(), BLOCKS)])
    line = Trend.of(torch.linspace(-1, 1, BLOCKS, dtype=torch.float64, device="cpu"), shares)
    least = max(3.5 * line.error / (BLOCKS - 2) ** 0.5, line.middle / 2)
    return len(logs) >= BLOCKS * _FEW and line.slope > least


def _spread(logs: Tensor) -> float:
    """The robust standard deviation 1.4826 · MAD, where MAD is the median distance from the median."""
    return DEVIATION * median_of((logs - median_of(logs)).abs())


def levels(norms: Tensor) -> list[tuple[float, float]]:
    """The levels that the norms are near, two to four, each with its share of the norms; empty if there is only one."""
    top = float(norms.max())
    logs = (norms / top).clamp(min=math.exp(-_LARGEST)).log().sort().values
    least = max(math.ceil(len(logs) / 20), 2)
    parts = _cut(logs, least)
    if not _are_levels(parts):
        parts = [level for part in parts for level in _levels_of(part, least)]
        if len(parts) == 2:
            return []
    middles = [median_of(part) for part in parts]
    borders = logs.new_tensor([(low + high) / 2 for low, high in pairwise(middles)])
    shares = (torch.bucketize(logs, borders).bincount(minlength=len(parts)).double() / len(logs)).tolist()
    if min(shares) <= 0.05:
        return []
    return [(math.exp(middle) * top, share) for middle, share in zip(middles, shares, strict=True)]


def _levels_of(logs: Tensor, least: int) -> list[Tensor]:
    """The sorted logarithms of two levels, or of one."""
    parts = _cut(logs, least) if len(logs) >= 2 * least else []
    return parts if parts and _are_levels(parts) else [logs]


def _cut(logs: Tensor, least: int) -> list[Tensor]:
    """Two parts of sorted logarithms with the largest variance between them, and at least so many in each."""
    inner = logs.clamp(quantile(logs, 0.025), quantile(logs, 0.975))  # a few spikes are not a level
    count, sums = len(logs), (inner - inner.mean()).cumsum(0)
    cuts = torch.arange(least, count - least + 1, device="cpu")
    cut = int(cuts[(sums[cuts - 1].square() / (cuts * (count - cuts))).argmax()])
    return [logs[:cut], logs[cut:]]


def _are_levels(parts: list[Tensor]) -> bool:
    logs, (low, high) = torch.cat(parts), map(median_of, parts)
    gap = high - low
    # in a normal, a uniform or an exponential distribution, a quarter lies in the middle half of the gap
    between = float(((logs > low + gap / 4) & (logs < high - gap / 4)).double().mean())
    return gap >= max(TWICE, 2 * sum(map(_spread, parts))) and between + 1 / len(logs) ** 0.5 <= 0.2


def _equal_largest(norms: Tensor) -> int:
    """How many norms are equal to the largest; 0 if another norm occurs as often, because norms were rounded."""
    ordered = (norms / norms.max()).sort().values
    same = int((ordered >= 1 - EQUAL).sum())
    rest = ordered[:-same]
    rounded = len(rest) >= same and bool((rest[: len(rest) - same + 1] >= rest[same - 1 :] * (1 - EQUAL)).any())
    return 0 if rounded else same


class EarlySign(NamedTuple):
    """A number of a layer that is large, and the median of those before."""

    step: int
    layer: str
    number: Literal["norm", "update_ratio"]  # of the gradient, or of the update divided by that of the weights
    value: float
    usual: float
    ratio: float  # of the value to the usual one, or to the rounding of the step if that is larger


def jumps(norms: Tensor, precision: float, used: Tensor) -> Tensor:
    """True for each norm that is far above those of the layer before it and above rounding. Each row is a step.

    ``used`` are the layers that had gradients other than 0 before these steps.
    """
    joint = joined_norms(norms)
    # a layer that is not used in each step is not compared with zeros, but the first matrix of a LoRA is
    is_used = (norms > 0).cumsum(dim=0).bool() | used
    rounding = precision * joint[:, None]
    is_compared = ((norms > 0) | (norms == 0) & ~is_used) & (joint.isfinite() & (joint > 0))[:, None]
    sizes = torch.where(is_compared, torch.maximum(norms, rounding), 0.0)
    near = torch.minimum(sizes[1:-1], sizes[:-2])  # most norms are not even far above the lower one of the two before
    steps, layers = (sizes[2:] > JUMP * near).nonzero().unbind(dim=1)
    steps = steps + 2
    before = torch.cat([sizes.new_zeros(LATEST, sizes.shape[1]), sizes]).unfold(0, LATEST, 1)[steps, layers]
    # the second largest, so that one jump does not hide the next
    is_far = sizes[steps, layers] > JUMP * before.topk(2, dim=1).values[:, 1]
    is_judged = ((before > 0).sum(dim=1) >= FEWEST_RATIOS) & (norms > JUMP * rounding)[steps, layers]
    return torch.zeros_like(norms, dtype=torch.bool).index_put_((steps, layers), is_far & is_judged)


def early_signs(steps: Sequence[int], layers: Sequence[str], ratios: Tensor) -> list[EarlySign]:
    """Find the ratios of update to weight norms that stand out; NaN is unknown. Each row is a step."""
    signs: list[EarlySign] = []
    logs = torch.where(ratios > 0, ratios, torch.nan).log()
    for i in range(FEWEST_RATIOS, len(logs)):
        before = logs[max(0, i - LATEST) : i]
        is_judged = before.isfinite().sum(dim=0) >= FEWEST_RATIOS
        median = before.nanmedian(dim=0).values
        spread = (before - median).abs().nanmedian(dim=0).values
        # of hundreds of layers, some have a small one by chance
        spread = torch.fmax(spread, spread[is_judged].median())
        border = median + (SPREAD * spread).clamp(min=TWICE)
        highest = before[-JUST_BEFORE:].nan_to_num(nan=-torch.inf).amax(dim=0)
        # more than twice each of the last ones, so that a learning rate that rises smoothly gives no sign
        is_above = is_judged & (logs[i] > torch.maximum(border, highest + TWICE))
        high: list[int] = is_above.nonzero().flatten().tolist()
        numbers = torch.stack([ratios[i], median.exp(), ratios[i] / median.exp()], dim=1).tolist()
        new = [EarlySign(steps[i], layers[k], "update_ratio", *numbers[k]) for k in high]
        signs += sorted(new, key=lambda sign: -sign.ratio)
    return signs
