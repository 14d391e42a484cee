"""Steps of this checkout against those of another one, interleaved in one process: time new / time old.

git worktree add ../old v0.1.0
python -m benchmarks.compare ../old --set tiny small gpt --threads 1
python -m benchmarks.compare ../old --what before functions
"""

import argparse
import importlib
import math
import statistics
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks import report
from benchmarks.cases import CASES
from benchmarks.sets import SETS, Shapes
from benchmarks.timing import Case, measure, ratios

PACKAGES = ("torchzero_clip", "benchmarks")


def cases_of(checkout: Path, what: str) -> list[Case]:
    """The rows of one part of another checkout, with its own modules."""
    mine = {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] in PACKAGES}
    sys.path.insert(0, str(checkout.resolve()))
    try:
        other: Any = importlib.import_module("benchmarks.cases")
        package = Path(str(importlib.import_module("torchzero_clip").__file__))
        if checkout.resolve() not in package.parents:
            raise RuntimeError(f"{package} is not in {checkout}")
        found: list[Case] = [Case(case.name, case.make, ()) for case in other.CASES[what]()]
    finally:
        sys.path.pop(0)
        for name in [name for name in sys.modules if name.partition(".")[0] in PACKAGES]:
            del sys.modules[name]
        sys.modules.update(mine)
    return found


def compared(new: Case, old: Case, shapes: Shapes, rounds: int) -> tuple[float, float]:
    """The median ratio of the times of two rows, and the ratio of their smallest times.

    In each round both steps run once before they are timed. Otherwise the first one has cold code and cold caches after
    the collection of the round, which makes equal code up to a fifth slower. Each row is first in half of the rounds.
    """
    medians: list[float] = []
    seconds: dict[str, list[float]] = {new.name: [], old.name: []}
    for pair in ([old, new], [new, old]):
        before = [replace(case, name=f"before {case.name}") for case in pair]
        rows = [replace(case, bases=()) for case in (*before, *pair)]
        found = measure(rows, shapes, (rounds + 1) // 2, "cpu", lambda _: None)
        own, base = found[new.name].seconds, found[old.name].seconds
        medians.append(statistics.median(ratios(own, base)))
        seconds[new.name] += own
        seconds[old.name] += base
    return math.prod(medians) ** 0.5, min(seconds[new.name]) / min(seconds[old.name])


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.compare", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkout", type=Path, help="the folder of the other checkout")
    parser.add_argument("--set", nargs="+", choices=SETS, default=["tiny", "small", "gpt"], dest="sets")
    parser.add_argument("--what", nargs="+", choices=CASES, default=["steps"])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rows", nargs="+", default=[""], help="only rows whose names contain one of these")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    own = [case for what in args.what for case in CASES[what]() if not case.name.startswith(("torch", "bare"))]
    own = [case for case in own if any(part in case.name for part in args.rows)]
    theirs = [case for what in args.what for case in cases_of(args.checkout, what)]
    others = {case.name: replace(case, name=f"old {case.name}") for case in theirs}
    print("{processor}, threads: {threads}, torch {torch}".format(**report.machine("cpu")))
    for name in args.sets:
        print(f"\n{name}: new / old, median of {args.rounds} rounds, and smallest / smallest")
        for case in own:
            if case.name in others:
                ratio, least = compared(case, others[case.name], SETS[name](), args.rounds)
                print(f"{ratio:5.2f}  {least:5.2f}  {case.name}", flush=True)


if __name__ == "__main__":
    main()
