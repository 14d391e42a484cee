"""Trainings whose settings are drawn at random, which go on after they were recorded."""

import random
from collections.abc import Callable
from functools import partial
from typing import NamedTuple, get_args

from benchmarks.limit_models import convolutions
from benchmarks.limit_tasks import (
    Method,
    Task,
    Training,
    autoencoder,
    control,
    denoising,
    guessing,
    heavy_inputs,
    heavy_noise,
    of_digits,
    of_words,
    tanh_function,
    text,
)

STEPS = (400, 400, 1000, 2000)
WIDTHS = (0.5, 1.0)  # times the width of the model in `benchmarks.limit_tasks`


class Kind(NamedTuple):
    """What is trained, with learning rates that work, and the width of the model if it can be chosen."""

    make: Callable[..., Training]
    adam: float
    sgd: float
    width: int | None = None


KINDS: dict[str, Kind] = {
    "text: LSTM": Kind(partial(text, "lstm"), 6e-3, 0.3, 48),
    "text: GRU": Kind(partial(text, "gru"), 6e-3, 0.3, 48),
    "text: RNN": Kind(partial(text, "rnn"), 3e-3, 0.1, 48),
    "text: transformer": Kind(partial(text, "transformer"), 3e-3, 0.2, 48),
    "text: window": Kind(partial(text, "window"), 3e-3, 0.2, 48),
    "text: words": Kind(of_words, 3e-3, 0.3, 48),
    "text: noisy labels": Kind(partial(text, "gru", noise=0.2), 6e-3, 0.3, 48),
    "text: corrupt batches": Kind(partial(text, "lstm", corrupted=0.02), 3e-3, 0.1, 48),
    "photograph: denoising": Kind(denoising, 3e-3, 0.1),
    "digits: autoencoder": Kind(autoencoder, 3e-3, 0.03),
    "digits: noisy labels": Kind(partial(of_digits, convolutions, noise=0.3), 3e-3, 0.03),
    "function: network": Kind(tanh_function, 3e-3, 0.03, 64),
    "heavy tails: noise": Kind(heavy_noise, 3e-4, 0.001, 64),
    "heavy tails: inputs": Kind(heavy_inputs, 1e-3, 0.003, 64),
    "RL: guessing digits": Kind(guessing, 1e-3, 0.03, 64),
    "RL: control": Kind(control, 3e-3, 0.002, 32),
}


def drawn(number: int) -> tuple[str, Task]:
    """A training and its name. The kinds come in turn; all else is drawn.

    The learning rate is within a factor of three of one that works.
    """
    draw = random.Random(number)
    name = list(KINDS)[number % len(KINDS)]
    kind, method, steps = KINDS[name], draw.choice(get_args(Method)), draw.choice(STEPS)
    rate = {"Adam": kind.adam, "SGD": kind.sgd, "RMSprop": kind.adam / 3}[method] * 3 ** draw.uniform(-1, 1)
    width, falls = draw.choice(WIDTHS), draw.random() < 0.5
    make = kind.make if kind.width is None else partial(kind.make, width=round(width * kind.width))
    schedule = "falls" if falls else "constant"
    return f"{number}: {name}, {method} {rate:.2g} ({schedule}), {steps:,}", Task(method, rate, steps, make, falls)
