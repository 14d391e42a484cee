"""The file of a record: a JSON object in each line.

{"kind": "run", "version": 1, "start": 0, "by": "parameter", "joint": ["clip_norm"], "layers": ["0.weight", "0.bias"]}
{"kind": "step", "step": 0, "norm": 1.5, "loss": 2.3, "reason": "", "metrics": {"clip_norm/limit": 1.0}}
{"kind": "layers", "step": 0, "norms": [1.2, 0.9]}
{"kind": "block", "first": 0, "last": 99, "median": [0.4, 0.1], "maximum": [1.2, 0.9]}
{"kind": "ratios", "step": 0, "params": [3.0, 0.1], "updates": [0.01, 0.01]}
"""

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchzero_clip.recorder.numbers import medians
from torchzero_clip.recorder.record import Block, Place, Ratios, Record

VERSION = 1
BLOCK = 100
IN_A_ROW = 10
"""In a series of spikes or refused steps, the layers of so many steps are written."""
KINDS: Mapping[str, Mapping[str, type | tuple[type, ...]]] = {
    "run": {"version": int, "start": int, "by": str, "joint": list, "layers": list},
    "step": {
        "step": int,
        "norm": (float, int, type(None)),
        "loss": (float, int, type(None)),
        "reason": str,
        "metrics": dict,
    },
    "layers": {"step": int, "norms": list},
    "block": {"first": int, "last": int, "median": list, "maximum": list},
    "ratios": {"step": int, "params": list, "updates": list},
}
"""The entries of each kind of line."""


def lines_of(record: Record, first: int, spikes: set[int], known: set[int]) -> tuple[list[str], set[int]]:
    """The lines of the steps from row ``first`` on, and the steps whose layers are among them.

    Args:
        record: Some steps.
        first: The first row that is not in the file.
        spikes: The steps that are spikes, including those that are already in the file.
        known: The steps whose layers are already in the file.
    """
    columns = zip(record.steps, record.norm.tolist(), record.loss.tolist(), record.reasons, strict=True)
    metrics = {name: values.tolist() for name, values in record.metrics.items()}
    rows: list[dict[str, Any]] = []
    for i, (step, norm, loss, reason) in enumerate(columns):
        if i >= first:
            own = {name: _json(values[i]) for name, values in metrics.items() if not math.isnan(values[i])}
            numbers = {"norm": _json(norm), "loss": _json(loss)}
            rows.append({"kind": "step", "step": step, **numbers, "reason": reason, "metrics": own})
    whole = _in_whole(record, spikes) - known
    for step, norms in zip(record.layer_steps, record.layer_norms, strict=True):
        if step in whole:
            rows.append({"kind": "layers", "step": step, "norms": _row(norms)})
    for start in range(first, len(record.layer_steps), BLOCK):
        steps, norms = record.layer_steps[start : start + BLOCK], record.layer_norms[start : start + BLOCK]
        median, maximum = _summary(norms)
        rows.append({"kind": "block", "first": steps[0], "last": steps[-1], "median": median, "maximum": maximum})
    for step, params, updates in record.ratios:
        if step >= record.steps[first]:
            rows.append({"kind": "ratios", "step": step, "params": _row(params), "updates": _row(updates)})
    return [json.dumps(row, allow_nan=False) for row in rows], whole


def _in_whole(record: Record, spikes: set[int]) -> set[int]:
    """Spikes and refused steps; of several in a row, only the first `IN_A_ROW`."""
    found, series = set[int](), 0
    for step, reason in zip(record.steps, record.reasons, strict=True):
        series = series + 1 if reason or step in spikes else 0
        if 0 < series <= IN_A_ROW:
            found.add(step)
    return found


def header(start: int, by: str, layers: Sequence[str], joint: Sequence[str] = ()) -> str:
    """The line before the steps of a run, or before steps with other layers than those before."""
    row = {"kind": "run", "version": VERSION, "start": start, "by": by, "joint": list(joint), "layers": list(layers)}
    return json.dumps(row)


def append(path: Path, lines: list[str]) -> None:
    """Append all lines to a file, or none. If the last line of the file is incomplete, it is ended first."""
    data = "".join(f"{line}\n" for line in lines).encode()
    with path.open("ab+") as file:
        size = file.tell()
        if size:
            file.seek(-1, os.SEEK_END)
            data = data if file.read(1) == b"\n" else b"\n" + data
        try:
            file.write(data)
            file.flush()
        except BaseException:  # the disk is full, or the user interrupts
            file.truncate(size)
            raise


def check(path: Path) -> None:
    """Raise a ValueError if a record cannot be written to this path."""
    try:
        if path.is_dir():
            raise ValueError(f"path={str(path)!r} is a directory: name a file, such as run.jsonl")
        if not path.parent.is_dir():
            raise ValueError(f"path={str(path)!r} is in a directory that does not exist: create {str(path.parent)!r}")
        is_new = not path.exists()
        with path.open("ab+") as file:
            file.seek(0)
            begin = file.read(16)
        if is_new:
            path.unlink()
    except OSError as error:
        raise ValueError(f"path={str(path)!r} cannot be written: {error}") from error
    if begin and not begin.startswith(b'{"kind": "run"'):
        raise ValueError(f"path={str(path)!r} was not written by a Recorder: choose another path")


def read_record(path: Place) -> Record:
    """Read the file of a `Recorder`.

    The file may have several runs. Each run replaces the steps of earlier runs from its own first step on. If the last
    line is incomplete because the process was killed, it is ignored.

    Args:
        path: The path that was given to `Recorder`.

    Raises:
        OSError: If the file cannot be read.
        ValueError: If a line is wrong. The message has its number.

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
    try:
        text = Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not a text file: {error}") from None
    lines = text.split("\n")
    reader = _Reader(str(path))
    for number, line in enumerate(lines, 1):
        if line.strip():
            may_be_cut = number == len(lines) or (number < len(lines) and lines[number].startswith('{"kind": "run"'))
            reader.read(number, line, may_be_cut=may_be_cut)
    return reader.record()


class _Reader:
    """Reads the lines of a file one by one."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._layers: list[str] = []
        self._columns: list[int] = []
        self._steps: dict[int, dict[str, Any]] = {}
        self._whole: dict[int, Tensor] = {}
        self._blocks: dict[int, Block] = {}
        self._ratios: dict[int, Ratios] = {}
        self._joint: list[str] = []

    def read(self, number: int, line: str, *, may_be_cut: bool) -> None:
        """Read one line."""
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            if may_be_cut:
                return
            raise self._wrong(number, f"it is not JSON: {error}") from None
        kind = row.get("kind") if isinstance(row, dict) else None
        if not isinstance(kind, str) or kind not in KINDS:
            raise self._wrong(number, f"its kind must be one of {', '.join(KINDS)}, got {kind!r}")
        for key, types in KINDS[kind].items():
            if key not in row or not isinstance(row[key], types) or isinstance(row[key], bool):
                raise self._wrong(number, f"{key!r} is missing or of the wrong type")
        if kind != "run" and not self._layers and not self._columns and not self._begun:
            raise self._wrong(number, "a line of the kind 'run' must come first")
        try:
            getattr(self, f"_read_{kind}")(row)
        except (TypeError, ValueError, OverflowError) as error:
            raise self._wrong(number, str(error)) from None

    _begun = False

    def _wrong(self, number: int, what: str) -> ValueError:
        return ValueError(f"{self._path}, line {number}: {what}")

    def _read_run(self, row: dict[str, Any]) -> None:
        if row["version"] != VERSION:
            raise ValueError(f"version {row['version']} cannot be read: this release reads version {VERSION}")
        self._begun = True
        names = [str(name) for name in row["layers"]]
        self._joint = [str(name) for name in row["joint"]]
        self._layers += [name for name in names if name not in self._layers]
        self._columns = [self._layers.index(name) for name in names]
        start = row["start"]
        for kept in (self._steps, self._whole, self._ratios):
            for step in [step for step in kept if step >= start]:
                del kept[step]
        self._blocks = {first: block for first, block in self._blocks.items() if block.last < start}

    def _read_step(self, row: dict[str, Any]) -> None:
        if not all(value is None or _is_number(value) for value in row["metrics"].values()):
            raise ValueError("its metrics must be numbers")
        _column([row["norm"], row["loss"], *row["metrics"].values()])  # a number may be too large
        self._steps[row["step"]] = row

    def _read_layers(self, row: dict[str, Any]) -> None:
        self._whole[row["step"]] = self._vector(row["norms"])

    def _read_block(self, row: dict[str, Any]) -> None:
        pair = (self._vector(row["median"]), self._vector(row["maximum"]))
        self._blocks[row["first"]] = Block(row["first"], row["last"], *pair)

    def _read_ratios(self, row: dict[str, Any]) -> None:
        step = row["step"]
        self._ratios[step] = Ratios(step, self._vector(row["params"]), self._vector(row["updates"]))

    def _vector(self, values: list[Any]) -> Tensor:
        if len(values) != len(self._columns):
            raise ValueError(f"it has {len(values)} numbers for {len(self._columns)} layers")
        if not all(value is None or _is_number(value) for value in values):
            raise ValueError("it must have numbers only")
        vector = torch.full((len(self._layers),), -1.0, dtype=torch.float64, device="cpu")
        for column, value in zip(self._columns, values, strict=True):
            vector[column] = math.nan if value is None else float(value)
        return vector

    def _wide(self, vector: Tensor) -> Tensor:
        """Add -1 for the layers that came later."""
        return torch.cat([vector, vector.new_full((len(self._layers) - len(vector),), -1.0)])

    def record(self) -> Record:
        """Return the record of all lines."""
        rows = [self._steps[step] for step in sorted(self._steps)]
        names = list(dict.fromkeys(name for row in rows for name in row["metrics"]))
        whole = sorted(step for step in self._whole if step in self._steps)
        norms = [self._wide(self._whole[step]) for step in whole]
        blocks = [Block(b.first, b.last, self._wide(b.median), self._wide(b.maximum)) for b in self._blocks.values()]
        ratios = [Ratios(r.step, self._wide(r.params), self._wide(r.updates)) for _, r in sorted(self._ratios.items())]
        return Record(
            [row["step"] for row in rows],
            [row["reason"] for row in rows],
            _column(row["norm"] for row in rows),
            _column(row["loss"] for row in rows),
            {name: _column(row["metrics"].get(name) for row in rows) for name in names},
            self._layers,
            whole,
            torch.stack(norms) if norms else torch.zeros(0, len(self._layers), dtype=torch.float64, device="cpu"),
            blocks,
            ratios,
            self._joint,
        )


def _column(values: Any) -> Tensor:
    return torch.tensor(
        [math.nan if value is None else float(value) for value in values], dtype=torch.float64, device="cpu"
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _json(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _row(values: Tensor) -> list[float | None]:
    return [_json(value) for value in values.tolist()]


def _summary(norms: Tensor) -> tuple[list[float | None], list[float | None]]:
    """The median and the largest norm of each layer; -1 for layers without a gradient in all steps."""
    absent = ((norms < 0).all(dim=0)).tolist()
    columns = (_row(medians(norms)), _row(norms.amax(dim=0)))
    median, maximum = ([-1.0 if no else x for x, no in zip(column, absent, strict=True)] for column in columns)
    return median, maximum
