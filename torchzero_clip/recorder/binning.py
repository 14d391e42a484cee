"""The numbers that pictures show: the events of each step, and long runs reduced to a few columns."""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from torchzero_clip.recorder.data import Block, Data
from torchzero_clip.recorder.precision import relative

MOST_COLUMNS = 1000
MOST_TILES = 252
MOST_NAMES = 25
MOST_MARKS = 100
_WIDTHS = 300  # a column this part of the picture wide can be seen
HUGE = 1e30  # stands for larger norms in pictures: matplotlib's margins overflow near the largest float


@dataclass(frozen=True)
class Events:
    """What happened in each step. Numbers are NaN if they are unknown."""

    steps: Tensor
    norm: Tensor  # the joint norms that matplotlib can draw; NaN for those that are not finite or not above 0
    clipped: Tensor
    limits: Tensor
    spikes: Tensor  # True for a spike or a norm that is not finite
    signs: Tensor
    skipped: Tensor

    @classmethod
    def of(cls, record: Data) -> "Events":
        def marked(steps: set[int]) -> Tensor:
            return torch.tensor([step in steps for step in record.steps], dtype=torch.bool, device="cpu")

        steps = torch.tensor(record.steps, dtype=torch.float64, device="cpu")
        skipped = torch.tensor([bool(reason) for reason in record.reasons], dtype=torch.bool, device="cpu")
        spikes, signs = marked(record.norm_spikes()), marked({sign.step for sign in record.early_signs()})
        norm, limits = _drawn(record.norm), _drawn(record.limits())
        return cls(steps, norm, record.share_clipped, limits, spikes, signs, skipped)

    def worst(self) -> tuple[dict[int, int], list[int]]:
        """The indices of spikes and skipped steps: of those without a norm, and of the others, the largest norm first.

        Consecutive steps without a norm are one series: its first index, with its length.
        """
        is_bad, has_norm = self.spikes | self.skipped, self.norm.isfinite()
        lost: dict[int, int] = {}
        first = -1
        for i in (is_bad & ~has_norm).nonzero().flatten().tolist():
            if i != first + lost.get(first, 0):
                first = i
            lost[first] = lost.get(first, 0) + 1
        high: list[int] = (is_bad & has_norm).nonzero().flatten().tolist()
        norms: list[float] = self.norm.tolist()
        return lost, sorted(high, key=lambda i: -norms[i])


def _drawn(norms: Tensor) -> Tensor:
    return torch.where(norms.isfinite() & (norms > 0), norms.clamp(1 / HUGE, HUGE), torch.nan)


def column_size(count: int) -> int:
    """How many steps are in one column; 1 if there are at most twice as many steps as columns."""
    return 1 if count <= 2 * MOST_COLUMNS else math.ceil(count / MOST_COLUMNS)


def in_columns(values: Tensor, size: int, reduce: Callable[[Tensor], Tensor]) -> Tensor:
    """One number for each ``size`` values, from those that are not NaN; NaN if all are NaN."""
    missing = -len(values) % size
    return reduce(torch.cat([values, values.new_full((missing,), torch.nan)]).view(-1, size))


medians_of_columns = partial(torch.nanquantile, q=0.5, dim=1)
largest = partial(torch.nanquantile, q=1.0, dim=1)
means = partial(torch.nanmean, dim=1)


@dataclass(frozen=True)
class Tiles:
    """The norms of layers divided by their medians over the run."""

    names: list[str]  # the layers that are shown, in the order of the model
    count: int  # how many layers there are
    edges: list[float]  # where each column begins, in steps, and where the last one ends
    ratios: Tensor  # what `relative` returns for the largest norm of each layer (row) in each span of steps (column)
    marks: list[tuple[int, int]] = field(default_factory=list)
    """Spikes, early signs and skipped steps, each with the row of the layer that `worst` lists first."""

    @classmethod
    def of(cls, record: Data, events: Events, most: int = MOST_NAMES) -> "Tiles":
        """Show the layers of marks, and then those with norms that are not finite or the largest ratios."""
        edges, highest = _columns(record)
        if not highest.numel():
            return cls([], len(record.layers), [], highest)
        first_layers = _first_layers(record, events)
        edges, highest = _with_own_columns(record, first_layers, edges, highest)
        ratios = relative(highest, _median_norms(record), record.precision).T
        finite: list[float] = torch.where(ratios.isfinite(), ratios, 0.0).amax(dim=1).tolist()
        broken: list[bool] = ratios.isinf().any(dim=1).tolist()
        marked = set(first_layers.values())
        ranked = sorted(range(len(finite)), key=lambda i: (i not in marked, not broken[i], -finite[i]))
        shown = sorted(ranked[: max(most, len(marked))])
        marks = [(step, shown.index(i)) for step, i in first_layers.items()]
        return cls([record.layers[i] for i in shown], len(record.layers), edges, ratios[shown], marks)


def _first_layers(record: Data, events: Events) -> dict[int, int]:
    """For spikes, skipped steps and early signs, the worst first, the place of the layer that `worst` lists first."""
    lost, high = events.worst()
    signs: list[int] = (events.signs & ~events.spikes & ~events.skipped).nonzero().flatten().tolist()
    with_layers, places = set(record.layer_steps), {name: i for i, name in enumerate(record.layers)}
    steps = [record.steps[i] for i in [*lost, *high, *signs]]
    tables = {step: record.layers_of(step) for step in [s for s in steps if s in with_layers][:MOST_MARKS]}
    return {step: places[layers[0].name] for step, layers in tables.items() if layers}


def _with_own_columns(
    record: Data, marked: Collection[int], edges: list[float], columns: Tensor
) -> tuple[list[float], Tensor]:
    """Give marked steps columns of their own, wide enough to be seen, and so other steps whose layers a file has."""
    stored = record.layer_steps
    low = min([edges[0], *(step - 0.5 for step in stored[:1])])
    high = max([edges[-1], *(step + 0.5 for step in stored[-1:])])
    half = max(0.5, (high - low) / _WIDTHS / 2)
    spans = {} if _is_whole(record) else {step: (step - 0.5, step + 0.5) for step in stored}
    marks = sorted(marked)
    between = [(a + b) / 2 for a, b in pairwise(marks)]
    for step, begin, end in zip(marks, [low, *between], [*between, high], strict=True) if marks else ():
        spans[step] = max(step - half, begin), min(step + half, end)
    borders = sorted({*edges, *(edge for span in spans.values() for edge in span)})
    absent = torch.full_like(columns[0], -1.0)
    padded = [absent, *columns, absent]
    chosen = [padded[bisect_right(edges, (a + b) / 2)] for a, b in pairwise(borders)]
    for step in [*(spans.keys() - marks), *marks]:
        begin, end = (bisect_left(borders, edge) for edge in spans[step])
        chosen[begin:end] = [record.layer_norms_of(step)] * (end - begin)
    return borders, torch.stack(chosen)


def _median_norms(record: Data) -> Tensor:
    """The median of the norms above 0 of each layer over the run; 0 if there are none."""
    norms = record.layer_norms if _is_whole(record) else torch.stack([block.median for block in record.blocks])
    return torch.where(norms.isfinite() & (norms > 0), norms, torch.nan).nanmedian(dim=0).values.nan_to_num(nan=0.0)


def _is_whole(record: Data) -> bool:
    """True if the norms of layers are known for all steps of the blocks, as in a short run."""
    return sum(block.last - block.first + 1 for block in record.blocks) <= len(record.layer_steps)


def _columns(record: Data) -> tuple[list[float], Tensor]:
    """The edges of the columns, and the largest norm of each layer in each column."""
    if _is_whole(record):
        spans = [(step, step) for step in record.layer_steps]
        norms = record.layer_norms
    else:
        blocks = sorted(record.blocks, key=lambda block: block.first)
        spans = [(block.first, block.last) for block in blocks]
        norms = torch.stack([_of_other_steps(record, block) for block in blocks])
    size = max(1, math.ceil(len(spans) / MOST_TILES))
    gap = (spans[-1][1] - spans[0][0]) / 100 if spans else 0
    edges: list[float] = [spans[0][0] - 0.5] if spans else []
    columns: list[Tensor] = []
    for k in range(0, len(spans), size):
        first, last = spans[k][0], spans[min(k + size, len(spans)) - 1][1]
        if first > edges[-1] + 1 + gap:
            columns.append(torch.full_like(norms[0], -1.0))
            edges.append(first - 0.5)
        columns.append(norms[k : k + size].amax(dim=0))
        edges.append(last + 0.5)
    return edges, torch.stack(columns) if columns else norms


def _of_other_steps(record: Data, block: Block) -> Tensor:
    """The largest norms of a block; the median where the largest is that of a step which gets its own column."""
    own = slice(bisect_left(record.layer_steps, block.first), bisect_right(record.layer_steps, block.last))
    norms, largest_one = record.layer_norms[own], block.maximum
    is_own = (norms == largest_one) | ~(norms.isfinite() | largest_one.isfinite())
    return torch.where(is_own.any(dim=0), block.median, largest_one)
