"""Reads the file of a record."""

import json
import math
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchzero_clip.recorder.data import Block, Ratios, widened
from torchzero_clip.recorder.files import BEGIN, KINDS, VERSION, Row
from torchzero_clip.recorder.places import Place
from torchzero_clip.recorder.record import Record

WITHOUT_ID = ""
"""Stands for the id of lines that an earlier release wrote."""
LARGEST_STEP = 2**53
MOST_EMPTY = 100
"""A record is refused if it would have more empty cells than so many for each number in the file."""


def read_record(path: Place, run: str | None = None) -> Record:
    """Read the file of a `Recorder`.

    A file may have several runs. The result is the run that wrote the last line. If it resumed another run of the file,
    it has the earlier steps of that run too. A warning names the runs of the file that are not related to it.

    Lines that are not JSON are left out, with a warning that counts them: a process may have been killed while it
    wrote. An incomplete last line is left out without a warning, and so are kinds of lines that a later release added.

    Args:
        path: The path that was given to `Recorder`.
        run: The id of another run, as in the warning.

    Raises:
        OSError: If the file cannot be read.
        ValueError: If the file was not written by a `Recorder`, if a line has wrong entries (the message has its
            number), or if the file does not have the run.

    Examples:
        >>> import tempfile, torch
        >>> from torchzero_clip import ClipNorm, Modular, Recorder, read_record
        >>> weight = torch.nn.Parameter(torch.zeros(2))
        >>> optimizer = Modular([("weight", weight)], ClipNorm(1.0))
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     recorder = Recorder(optimizer, path=f"{directory}/run.jsonl")
        ...     weight.grad = torch.tensor([3.0, 4.0])
        ...     optimizer.step()
        ...     recorder.close()
        ...     read_record(f"{directory}/run.jsonl").norm
        tensor([5.], dtype=torch.float64)
    """
    reader = _read(path)
    if run is not None and run not in reader.runs:
        raise ValueError(f"{path} has no run {run!r}: it has {', '.join(map(repr, reader.runs)) or 'no runs'}")
    if reader.broken:
        one = reader.broken == 1
        what = "1 line is broken or belongs" if one else f"{reader.broken} lines are broken or belong"
        warnings.warn(f"{path}: {what} to an unknown run, and {'was' if one else 'were'} left out", stacklevel=2)
    family = reader.ancestry(reader.last if run is None else run)
    if run is None and (others := reader.others(family)):
        warnings.warn(f"{path} also has {', '.join(others)}: pass run= to read another one", stacklevel=2)
    whole = _Run("")
    for one in family:
        whole.drop(one.start)
        whole.add(one)
    whole.layers = list(dict.fromkeys(chain(*(one.layers for one in family))))
    return _composed(str(path), whole, reader.size)


def last_run(path: Path) -> str | None:
    """The id of the run that wrote the last line of a file; None if there are no lines."""
    try:
        return _read(path).last
    except (OSError, ValueError):
        return None


@dataclass(eq=False)
class _Run:
    """The lines of one run."""

    id: str
    parent: str | None = None
    start: int = 0
    joint: list[str] = field(default_factory=list)
    layers: list[str] = field(default_factory=list)
    steps: dict[int, Row] = field(default_factory=dict)
    losses: dict[int, float | None] = field(default_factory=dict)
    whole: dict[int, "_Row"] = field(default_factory=dict)
    blocks: dict[int, tuple[int, "_Row", "_Row"]] = field(default_factory=dict)
    ratios: dict[int, tuple["_Row", "_Row"]] = field(default_factory=dict)

    def drop(self, start: int) -> None:
        """Forget the steps from ``start`` on."""
        for kept in (self.steps, self.losses, self.whole, self.ratios):
            for step in [step for step in kept if step >= start]:
                del kept[step]
        self.blocks = {first: block for first, block in self.blocks.items() if block[0] < start}

    def add(self, later: "_Run") -> None:
        """Add the lines of a run that resumed this one."""
        self.joint = later.joint
        self.steps |= later.steps
        self.losses |= later.losses
        self.whole |= later.whole
        self.blocks |= later.blocks
        self.ratios |= later.ratios


@dataclass(frozen=True)
class _Row:
    """A number for each of some layers."""

    layers: Sequence[str]
    values: Sequence[float | None]


def _read(path: Place) -> "_Reader":
    text = Path(path).read_text(encoding="utf-8", errors="replace")
    reader = _Reader(str(path))
    lines = text.split("\n")
    for number, line in enumerate(lines, 1):
        if line.strip():
            reader.read(number, line, is_end=number == len(lines))
    return reader


class _Reader:
    """Reads the lines of a file one by one."""

    def __init__(self, path: str) -> None:
        self.runs: dict[str, _Run] = {}
        self.last = WITHOUT_ID
        """The id of the run that wrote the last line."""
        self.broken = 0
        """How many lines are not JSON or belong to no run, without an incomplete last one."""
        self.size = 0
        """How many numbers and names the file has."""
        self._path = path

    def read(self, number: int, line: str, *, is_end: bool) -> None:
        """Read one line."""
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if not isinstance(row, dict) or not isinstance(row.get("kind"), str):
            # only the first line tells whose file it is
            if not self.runs and not (BEGIN.startswith(line) or line.startswith(BEGIN)):
                raise self._wrong(number, "the file was not written by a Recorder")
            self.broken += not is_end
            return
        kind = row["kind"]
        if not self.runs and kind != "run" and "run" not in row:
            raise self._wrong(number, "a line of the kind 'run' must come first")
        if kind not in KINDS:
            return
        for key, types in KINDS[kind].items():
            if key not in row or not isinstance(row[key], types) or isinstance(row[key], bool):
                raise self._wrong(number, f"{key!r} is missing or of the wrong type")
        try:
            self._read_run(row) if kind == "run" else self._read_numbers(kind, row)
        except (TypeError, ValueError, OverflowError) as error:
            raise self._wrong(number, str(error)) from None

    def _wrong(self, number: int, what: str) -> ValueError:
        return ValueError(f"{self._path}, line {number}: {what}")

    def _read_run(self, row: Row) -> None:
        if row["version"] != VERSION:
            raise ValueError(f"version {row['version']} cannot be read: this release reads version {VERSION}")
        self.last, start = str(row.get("id", WITHOUT_ID)), _step(row["start"])
        run = self.runs.setdefault(self.last, _Run(self.last, row.get("parent"), start))
        run.joint = [str(name) for name in row["joint"]]
        run.layers = [str(name) for name in row["layers"]]
        run.drop(start)
        self.size += len(run.layers)

    def _read_numbers(self, kind: str, row: Row) -> None:
        name = row.get("run", self.last)
        if name not in self.runs:  # the line that names its layers is broken, or in another file
            self.broken += 1
            return
        self.last, run = name, self.runs[name]
        if kind == "block":
            pair = (self._row(run, row["median"]), self._row(run, row["maximum"]))
            run.blocks[_step(row["first"])] = (_step(row["last"]), *pair)
            return
        step = _step(row["step"])
        if kind == "step":
            self._check([row["norm"], row["loss"], *row["metrics"].values()], "its metrics must be numbers")
            run.steps[step] = row
            run.losses.pop(step, None)
        elif kind == "loss":
            self._check([row["loss"]])
            run.losses[step] = row["loss"]
        elif kind == "layers":
            run.whole[step] = self._row(run, row["norms"])
        else:
            run.ratios[step] = (self._row(run, row["params"]), self._row(run, row["updates"]))

    def _row(self, run: _Run, values: list[Any]) -> _Row:
        if len(values) != len(run.layers):
            raise ValueError(f"it has {len(values)} numbers for {len(run.layers)} layers")
        self._check(values)
        return _Row(run.layers, values)

    def _check(self, values: Sequence[Any], otherwise: str = "it must have numbers only") -> None:
        """Raise unless all are numbers that fit into float64, or None."""
        for value in values:
            if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
                raise ValueError(otherwise)
            if value is not None:
                float(value)  # an integer may be too large
        self.size += len(values)

    def ancestry(self, name: str) -> list[_Run]:
        """A run and the runs that it resumed, the first one first."""
        found: dict[str, _Run] = {}
        while name in self.runs and name not in found:
            found[name] = self.runs[name]
            name = str(found[name].parent)
        return list(found.values())[::-1]

    def others(self, family: Sequence[_Run]) -> list[str]:
        """The runs that have steps, and share no run with the ancestry of a run."""
        related = {run.id for run in family}
        found: list[str] = []
        for run in self.runs.values():  # a run comes after the one that it resumed
            if run.id in related or run.parent in related:
                related.add(run.id)
            elif run.steps:
                found.append(f"run {run.id!r} (steps {min(run.steps):,} to {max(run.steps):,})")
        return found


def _step(value: int) -> int:
    if not 0 <= value < LARGEST_STEP:
        raise ValueError(f"the number of a step is out of range: {value:.3g}")
    return value


def _composed(path: str, run: _Run, size: int) -> Record:
    """The record of a run, with the lines of those that it resumed."""
    steps = sorted(run.steps)
    rows = [run.steps[step] for step in steps]
    whole = {step: run.whole[step] for step in sorted(run.whole) if step in run.steps}
    blocks = [(first, *run.blocks[first]) for first in sorted(run.blocks)]
    named = [*whole.values(), *(row for block in blocks for row in block[2:]), *chain(*run.ratios.values())]
    listed = {id(names): names for names in [run.layers, *(row.layers for row in named)]}
    places = {name: place for place, name in enumerate(dict.fromkeys(chain(*listed.values())))}
    metrics = list(dict.fromkeys(name for row in rows for name in row["metrics"]))
    if len(places) * len(named) + len(metrics) * len(steps) > MOST_EMPTY * (size + 10_000):
        raise ValueError(f"{path} has other layers or metrics in every line: it is not the record of one run")

    def wide(row: _Row) -> Tensor:
        return widened(_column(row.values), row.layers, places)

    norms = [wide(row) for row in whole.values()]
    return Record(
        steps,
        [row["reason"] for row in rows],
        _column(row["norm"] for row in rows),
        _column(run.losses.get(row["step"], row["loss"]) for row in rows),
        {name: _column(row["metrics"].get(name) for row in rows) for name in metrics},
        list(places),
        list(whole),
        torch.stack(norms) if norms else torch.zeros(0, len(places), dtype=torch.float64, device="cpu"),
        [Block(first, last, wide(median), wide(maximum)) for first, last, median, maximum in blocks],
        [Ratios(step, *map(wide, run.ratios[step])) for step in sorted(run.ratios)],
        run.joint,
    )


def _column(values: Iterable[float | None]) -> Tensor:
    return torch.tensor(
        [math.nan if value is None else float(value) for value in values], dtype=torch.float64, device="cpu"
    )
