"""Compares limits for people who do not know one: ``python -m benchmarks.choices``.

The tasks, the candidates and the rule were fixed before the first run. In each task, every candidate trains with the
same seeds. A candidate is *worse* in a task if the 95% interval of the mean of its differences to the best candidate,
seed by seed, does not contain 0. The first candidate in the list, from simple to complicated, that is worse in no task
is recommended.
"""

import argparse
import json
import multiprocessing
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from tqdm import tqdm

from benchmarks.control_tasks import CONTROL, train_by_ppo
from benchmarks.limit_tasks import TASKS
from benchmarks.limits import train
from torchzero_clip import AutoClip, ClipNorm, ClipNormGrowth, SkipStep, Transform, ZClip

SEEDS = 5
T95 = {3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 8: 2.365, 10: 2.262}  # Student's t, by the number of seeds
RECORDED_SEED = 100  # of the run without a limit that suggests one

ADAPTIVE: dict[str, Callable[[], list[Transform]]] = {
    "AutoClip(window=200)": lambda: [AutoClip(window=200)],
    "ClipNormGrowth(parameterwise=False)": lambda: [ClipNormGrowth(parameterwise=False)],
    "ZClip(max_norm=None)": lambda: [ZClip(max_norm=None)],
    "SkipStep(max_ratio=10), ZClip(max_norm=None)": lambda: [SkipStep(max_ratio=10.0), ZClip(max_norm=None)],
}
PPO: dict[str, Callable[[], list[Transform]]] = {
    "no limit": list,
    'ClipNorm(0.5, dim="global")': lambda: [ClipNorm(0.5, dim="global")],
    "one for policy, one for value": lambda: [
        ClipNorm(0.5, dim="global", name="policy_limit").only("policy"),
        ClipNorm(0.5, dim="global", name="value_limit").only("value"),
    ],
    **ADAPTIVE,
}
OTHERS: dict[str, Callable[[], list[Transform]]] = {
    "no limit": list,
    'ClipNorm(1, dim="global")': lambda: [ClipNorm(1, dim="global")],
    "the limit of a record": list,
    **ADAPTIVE,
}
TRAININGS = ("text: transformer", "text: corrupt batches, transformer", "digits: bright pictures, convolutions")


class Job(NamedTuple):
    """One training."""

    task: str
    candidate: str
    seed: int


class Score(NamedTuple):
    """What came of it: the return of episodes, or minus the held-out loss, so that more is better."""

    task: str
    candidate: str
    seed: int
    score: float


def scored(job: Job) -> Score:
    torch.set_num_threads(1)
    if job.task in CONTROL:
        return Score(*job, train_by_ppo(CONTROL[job.task], PPO[job.candidate](), job.seed))
    task, transforms = TASKS[job.task], OTHERS[job.candidate]()
    if job.candidate == "the limit of a record":
        _, recorder = train(task, RECORDED_SEED, [])
        transforms = [ClipNorm(recorder.suggest_max_norm().limits["joint"], dim="global")]
    return Score(*job, -train(task, job.seed, transforms)[0])


def differences(scores: list[Score], task: str, candidate: str, best: str) -> tuple[float, float]:
    """The mean difference of a candidate to the best one, and half the length of its 95% interval."""
    by_seed = {(score.candidate, score.seed): score.score for score in scores if score.task == task}
    seeds = sorted({seed for _, seed in by_seed})
    apart = [by_seed[candidate, seed] - by_seed[best, seed] for seed in seeds]
    spread = statistics.stdev(apart) if len(apart) > 1 else 0.0
    return statistics.fmean(apart), T95[len(apart)] * spread / len(apart) ** 0.5


def report(scores: list[Score], tasks: list[str], candidates: list[str]) -> str:
    """A table in Markdown, and what is recommended."""
    lines = [f"| | {' | '.join(tasks)} |", f"| --- |{' --- |' * len(tasks)}"]
    is_worse: set[str] = set()
    cells: dict[str, list[str]] = {candidate: [] for candidate in candidates}
    for task in tasks:
        means = {
            candidate: statistics.fmean(s.score for s in scores if (s.task, s.candidate) == (task, candidate))
            for candidate in candidates
        }
        best = max(candidates, key=lambda candidate: means[candidate])
        for candidate in candidates:
            mean, half = differences(scores, task, candidate, best)
            worse = mean + half < 0
            if worse:
                is_worse.add(candidate)
            apart = "the best" if candidate == best else f"{mean:+.3g} ± {half:.2g}"
            cells[candidate].append(f"{means[candidate]:.4g} ({apart}){', worse' if worse else ''}")
    lines += [f"| {candidate} | {' | '.join(cells[candidate])} |" for candidate in candidates]
    usable = [candidate for candidate in candidates if candidate not in is_worse]
    lines.append(f"\nrecommended: {usable[0] if usable else 'none, each is worse somewhere'}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--what", nargs="+", choices=["ppo", "limits"], default=["ppo", "limits"])
    parser.add_argument("--seeds", type=int, choices=list(T95), default=SEEDS)
    parser.add_argument("--processes", type=int, default=2, help="how many processes (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="where to write the scores; those that it has are not run again")
    options = parser.parse_args()
    parts: dict[str, tuple[list[str], list[str]]] = {
        "ppo": (list(CONTROL), list(PPO)),
        "limits": (list(TRAININGS), list(OTHERS)),
    }
    chosen = [parts[what] for what in options.what]
    jobs = [Job(*job) for tasks, names in chosen for job in _product(tasks, names, options.seeds)]
    scores: list[Score] = []
    if options.json and options.json.exists():
        scores = [Score(**score) for score in json.loads(options.json.read_text())]
    done = {score[:3] for score in scores}
    with multiprocessing.get_context("spawn").Pool(options.processes) as pool:
        jobs_left = [job for job in jobs if job not in done]
        for score in tqdm(pool.imap_unordered(scored, jobs_left), total=len(jobs_left), disable=None):
            scores.append(score)
            if options.json:
                options.json.write_text(json.dumps([each._asdict() for each in scores], indent=1) + "\n")
    for tasks, candidates in chosen:
        print(report(scores, tasks, candidates), "\n")


def _product(tasks: list[str], candidates: list[str], seeds: int) -> list[tuple[str, str, int]]:
    return [(task, name, seed) for seed in range(seeds) for task in tasks for name in candidates]


if __name__ == "__main__":
    main()
