"""Train a small transformer on real text without clipping and with three ways to limit it, while batches are corrupted.

The text is the reference manual of Python, which ships inside Python itself. A corrupted batch has shuffled targets and
a loss that was summed instead of averaged, as happens in real pipelines: its gradient is a thousand times too large.
"""

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from pydoc_data import topics

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor, nn
from tqdm import tqdm

from torchzero_clip import Adam, ClipNorm, Modular, SkipStep, get_total_norm

CONTEXT, BATCH, WIDTH, HEADS, LAYERS = 64, 16, 64, 4, 2
MAX_NORM = 1.0

OPTIMIZERS: dict[str, Callable[[nn.Module], Modular]] = {
    "no clipping": lambda model: Modular(model, Adam()),
    "ClipNorm(1)": lambda model: Modular(model, ClipNorm(MAX_NORM), Adam()),
    'ClipNorm(1, dim="global")': lambda model: Modular(model, ClipNorm(MAX_NORM, dim="global"), Adam()),
    "SkipStep(max_ratio=10)": lambda model: Modular(model, SkipStep(max_ratio=10.0), Adam()),
}
STYLES = [("#0072b2", "-", 1.4), ("#e69f00", "--", 1.4), ("#009e73", "-", 3.5), ("#8b0000", ":", 1.6)]
"""Color, dashes and width of each line. The last two lie on each other."""


@dataclass
class Run:
    """What happened during one training run."""

    name: str
    seed: int
    losses: list[float] = field(default_factory=list[float])
    norms: list[float] = field(default_factory=list[float])
    acted: int = 0
    """The number of steps that were clipped or skipped."""
    held_out: float = float("nan")


class CharTransformer(nn.Module):
    """Predicts the next character."""

    mask: Tensor

    def __init__(self, characters: int) -> None:
        super().__init__()
        self.characters = nn.Embedding(characters, WIDTH)
        self.positions = nn.Embedding(CONTEXT, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, LAYERS, nn.LayerNorm(WIDTH), enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, characters)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(CONTEXT), persistent=False)

    def forward(self, text: Tensor) -> Tensor:
        """Logits of the next character at every position."""
        hidden = self.characters(text) + self.positions.weight
        return self.head(self.blocks(hidden, mask=self.mask, is_causal=True))


def load_text() -> tuple[Tensor, Tensor, int]:
    """The manual as numbers, split into training and held-out text, and how many characters there are."""
    text = "\n".join(topics.topics[name] for name in sorted(topics.topics))
    alphabet = {character: i for i, character in enumerate(sorted(set(text)))}
    data = torch.tensor([alphabet[character] for character in text])
    cut = len(data) * 9 // 10
    return data[:cut], data[cut:], len(alphabet)


def sample(data: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    starts = torch.randint(len(data) - CONTEXT, (BATCH, 1), generator=generator) + torch.arange(CONTEXT)
    return data[starts], data[starts + 1]


def corrupted_steps(steps: int) -> set[int]:
    """After a quarter, a half and three quarters of the training."""
    return {steps // 4, steps // 2, 3 * steps // 4}


def train(name: str, steps: int, seed: int) -> Run:
    run = Run(name, seed)
    data, held_out, characters = load_text()
    torch.manual_seed(seed)
    model = CharTransformer(characters)
    optimizer = OPTIMIZERS[name](model)
    generator = torch.Generator().manual_seed(seed)
    corrupted = corrupted_steps(steps)
    for step in tqdm(range(steps), desc=f"{name}, seed {seed}", unit="step", disable=None):
        text, target = sample(data, generator)
        logits = model(text).flatten(0, 1)
        loss = F.cross_entropy(logits, target.flatten())
        run.losses.append(loss.item())
        if step in corrupted:
            shuffled = target.flatten()[torch.randperm(target.numel(), generator=generator)]
            loss = F.cross_entropy(logits, shuffled, reduction="sum")
        optimizer.zero_grad()
        loss.backward()
        run.norms.append(get_total_norm([p.grad for p in model.parameters() if p.grad is not None]).item())
        optimizer.step()
        run.acted += int(optimizer.metrics().get("clip_norm/clipped", torch.zeros(())) > 0)
    run.acted += int(optimizer.metrics().get("skipped_steps", torch.zeros(())))
    run.held_out = evaluate(model, held_out, seed)
    return run


@torch.no_grad()
def evaluate(model: nn.Module, data: Tensor, seed: int) -> float:
    generator = torch.Generator().manual_seed(seed)
    batches = [sample(data, generator) for _ in range(20)]
    losses = [F.cross_entropy(model(text).flatten(0, 1), target.flatten()) for text, target in batches]
    return torch.stack(losses).mean().item()


def print_table(runs: Sequence[Run], steps: int, seeds: int) -> None:
    blind = math.log(load_text()[2])
    print(f"\nHeld-out cross-entropy per character, in nats (a blind guess costs {blind:.2f}):\n")
    headings = "".join(f"{f'seed {seed}':>9}" for seed in range(seeds))
    print(f"{'':>26}{headings}{'steps clipped or skipped':>27}")
    for name in OPTIMIZERS:
        own = [run for run in runs if run.name == name]
        acted = sum(run.acted for run in own) / (steps * len(own))
        print(f"{name:>26}{''.join(f'{run.held_out:9.3f}' for run in own)}{acted:27.1%}")


def plot(runs: Sequence[Run], steps: int, path: Path) -> None:
    """Losses, and below them one axis of gradient norms for each way, so that none hides another."""
    figure = Figure(figsize=(5.2, 6.4), layout="constrained")
    heights = [4, *[1] * len(OPTIMIZERS)]
    axes_of = figure.subplot_mosaic([["losses"], *([name] for name in OPTIMIZERS)], sharex=True, height_ratios=heights)
    losses = axes_of["losses"]
    corrupted = sorted(corrupted_steps(steps))
    window = max(steps // 50, 1)
    for run, (color, style, width) in zip((run for run in runs if run.seed == 0), STYLES, strict=True):
        smooth = torch.tensor(run.losses).unfold(0, window, 1).mean(1)
        losses.plot(range(window - 1, steps), smooth, color=color, linestyle=style, linewidth=width, label=run.name)
        axes = axes_of[run.name]
        axes.plot(run.norms, color=color, linewidth=0.8)
        axes.plot(corrupted, [run.norms[step] for step in corrupted], "v", color="black", markersize=5)
        axes.axhline(MAX_NORM, color="black", linestyle="--", linewidth=0.8)
        axes.set_title(f"gradient norm, {run.name}", fontsize=10, loc="left", pad=2)
        axes.set_yscale("log")
        axes.set_ylim(0.1, 4 * max(max(run.norms) for run in runs))
        axes.set_xlabel("step (triangles: corrupted batches; dashed: a norm of 1)" * (run.name == [*OPTIMIZERS][-1]))
    for step in corrupted:
        losses.axvline(step, color="0.85", linewidth=4, zorder=0, label="corrupted batch" * (step == corrupted[0]))
    losses.set_ylabel(f"training loss, mean of {window} steps")
    losses.legend(fontsize=9)
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=500, help="training steps of each run (default: %(default)s)")
    parser.add_argument("--seeds", type=int, default=2, help="runs with each optimizer (default: %(default)s)")
    parser.add_argument("--figure", type=Path, default=Path("quickstart.png"), help="where to save it (%(default)s)")
    args = parser.parse_args()
    if args.steps < 8:
        parser.error("--steps must be at least 8")
    if args.seeds < 1:
        parser.error("--seeds must be at least 1")

    torch.set_num_threads(1)  # so small a model gains nothing from more, and loses much on a busy machine
    runs = [train(name, args.steps, seed) for name in OPTIMIZERS for seed in range(args.seeds)]
    print_table(runs, args.steps, args.seeds)
    plot(runs, args.steps, args.figure)
    print(f"\nLosses and gradient norms: {args.figure}")


if __name__ == "__main__":
    main()
