"""Train a small transformer on real text, with and without clipping, while a few batches are corrupted.

The text is the reference manual of Python, which ships inside Python itself. A corrupted batch has shuffled targets and
a loss that was summed instead of averaged, as happens in real pipelines: its gradient is a thousand times too large.
"""

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from pydoc_data import topics

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor, nn
from tqdm import tqdm

from torchzero_clip import Adam, ClipNorm, Modular, norm

CONTEXT, BATCH, WIDTH, HEADS, LAYERS = 64, 16, 64, 4, 2
MAX_NORM = 1.0


@dataclass
class Run:
    """What happened during one training run."""

    name: str
    losses: list[float] = field(default_factory=list[float])
    largest_norms: list[float] = field(default_factory=list[float])
    clipped: list[float] = field(default_factory=list[float])
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


def train(run: Run, make_optimizer: Callable[[nn.Module], Modular], steps: int, seed: int) -> None:
    data, held_out, characters = load_text()
    torch.manual_seed(seed)
    model = CharTransformer(characters)
    optimizer = make_optimizer(model)
    generator = torch.Generator().manual_seed(seed)
    corrupted = corrupted_steps(steps)
    for step in tqdm(range(steps), desc=f"{run.name:>13}", unit="step"):
        text, target = sample(data, generator)
        logits = model(text).flatten(0, 1)
        loss = F.cross_entropy(logits, target.flatten())
        run.losses.append(loss.item())
        if step in corrupted:
            shuffled = target.flatten()[torch.randperm(target.numel(), generator=generator)]
            loss = F.cross_entropy(logits, shuffled, reduction="sum")
        optimizer.zero_grad()
        loss.backward()
        run.largest_norms.append(max(norm(p.grad).item() for p in model.parameters() if p.grad is not None))
        optimizer.step()
        run.clipped.append(optimizer.metrics().get("clip_norm/clipped", torch.zeros(())).item())
    run.held_out = evaluate(model, held_out, seed)


@torch.no_grad()
def evaluate(model: nn.Module, data: Tensor, seed: int) -> float:
    generator = torch.Generator().manual_seed(seed)
    batches = [sample(data, generator) for _ in range(20)]
    losses = [F.cross_entropy(model(text).flatten(0, 1), target.flatten()) for text, target in batches]
    return torch.stack(losses).mean().item()


def print_table(runs: list[Run], steps: int) -> None:
    first, *_, last = sorted(corrupted_steps(steps))
    blind = math.log(load_text()[2])
    print(f"\nCross-entropy per character, in nats (a blind guess costs {blind:.2f}):\n")
    print(f"{'':>13}  {'before the first':>17}  {'after the last':>15}  {'held-out':>9}  {'clipped':>8}")
    print(f"{'':>13}  {'corrupted batch':>17}  {'corrupted batch':>15}  {'text':>9}  {'tensors':>8}")
    for run in runs:
        before, after = torch.tensor(run.losses[:first])[-10:].mean(), torch.tensor(run.losses[last + 1 :])[-10:].mean()
        share = torch.tensor(run.clipped).mean()
        print(f"{run.name:>13}  {before:17.3f}  {after:15.3f}  {run.held_out:9.3f}  {share:8.1%}")


def plot(runs: list[Run], steps: int, path: Path) -> None:
    figure = Figure(figsize=(11, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for run in runs:
        left.plot(run.losses, label=run.name, linewidth=1)
        right.plot(run.largest_norms, label=run.name, linewidth=1)
    for axes in (left, right):
        for step in corrupted_steps(steps):
            axes.axvline(
                step, color="0.8", linewidth=4, zorder=0, label="corrupted batch" if step == steps // 4 else None
            )
        axes.set_xlabel("step")
    right.axhline(MAX_NORM, color="black", linestyle="--", linewidth=1, label=f"limit, {MAX_NORM:g}")
    right.set_yscale("log")
    left.set_ylabel("loss, nats per character")
    right.set_ylabel("largest gradient norm of a tensor, before clipping")
    left.legend()
    right.legend(loc="upper left", framealpha=1)
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=500, help="training steps of each run (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and the batches (default: %(default)s)")
    parser.add_argument("--figure", type=Path, default=Path("quickstart.png"), help="where to save it (%(default)s)")
    args = parser.parse_args()
    if args.steps < 8:
        parser.error("--steps must be at least 8")

    torch.set_num_threads(1)  # so small a model gains nothing from more, and loses much on a busy machine
    runs = [Run("no clipping"), Run("ClipNorm(1)")]
    train(runs[0], lambda model: Modular(model.parameters(), Adam()), args.steps, args.seed)
    train(runs[1], lambda model: Modular(model.parameters(), ClipNorm(MAX_NORM), Adam()), args.steps, args.seed)
    print_table(runs, args.steps)
    plot(runs, args.steps, args.figure)
    print(f"\nLoss and gradient norms, with the limit drawn in: {args.figure}")


if __name__ == "__main__":
    main()
