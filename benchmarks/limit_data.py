"""What the trainings of `benchmarks.limits` learn from: texts, pictures and functions that need no download."""

from functools import cache
from importlib.util import find_spec
from pathlib import Path
from pydoc_data import topics
from typing import Any, NamedTuple

import torch
from sklearn import datasets
from torch import Tensor, nn

CHARACTERS = 128
CONTEXT = 32
WORDS = 2000
SOURCES = ("argparse", "typing", "inspect", "tarfile", "doctest", "ast")


class Split(NamedTuple):
    """Inputs and targets to learn from, and others for the held-out loss."""

    x: Tensor
    y: Tensor
    held_x: Tensor
    held_y: Tensor


@cache
def manual() -> str:
    """The reference manual of Python."""
    return "\n".join(topics.topics[name] for name in sorted(topics.topics))


@cache
def source() -> str:
    """Source code of Python's library."""
    files = [spec.origin for spec in map(find_spec, SOURCES) if spec is not None and spec.origin is not None]
    return "\n".join(Path(file).read_text() for file in files)


def contexts(codes: Tensor, length: int) -> Split:
    """Pieces of a text, each with the characters that follow; the last tenth of the text is held out."""
    pieces = codes[: (len(codes) - 1) // length * length].view(-1, length)
    after = codes[1 : 1 + pieces.numel()].view(-1, length)
    cut = len(pieces) * 9 // 10
    held = torch.linspace(cut, len(pieces) - 1, 300).long()
    return Split(pieces[:cut], after[:cut], pieces[held], after[held])


@cache
def characters(text: str) -> Split:
    codes = torch.tensor(list(text.encode("ascii", "replace")))
    return contexts(codes, CONTEXT)


@cache
def words() -> Split:
    """Words of the manual, the most frequent ones by number, all others as 0."""
    found = manual().lower().split()
    counts: dict[str, int] = {}
    for word in found:
        counts[word] = counts.get(word, 0) + 1
    kept = sorted(counts, key=lambda word: (-counts[word], word))[: WORDS - 1]
    numbers = {word: i + 1 for i, word in enumerate(kept)}
    return contexts(torch.tensor([numbers.get(word, 0) for word in found]), 8)


def digits(seed: int, learned: int = 1000) -> Split:
    """Pictures of 8 by 8 pixels of handwritten digits."""
    data: Any = datasets.load_digits()
    x, y = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16, torch.tensor(data.target)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    return Split(x[order[:learned]], y[order[:learned]], x[order[learned:]], y[order[learned:]])


@cache
def photo() -> Split:
    """Noisy and clean pieces of a photograph: the left part to learn from, the right part held out."""
    image = torch.tensor(datasets.load_sample_image("china.jpg"), dtype=torch.float32).mean(-1) / 255
    pieces = image.unfold(0, 16, 16).unfold(1, 16, 16)
    noise = 0.2 * torch.randn(pieces.shape, generator=torch.Generator().manual_seed(0))
    cut = pieces.shape[1] * 3 // 4
    clean, noisy = ((p[:, :cut], p[:, cut:]) for p in (pieces, pieces + noise))
    (y, held_y), (x, held_x) = ([p.reshape(-1, 1, 16, 16) for p in pair] for pair in (clean, noisy))
    return Split(x, y, held_x, held_y)


def function(seed: int, inputs: int, outputs: int, count: int = 4000) -> Split:
    """Normal inputs, and what a random network makes of them."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, inputs, generator=generator)
    first, second = (torch.randn(a, b, generator=generator) for a, b in ((inputs, 32), (32, outputs)))
    y = torch.tanh(x @ first / inputs**0.5) @ second / 32**0.5
    cut = count // 2
    return Split(x[:cut], y[:cut], x[cut:], y[cut:])


def relabelled(y: Tensor, share: float, classes: int, seed: int) -> Tensor:
    """The labels, this share of them replaced by random ones."""
    generator = torch.Generator().manual_seed(seed)
    wrong = torch.rand(y.shape, generator=generator) < share
    return torch.where(wrong, torch.randint(classes, y.shape, generator=generator), y)


class LowRank(nn.Module):
    """A fixed linear layer, plus a product of two small matrices that is learned."""

    def __init__(self, layer: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, layer.in_features) / layer.in_features**0.5)
        self.up = nn.Parameter(torch.zeros(layer.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + x @ self.down.T @ self.up.T
