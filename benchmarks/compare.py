"""Steps of this checkout against those of another one, interleaved in one process: time new / time old.

git worktree add ../old v0.1.0
python -m benchmarks.compare ../old --set tiny small gpt --threads 1
"""

import argparse
import importlib
import statistics
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks import report
from benchmarks.cases import CASES
from benchmarks.sets import SETS
from benchmarks.timing import Case, measure

PACKAGES = ("torchzero_clip", "benchmarks")


def cases_of(checkout: Path) -> list[Case]:
    """The rows of another checkout, with its own modules."""
    mine = {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] in PACKAGES}
    sys.path.insert(0, str(checkout.resolve()))
    try:
        other: Any = importlib.import_module("benchmarks.cases")
        package = Path(str(importlib.import_module("torchzero_clip").__file__))
        if checkout.resolve() not in package.parents:
            raise RuntimeError(f"{package} is not in {checkout}")
        found: list[Case] = [Case(case.name, case.make, ()) for case in other.CASES["steps"]()]
    finally:
        sys.path.pop(0)
        for name in [name for name in sys.modules if name.partition(".")[0] in PACKAGES]:
            del sys.modules[name]
        sys.modules.update(mine)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.compare", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkout", type=Path, help="the folder of the other checkout")
    parser.add_argument("--set", nargs="+", choices=SETS, default=["tiny", "small", "gpt"], dest="sets")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rows", nargs="+", default=[""], help="only rows whose names contain one of these")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    own = [case for case in CASES["steps"]() if not case.name.startswith(("torch", "bare"))]
    own = [case for case in own if any(part in case.name for part in args.rows)]
    others = {case.name: replace(case, name=f"old {case.name}") for case in cases_of(args.checkout)}
    print("{processor}, threads: {threads}, torch {torch}".format(**report.machine("cpu")))
    for name in args.sets:
        print(f"\n{name}: new / old, median of {args.rounds} rounds, smallest / smallest")
        for case in own:
            if case.name in others:
                old = others[case.name]
                first = replace(old, name="first")  # the collection before each round makes its first row slower
                rows = [first, old, Case(case.name, case.make, (old.name,))]
                found = measure(rows, SETS[name](), args.rounds, "cpu", lambda _: None)
                ratio = statistics.median(found[case.name].ratios[old.name])
                least = min(found[case.name].seconds) / min(found[old.name].seconds)
                print(f"{ratio:5.2f}  {least:5.2f}  {case.name}", flush=True)


if __name__ == "__main__":
    main()
