"""Compares trainings with and without the limits that a recorder suggests: ``python -m benchmarks.limits``.

It trains each task of `benchmarks.limit_tasks` without a clip and records the whole run. Then it trains anew, from the
same weights and with the same batches: with the limits that the record suggests, and with the limit 1. It compares
the held-out losses, averaged over seeds, and prints the table that docs/choosing_a_limit.md sums up.

``--continue 72`` records 72 other trainings, of `benchmarks.limit_draws`, which go on for a quarter of the recorded
steps. It prints what the suggestion for 10% of the steps answers, and the share of later norms above its limit, also
for the first half and the first quarter of a record. The tasks that memorize follow. ``--from 80`` begins with the
training of this number.
"""

import argparse
import json
import math
import multiprocessing
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch.optim.lr_scheduler import LambdaLR
from tqdm import tqdm

from benchmarks.limit_draws import drawn
from benchmarks.limit_tasks import MEMORIZED, TASKS, Task
from torchzero_clip import SGD, Adam, ClipNorm, Modular, Recorder, RMSprop, Transform, UpdateRule
from torchzero_clip.recorder.series import FACTOR
from torchzero_clip.recorder.suggestion import suggested

SHARE, FEWEST_STEPS = 0.1, 300
SHARES = {"1%": 0.01, "10%": 0.1, "median": 0.5}
CHOICES = ["none", *SHARES, "1.0"]
MOST_WORSE = 1.02
RATES = {"Adam": (3e-4, 1e-3, 3e-3, 1e-2, 3e-2), "SGD": (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)}
SWEEP_SEED = 100


class Result(NamedTuple):
    """The held-out losses of a task with one seed, the limits, and the confidence of the suggestions."""

    task: str
    seed: int
    losses: dict[str, float]
    limits: dict[str, float]
    confidence: dict[str, str]


class Row(NamedTuple):
    """The held-out losses of a task by choices, averaged over seeds, and their ratios and ranks.

    The confidence is that of the 1% limit with the first seed.
    """

    task: str
    confidence: str
    none: float
    ratios: dict[str, float]
    ranks: dict[str, float]


def train(
    task: Task, seed: int, clip: Sequence[Transform], lr: float | None = None, more: int = 0
) -> tuple[float, Recorder]:
    """Return the held-out loss, and the record of the run, which takes so many steps ``more``."""
    torch.manual_seed(seed)
    training = task.make(seed)
    torch.manual_seed(seed)
    params = [param for param in training.model.parameters() if param.requires_grad]
    rate = task.lr if lr is None else lr
    optimizer, steps = Modular(params, *clip, _rule(task, rate)), task.steps + more
    recorder = Recorder(optimizer, keep=steps)
    scheduler = LambdaLR(optimizer, lambda step: 1 - step / steps if task.falls else 1.0)
    for step in range(steps):
        optimizer.zero_grad()
        training.loss(step).backward()
        optimizer.step()
        scheduler.step()
    with torch.no_grad():
        loss = training.held_out().item()
    return loss if math.isfinite(loss) else math.inf, recorder


def _rule(task: Task, lr: float) -> UpdateRule:
    if task.method == "SGD":
        return SGD(lr, momentum=0.9)
    return Adam(lr) if task.method == "Adam" else RMSprop(lr)


class Continued(NamedTuple):
    """What the suggestion says of the recorded norms of a training, and what came true."""

    training: str
    steps: int
    answer: str
    chance: float  # the probability of a right limit
    later: float  # the share of later norms above the limit; NaN without later norms

    @property
    def is_right(self) -> bool:
        return SHARE / FACTOR <= self.later <= SHARE * FACTOR


def continued(training: str, steps: int, norms: Sequence[float]) -> list[Continued]:
    """What the suggestions from the first ``steps`` norms, from their half and from their quarter say.

    Parts of fewer than 300 steps are left out. If a norm is not finite, the training diverged, and the list is empty.
    """
    found: list[Continued] = []
    if not all(map(math.isfinite, norms)):
        return found
    for count in [steps, *(part for part in (steps // 2, steps // 4) if part >= FEWEST_STEPS)]:
        recorded, later = torch.tensor(norms[:count], dtype=torch.float64), norms[count : count + count // 4]
        suggestion = suggested({"joint": recorded}, SHARE, "joint")
        above = sum(not norm <= suggestion.limits["joint"] for norm in later)
        chance, share = suggestion.series["joint"].chance(SHARE), above / len(later) if later else math.nan
        found.append(Continued(training, count, suggestion.answer, chance, share))
    return found


def summed_up(found: Sequence[Continued]) -> list[str]:
    """How often each answer was given, how often its limit was right, and how good the probabilities are."""
    lines: list[str] = []
    for answer in ("enough", "too few", "drifting"):
        given = [each for each in found if each.answer == answer]
        lines.append(f"{answer}: {len(given)}, of which {sum(each.is_right for each in given)} have a right limit")
    for low, high in ((0.0, 0.2), (0.2, 0.5), (0.5, 0.8), (0.8, 0.95), (0.95, 1.01)):
        given = [each for each in found if low <= each.chance < high]
        if given:
            mean, right = (sum(x) / len(given) for x in ([g.chance for g in given], [g.is_right for g in given]))
            lines.append(f"probability {low} to {min(high, 1.0)}: {len(given)}, mean {mean:.0%}, right {right:.0%}")
    return lines


def compared(job: tuple[str, int]) -> Result:
    """Train a task with one seed: without a clip, and with each limit."""
    torch.set_num_threads(1)
    name, seed = job
    task = TASKS[name]
    loss, recorder = train(task, seed, [])
    found = {choice: recorder.suggest_max_norm(share) for choice, share in SHARES.items()}
    limits = {choice: suggestion.limits["joint"] for choice, suggestion in found.items()} | {"1.0": 1.0}
    clipped = {choice: train(task, seed, [ClipNorm(x, dim="global")])[0] for choice, x in limits.items()}
    confidence = {choice: suggestion.confidence for choice, suggestion in found.items()}
    return Result(name, seed, {"none": loss} | clipped, limits, confidence)


def swept(job: tuple[str, int]) -> Result:
    """Train a task with one seed without a clip, with several learning rates."""
    torch.set_num_threads(1)
    name, seed = job
    task = TASKS[name]
    return Result(name, seed, {f"{lr:g}": train(task, seed, [], lr)[0] for lr in RATES[task.method]}, {}, {})


def rows_of(results: Sequence[Result]) -> list[Row]:
    """A row for each task. Equal losses share their rank."""
    rows: list[Row] = []
    for task in [name for name in TASKS if any(result.task == name for result in results)]:
        losses = [result.losses for result in results if result.task == task]
        confidence = next(r.confidence["1%"] for r in results if r.task == task and r.seed == 0)
        means = {choice: sum(each[choice] for each in losses) / len(losses) for choice in CHOICES}
        none = means["none"]
        ratios = {choice: mean / none if math.isfinite(none) else math.nan for choice, mean in means.items()}
        ranks = {
            choice: sum(other < mean for other in means.values())
            + (1 + sum(other == mean for other in means.values())) / 2
            for choice, mean in means.items()
        }
        rows.append(Row(task, confidence, none, ratios, ranks))
    return rows


def chosen(rows: Sequence[Row]) -> tuple[dict[str, float], dict[str, float], str]:
    """The mean rank and the worst ratio of each choice, and the choice that should be the default.

    That is the suggested limit with the best mean rank among those that are never more than 2% worse than no clip. If
    there is none, it is the one whose worst ratio is the lowest.
    """
    ranks = {choice: sum(row.ranks[choice] for row in rows) / len(rows) for choice in CHOICES}
    worst = {
        choice: max((row.ratios[choice] for row in rows if not math.isnan(row.ratios[choice])), default=math.nan)
        for choice in CHOICES
    }
    safe = [choice for choice in SHARES if worst[choice] <= MOST_WORSE]
    best = min(safe, key=lambda choice: ranks[choice]) if safe else min(SHARES, key=lambda choice: worst[choice])
    return ranks, worst, best


def table(rows: Sequence[Row]) -> str:
    """The rows in Markdown: the loss without a clip, and the ratios of the others to it."""
    others = [choice for choice in CHOICES if choice != "none"]
    lines = [f"| task | confidence | none | {' | '.join(others)} |", f"| --- | --- |{' ---: |' * (1 + len(others))}"]
    for row in rows:
        shown = [f"{row.none:.3g}", *(_ratio(row, choice) for choice in others)]
        lines.append(f"| {row.task} | {row.confidence} | {' | '.join(shown)} |")
    ranks, worst, _ = chosen(rows)
    lines.append(f"| **mean rank** | | {' | '.join(f'{ranks[choice]:.2f}' for choice in CHOICES)} |")
    lines.append(f"| **worst ratio** | | {' | '.join(f'{worst[choice]:.3f}' for choice in CHOICES)} |")
    return "\n".join(lines)


def _ratio(row: Row, choice: str) -> str:
    ratio = row.ratios[choice]
    best = min(row.ranks.values()) == row.ranks[choice]
    return f"**{ratio:.3f}**" if best else f"{ratio:.3f}"


def recorded_norms(task: Task, seed: int) -> list[float]:
    """The norms of a training without a clip, which goes on for a quarter of its steps."""
    return train(task, seed, [], more=task.steps // 4)[1].record().norms_of_gradients().tolist()


def print_continued(numbers: range, path: Path | None) -> None:
    torch.set_num_threads(1)
    norms = dict[str, list[float]]()
    found: list[Continued] = []
    jobs = [(*drawn(number), 1000 + number) for number in numbers]
    print("| training | steps | answer | probability | later norms above the limit |")
    print("| --- | ---: | --- | ---: | ---: |")
    for name, task, seed in tqdm([*jobs, *((name, TASKS[name], 0) for name in MEMORIZED)], disable=None):
        norms[name] = recorded_norms(task, seed)[: task.steps if name in MEMORIZED else None]
        for each in continued(name, task.steps, norms[name]):
            print(f"| {name} | {each.steps:,} | {each.answer} | {each.chance:.0%} | {each.later:.1%} |", flush=True)
            found += [each] if name not in MEMORIZED else []
        if path:
            path.write_text(json.dumps(norms) + "\n")
    print("\n".join(["", *summed_up(found)]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), metavar="TASK", help="names, or parts of names")
    parser.add_argument("--seeds", type=int, default=3, help="how many seeds (default: %(default)s)")
    parser.add_argument("--processes", type=int, default=2, help="how many processes (default: %(default)s)")
    parser.add_argument("--sweep", action="store_true", help="try learning rates without a clip instead")
    parser.add_argument("--json", type=Path, help="where to write the losses, or the norms")
    parser.add_argument("--continue", type=int, dest="continued", metavar="TRAININGS", help="see above")
    parser.add_argument("--from", type=int, default=0, dest="first", metavar="NUMBER", help="the first one of them")
    options = parser.parse_args()
    if options.continued is not None:
        print_continued(range(options.first, options.first + options.continued), options.json)
        return
    names = [name for name in TASKS if any(part in name for part in options.tasks)]
    seeds = [SWEEP_SEED] if options.sweep else range(options.seeds)
    jobs = [(name, seed) for seed in seeds for name in names]
    found: list[Result] = []
    with multiprocessing.get_context("spawn").Pool(options.processes) as pool:
        work = pool.imap_unordered(swept if options.sweep else compared, jobs)
        for result in tqdm(work, total=len(jobs), disable=None):
            found.append(result)
            if options.json:
                options.json.write_text(json.dumps([each._asdict() for each in found], indent=1) + "\n")
            if options.sweep:
                print(result.task, result.losses, flush=True)
    if not options.sweep:
        rows = rows_of(found)
        print(table(rows))
        print(f"\ndefault by the rule: {chosen(rows)[2]}")


if __name__ == "__main__":
    main()
