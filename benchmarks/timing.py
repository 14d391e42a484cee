"""Steps that take turns, and the ratios of their times in each round."""

import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import nn

from benchmarks.sets import Shapes

Step = Callable[[], object]
Params = list[nn.Parameter]

GROWTH = 1.52  # of the gradients from step to step: the growth clips let a factor of 1.5 pass
STEPS = 80  # 1.52 ** 80 is 4e14, whose square is still in the range of float32
WARM_UP = 2  # the first steps create state and compile
MEMORY = 12e9  # bytes that the rows of one batch may hold


class Timed(NamedTuple):
    """A step, and what precedes it outside of the timed part."""

    step: Step
    before: Step = lambda: None
    extra_bytes: Callable[[], int] | None = None  # of packages that do not allocate through torch


@dataclass(frozen=True)
class Case:
    """A row of a table: how its step is made, and the rows that its time is divided by."""

    name: str
    make: Callable[[Params], Timed]
    bases: tuple[str, ...]
    most_tensors: int | None = None  # in plots, where compiling for more takes too long


@dataclass
class Measured:
    """What was measured of one row."""

    seconds: list[float] = field(default_factory=list[float])
    ratios: dict[str, list[float]] = field(default_factory=dict[str, list[float]])


class Gradients:
    """Gradients of the given shapes; all rows use the same memory for theirs."""

    def __init__(self, shapes: Shapes, device: str, dtype: torch.dtype = torch.float32) -> None:
        generator = torch.Generator(device).manual_seed(0)
        self.source = [torch.randn(shape, generator=generator, device=device, dtype=dtype) for shape in shapes]
        self.buffers = [torch.empty_like(source) for source in self.source]

    @property
    def nbytes(self) -> int:
        return sum(source.nbytes for source in self.source)

    def params(self) -> Params:
        return [nn.Parameter(source * 0.02) for source in self.source]

    def refill(self, params: Params, number: int) -> None:
        """Give the parameters the gradients of this step: larger than the last, so that the growth clips clip."""
        factor = GROWTH**number
        for param, source, buffer in zip(params, self.source, self.buffers, strict=True):
            torch.mul(source, factor, out=buffer)
            param.grad = buffer.detach()  # a new tensor in every step, as backward makes one


def interleaved(
    runs: Mapping[str, Timed],
    rounds: int,
    *,
    warm_up: int,
    in_a_row: int = 1,
    refill: Callable[[str, int], None] = lambda name, number: None,
    tick: Callable[[str], None] = lambda name: None,
) -> dict[str, list[float]]:
    """The seconds of every step in every round, after the rounds of the warm-up.

    Args:
        runs: The steps by name. They take turns: A B C A B C.
        rounds: The timed rounds.
        warm_up: The rounds before those.
        in_a_row: The steps of each turn. The last one is timed; those before it bring its tensors into the cache.
        refill: Receives the name and the number of the step before every step.
        tick: Receives the name before every step.
    """
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    gc.disable()  # a collection would be part of the step it falls into
    try:
        for number in range(warm_up + rounds):
            gc.collect()
            for name, run in runs.items():
                taken = 0.0
                for again in range(in_a_row):
                    tick(name)
                    refill(name, number * in_a_row + again)
                    run.before()
                    taken = timed(run.step)
                if number >= warm_up:
                    seconds[name].append(taken)
    finally:
        gc.enable()
    return seconds


def timed(step: Step) -> float:
    wait: Step = torch.cuda.synchronize if torch.cuda.is_initialized() else lambda: None
    wait()
    start = time.perf_counter()
    step()
    wait()
    return time.perf_counter() - start


def measure(
    cases: Sequence[Case], shapes: Shapes, rounds: int, device: str, tick: Callable[[str], None], in_a_row: int = 1
) -> dict[str, Measured]:
    """The seconds of every row, and its ratios to its bases in the same rounds."""
    gradients = Gradients(shapes, device)
    measured = {case.name: Measured() for case in cases}
    for batch in batches(cases, gradients.nbytes):
        for part in spans(rounds, in_a_row):
            seconds = together(batch, gradients, part, tick, in_a_row)
            for case in batch:
                add(measured[case.name], case, seconds)
    return measured


def together(
    cases: Sequence[Case], gradients: Gradients, rounds: int, tick: Callable[[str], None], in_a_row: int
) -> dict[str, list[float]]:
    """Make the steps, and time them in turns."""
    params = {case.name: gradients.params() for case in cases}
    runs = {case.name: case.make(params[case.name]) for case in cases}

    def refill(name: str, number: int) -> None:
        gradients.refill(params[name], number)

    return interleaved(runs, rounds, warm_up=WARM_UP, in_a_row=in_a_row, refill=refill, tick=tick)


def add(measured: Measured, case: Case, seconds: Mapping[str, list[float]]) -> None:
    measured.seconds += seconds[case.name]
    for base in case.bases:
        measured.ratios.setdefault(base, []).extend(ratios(seconds[case.name], seconds[base]))


def ratios(seconds: Sequence[float], base: Sequence[float]) -> list[float]:
    """The ratio of each round."""
    return [own / other for own, other in zip(seconds, base, strict=True)]


def batches(cases: Sequence[Case], nbytes: int) -> Iterator[list[Case]]:
    """Rows that fit into memory together; each batch has all bases."""
    bases = {base for case in cases for base in case.bases}
    others = [case for case in cases if case.name not in bases]
    room = max(1, int(MEMORY / (4 * nbytes)) - len(bases))  # a row holds p, m, v, and some hold one more
    for start in range(0, max(1, len(others)), room):
        chosen = bases.union(case.name for case in others[start : start + room])
        yield [case for case in cases if case.name in chosen]


def spans(rounds: int, in_a_row: int) -> list[int]:
    """The rounds in parts that are short enough for gradients that grow; each part makes the steps anew."""
    parts = math.ceil(rounds / (STEPS // in_a_row - WARM_UP))
    return [rounds // parts + (i < rounds % parts) for i in range(parts)]


def turns(cases: Sequence[Case], shapes: Shapes, rounds: int, in_a_row: int = 1) -> int:
    """How many steps `measure` takes."""
    nbytes = 4 * sum(math.prod(shape) for shape in shapes)
    each = sum(number + WARM_UP for number in spans(rounds, in_a_row)) * in_a_row
    return sum(len(batch) for batch in batches(cases, nbytes)) * each


def spread(values: Sequence[float]) -> tuple[float, float, float]:
    """The median, the 10th and the 90th percentile."""
    low, high = torch.tensor(values, dtype=torch.float64).quantile(torch.tensor([0.1, 0.9], dtype=torch.float64))
    return statistics.median(values), low.item(), high.item()
