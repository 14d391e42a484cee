"""The trainings of `benchmarks.limits`, each of a few seconds."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.limit_data import (
    CHARACTERS,
    WORDS,
    LowRank,
    Split,
    characters,
    digits,
    function,
    manual,
    photo,
    relabelled,
    source,
    words,
)
from benchmarks.limit_models import (
    Autoencoder,
    Core,
    Patches,
    Rows,
    Sequence,
    convolutions,
    denoiser,
    network,
)

Method: TypeAlias = Literal["Adam", "SGD", "RMSprop"]
Loss: TypeAlias = Callable[[Tensor, Tensor], Tensor]


class Training(NamedTuple):
    """A model, the loss of a batch by the number of its step, and the held-out loss."""

    model: nn.Module
    loss: Callable[[int], Tensor]
    held_out: Callable[[], Tensor]


@dataclass(frozen=True)
class Task:
    """One training.

    Args:
        method: The optimizer.
        lr: The learning rate. In `TASKS`, it is the best of a sweep without a clip.
        steps: The number of steps that are recorded.
        make: Make the training from a seed.
        falls: True if the learning rate falls linearly to 0.
    """

    method: Method
    lr: float
    steps: int
    make: Callable[[int], Training]
    falls: bool = True


def bound(output: Tensor, pictures: Tensor) -> Tensor:
    """What a variational autoencoder minimizes, by pixel."""
    pixels = F.binary_cross_entropy_with_logits(output[:, :-1], pictures.flatten(1), reduction="none").sum(1)
    return (pixels + output[:, -1]).mean() / 64


def entropy(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, -2), target.flatten())


def supervised(model: nn.Module, split: Split, loss: Loss, seed: int, size: int, corrupted: float = 0.0) -> Training:
    """Random batches. In the corrupted ones the targets are shuffled, and the loss is that of their sum."""
    generator = torch.Generator().manual_seed(1000 + seed)

    def of_batch(step: int) -> Tensor:
        rows = torch.randint(len(split.x), (size,), generator=generator)
        bad = torch.rand((), generator=generator).item() < corrupted
        shuffled = rows[torch.randperm(size, generator=generator)]
        found = loss(model(split.x[rows]), split.y[shuffled if bad else rows])
        return found * size if bad else found

    def held_out() -> Tensor:
        torch.manual_seed(0)
        return loss(model.eval()(split.held_x), split.held_y)

    return Training(model, of_batch, held_out)


def text(core: Core, seed: int, *, width: int = 48, noise: float = 0.0, corrupted: float = 0.0) -> Training:
    split = characters(manual())
    if noise:
        split = split._replace(y=relabelled(split.y, noise, CHARACTERS, seed))
    return supervised(Sequence(core, width=width), split, entropy, seed, 16, corrupted)


def of_words(seed: int, width: int = 48) -> Training:
    return supervised(Sequence("gru", WORDS, width), words(), entropy, seed, 16)


def adapters(seed: int) -> Training:
    """A transformer that has learned the manual learns source code, by low-rank changes of its layers."""
    model = Sequence("transformer")
    before = supervised(model, characters(manual()), entropy, seed, 16)
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    for step in range(200):
        optimizer.zero_grad()
        before.loss(step).backward()
        optimizer.step()
    model.requires_grad_(False)
    for block in model.body:
        for name in ("into", "out", "up", "down"):
            setattr(block, name, LowRank(getattr(block, name)))
    if isinstance(model.head, nn.Linear):
        model.head = LowRank(model.head)
    return supervised(model, characters(source()), entropy, seed, 16)


def of_digits(
    make: Callable[[], nn.Module], seed: int, *, noise: float = 0.0, corrupted: float = 0.0, loud: float = 0.0
) -> Training:
    """Digits; with ``loud``, this share of the pictures is 16 times too bright, as if they were not scaled."""
    split = digits(seed)
    split = split._replace(y=relabelled(split.y, noise, 10, seed))
    if loud:
        bright = torch.rand(len(split.x), 1, 1, 1, generator=torch.Generator().manual_seed(seed)) < loud
        split = split._replace(x=torch.where(bright, 16 * split.x, split.x))
    return supervised(make(), split, entropy, seed, 32, corrupted)


def of_rows(seed: int) -> Training:
    """Digits, read row by row."""
    return of_digits(Rows, seed)


def autoencoder(seed: int) -> Training:
    split = digits(seed)
    return supervised(Autoencoder(), split._replace(y=split.x, held_y=split.held_x), bound, seed, 32)


def denoising(seed: int) -> Training:
    return supervised(denoiser(), photo(), F.mse_loss, seed, 16)


def heavy_noise(seed: int, width: int = 64) -> Training:
    """A function with noise whose variance is infinite (Student's t with 1.5 degrees of freedom)."""
    split = function(seed, 16, 4)
    torch.manual_seed(seed)
    noise = torch.distributions.StudentT(1.5).sample(split.y.shape)
    return supervised(network(16, 4, width), split._replace(y=split.y + 0.5 * noise), F.mse_loss, seed, 32)


def heavy_inputs(seed: int, width: int = 64) -> Training:
    """Classes, from inputs with a lognormal scale."""
    split = function(seed, 16, 6)
    torch.manual_seed(seed)
    x, held_x = (v * torch.randn(len(v), 1).mul(1.5).exp() for v in (split.x, split.held_x))
    y, held_y = (v.argmax(1) for v in (split.y, split.held_y))
    return supervised(network(16, 6, width), Split(x, y, held_x, held_y), entropy, seed, 32)


def guessing(seed: int, width: int = 64) -> Training:
    """A policy guesses the digit of a picture, and learns only whether the guess was right."""
    split, model = digits(seed), network(64, 10, width)
    generator = torch.Generator().manual_seed(1000 + seed)
    usual = torch.tensor(0.1)

    def loss(step: int) -> Tensor:
        rows = torch.randint(len(split.x), (32,), generator=generator)
        chances = torch.distributions.Categorical(logits=model(split.x[rows]))
        guess = chances.sample()
        reward = (guess == split.y[rows]).float()
        advantage = reward - usual
        usual.lerp_(reward.mean(), 0.05)
        return -(advantage * chances.log_prob(guess)).mean() - 0.01 * chances.entropy().mean()

    def held_out() -> Tensor:
        return 1 - model(split.held_x).softmax(1).gather(1, split.held_y[:, None]).mean()

    return Training(model, loss, held_out)


def tanh_function(seed: int, width: int = 64) -> Training:
    """A function, from so many samples that few are seen twice."""
    return supervised(network(16, 4, width), function(seed, 16, 4, 300_000), F.mse_loss, seed, 32)


def control(seed: int, width: int = 32) -> Training:
    """A policy pushes a mass to the origin while the wind blows; it learns from the cost alone (REINFORCE)."""
    model, spread = network(2, 1, width), 0.5

    def costs(count: int, explore: float) -> tuple[Tensor, Tensor]:
        place, speed = torch.randn(count), torch.randn(count)
        found: list[Tensor] = []
        logs: list[Tensor] = []
        for _ in range(15):
            mean = model(torch.stack([place, speed], 1)).squeeze(1)
            push = (mean + explore * torch.randn(count)).detach()
            logs.append(-(push - mean).square() / (2 * spread**2))
            speed = 0.95 * speed + 0.3 * push.clamp(-3, 3) + 0.1 * torch.randn(count)
            place = place + 0.3 * speed
            found.append(place.square() + 0.1 * speed.square() + 0.01 * push.square())
        return torch.stack(found), torch.stack(logs)

    def loss(step: int) -> Tensor:
        cost, logs = costs(48, spread)
        to_go = cost.flip(0).cumsum(0).flip(0)
        return ((to_go - to_go.mean(1, keepdim=True)) * logs).mean()

    def held_out() -> Tensor:
        torch.manual_seed(0)
        return costs(4000, 0.0)[0].mean()

    return Training(model, loss, held_out)


TASKS: dict[str, Task] = {
    "text: LSTM": Task("Adam", 3e-2, 500, partial(text, "lstm")),
    "text: LSTM, SGD": Task("SGD", 1.0, 800, partial(text, "lstm")),
    "text: GRU": Task("Adam", 3e-2, 600, partial(text, "gru")),
    "text: RNN, SGD": Task("SGD", 0.3, 800, partial(text, "rnn")),
    "text: transformer": Task("Adam", 1e-2, 500, partial(text, "transformer")),
    "text: transformer, SGD": Task("SGD", 0.3, 500, partial(text, "transformer")),
    "text: window of characters, SGD": Task("SGD", 0.3, 800, partial(text, "window")),
    "text: words, GRU": Task("Adam", 1e-2, 500, of_words),
    "text: corrupt batches, transformer": Task("Adam", 3e-3, 500, partial(text, "transformer", corrupted=0.02)),
    "text: corrupt batches, LSTM, SGD": Task("SGD", 0.1, 800, partial(text, "lstm", corrupted=0.02)),
    "text: noisy labels, GRU": Task("Adam", 3e-2, 600, partial(text, "gru", noise=0.2)),
    "text: low-rank adapters": Task("Adam", 3e-2, 400, adapters),
    "text: low-rank adapters, SGD": Task("SGD", 0.3, 400, adapters),
    "digits: network": Task("Adam", 3e-2, 800, partial(of_digits, partial(network, 64, 10))),
    "digits: convolutions, SGD": Task("SGD", 0.1, 800, partial(of_digits, convolutions)),
    "digits: batch norm, SGD": Task("SGD", 0.1, 500, partial(of_digits, partial(convolutions, norm=True))),
    "digits: transformer": Task("Adam", 1e-2, 800, partial(of_digits, Patches)),
    "digits: rows, LSTM, SGD": Task("SGD", 0.3, 800, of_rows),
    "digits: noisy labels, convolutions": Task("Adam", 3e-2, 600, partial(of_digits, convolutions, noise=0.3)),
    "digits: noisy labels, SGD": Task("SGD", 0.1, 800, partial(of_digits, partial(network, 64, 10), noise=0.3)),
    "digits: bright pictures, convolutions": Task("Adam", 3e-2, 500, partial(of_digits, convolutions, loud=0.02)),
    "digits: corrupt batches, SGD": Task(
        "SGD", 0.01, 800, partial(of_digits, partial(network, 64, 10), corrupted=0.02)
    ),
    "digits: autoencoder": Task("Adam", 1e-2, 800, autoencoder),
    "photograph: denoising": Task("Adam", 1e-2, 500, denoising),
    "photograph: denoising, SGD": Task("SGD", 0.1, 500, denoising),
    "heavy tails: noise": Task("Adam", 3e-4, 1500, heavy_noise),
    "heavy tails: noise, SGD": Task("SGD", 0.001, 1500, heavy_noise),
    "heavy tails: inputs": Task("Adam", 1e-3, 1500, heavy_inputs),
    "heavy tails: inputs, SGD": Task("SGD", 0.003, 1500, heavy_inputs),
    "RL: guessing digits": Task("Adam", 1e-3, 1500, guessing),
    "RL: control": Task("Adam", 1e-2, 400, control),
    "RL: control, SGD": Task("SGD", 0.003, 400, control),
}
MEMORIZED = (
    "digits: network",
    "digits: convolutions, SGD",
    "digits: batch norm, SGD",
    "digits: transformer",
    "digits: rows, LSTM, SGD",
)
