"""Tables to read, and what is saved as JSON."""

import datetime
import platform
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.memory import Memory
from benchmarks.timing import Case, Measured, spread

Times = Mapping[str, Mapping[str, Measured]]  # by set and row
Memories = Mapping[str, Mapping[str, Memory]]

MIB = 2**20


def machine(device: str) -> dict[str, Any]:
    """What the numbers depend on."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "device": device,
        "processor": torch.cuda.get_device_name() if device == "cuda" else processor(),
    }


def processor() -> str:
    """The name of the CPU; on Linux `platform.processor` has only the architecture."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def time_tables(times: Times, cases: Sequence[Case]) -> str:
    """A table for each base; the row of the base has its milliseconds."""
    tables: list[str] = []
    for base in dict.fromkeys(base for case in cases for base in case.bases):
        rows = [[f"relative to {base}", *times]]
        for case in cases:
            if base in case.bases:
                rows.append([f"  {case.name}", *(time_cell(own[case.name], base, case.name) for own in times.values())])
        tables.append(aligned(rows))
    return "\n\n".join(tables)


def time_cell(measured: Measured, base: str, name: str) -> str:
    if name == base:
        return f"1.00 = {milliseconds(measured):.3g} ms"
    median, low, high = spread(measured.ratios[base])
    return f"{median:.2f} ({low:.2f} - {high:.2f})"


def milliseconds(measured: Measured) -> float:
    return statistics.median(measured.seconds) * 1000


def times_as_json(times: Times) -> dict[str, Any]:
    return {name: {row: of_row(measured) for row, measured in own.items()} for name, own in times.items()}


def of_row(measured: Measured) -> dict[str, Any]:
    relative: dict[str, dict[str, float]] = {}
    for base, ratios in measured.ratios.items():
        median, low, high = spread(ratios)
        relative[base] = {"median": median, "p10": low, "p90": high, "mean": statistics.mean(ratios)}
    return {"ms": milliseconds(measured), "relative to": relative}


def memory_table(memories: Memories) -> str:
    """Multiples of the bytes of the gradients, and MiB."""
    rows = [["", *(f"{name}: {column}" for name in memories for column in ("held", "extra in a step"))]]
    for row in next(iter(memories.values())):
        cells = [cell for own in memories.values() for cell in memory_cells(own[row])]
        rows.append([row, *cells])
    return aligned(rows)


def memory_cells(memory: Memory) -> list[str]:
    held = "-" if memory.held is None else f"{memory.held / memory.gradients:.2f}"
    return [held, f"{memory.peak / memory.gradients:.3f} = {memory.peak / MIB:8.2f} MiB"]


def memories_as_json(memories: Memories) -> dict[str, Any]:
    return {name: {row: memory._asdict() for row, memory in own.items()} for name, own in memories.items()}


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """The first column on the left, the others on the right."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))])
        for row in rows
    )
