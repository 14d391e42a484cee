"""The lines of the file of a record, and how they are appended. Each line is a JSON object.

{"kind": "run", "version": 1, "id": "5c1f", "parent": null, "start": 0, "by": "parameter", "joint": [], "layers": ["w"],
 "precision": 1.9e-06}
{"kind": "step", "run": "5c1f", "step": 0, "norm": 1.5, "loss": 2.3, "reason": "", "metrics": {"clip_norm/limit": 1.0}}
{"kind": "loss", "run": "5c1f", "step": 0, "loss": 2.4}
{"kind": "layers", "run": "5c1f", "step": 0, "norms": [1.5], "jumps": ["w"]}
{"kind": "block", "run": "5c1f", "first": 0, "last": 99, "median": [0.4], "maximum": [1.5]}
{"kind": "ratios", "run": "5c1f", "step": 0, "params": [3.0], "updates": [0.01]}
"""

import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from io import FileIO
from pathlib import Path
from types import UnionType
from typing import Any, TypeAlias

from torch import Tensor

from torchzero_clip.recorder.arithmetic import medians
from torchzero_clip.recorder.data import Data

VERSION = 1
BEGIN = '{"kind": "run"'  # how the first line of a file begins
NUMBER = float | int | None
# what lines must have; files of earlier releases have no ids
KINDS_OF_LINES: Mapping[str, Mapping[str, type | UnionType]] = {
    "run": {"version": int, "start": int, "by": str, "joint": list, "layers": list},
    "step": {"step": int, "norm": NUMBER, "loss": NUMBER, "reason": str, "metrics": dict},
    "loss": {"step": int, "loss": NUMBER},
    "layers": {"step": int, "norms": list},
    "block": {"first": int, "last": int, "median": list, "maximum": list},
    "ratios": {"step": int, "params": list, "updates": list},
}

Line: TypeAlias = dict[str, Any]  # a JSON object with the entries in `KINDS_OF_LINES`
FilePath: TypeAlias = str | Path


def run_line(name: str, parent: str | None, start: int, by: str, record: Data) -> Line:
    """The line before the steps of a run, or before steps with other layers than those before."""
    run = {"kind": "run", "version": VERSION, "id": name, "parent": parent, "start": start, "by": by}
    return {**run, "joint": list(record.joint), "layers": list(record.layers), "precision": record.precision}


def step_lines(record: Data) -> list[Line]:
    columns = zip(record.steps, record.norm.tolist(), record.loss.tolist(), record.reasons, strict=True)
    metrics = {name: values.tolist() for name, values in record.metrics.items()}
    lines: list[Line] = []
    for i, (step, norm, loss, reason) in enumerate(columns):
        measured = {name: json_number(values[i]) for name, values in metrics.items() if not math.isnan(values[i])}
        numbers = {"norm": json_number(norm), "loss": json_number(loss)}
        lines.append({"kind": "step", "step": step, **numbers, "reason": reason, "metrics": measured})
    for step, params, updates in record.ratios:
        lines.append({"kind": "ratios", "step": step, "params": _numbers(params), "updates": _numbers(updates)})
    return lines


def layer_lines(record: Data, steps: set[int]) -> list[Line]:
    lines: list[Line] = []
    for step, norms in zip(record.layer_steps, record.layer_norms, strict=True):
        if step in steps:
            line: Line = {"kind": "layers", "step": step, "norms": _numbers(norms)}
            jumps = [name for jumped, name in record.jumps if jumped == step]
            lines.append(line | {"jumps": jumps} if jumps else line)
    return lines


def block_line(steps: Sequence[int], norms: Tensor) -> Line:
    """The line that sums up the norms of layers over these steps."""
    absent = ((norms < 0).all(dim=0)).tolist()
    columns = (_numbers(medians(norms)), _numbers(norms.amax(dim=0)))
    median, maximum = ([-1.0 if no else x for x, no in zip(column, absent, strict=True)] for column in columns)
    return {"kind": "block", "first": steps[0], "last": steps[-1], "median": median, "maximum": maximum}


def encoded(lines: Sequence[Line], run: str) -> bytes:
    named = [line if line["kind"] == "run" else {"kind": line["kind"], "run": run, **line} for line in lines]
    return "".join(f"{json.dumps(line, allow_nan=False)}\n" for line in named).encode()


def append(path: Path, data: bytes) -> None:
    """Append all lines to a file, or none. If the last line of the file is incomplete, it is ended first."""
    with _opened(path) as opened:
        file = opened.fileno()
        size = os.fstat(file).st_size
        if size and _read(file, size - 1, 1) != b"\n":
            data = b"\n" + data
        written = 0
        try:
            while written < len(data):
                written += os.write(file, data[written:])
        except BaseException:  # the disk is full, or the user interrupts
            if data.startswith(_read(file, size, len(data) + 1)):  # else another process has appended lines behind
                os.ftruncate(file, size)
            raise


def status(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except FileNotFoundError:
        return None


def check(path: Path) -> bool:
    """Create the file if there is none. Return True if it has lines; raise if they are not those of a record."""
    try:
        if path.is_dir():
            raise ValueError(f"path={str(path)!r} is a directory: name a file, such as run.jsonl")
        if not path.parent.is_dir():
            raise ValueError(f"path={str(path)!r} is in a directory that does not exist: create {str(path.parent)!r}")
        with _opened(path) as file:
            begin = _read(file.fileno(), 0, len(BEGIN))
    except OSError as error:
        raise ValueError(f"path={str(path)!r} cannot be written: {error}") from error
    if not BEGIN.encode().startswith(begin):
        raise ValueError(f"path={str(path)!r} was not written by a Recorder: choose another path")
    return len(begin) > 0


def not_a_record(path: FilePath) -> None:
    """Raise a ValueError if this path is the file of a recorder, which must not be overwritten."""
    try:
        with Path(path).open("rb") as file:
            begin = file.read(100)  # perhaps of a file that another tool has written again, with other spaces
    except OSError:  # there is no such file, or writing to it will raise a better error
        return
    if re.match(rb'\s*\{\s*"kind"\s*:\s*"run"', begin):
        advice = "Choose another path, so that it is not overwritten"
        raise ValueError(f"path={str(path)!r} is the file of a Recorder. {advice}")


def _opened(path: Path) -> FileIO:
    # never truncated or unlinked, because other processes may have the file open; without a buffer, because one that
    # could not be written is written again when the file is closed
    return path.open("a+b", buffering=0)


def _read(file: int, place: int, count: int) -> bytes:
    os.lseek(file, place, os.SEEK_SET)  # appending does not use this position
    return os.read(file, count)


def json_number(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _numbers(values: Tensor) -> list[float | None]:
    return [json_number(value) for value in values.tolist()]
