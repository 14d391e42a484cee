"""Where the samples of a batch are among the rows of a layer, and what is kept of it for batches of other sizes."""

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

# in place of the index of a sample: a gradient of 0 fits any, a ratio cannot be read, a row is of several
ZERO, UNTOLD, MIXED = -1, -2, -3
GRAPHS = 1024  # the most outlines of graphs of which something is kept
PATTERNS = 4096  # the most patterns of one outline


class Place(NamedTuple):
    """The dimension that holds the samples. Each has ``run`` entries of it: neighbors, or every B-th if ``in_turn``."""

    dim: int
    run: int = 1
    in_turn: bool = False

    def rows(self, shape: Sequence[int], count: int) -> Tensor:
        """The sample of each row, with size 1 in dimensions along which it does not vary."""
        entries = torch.arange(shape[self.dim], device="cpu")
        samples = entries % count if self.in_turn else entries // self.run
        return samples.view(*[1] * self.dim, -1, *[1] * (len(shape) - self.dim - 1))


class Pattern(NamedTuple):
    """The place of samples in batches of any size. Each sample has one entry of the dimension, or ``several``."""

    dim: int
    several: bool = False
    in_turn: bool = False

    def place(self, shape: Sequence[int], count: int) -> Place | None:
        """The place among rows of this shape; None if it does not fit."""
        run, rest = divmod(shape[self.dim], count)
        return None if rest or (run == 1) == self.several else Place(self.dim, run, self.in_turn)


def kinds_of_sizes(shape: Sequence[int], count: int) -> tuple[int, ...]:
    """Which dimensions have the size of the batch (1), a multiple of it (2), or another size (0)."""
    return tuple([1 if size == count else 2 if size and not size % count else 0 for size in shape])


def patterns_of(samples: Tensor, count: int) -> list[Pattern]:
    """The patterns that agree with all rows whose samples are known."""
    found: list[Pattern] = []
    known = samples >= 0
    for dim, size in enumerate(samples.shape):
        if not size or size % count:
            continue
        for pattern in [Pattern(dim)] if size == count else [Pattern(dim, True), Pattern(dim, True, True)]:
            place = pattern.place(samples.shape, count)
            if place is not None:
                rows = place.rows(samples.shape, count).to(samples.device)
                if bool(((rows == samples) | ~known).all()) and (not pattern.in_turn or _has_turns(known, dim, count)):
                    found.append(pattern)
    return found


def some_place(samples: Tensor, count: int) -> Place | Tensor:
    """A place that agrees with all rows whose samples are known, or the sample of each row. Rows of zeros fit any."""
    for pattern in patterns_of(samples, count):
        if (place := pattern.place(samples.shape, count)) is not None:
            return place
    usual = torch.arange(samples.shape[0], device=samples.device).clamp(max=count - 1)
    return torch.where(samples == ZERO, usual.view(-1, *[1] * (samples.ndim - 1)), samples)


def _has_turns(known: Tensor, dim: int, count: int) -> bool:
    """True if two samples are known in each turn. Else another order of its samples would fit too."""
    turns = known.movedim(dim, 0).flatten(1).any(1) if known.ndim > 1 else known
    return bool((turns.view(-1, count).sum(1) >= 2).all())


def samples_of_items(items: Tensor, count: int, samples: Tensor) -> Tensor:
    """The sample of each of ``count`` items, such as sequences, from those of its rows; `MIXED` if it has several.

    ``items`` has the item of each row.
    """
    items = items.to(samples.device)
    largest = torch.full((count,), UNTOLD, device=samples.device).scatter_reduce(0, items, samples, "amax")
    largest = torch.where(largest == UNTOLD, ZERO, largest)
    clash = ((samples >= 0) & (samples != largest[items])) | (samples == MIXED)
    return largest.index_fill(0, items[clash], MIXED)


@dataclass
class Known:
    """What was proved of graphs with the same functions."""

    patterns: dict[Hashable, Pattern | None] = field(default_factory=dict)
    """Where the samples are in each call, by the key of the graph and its kind. None if they have no pattern."""
    silent: set[Hashable] = field(default_factory=set)
    """The calls, by the same keys, that got only zeros in all proofs."""
    is_trusted: bool = False
    """True if a step without a proof has used a pattern."""
    needs_each_step: bool = False
    """True if each step is proved, because values decide which sample a row belongs to in one of the graphs."""

    def learn(self, key: Hashable, pattern: Pattern | None) -> None:
        """Keep the pattern of calls of one kind."""
        if len(self.patterns) >= PATTERNS and key not in self.patterns:
            self.patterns.clear()
        self.patterns[key] = pattern

    def note_silence(self, key: Hashable, *, is_silent: bool) -> None:
        """Note whether a call of one kind got only zeros in a proof."""
        if not is_silent:
            self.silent.discard(key)
        elif len(self.silent) < PATTERNS:
            self.silent.add(key)


class KnownGraphs:
    """What was proved of the graphs that were used last."""

    def __init__(self) -> None:
        self._of: OrderedDict[Hashable, Known] = OrderedDict()

    def of(self, key: Hashable) -> Known:
        """What was proved of a graph, which is nothing if the graph is new."""
        if (found := self._of.get(key)) is None:
            found = self._of[key] = Known()
            if len(self._of) > GRAPHS:
                self._of.popitem(last=False)
        self._of.move_to_end(key)
        return found
