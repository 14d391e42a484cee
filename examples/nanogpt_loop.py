"""A loop like nanoGPT's: two decay groups, warm-up and cosine schedule, accumulation, clipping, and a resume.

From nanoGPT's `train.py` the lines of `clip_grad_norm_`, of `scaler.unscale_` and of setting the learning rate by hand
are gone: the chain clips within `optimizer.step()`, and the schedule is a function that the chain calls.
"""

import argparse
import math
import tempfile
from functools import partial
from pathlib import Path
from pydoc_data import topics

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchzero_clip import AdamW, ClipNorm, Modular

CONTEXT, BATCH, MICRO_BATCHES, WIDTH, HEADS, LAYERS = 32, 8, 2, 64, 4, 2


class Block(nn.Module):
    """Attention and a perceptron, each after a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH, bias=False), nn.LayerNorm(WIDTH, bias=False)])
        self.attention = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """Of shape (batch, length, width), as the input."""
        q, k, v = (
            part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.attention(self.norms[0](x)).chunk(3, -1)
        )
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))
        return x + self.mlp(self.norms[1](x))


class GPT(nn.Module):
    """Predicts the next byte. The embedding is also the head."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(WIDTH, bias=False)
        self.head = nn.Linear(WIDTH, 256, bias=False)
        self.head.weight = self.tokens.weight
        for weight in self.parameters():
            if weight.ndim == 2:
                nn.init.normal_(weight, std=0.02)

    def forward(self, index: Tensor, target: Tensor) -> Tensor:
        """The mean cross-entropy."""
        x = self.tokens(index) + self.positions.weight[: index.shape[1]]
        return F.cross_entropy(self.head(self.norm(self.blocks(x))).flatten(0, 1), target.flatten())


def learning_rate(step: int, steps: int) -> float:
    """Warm-up over a tenth of the run, then a cosine down to a tenth."""
    highest, warm_up = 6e-3, max(steps // 10, 1)
    if step < warm_up:
        return highest * (step + 1) / warm_up
    return highest * (0.55 + 0.45 * math.cos(math.pi * (step - warm_up) / max(steps - warm_up, 1)))


def make_optimizer(model: nn.Module, steps: int) -> Modular:
    """AdamW with weight decay for matrices only, after a clip of the norm of all gradients together."""
    params = list(model.named_parameters())
    groups = [
        {"params": [(name, p) for name, p in params if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [(name, p) for name, p in params if p.ndim < 2], "weight_decay": 0.0},
    ]
    adamw = AdamW(lr=partial(learning_rate, steps=steps), betas=(0.9, 0.95))
    return Modular(groups, ClipNorm(1, dim="global"), adamw, nonfinite="skip")


def sample(data: Tensor, number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    starts = torch.randint(len(data) - CONTEXT, (BATCH, 1), generator=generator) + torch.arange(CONTEXT)
    return data[starts], data[starts + 1]


def train(model: nn.Module, optimizer: Modular, first: int, end: int) -> list[tuple[float, float]]:
    """The loss of each step from ``first`` to before ``end``, and the norm before clipping."""
    text = "\n".join(topics.topics[name] for name in sorted(topics.topics))
    data = torch.tensor(list(text.encode()))
    results: list[tuple[float, float]] = []
    for step in range(first, end):
        total = 0.0
        optimizer.zero_grad()
        for k in range(MICRO_BATCHES):
            loss = model(*sample(data, step * MICRO_BATCHES + k)) / MICRO_BATCHES
            loss.backward()
            total += loss.item()
        optimizer.step()
        results.append((total, optimizer.metrics()["clip_norm/norm"].item()))
    return results


def made(steps: int) -> tuple[GPT, Modular]:
    torch.manual_seed(0)
    model = GPT()
    return model, make_optimizer(model, steps)


def run(steps: int) -> tuple[list[tuple[float, float]], bool]:
    """Losses and norms of an uninterrupted run, and whether an interrupted one ends with the same bits."""
    half = max(steps // 2, 1)
    whole, optimizer = made(steps)
    results = train(whole, optimizer, 0, steps)

    model, optimizer = made(steps)
    train(model, optimizer, 0, half)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "ckpt.pt")
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": half}, file)
        checkpoint = torch.load(file, weights_only=True)
    resumed, optimizer = made(steps)
    resumed.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    train(resumed, optimizer, checkpoint["step"], steps)
    return results, all(torch.equal(a, b) for a, b in zip(whole.parameters(), resumed.parameters(), strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200, help="training steps (default: %(default)s)")
    steps = max(parser.parse_args().steps, 2)
    torch.set_num_threads(1)
    results, same = run(steps)
    print(f"{'step':>6}  {'loss':>6}  {'norm before clipping':>21}")
    for step in range(0, steps, max(steps // 10, 1)):
        loss, norm = results[step]
        print(f"{step:6}  {loss:6.3f}  {norm:21.3f}")
    print(f"\nStopped at step {steps // 2} and resumed: the parameters are {'the same bits' if same else 'DIFFERENT'}.")


if __name__ == "__main__":
    main()
