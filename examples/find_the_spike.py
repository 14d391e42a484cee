"""Find the steps and layers of loss spikes from the record of a run, and train again with the limit that it suggests.

A small transformer learns the reference manual of Python, which is part of every Python installation. Some batches are
corrupted. Their loss is summed instead of averaged. In addition, either the targets are shuffled, or the text is one
character again and again, as a broken reader returns it. Only the record is used to find these batches. The table shows
beside each step how its batch was corrupted. The folder find_the_spike has the records, the pictures and a report.
"""

import argparse
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from pydoc_data import topics

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

from torchzero_clip import Adam, Modular, Record, Recorder, Suggestion, Transform, read_record
from torchzero_clip.recorder.report import write_report

CONTEXT, BATCH, WIDTH, HEADS, LAYERS = 32, 16, 32, 2, 2
CORRUPTED = 0.01
CLEAN = 0.3
"""The share of a run, at its start, without corrupted batches."""


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


@dataclass(frozen=True)
class Run:
    """One training run."""

    held_out: float
    wrong: dict[int, str]
    """The corrupted steps, and what was wrong."""
    record: Record
    suggestion: Suggestion


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


def corrupted(steps: int) -> dict[int, str]:
    """Which steps are corrupted, and how."""
    order = torch.randperm(steps - int(CLEAN * steps), generator=torch.Generator().manual_seed(1))
    chosen = sorted((order[: max(int(CORRUPTED * steps), 2)] + int(CLEAN * steps)).tolist())
    return {step: ("shuffled targets", "one character")[k % 2] for k, step in enumerate(chosen)}


def train(name: str, steps: int, path: Path, clip: list[Transform]) -> Run:
    data, held_out, characters = load_text()
    torch.manual_seed(0)
    model = CharTransformer(characters)
    optimizer = Modular(model, *clip, Adam(0.005))
    path.unlink(missing_ok=True)
    recorder = Recorder(optimizer, path=path, keep=steps)
    generator = torch.Generator().manual_seed(0)
    wrong = corrupted(steps)
    for step in tqdm(range(steps), desc=name, unit="step", disable=None):
        text, target = sample(data, generator)
        if wrong.get(step) == "one character":
            text = torch.full_like(text, int(text[0, 0]))
        if wrong.get(step) == "shuffled targets":
            target = target.flatten()[torch.randperm(target.numel(), generator=generator)].view_as(target)
        reduction = "sum" if step in wrong else "mean"
        loss = F.cross_entropy(model(text).flatten(0, 1), target.flatten(), reduction=reduction)
        optimizer.zero_grad()
        loss.backward()
        optimizer.report_loss(loss)
        optimizer.step()
    recorder.close()
    return Run(evaluate(model, held_out), wrong, recorder.record(), recorder.suggest_max_norm())


@torch.no_grad()
def evaluate(model: nn.Module, data: Tensor) -> float:
    generator = torch.Generator().manual_seed(0)
    batches = [sample(data, generator) for _ in range(40)]
    losses = [F.cross_entropy(model(text).flatten(0, 1), target.flatten()) for text, target in batches]
    return torch.stack(losses).mean().item()


def print_findings(run: Run) -> None:
    """The spikes that the record shows, beside what was done to the run."""
    print("\nWhat the record shows:\n")
    print(f"{'step':>6}{'norm':>9}  {'layer that stands out most':34}{'norm':>8}{'usual':>8}   what was done")
    record, found = run.record, run.record.spikes()
    for step in sorted({*found, *run.wrong}):
        truth = run.wrong.get(step, "nothing")
        if step in found:
            (layer,) = record.worst(step, top=1)
            norm = record.norm[record.index(step)]
            print(f"{step:6}{norm:9.3g}  {layer.name:34}{layer.norm:8.3g}{layer.usual:8.3g}   {truth}")
        else:
            print(f"{step:6}  not found {'':41}   {truth}")
    layers = Counter(layer.name for step in found for layer in record.worst(step, top=3))
    print("\nMost often among the three worst layers:")
    print(", ".join(f"{name} ({n})" for name, n in layers.most_common(3)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1200, help="steps of each of the two runs")
    steps: int = parser.parse_args().steps

    folder = Path("find_the_spike")
    folder.mkdir(exist_ok=True)
    before = train("without a clip", steps, folder / "run.jsonl", [])
    print_findings(before)
    print(f"\n{before.suggestion}\n")
    after = train("with the limit", steps, folder / "run_with_limit.jsonl", [before.suggestion.transform()])

    print(f"\n{'':18}{'held-out loss':>14}{'steps clipped':>15}")
    for name, run in (("without a clip", before), ("with the limit", after)):
        print(f"{name:18}{run.held_out:14.3f}{run.record.share_clipped.nan_to_num().mean():15.1%}")
    before.record.plot(folder / "norms.png")
    before.suggestion.plot(folder / "limit.png")
    write_report(read_record(folder / "run.jsonl"), folder / "report.html")
    print(f"\nThe pictures are {folder}/norms.png and {folder}/limit.png, and the report is {folder}/report.html")


if __name__ == "__main__":
    main()
