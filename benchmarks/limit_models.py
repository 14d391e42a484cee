"""The models of the trainings of `benchmarks.limit_tasks`."""

from typing import Literal, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.limit_data import CHARACTERS, LowRank

Core: TypeAlias = Literal["rnn", "lstm", "gru", "transformer", "window"]


class Sequence(nn.Module):
    """Predicts the next symbol at every place of a sequence."""

    def __init__(self, core: Core, symbols: int = CHARACTERS, width: int = 48) -> None:
        super().__init__()
        self.core = core
        self.embedding = nn.Embedding(symbols, width)
        self.positions = nn.Parameter(torch.zeros(32, width))
        if core == "transformer":
            self.body = nn.ModuleList(Block(width) for _ in range(2))
        elif core == "window":
            self.body = nn.ModuleList([nn.Conv1d(width, 2 * width, 6), nn.Conv1d(2 * width, width, 1)])
        else:
            self.body = nn.ModuleList([{"rnn": nn.RNN, "lstm": nn.LSTM, "gru": nn.GRU}[core](width, width)])
        self.head: nn.Linear | LowRank = nn.Linear(width, symbols)

    def forward(self, text: Tensor) -> Tensor:
        x = self.embedding(text)
        if self.core == "transformer":
            x = x + self.positions[: x.shape[1]]
            for block in self.body:
                x = block(x)
            x = F.layer_norm(x, x.shape[-1:])
        elif self.core == "window":
            x = F.pad(x.transpose(1, 2), (5, 0))
            x = self.body[1](F.relu(self.body[0](x))).transpose(1, 2)
        else:
            x = self.body[0](x.transpose(0, 1))[0].transpose(0, 1)
        return self.head(x)


class Block(nn.Module):
    """A block of a transformer."""

    def __init__(self, width: int, causal: bool = True) -> None:
        super().__init__()
        self.causal = causal
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.into, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.into(self.norms[0](x)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class Patches(nn.Module):
    """A transformer on the sixteen pieces of a picture."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.places = nn.Linear(4, 32), nn.Parameter(0.02 * torch.randn(16, 32))
        self.blocks = nn.Sequential(Block(32, causal=False), Block(32, causal=False))
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        pieces = x.unfold(2, 2, 2).unfold(3, 2, 2).reshape(len(x), 16, 4)
        return self.head(self.blocks(self.first(pieces) + self.places).mean(1))


class Autoencoder(nn.Module):
    """A variational autoencoder of digits; the output is the picture, with the divergence of the code beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 16))
        self.decoder = nn.Sequential(nn.Linear(8, 128), nn.ReLU(), nn.Linear(128, 64))

    def forward(self, x: Tensor) -> Tensor:
        mean, log_var = self.encoder(x).chunk(2, dim=1)
        code = mean + torch.randn_like(mean) * (log_var / 2).exp()
        divergence = 0.5 * (mean.square() + log_var.exp() - 1 - log_var).sum(1, keepdim=True)
        return torch.cat([self.decoder(code), divergence], dim=1)


class Rows(nn.Module):
    """Reads a picture row by row."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.LSTM(8, 48, batch_first=True), nn.Linear(48, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x.squeeze(1))[0][:, -1])


def network(inputs: int, outputs: int, width: int = 64) -> nn.Module:
    hidden = [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(nn.Flatten(), nn.Linear(inputs, width), nn.ReLU(), *hidden, nn.Linear(width, outputs))


def convolutions(*, norm: bool = False) -> nn.Module:
    norms = [nn.BatchNorm2d(16), nn.BatchNorm2d(32)] if norm else [nn.Identity(), nn.Identity()]
    first, second = nn.Conv2d(1, 16, 3, padding=1), nn.Conv2d(16, 32, 3, padding=1, stride=2)
    tail = [nn.ReLU(), nn.Flatten(), nn.Linear(512, 10)]
    return nn.Sequential(first, norms[0], nn.ReLU(), second, norms[1], *tail)


def denoiser() -> nn.Module:
    def layer(a: int, b: int) -> nn.Module:
        return nn.Conv2d(a, b, 3, padding=1)

    return nn.Sequential(layer(1, 12), nn.ReLU(), layer(12, 12), nn.ReLU(), layer(12, 1))
