"""Time and memory of an optimizer step, against torch's clip and its fused AdamW in the same run.

Each row of a table has parameters of its own, and the rows take turns. Before each step the gradients are refilled,
larger than in the step before, so that every clip is active. A number is the median over rounds of the ratio to the
base in the same round, with the 10th and the 90th percentile: below 1 is faster. Use the ratios; absolute times on a
shared machine drift.

    python -m benchmarks.step --threads 1                    # whole steps
    python -m benchmarks.step --what memory --set small      # or transforms, functions, before (before_step), compiled
    python -m benchmarks.step --floor                        # beside the same steps in C, without checks
    python -m benchmarks.step --peers --plot step_time.png   # by the number of parameters and of tensors
"""

import argparse
import json
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from benchmarks import plot, report
from benchmarks.cases import CASES
from benchmarks.floor import floor_cases
from benchmarks.memory import measure_memory
from benchmarks.peers import installed_peers
from benchmarks.progress import progress
from benchmarks.sets import SETS
from benchmarks.timing import Case, measure, turns


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.step", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--what", choices=[*CASES, "memory"], default="steps")
    parser.add_argument("--set", "--sets", nargs="+", choices=SETS, default=["small", "gpt"], dest="sets")
    parser.add_argument("--rounds", type=int, default=15, help="timed steps of each row")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--warm", action="store_true", help="take five steps of a row in each turn, and time the last")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--peers", action="store_true", help="also measure other packages, where installed")
    parser.add_argument("--floor", action="store_true", help="also measure the same steps in C, without checks")
    parser.add_argument("--json", type=Path, help="where to save the numbers")
    parser.add_argument("--plot", type=Path, help="where to draw the time of steps by their size, instead of a table")
    args = parser.parse_args()
    if args.rounds < 1 or args.threads < 1:
        parser.error("--rounds and --threads must be >= 1")
    if args.peers and args.what not in ("steps", "memory"):
        parser.error("--peers needs --what steps or --what memory, because peers are measured as whole steps")
    if args.floor and (args.what != "steps" or args.plot or args.device != "cpu"):
        parser.error("--floor needs --what steps on CPU, without --plot")
    if args.plot and args.what != "steps":
        parser.error("--plot needs --what steps")
    if args.warm and (args.plot or args.what == "memory"):
        parser.error("--warm is for tables of times")
    return args


def time_of_steps(cases: Sequence[Case], args: argparse.Namespace) -> tuple[str, Any]:
    """The table, and the numbers for JSON."""
    sets = {name: SETS[name]() for name in args.sets}
    in_a_row = 5 if args.warm else 1
    with progress(sum(turns(cases, shapes, args.rounds, in_a_row) for shapes in sets.values())) as tick:
        times = {
            name: measure(cases, shapes, args.rounds, args.device, tick, in_a_row) for name, shapes in sets.items()
        }
    return report.time_tables(times, cases), report.times_as_json(times)


def memory_of_steps(cases: Sequence[Case], args: argparse.Namespace) -> tuple[str, Any]:
    """The table, and the numbers for JSON."""
    sets = {name: SETS[name]() for name in args.sets}
    with progress(len(cases) * len(sets)) as tick:
        memories = {name: measure_memory(cases, shapes, args.device, tick) for name, shapes in sets.items()}
    return report.memory_table(memories), report.memories_as_json(memories)


def lines_of_steps(peers: Sequence[Case], args: argparse.Namespace, title: str) -> tuple[str, Any]:
    """Where the plot is, and the numbers for JSON."""
    panels = plot.sweep(peers, args.rounds, args.device)
    plot.draw(panels, args.plot, title)
    return f"drawn: {args.plot}", panels


def main() -> None:
    args = parsed()
    if args.device == "cuda" and not torch.cuda.is_available():
        print("nothing measured: this machine has no CUDA device")
        return
    torch.set_num_threads(args.threads)
    machine = report.machine(args.device)
    about = "{processor}, threads: {threads}, torch {torch}".format(**machine)
    peers = installed_peers(args.device) if args.peers else {}
    cases = CASES["steps" if args.what == "memory" else args.what]() + list(chain(*peers.values()))
    cases += floor_cases() if args.floor else []
    if args.plot:
        text, results = lines_of_steps([own[0] for own in peers.values()], args, about)
    elif args.what == "memory":
        text, results = memory_of_steps(cases, args)
        about = f"memory beyond parameters and gradients, x the gradients; {about}"
    else:
        text, results = time_of_steps(cases, args)
        about = f"time of {args.what}: median of {args.rounds} rounds (10th - 90th percentile); {about}"
    print(f"{about}\n\n{text}")
    if args.json:
        what = "plot" if args.plot else args.what
        args.json.write_text(json.dumps({**machine, "what": what, "rounds": args.rounds, "results": results}))


if __name__ == "__main__":
    main()
