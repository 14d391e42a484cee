"""Train a small transformer twice: with torch's clip and fused AdamW, and with one chain. Compare losses and times.

The steps are the same but for rounding. The two runs take turns, so that both meet the same conditions, and the time of
the optimizer is the median over all steps.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from torchzero_clip import AdamW, ClipNorm, Modular

LIMIT, RATE = 0.5, 1e-3
TOKENS, LENGTH = 32, 24


class Model(nn.Module):
    """Predicts the next of some tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, 128)
        layer = nn.TransformerEncoderLayer(128, 4, 256, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(128, TOKENS)

    def forward(self, tokens: Tensor) -> Tensor:
        """The logits of the next token at each place."""
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        return self.head(self.layers(self.embedding(tokens), mask=mask, is_causal=True))


def batch(generator: torch.Generator) -> Tensor:
    """Sequences in which each token follows from the two before it."""
    start = torch.randint(TOKENS, (16, 2), generator=generator)
    columns = list(start.unbind(1))
    while len(columns) <= LENGTH:
        columns.append((columns[-1] + columns[-2]) % TOKENS)
    return torch.stack(columns, 1)


def two_calls(model: Model) -> Callable[[], None]:
    """What is written today."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, fused=True)

    def step() -> None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), LIMIT)
        optimizer.step()

    return step


def chain(model: Model) -> Callable[[], None]:
    """The same as a chain."""
    return Modular(model, ClipNorm(LIMIT, dim="global"), AdamW(lr=RATE)).step


def train(steps: int) -> dict[str, tuple[float, float]]:
    """The loss at the end, and the median time of an optimizer's step in milliseconds, of each way."""
    runs: dict[str, tuple[Model, Callable[[], None]]] = {}
    for name, make in (("two calls", two_calls), ("chain", chain)):
        torch.manual_seed(0)
        model = Model()
        runs[name] = model, make(model)
    times: dict[str, list[float]] = {name: [] for name in runs}
    losses: dict[str, float] = {}
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        tokens = batch(generator)
        for name, (model, step) in runs.items():
            model.zero_grad()
            loss = nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
            loss.backward()
            start = time.perf_counter()
            step()
            times[name].append(1e3 * (time.perf_counter() - start))
            losses[name] = loss.item()
    return {name: (losses[name], statistics.median(times[name])) for name in runs}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()
    print(f"{'':10} {'loss':>8} {'optimizer':>12}")
    for name, (loss, milliseconds) in train(args.steps).items():
        print(f"{name:10} {loss:8.4f} {milliseconds:9.2f} ms")


if __name__ == "__main__":
    main()
