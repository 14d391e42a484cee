"""Reads the file of a record."""

import json
import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor

from torchzero_clip.compat import warn_user
from torchzero_clip.recorder import words
from torchzero_clip.recorder.data import Block, Ratios, at_places, places_of
from torchzero_clip.recorder.files import BEGIN, KINDS_OF_LINES, NUMBER, VERSION, FilePath, Line
from torchzero_clip.recorder.precision import FLOAT32_ROUNDING, relative
from torchzero_clip.recorder.record import Record
from torchzero_clip.recorder.series import JUMP

LARGEST_STEP = 2**53  # the largest number up to which float64 has all integers
MOST_EMPTY = 100  # a record is refused if it would have more empty cells than so many for each number in the file


def read_record(path: FilePath, run: str | None = None) -> Record:
    """Read the file of a `Recorder`.

    If the file has several runs, the result is the run that wrote the last line, with the earlier steps of the run that
    it resumed. A warning names the others. Lines that are not JSON are left out, and a warning says how many there are.

    Args:
        path: The path that was given to `Recorder`.
        run: The id of another run, as in the warning.

    Raises:
        OSError: If the file cannot be read.
        ValueError: If the file was not written by a `Recorder`, if a line has wrong entries (the message has the number
            of the line), or if the file does not have the run.

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
    reader = _Reader(path)
    if run is not None and run not in reader.runs:
        raise ValueError(f"{path} has no run {run!r}: it has {', '.join(map(repr, reader.runs)) or 'no runs'}")
    if reader.broken:
        what = "1 line is broken or belongs" if reader.broken == 1 else f"{reader.broken} lines are broken or belong"
        warn_user(f"{path}: {what} to an unknown run, and {words.was(reader.broken)} left out")
    family = reader.ancestry(reader.last if run is None else run)
    if run is None and (others := reader.others(family)):
        warn_user(f"{path} also has {', '.join(others)}: pass run= to read another one")
    joined = _RunInFile("")
    for resumed in family:
        joined.drop(resumed.start)
        joined.add(resumed)
    joined.layers = list(dict.fromkeys(chain(*(resumed.layers for resumed in family))))
    record = _composed(str(path), joined, reader.size)
    if lost := record.steps[-1] - record.steps[0] + 1 - len(record.steps) if record.steps else 0:
        span = f"steps {record.steps[0]:,} to {record.steps[-1]:,}"
        warn_user(f"{path}: of {span}, {lost:,} {words.was(lost)} lost")
    return record


def last_run(path: Path) -> str | None:
    """The id of the run that wrote the last line of a file; None if there are no lines."""
    try:
        return _Reader(path).last
    except (OSError, ValueError):
        return None


@dataclass(eq=False)
class _RunInFile:
    id: str
    parent: str | None = None
    start: int = 0
    joint: list[str] = field(default_factory=list)
    layers: list[str] = field(default_factory=list)
    precision: float = 0.0
    lines: dict[str, dict[int, Line]] = field(default_factory=lambda: {kind: {} for kind in KINDS_OF_LINES})
    """By kind and step, or the first step of a block. Each has the names of the layers in "layers"."""

    def drop(self, start: int) -> None:
        for kind, lines in self.lines.items():
            end = "last" if kind == "block" else "step"
            self.lines[kind] = {first: line for first, line in lines.items() if line[end] < start}

    def add(self, later: "_RunInFile") -> None:
        self.joint, self.precision = later.joint, max(self.precision, later.precision)
        for kind, lines in later.lines.items():
            self.lines[kind] |= lines


class _Reader:
    def __init__(self, path: FilePath) -> None:
        self.runs: dict[str, _RunInFile] = {}
        self.last = ""  # the id of the run that wrote the last line; empty for lines of an earlier release
        self.broken = 0  # how many lines are not JSON or belong to no run, without an incomplete last one
        self.size = 0  # how many numbers and names the file has
        self._path = path
        texts = Path(path).read_text(encoding="utf-8", errors="replace").split("\n")
        for number, text in enumerate(texts, 1):
            if text.strip():
                self._read(number, text, is_end=number == len(texts))

    def _read(self, number: int, text: str, *, is_end: bool) -> None:
        try:
            line = json.loads(text)
        except (ValueError, RecursionError):
            line = None
        if not isinstance(line, dict) or not isinstance(line.get("kind"), str):
            # only the first line tells whose file it is
            if not self.runs and not (BEGIN.startswith(text) or text.startswith(BEGIN)):
                raise self._wrong(number, "the file was not written by a Recorder")
            self.broken += not is_end
            return
        kind = line["kind"]
        if not self.runs and kind != "run" and "run" not in line:
            raise self._wrong(number, "a line of the kind 'run' must come first")
        if kind not in KINDS_OF_LINES:
            return
        try:
            _check_types(line)
            self._read_run(line) if kind == "run" else self._read_numbers(kind, line)
        except (TypeError, ValueError, OverflowError) as error:
            raise self._wrong(number, str(error)) from None

    def _wrong(self, number: int, what: str) -> ValueError:
        return ValueError(f"{self._path}, line {number}: {what}")

    def _read_run(self, line: Line) -> None:
        if line["version"] != VERSION:
            raise ValueError(f"version {line['version']} cannot be read: this release reads version {VERSION}")
        self.last, start = str(line.get("id", "")), line["start"]
        run = self.runs.setdefault(self.last, _RunInFile(self.last, line.get("parent"), start))
        run.joint = [str(name) for name in line["joint"]]
        run.layers = [str(name) for name in line["layers"]]
        run.precision = max(run.precision, min(float(line.get("precision", 0.0)), 1.0))
        run.drop(start)
        self.size += len(run.layers)

    def _read_numbers(self, kind: str, line: Line) -> None:
        name = line.get("run", self.last)
        if name not in self.runs:  # the line that names its layers is broken, or in another file
            self.broken += 1
            return
        self.last, run = name, self.runs[name]
        for key, types in KINDS_OF_LINES[kind].items():
            if types is list:
                if len(line[key]) != len(run.layers):
                    raise ValueError(f"it has {len(line[key])} numbers for {len(run.layers)} layers")
                self._check(line[key], "it must have numbers only")
            elif types is dict:
                self._check(line[key].values(), f"its {key} must be numbers")
            elif types is NUMBER:
                self._check([line[key]], f"its {key} must be a number")
        if not set(line.get("jumps", ())) <= set(run.layers):
            raise ValueError("its jumps must be names of layers")
        step = line["first" if kind == "block" else "step"]
        run.lines[kind][step] = line | {"layers": run.layers}
        if kind == "step":
            run.lines["loss"].pop(step, None)

    def _check(self, values: Collection[object], otherwise: str) -> None:
        """Raise unless all are numbers that fit into float64, or None."""
        for value in values:
            if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
                raise ValueError(otherwise)
            if value is not None:
                float(value)  # an integer may be too large
        self.size += len(values)

    def ancestry(self, name: str) -> list[_RunInFile]:
        """A run and the runs that it resumed, the first one first."""
        runs: list[_RunInFile] = []
        while (run := self.runs.get(name)) and run not in runs:
            runs.insert(0, run)
            name = str(run.parent)
        return runs

    def others(self, family: Sequence[_RunInFile]) -> list[str]:
        """The runs that have steps, and share no run with the ancestry of a run."""
        related = {run.id for run in family}
        unrelated: list[str] = []
        for run in self.runs.values():  # a run comes after the one that it resumed
            if run.id in related or run.parent in related:
                related.add(run.id)
            elif steps := run.lines["step"]:
                unrelated.append(f"run {run.id!r} (steps {min(steps):,} to {max(steps):,})")
        return unrelated


def _check_types(line: Line) -> None:
    for key, types in KINDS_OF_LINES[line["kind"]].items():
        if key not in line or not isinstance(line[key], types) or isinstance(line[key], bool):
            raise ValueError(f"{key!r} is missing or of the wrong type")
        if types is int and not 0 <= line[key] < LARGEST_STEP:
            raise ValueError(f"the number of a step is out of range: {line[key]:.3g}")


def _composed(path: str, run: _RunInFile, size: int) -> Record:
    by_step = {kind: dict(sorted(lines.items())) for kind, lines in run.lines.items()}
    steps, losses = by_step["step"], by_step["loss"]
    with_layers = [line for step, line in by_step["layers"].items() if step in steps]
    blocks, ratios = (list(by_step[kind].values()) for kind in ("block", "ratios"))
    of_layers = [*with_layers, *blocks, *blocks, *ratios, *ratios]  # blocks and ratios have two norms of each layer
    listed = {id(names): names for names in (run.layers, *(line["layers"] for line in of_layers))}
    places = places_of(listed.values())
    metrics = list(dict.fromkeys(name for line in steps.values() for name in line["metrics"]))
    # small files may have more
    if len(places) * len(of_layers) + len(metrics) * len(steps) > MOST_EMPTY * (size + 10_000):
        raise ValueError(f"{path} has other layers or metrics in every line: it is not the record of one run")

    def wide(line: Line, key: str) -> Tensor:
        return at_places(_column(line[key]), line["layers"], places)

    empty = torch.zeros(0, len(places), dtype=torch.float64, device="cpu")
    norms = torch.stack([wide(line, "norms") for line in with_layers]) if with_layers else empty
    # the run may have found only later how coarse its gradients were
    is_far = (relative(norms, torch.zeros_like(norms), run.precision or FLOAT32_ROUNDING) > JUMP).tolist()
    jumps = [
        (line["step"], str(name))
        for line, far in zip(with_layers, is_far, strict=True)
        for name in line.get("jumps", ())
        if far[places[name]]
    ]
    return Record(
        list(steps),
        [line["reason"] for line in steps.values()],
        _column(line["norm"] for line in steps.values()),
        _column(losses.get(step, line)["loss"] for step, line in steps.items()),
        {name: _column(line["metrics"].get(name) for line in steps.values()) for name in metrics},
        list(places),
        [line["step"] for line in with_layers],
        norms,
        [Block(line["first"], line["last"], wide(line, "median"), wide(line, "maximum")) for line in blocks],
        [Ratios(line["step"], wide(line, "params"), wide(line, "updates")) for line in ratios],
        run.joint,
        run.precision or FLOAT32_ROUNDING,
        jumps,
    )


def _column(values: Iterable[float | None]) -> Tensor:
    numbers = [math.nan if value is None else float(value) for value in values]
    return torch.tensor(numbers, dtype=torch.float64, device="cpu")
