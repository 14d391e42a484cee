"""Whole models, with what their authors do in them, equal one backward per sample."""

import pytest
import torch
from per_sample.harness import assert_matches_loop
from torch import nn


class Causal(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x):
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype)
        return self.attention(x, x, x, attn_mask=mask, is_causal=True)[0]


class VisionTransformer(nn.Module):
    """A class token and positions as bare parameters at the top."""

    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(3, 8, 2, 2)
        self.token, self.positions = nn.Parameter(torch.randn(1, 1, 8)), nn.Parameter(torch.randn(1, 5, 8))
        self.encoder = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.positions
        return self.head(self.encoder(x)[:, 0])


class LastState(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.lstm, self.head = nn.Embedding(7, 4), nn.LSTM(4, 6, batch_first=True), nn.Linear(6, 2)

    def forward(self, index):
        _, (hidden, _) = self.lstm(self.embedding(index))
        return self.head(hidden[-1])


class Cells(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.LSTMCell(3, 4)

    def forward(self, x):
        state = x.new_zeros(len(x), 4), x.new_zeros(len(x), 4)
        for step in x.unbind(1):
            state = self.cell(step, state)
        return state[0]


class ByKeyword(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.conv, self.norm, self.groups = (
            nn.Linear(3, 3),
            nn.Conv1d(4, 4, 1),
            nn.LayerNorm(3),
            nn.GroupNorm(2, 4),
        )

    def forward(self, x):
        return self.groups(input=self.norm(input=self.conv(input=self.linear(input=x))))


class InDicts(nn.Module):
    def __init__(self):
        super().__init__()
        self.scales = nn.ParameterDict({"a": nn.Parameter(torch.randn(3))})
        self.layers = nn.ModuleDict({"x": nn.Linear(3, 2)})

    def forward(self, x):
        return self.layers["x"](x * self.scales["a"])


class DetachedOnce(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x):
        return self.layer(x.detach()) + self.layer(torch.tanh(self.layer(x)).detach())


class SomePositions(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x):
        return self.second(self.first(x)[:, :2])


class SomeSamples(SomePositions):
    def forward(self, x):
        hidden = self.first(x)
        return torch.cat([self.second(hidden[:2]), hidden[2:, :2]])


MODELS = {
    "causal attention, as many positions as samples": (Causal, lambda: torch.randn(5, 5, 8)),
    "vision transformer": (VisionTransformer, lambda: torch.randn(5, 3, 4, 4)),
    "last state of an LSTM": (LastState, lambda: torch.randint(0, 7, (5, 6))),
    "LSTM cells": (Cells, lambda: torch.randn(5, 4, 3)),
    "by keyword": (ByKeyword, lambda: torch.randn(5, 4, 3)),
    "in dicts": (InDicts, lambda: torch.randn(5, 3)),
    "one use detached": (DetachedOnce, lambda: torch.randn(5, 3)),
    "some positions": (SomePositions, lambda: torch.randn(5, 4, 3)),
    "pooling": (
        lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 2)),
        lambda: torch.randn(5, 3, 6, 6),
    ),
    "orthogonal weight": (
        lambda: nn.utils.parametrizations.orthogonal(nn.Linear(3, 3)),
        lambda: torch.randn(5, 3),
    ),
    "one sample": (lambda: nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 2)), lambda: torch.randint(0, 5, (1, 4))),
    "seventeen samples": (lambda: nn.Sequential(nn.Conv1d(8, 9, 3), nn.Conv1d(9, 4, 3)), lambda: torch.randn(17, 8, 7)),
}


@pytest.mark.parametrize("name", MODELS)
def test_equals_one_backward_per_sample(name):
    make_model, make_input = MODELS[name]
    assert_matches_loop(make_model(), make_input())


def test_encoder_and_decoder():
    assert_matches_loop(
        nn.Transformer(8, 2, 1, 1, 12, dropout=0.0, batch_first=True), torch.randn(5, 4, 8), torch.randn(5, 3, 8)
    )


def test_attention_with_sequences_first():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.attention = nn.Linear(8, 8), nn.MultiheadAttention(8, 2)

        def forward(self, x):
            hidden = self.linear(x)
            return x + self.attention(hidden, hidden, hidden, need_weights=False)[0]

    assert_matches_loop(Block(), torch.randn(4, 5, 8), batch_first=False)


def test_a_layer_called_on_some_samples_only_is_refused_by_name():
    with pytest.raises(ValueError, match=r"'second' \(Linear\) saw 2 samples, the batch has 5"):
        assert_matches_loop(SomeSamples(), torch.randn(5, 3))
