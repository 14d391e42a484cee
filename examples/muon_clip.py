"""MuonClip: Muon for the matrices, AdamW for the rest, and QK-Clip for the logits of attention.

QK-Clip (Kimi Team, "Kimi K2: open agentic intelligence", https://arxiv.org/abs/2507.20534) acts on weights, so it is a
hook after the step. If the largest logit of a head was above tau in this step, it scales the queries and the keys of
the head so that the same logit would be tau. A small transformer reads the digits of scikit-learn row by row.
"""

import argparse
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

from torchzero_clip import AdamW, ClipNorm, Modular, Muon

WIDTH, HEADS, LAYERS = 32, 4, 2


class QKClip:
    """Keeps the largest logit of each head near ``tau``: after a step, heads with a larger one are scaled.

    Args:
        layers: Attentions with ``query`` and ``key``, linear layers whose outputs are split into heads, and with
            ``largest``, the largest logit of each head since the last step. Parameters may be replicated, not sharded.
        tau: The limit.
    """

    def __init__(self, layers: Iterable["Attention"], tau: float = 100.0) -> None:
        self.layers = list(layers)
        self.tau = tau

    @torch.no_grad()
    def __call__(self, *_: Any) -> None:
        """Scale weights and biases; a hook for ``optimizer.register_step_post_hook``."""
        for layer in self.layers:
            largest = layer.largest
            if dist.is_initialized():
                dist.all_reduce(largest, dist.ReduceOp.MAX)  # replicas have to stay equal
            is_over = (largest > self.tau) & largest.isfinite()  # False for NaN
            factors = torch.where(is_over, self.tau / largest, 1.0)
            few_keys = layer.key.out_features < layer.query.out_features  # several heads share a key
            if not few_keys:
                factors = factors.sqrt()
            for linear in [layer.query] if few_keys else [layer.query, layer.key]:
                for param in linear.parameters():  # logits are products of the outputs, which have a bias
                    heads = param.view(len(factors), -1)
                    heads.mul_(factors.to(param.dtype).unsqueeze(1))
            layer.largest.fill_(-torch.inf)


class Attention(nn.Module):
    """Attention that notes the largest logit of each head."""

    largest: Tensor

    def __init__(self, keys: int = HEADS) -> None:
        super().__init__()
        self.query = nn.Linear(WIDTH, WIDTH)
        self.key, self.value = (nn.Linear(WIDTH, WIDTH * keys // HEADS) for _ in range(2))
        self.out = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("largest", torch.full((HEADS,), -torch.inf), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Take and return (samples, rows, WIDTH)."""
        query, key, value = (
            layer(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        key, value = (part.repeat_interleave(HEADS // part.shape[1], dim=1) for part in (key, value))
        logits = query @ key.mT / key.shape[-1] ** 0.5
        if self.training:  # micro-batches of one step: the largest of all
            self.largest.copy_(torch.maximum(self.largest, logits.detach().amax(dim=(0, 2, 3))))
        return self.out((logits.softmax(dim=-1) @ value).transpose(1, 2).flatten(2))


class Block(nn.Module):
    """A layer of a transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.attention = Attention()
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """Take and return (samples, rows, WIDTH)."""
        x = x + self.attention(self.norms[0](x))
        return x + self.mlp(self.norms[1](x))


class Transformer(nn.Module):
    """Reads the eight rows of an image and guesses the digit."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(8, WIDTH), nn.Linear(WIDTH, 10)
        self.place = nn.Parameter(torch.zeros(8, WIDTH))
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))

    def forward(self, images: Tensor) -> Tensor:
        """Take (samples, 8, 8)."""
        return self.head(self.blocks(self.embed(images) + self.place).mean(dim=1))


def attentions(model: nn.Module) -> list[Attention]:
    """The layers that `QKClip` takes."""
    return [module for module in model.modules() if isinstance(module, Attention)]


def train(tau: float | None, steps: int) -> tuple[list[float], float]:
    """Return the largest logit of each step, and the accuracy on digits that were held out."""
    torch.manual_seed(0)
    pixels, labels = load_digits(return_X_y=True)
    images, targets = torch.tensor(pixels, dtype=torch.float32).view(-1, 8, 8) / 16, torch.tensor(labels)
    model = Transformer()
    hidden = [name for name, param in model.named_parameters() if name.startswith("blocks") and param.ndim == 2]
    clip = ClipNorm(1, dim="global").without(*hidden)
    optimizer = Modular(model, clip, Muon(lr=0.05).only(*hidden), AdamW(lr=3e-3).without(*hidden))
    if tau is not None:
        optimizer.register_step_post_hook(QKClip(attentions(model), tau))
    seen: list[float] = []
    for _ in range(steps):
        batch = torch.randint(1400, (64,))
        for layer in attentions(model):
            layer.largest.fill_(-torch.inf)
        optimizer.zero_grad()
        F.cross_entropy(model(images[batch]), targets[batch]).backward()
        seen.append(max(layer.largest.max().item() for layer in attentions(model)))
        optimizer.step()
    with torch.no_grad():
        guesses = model.eval()(images[1400:]).argmax(dim=1)
    return seen, (guesses == targets[1400:]).float().mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    steps = max(parser.parse_args().steps, 4)
    torch.set_num_threads(1)
    print(
        f"{'largest logit of attention':26}" + "".join(f"{part:>8}" for part in ("1/4", "1/2", "3/4", "end", "right"))
    )
    for tau in (None, 10.0):
        logits, right = train(tau, steps)
        name = "Muon and AdamW" if tau is None else f"with QKClip({tau:g})"
        print(f"  {name:24}" + "".join(f"{logits[k * steps // 4 - 1]:8.1f}" for k in range(1, 5)) + f"{right:8.1%}")


if __name__ == "__main__":
    main()
