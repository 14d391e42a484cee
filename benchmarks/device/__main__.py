"""Steps on a GPU, against torch's clip and fused AdamW in the same run, in one call of at most eight minutes.

    python -m benchmarks.device --out results
    python -m benchmarks.device --device cpu --sets tiny --seconds 60

It first checks that numbers are right. Then it measures steps: ``GPU`` is the time between two events of a step that is
enqueued while the GPU sleeps, ``Python`` the time to enqueue it, and ``both`` the time until the GPU is idle again. It
goes on with norms in float32 and in float64, iterations, per-sample clipping, CUDA graphs, and what has to be compiled.
Each row takes turns with torch's clip and AdamW. It writes device.json after each row, and device.md, which also lists
errors and the rows for which there was no time. On a CPU, all three times are one, and large sets are left out.
"""

import argparse
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch

from benchmarks import report
from benchmarks.device import iterations, right, rows, steps, tables
from benchmarks.device.meter import Meter
from benchmarks.device.run import Result, Run
from benchmarks.sets import SETS
from benchmarks.timing import Case, Gradients
from torchzero_clip import set_norm_dtype

ENDS = {
    "right": 0.12,
    "steps": 0.48,
    "norms": 0.56,
    "iterations": 0.68,
    "per sample": 0.74,
    "captured": 0.82,
    "compiled": 1.0,
}
"""The parts, and the share of the time after which no further row of a part begins."""
GPU_SETS = ["tiny", "small", "gpt2", "billion"]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
COMPILING = 70.0  # seconds that a row may need


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.device", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seconds", type=float, default=440.0, help="no row begins later")
    parser.add_argument("--parts", nargs="+", choices=ENDS, default=list(ENDS))
    parser.add_argument("--sets", nargs="+", choices=SETS, help="of parameters")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, help="of parameters")
    parser.add_argument("--rows", nargs="+", help="only rows that contain one of these texts")
    parser.add_argument("--rounds", type=int, help="timed steps of each row, at most 30")
    parser.add_argument("--out", type=Path, default=Path(), help="the folder of device.json and device.md")
    args = parser.parse_args()
    if args.rounds is not None and not 1 <= args.rounds <= steps.MOST_ROUNDS:
        parser.error(f"--rounds must be from 1 to {steps.MOST_ROUNDS}")
    args.sets = args.sets or (GPU_SETS if args.device == "cuda" else ["tiny", "small"])
    args.dtypes = args.dtypes or (list(DTYPES) if args.device == "cuda" else ["float32"])
    return args


class Program:
    """The parts of a run."""

    def __init__(self, args: argparse.Namespace) -> None:
        args.out.mkdir(parents=True, exist_ok=True)
        self.args = args
        self.device: str = args.device
        self.meter = Meter(args.device)
        self.run = Run(args.seconds, args.out / "device.json")
        self.run.about = report.machine(args.device)
        self.cases = rows.cases(args.device)
        self.base = self.cases[rows.BASE]
        self.usual = [case for case in self.cases.values() if not rows.compiles(case)]

    def wanted(self, names: Iterable[str]) -> list[str]:
        texts = self.args.rows
        return [name for name in names if texts is None or any(text in name for text in texts)]

    def right(self) -> None:
        checks = right.rows(self.device)
        for name in self.wanted(checks):
            self.run.attempt("Numbers", name, checks[name], ENDS["right"])

    def steps(self) -> None:
        tables = [(name, dtype) for dtype in self.args.dtypes for name in self.args.sets]
        start, end = self.run.elapsed / self.args.seconds, ENDS["steps"]
        for k, (name, dtype) in enumerate(tables):  # what one set leaves of its time, the next ones have
            self._table(name, dtype, self.usual, start + (end - start) * (k + 1) / len(tables))

    def _table(
        self, name: str, dtype: str, cases: Iterable[Case], end: float, title: str = "", need: float = 0
    ) -> None:
        """Measure rows with parameters of one set and dtype."""
        gradients: Gradients | None = None
        chosen = [self.base.name, *self.wanted(case.name for case in cases)]
        for case in [case for case in cases if case.name in chosen]:

            def measure(case: Case = case) -> Result:
                nonlocal gradients
                gradients = gradients or Gradients(SETS[name](), self.device, DTYPES[dtype])
                rounds = self.args.rounds or steps.rounds_of(gradients)
                return steps.measured(self.meter, self.device, case, self.base, gradients, rounds)

            self.run.attempt(f"{title}{name}, {dtype}", case.name, measure, end, need)

    def norms(self) -> None:
        if self.device == "cpu":
            self.run.left_out.append("norms: on a CPU they are always float64")
            return
        chosen = [self.cases[name] for name in rows.WITH_NORMS]
        for name in self.args.sets[1:3] or self.args.sets:
            for width in ("float64", "float32"):
                with norm_dtype(self.device, width):
                    self._table(name, self.args.dtypes[0], chosen, ENDS["norms"], f"Norms in {width}: ")

    def iterations(self) -> None:
        for name, task in iterations.tasks(self.device).items():
            if self.wanted([name]):
                self._together(f"Iterations: {name}", partial(iterations.iterations, self.meter, task), "iterations")

    def per_sample(self) -> None:
        for name in self.wanted(["mlp", "cnn", "gpt"]):
            self._together(
                f"Per-sample clipping: {name}", partial(iterations.per_sample, self.meter, name), "per sample"
            )

    def _together(self, table: str, measure: Callable[[str, int], dict[str, Result]], part: str) -> None:
        """Measure all rows of a table in turns."""
        found: dict[str, Result] = {}

        def all_rows() -> Result:
            found.update(measure(self.device, self.args.rounds or 12))
            return {name: row["wall ratio"] for name, row in found.items()}

        self.run.attempt(table, "", all_rows, ENDS[part])
        if found:
            self.run.results[table] = found

    def captured(self) -> None:
        """Steps in CUDA graphs come late, because an error in a capture may make later calls of CUDA fail."""
        if self.device == "cpu":
            self.run.left_out.append("captured steps: a CUDA graph needs a GPU")
            return
        cases = rows.captured_cases()
        for case in cases:
            ordinary = self.cases[case.name.removesuffix(", captured")]
            replays = partial(right.replays, case, ordinary, self.device)
            self.run.attempt("Replays of captured steps", case.name, replays, ENDS["captured"])
        for name in self.args.sets[:2]:
            self._table(name, self.args.dtypes[0], cases, ENDS["captured"], "Captured: ")

    def compiled(self) -> None:
        name = self.args.sets[min(1, len(self.args.sets) - 1)]
        for case in filter(rows.compiles, self.cases.values()):
            self._table(name, self.args.dtypes[0], [case], ENDS["compiled"], "Compiled: ", COMPILING)
            torch.compiler.reset()  # which keeps the parameters


@contextmanager
def norm_dtype(device: str, width: str) -> Generator[None]:
    set_norm_dtype(device, getattr(torch, width))
    try:
        yield
    finally:
        set_norm_dtype(device, torch.float64)


def main() -> None:
    args = parsed()
    if args.device == "cuda" and not torch.cuda.is_available():
        print("nothing measured: this machine has no CUDA device")
        return
    program = Program(args)
    parts = {
        "right": program.right,
        "steps": program.steps,
        "norms": program.norms,
        "iterations": program.iterations,
        "per sample": program.per_sample,
        "captured": program.captured,
        "compiled": program.compiled,
    }
    try:
        for name in args.parts:
            parts[name]()
    finally:
        program.run.save()
        (args.out / "device.md").write_text(tables.page(program.run))
    print(f"{program.run.elapsed:.0f} s, {len(program.run.errors)} errors, {len(program.run.left_out)} rows left out")


if __name__ == "__main__":
    main()
