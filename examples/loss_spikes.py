"""Does an adaptive limit help? All of them beside no clipping and a fixed limit, in three bad situations.

A small transformer learns the reference manual of Python, which ships inside Python itself. Either some of its batches
are corrupted, or its learning rate is ten times too high, or both. Half of the corrupted batches are random characters.
The others have shuffled targets and a loss that was summed instead of averaged, so that their gradients are about five
hundred times too large. The first fifth of a run has none, because statistics have to start; ``--clean 0`` shows what
happens if they have no time to. The update rule is Adam, to which the scale of all gradients together is nothing, or
with ``--rule sgd`` SGD, to which it is everything.

Each row of a table is one transform with its defaults. `SoftSpectralClip` has none and gets the limits of its paper; it
leaves embeddings out, and `AdaptiveGradientClip` the last layer, as they should. The fixed limit is one of the norm of
all gradients together: the best of a sweep by the loss on validation text, and a tenth of it. The final loss is that on
a third text, which nothing else uses. Every transform is shown, also where it does not help or does harm.

* spikes: how often the loss rises above the median of the 32 clean batches before it by more than six standard
  deviations (six times 1.4826 MAD of its logarithm), and at least by a factor of two.
* worst rise: the largest ratio of a loss to that median.
* clipped: the share of steps, tensors, rows or elements that were changed, for clean and for corrupted batches.
* cost: processor time of a whole training step, relative to no clipping. A model so small shows the largest cost.
"""

import argparse
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from pydoc_data import topics
from typing import Any

import torch
import torch.nn.functional as F
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor, nn
from tqdm import tqdm

from torchzero_clip import (
    SGD,
    AdaGC,
    Adam,
    AdaptiveGradientClip,
    AutoClip,
    ClipByMaxEMA,
    ClipNorm,
    ClipNormByEMA,
    ClipNormGrowth,
    ClipRMS,
    GradientStabilizer,
    Modular,
    SkipStep,
    SoftSpectralClip,
    SpikeAwareClip,
    Transform,
    ZClip,
)

CONTEXT, BATCH, WIDTH, HEADS, LAYERS = 32, 16, 32, 2, 2
TOO_HIGH, CORRUPTED = 10, 0.04
LIMITS = (0.03, 0.1, 0.3, 1.0, 3.0)
MEDIAN_OF = 32
SHORT = 300
"""Runs of fewer steps have one seed by default, and a sweep of two limits."""
RULES: dict[str, tuple[Callable[[], Transform], float]] = {
    "adam": (Adam, 0.01),
    "sgd": (partial(SGD, momentum=0.9), 0.5),
}
"""Update rules, with a good learning rate."""


@dataclass(frozen=True)
class Situation:
    """What is wrong with a run."""

    name: str
    factor: float
    """What the learning rate is multiplied by."""
    corrupted: float
    """The share of corrupted batches."""


NOTHING_WRONG = Situation("nothing wrong", 1, 0.0)
SITUATIONS = (
    Situation("corrupted batches", 1, CORRUPTED),
    Situation("too high a learning rate", TOO_HIGH, 0.0),
    Situation("both", TOO_HIGH, CORRUPTED),
)


@dataclass(frozen=True)
class Options:
    """What all runs have in common."""

    steps: int
    seeds: int
    rule: str = "adam"
    clean: float = 0.2
    """The share of a run, at its start, without corrupted batches."""

    @property
    def limits(self) -> tuple[float, ...]:
        """The fixed limits that are tried."""
        return LIMITS[1:4:2] if self.steps < SHORT else LIMITS


@dataclass(frozen=True)
class Method:
    """A chain around an update rule."""

    chain: Callable[[Transform], list[Transform]]
    unit: str = ""
    """What its metric counts."""
    color: str = "black"


def before(make: Callable[[], Transform], unit: str, color: str) -> Method:
    """A transform of gradients."""
    return Method(lambda rule: [make(), rule], unit, color)


def after(make: Callable[[], Transform], unit: str, color: str) -> Method:
    """A transform of the updates of the rule."""
    return Method(lambda rule: [rule, make()], unit, color)


def fixed(limit: float) -> Method:
    return before(lambda: ClipNorm(limit, dim="global"), "steps", "C0")


NONE, BEST, TENTH = "no clipping", "ClipNorm, best limit", "ClipNorm, a tenth of it"
EMBEDDINGS = ("characters.*", "positions.*")
ADAPTIVE: dict[str, Method] = {
    "AutoClip()": before(AutoClip, "steps", "C1"),
    "ZClip()": before(ZClip, "steps", "C1"),
    "AdaGC()": before(AdaGC, "tensors", "C1"),
    "GradientStabilizer()": before(GradientStabilizer, "tensors", "C1"),
    "ClipNormByEMA()": before(ClipNormByEMA, "tensors", "C1"),
    "ClipNormGrowth()": before(ClipNormGrowth, "tensors", "C1"),
    "ClipNormGrowth as in Fira": before(
        lambda: ClipNormGrowth(mul=1.01, min_value=1e-8, max_decay=None), "tensors", "C1"
    ),
    "SpikeAwareClip()": before(SpikeAwareClip, "elements", "C4"),
    "ClipByMaxEMA()": before(ClipByMaxEMA, "elements", "C4"),
    "AdaptiveGradientClip()": before(lambda: AdaptiveGradientClip().without("head.*"), "rows", "C2"),
    "SoftSpectralClip(0.1)": before(lambda: SoftSpectralClip(0.1).without(*EMBEDDINGS), "", "C2"),
    "SoftSpectralClip(10) of updates": after(lambda: SoftSpectralClip(10.0).without(*EMBEDDINGS), "", "C2"),
    "ClipRMS() of updates": after(ClipRMS, "tensors", "C2"),
    "SkipStep(max_ratio=10)": before(lambda: SkipStep(max_ratio=10.0), "steps", "C3"),
    "SkipStep(sigma=6)": before(lambda: SkipStep(sigma=6.0), "steps", "C3"),
}
METHODS: dict[str, Method] = {NONE: Method(lambda rule: [rule]), BEST: fixed(1.0), TENTH: fixed(1.0), **ADAPTIVE}
"""All rows. The limits of `BEST` and `TENTH` depend on the situation."""


@dataclass
class Run:
    """What happened during one training run."""

    losses: dict[int, float] = field(default_factory=dict[int, float])
    """The loss of each step with a clean batch."""
    clipped: list[float] = field(default_factory=list[float])
    """The share that was changed in each step with a clean batch, if the transform tells it."""
    clipped_corrupted: list[float] = field(default_factory=list[float])
    validation: float = math.nan
    held_out: float = math.nan


@dataclass
class Results:
    """All runs in one situation."""

    situation: Situation
    sweep: dict[float, list[Run]] = field(default_factory=dict[float, list[Run]])
    runs: dict[str, list[Run]] = field(default_factory=dict[str, list[Run]])
    best: float = math.nan
    """The best limit of the sweep."""


class Block(nn.Module):
    """Attention and a perceptron, each after a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.attention, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.ReLU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """Of shape (batch, length, width), as the input."""
        q, k, v = (
            part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.attention(self.norms[0](x)).chunk(3, -1)
        )
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))
        return x + self.mlp(self.norms[1](x))


class CharTransformer(nn.Module):
    """Predicts the next character."""

    def __init__(self, characters: int) -> None:
        super().__init__()
        self.characters, self.positions = nn.Embedding(characters, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)), nn.LayerNorm(WIDTH))
        self.head = nn.Linear(WIDTH, characters)

    def forward(self, text: Tensor, target: Tensor) -> Tensor:
        """The mean cross-entropy."""
        logits = self.head(self.blocks(self.characters(text) + self.positions.weight))
        return F.cross_entropy(logits.flatten(0, 1), target.flatten())


@dataclass
class Texts:
    """The manual as numbers, in three parts."""

    train: Tensor
    validation: Tensor
    held_out: Tensor
    characters: int


def load_texts() -> Texts:
    text = "\n".join(topics.topics[name] for name in sorted(topics.topics))
    alphabet = {character: i for i, character in enumerate(sorted(set(text)))}
    data = torch.tensor([alphabet[character] for character in text])
    train, validation, held_out = data.tensor_split([len(data) * 8 // 10, len(data) * 9 // 10])
    return Texts(train, validation, held_out, len(alphabet))


def sample(data: Tensor, generator: torch.Generator, count: int = BATCH) -> tuple[Tensor, Tensor]:
    starts = torch.randint(len(data) - CONTEXT, (count, 1), generator=generator) + torch.arange(CONTEXT)
    return data[starts], data[starts + 1]


def corrupted_steps(situation: Situation, options: Options, seed: int) -> dict[int, bool]:
    """The steps with a corrupted batch: True for random characters, False for shuffled targets and a summed loss."""
    chance = torch.rand(options.steps, generator=torch.Generator().manual_seed(seed))
    chance[: round(options.clean * options.steps)] = 1
    return {step: x < situation.corrupted / 2 for step, x in enumerate(chance.tolist()) if x < situation.corrupted}


def schedule(step: int, steps: int) -> float:
    """Warm-up over a twentieth of the run, then a cosine down to a tenth."""
    warm_up = max(steps // 20, 1)
    return min((step + 1) / warm_up, 0.55 + 0.45 * math.cos(math.pi * step / steps))


def train(method: Method, situation: Situation, texts: Texts, options: Options, seed: int) -> Run:
    run, corrupted = Run(), corrupted_steps(situation, options, seed)
    make_rule, learning_rate = RULES[options.rule]
    torch.manual_seed(seed)
    model = CharTransformer(texts.characters)
    optimizer = Modular(model, method.chain(make_rule()))
    generator = torch.Generator().manual_seed(seed)
    skipped = 0.0
    for step in range(options.steps):
        optimizer.param_groups[0]["lr"] = learning_rate * situation.factor * schedule(step, options.steps)
        text, target = sample(texts.train, generator)
        scale = 1
        if corrupted.get(step) is True:
            text, target = torch.randint(texts.characters, (2, *text.shape), generator=generator)
        elif corrupted.get(step) is False:
            target = target.flatten()[torch.randperm(target.numel(), generator=generator)].view_as(target)
            scale = target.numel()
        loss = model(text, target) * scale
        optimizer.zero_grad()
        loss.backward()
        optimizer.report_loss(loss)
        optimizer.step()

        metrics = optimizer.metrics()
        shares = [share.item() for name, share in metrics.items() if name.endswith("/clipped")]
        if "skipped_steps" in metrics:
            earlier, skipped = skipped, metrics["skipped_steps"].item()
            shares = [skipped - earlier]
        if step in corrupted:
            run.clipped_corrupted += shares
        else:
            run.clipped += shares
            run.losses[step] = loss.item()
    run.validation, run.held_out = evaluate(model, texts.validation), evaluate(model, texts.held_out)
    return run


@torch.no_grad()
def evaluate(model: nn.Module, data: Tensor) -> float:
    return model(*sample(data, torch.Generator().manual_seed(0), 500)).item()


def spikes(losses: Sequence[float]) -> tuple[int, float]:
    """How many spikes there are, and the largest ratio of a loss to the median before it."""
    logs = torch.tensor(losses, dtype=torch.float64).nan_to_num(nan=math.inf, posinf=math.inf).log()
    windows = logs.unfold(0, min(MEDIAN_OF, len(logs) - 1), 1)[:-1]
    medians = windows.median(1).values
    deviations = 1.4826 * (windows - medians[:, None]).abs().median(1).values
    rises = (logs[-len(windows) :] - medians).nan_to_num(nan=0.0, posinf=math.inf)
    high = rises > (6 * deviations).nan_to_num().clamp(min=math.log(2))
    starts = high & ~torch.cat([high.new_zeros(1), high[:-1]])
    return int(starts.sum()), rises.max().exp().item()


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def measure_costs(texts: Texts, options: Options) -> dict[str, float]:
    """Processor time of a training step relative to no clipping: the methods take turns, and the median counts."""
    batch = sample(texts.train, torch.Generator().manual_seed(0))
    make_rule, _ = RULES[options.rule]
    models = {name: CharTransformer(texts.characters) for name in METHODS}
    optimizers = {name: Modular(models[name], method.chain(make_rule())) for name, method in METHODS.items()}
    times: dict[str, list[float]] = {name: [] for name in METHODS}
    for _ in range(min(options.steps // 10, 50)):
        for name, optimizer in optimizers.items():
            start = time.process_time()
            optimizer.zero_grad()
            loss = models[name](*batch)
            loss.backward()
            optimizer.report_loss(loss)
            optimizer.step()
            times[name].append(time.process_time() - start)
    medians = {name: torch.tensor(own, dtype=torch.float64).median().item() for name, own in times.items()}
    return {name: median / medians[NONE] for name, median in medians.items()}


def train_all(
    label: str, method: Method, situation: Situation, texts: Texts, options: Options, progress: "tqdm[Any]"
) -> list[Run]:
    """One run for each seed."""
    runs: list[Run] = []
    for seed in range(options.seeds):
        progress.set_description(f"{situation.name}, {label}, seed {seed}")
        runs.append(train(method, situation, texts, options, seed))
        progress.update()
    return runs


def compare(situation: Situation, texts: Texts, options: Options, progress: "tqdm[Any]") -> Results:
    """All runs in one situation: first the sweep, from which the best limit is chosen."""
    results = Results(situation)

    def runs(label: str, method: Method) -> list[Run]:
        return train_all(label, method, situation, texts, options, progress)

    for limit in options.limits:
        results.sweep[limit] = runs(f"ClipNorm({limit:g})", fixed(limit))
    validation = {limit: mean([run.validation for run in own]) for limit, own in results.sweep.items()}
    results.best = min(validation, key=lambda limit: (math.isnan(validation[limit]), validation[limit]))
    results.runs[NONE] = runs(NONE, METHODS[NONE])
    results.runs[BEST] = results.sweep[results.best]
    results.runs[TENTH] = runs(TENTH, fixed(results.best / 10))
    results.runs |= {name: runs(name, method) for name, method in ADAPTIVE.items()}
    return results


def spread(values: Sequence[float]) -> str:
    """The mean, the lowest and the highest value."""
    return f"{number(mean(values))} ({number(min(values))}-{number(max(values))})"


def number(x: float) -> str:
    return f"{x:.3f}" if x < 100 else f"{x:.0f}"


def percent(values: Sequence[float]) -> str:
    return f"{mean(values):.0%}" if values else "-"


def print_table(results: Results, costs: dict[str, float], options: Options) -> None:
    situation = results.situation
    learning_rate = RULES[options.rule][1] * situation.factor
    shown = f"learning rate {learning_rate:g}, {situation.corrupted:.0%} of the batches corrupted"
    print(f"\n{situation.name.capitalize()}: {shown}\n")
    sweep = (f"{limit:g}: {mean([run.validation for run in own]):.3f}" for limit, own in results.sweep.items())
    print(f"validation loss of each limit of the sweep: {', '.join(sweep)}\n")
    headings = f"{'spikes':>8}{'worst rise':>12}{'clipped: clean':>16}{'corrupted':>11}  {'of':10}{'cost':>5}"
    print(f"{'':33}{'held-out loss':^21}{headings}")
    for name, own in results.runs.items():
        found = [spikes(list(run.losses.values())) for run in own]
        label = {BEST: f"{BEST}: {results.best:g}", TENTH: f"{TENTH}: {results.best / 10:g}"}.get(name, name)
        cells = f"{mean([count for count, _ in found]):8.1f}{max(rise for _, rise in found):12.1f}"
        clean, corrupted = [x for run in own for x in run.clipped], [x for run in own for x in run.clipped_corrupted]
        cells += f"{percent(clean):>16}{percent(corrupted):>11}  {METHODS[name].unit:10}{costs[name]:5.2f}"
        print(f"{label:33}{spread([run.held_out for run in own]):21}{cells}")


def average(runs: Sequence[Run]) -> float:
    """The mean held-out loss, infinite if a run ended with NaN."""
    loss = mean([run.held_out for run in runs])
    return math.inf if math.isnan(loss) else loss


def plot_losses(axes: Axes, results: Results, options: Options) -> None:
    """The losses of clean batches, with the first seed."""
    adaptive = sorted(ADAPTIVE, key=lambda name: average(results.runs[name]))
    drawn = {NONE: ("black", ""), BEST: ("C0", ""), adaptive[0]: ("C2", "best: ")}
    drawn[adaptive[-1]] = ("C3", "worst: ")
    for name, (color, label) in drawn.items():
        losses = results.runs[name][0].losses
        axes.plot(list(losses), list(losses.values()), color=color, linewidth=0.9, label=label + name)
    corrupted = list(corrupted_steps(results.situation, options, 0))
    axes.plot(corrupted, [0.01] * len(corrupted), "^", color="0.4", markersize=5, transform=axes.get_xaxis_transform())
    axes.set_title(results.situation.name.capitalize())
    axes.set_yscale("log")
    ticks = (2, 3, 5, 10, 20, 50)
    axes.set_yticks(ticks, [str(tick) for tick in ticks])
    axes.set_yticks([], minor=True)
    axes.set_ylim(1.5, 100)
    axes.set_xlabel("step (triangles: corrupted batches)" if corrupted else "step")
    axes.legend(fontsize="medium", frameon=False, handlelength=1, borderpad=0)


def plot_summary(axes: Axes, results: Results, clean: float) -> None:
    """The final losses of all methods: a dot for the mean, a line from the lowest to the highest."""
    low, high = clean - 0.05, clean + 1.35
    axes.axvline(clean, color="0.4", linestyle=":", zorder=0)
    axes.axvline(average(results.runs[NONE]), color="black", linewidth=0.8, zorder=0)
    axes.axvline(average(results.runs[BEST]), color="C0", linewidth=0.8, zorder=0)
    for row, (name, runs) in enumerate(results.runs.items()):
        color, loss, losses = METHODS[name].color, average(runs), [run.held_out for run in runs]
        axes.plot([min(losses), max(losses)], [row, row], color=color, linewidth=2, alpha=0.4)
        axes.plot(min(loss, high), row, "o" if loss < high else ">", color=color, markersize=6, clip_on=False)
        left, texts = (min(losses), []) if loss < high else (high, [number(loss) if loss < math.inf else "NaN"])
        if count := mean([spikes(list(run.losses.values()))[0] for run in runs]):
            texts.append(f"{count:.1f} spikes")
        axes.annotate(", ".join(texts), (left, row), (-8, 0), textcoords="offset points", ha="right", va="center")
    axes.set_xlim(low, high)
    axes.set_ylim(len(results.runs) - 0.5, -0.5)
    axes.grid(axis="y", color="0.93")
    axes.set_axisbelow(True)
    axes.set_xlabel("held-out loss at the end")


def plot(compared: Sequence[Results], clean: Sequence[Run], options: Options, path: Path) -> None:
    """Losses over the first run above, the final losses of all runs below."""
    figure = Figure(figsize=(10.5, 10), layout="constrained")
    rows = figure.subplots(2, len(compared), squeeze=False, sharey="row", height_ratios=(1, 1.7))
    for top, bottom, results in zip(*rows, compared, strict=True):
        plot_losses(top, results, options)
        plot_summary(bottom, results, average(clean))
    rows[0][0].set_ylabel("loss of clean batches, first seed")
    names = list(compared[0].runs)
    rows[1][0].set_yticks(range(len(names)), names)
    for label, name in zip(rows[1][0].get_yticklabels(), names, strict=True):
        label.set_color(METHODS[name].color)
    dots = f"Dots: means of {options.seeds} seeds. Lines through them: from the lowest to the highest."
    lines = "Vertical lines: no clipping (black), the best fixed limit (blue), and a run with nothing wrong (dotted)."
    figure.supxlabel(f"{dots}\n{lines}", fontsize="medium")
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=500, help="training steps of each run (default: %(default)s)")
    parser.add_argument("--seeds", type=int, help=f"runs of each method (default: 3, or 1 for less than {SHORT} steps)")
    parser.add_argument("--rule", choices=list(RULES), default="adam", help="the update rule (default: %(default)s)")
    parser.add_argument("--clean", type=float, default=0.2, help="share of clean steps at the start (%(default)s)")
    parser.add_argument("--figure", type=Path, default=Path("loss_spikes.png"), help="where to save it (%(default)s)")
    args = parser.parse_args()
    if args.steps < 20:
        parser.error("--steps must be at least 20")
    seeds = (1 if args.steps < SHORT else 3) if args.seeds is None else args.seeds
    if seeds < 1:
        parser.error("--seeds must be at least 1")
    options = Options(args.steps, seeds, args.rule, args.clean)

    torch.set_num_threads(1)  # so small a model gains nothing from more, and loses much on a busy machine
    texts = load_texts()
    costs = measure_costs(texts, options)
    rows = len(SITUATIONS) * (len(options.limits) + 2 + len(ADAPTIVE)) + 1
    with tqdm(total=rows * seeds, unit="run", disable=None) as progress:
        compared = [compare(situation, texts, options, progress) for situation in SITUATIONS]
        clean = train_all(NONE, METHODS[NONE], NOTHING_WRONG, texts, options, progress)
    print(f"\nCross-entropy per character, in nats: the mean of {seeds} seeds, and the lowest and highest of them.")
    print(f"Without clipping, and with nothing wrong: {spread([run.held_out for run in clean])}")
    for results in compared:
        print_table(results, costs, options)
    plot(compared, clean, options, args.figure)
    print(f"\nLosses: {args.figure}")


if __name__ == "__main__":
    main()
