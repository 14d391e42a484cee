"""What a run has measured, which errors there were, and what it had no time for."""

import gc
import json
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

Result = dict[str, Any]


class Run:
    """Results by part, set and row. An error in one row is noted, and the others go on."""

    def __init__(self, seconds: float, path: Path) -> None:
        self.results: dict[str, dict[str, Result]] = {}
        self.errors: dict[str, str] = {}
        self.left_out: list[str] = []
        self.about: Result = {}
        self._path = path
        self._start = time.perf_counter()
        self._seconds = seconds

    @property
    def elapsed(self) -> float:
        return time.perf_counter() - self._start

    def left(self, share: float = 1.0) -> float:
        """Seconds until this share of the time is over."""
        return self._seconds * share - self.elapsed

    def attempt(self, table: str, row: str, measure: Callable[[], Result], end: float = 1.0, need: float = 0.0) -> None:
        """Measure a row, unless this share of the time is over, or fewer seconds are left than it needs."""
        name = f"{table}: {row.strip()}" if row else table
        if self.left(end) <= need:
            self.left_out.append(name)
            return
        start = self.elapsed
        try:
            self.results.setdefault(table, {})[row] = found = measure()
            print(f"{self.elapsed - start:6.1f} s  {name}  {brief(found)}", flush=True)
        except Exception as error:
            self.errors[name] = "".join(traceback.format_exception_only(error)).strip()[:500]
            print(f"{self.elapsed - start:6.1f} s  {name}  {self.errors[name]}", flush=True)
        gc.collect()  # the tensors of the row, also those in frames of an error
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
        self.save()

    def save(self) -> None:
        parts = {"results": self.results, "errors": self.errors, "left out": self.left_out}
        self._path.write_text(json.dumps({**self.about, "seconds": self.elapsed, **parts}, indent=1))


def brief(result: Result) -> str:
    return "  ".join(f"{key} {value:.3g}" for key, value in result.items() if value is not None)
