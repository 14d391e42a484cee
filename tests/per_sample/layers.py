"""Layers and small models, each with its input, which the tests compare with one backward per sample in every mode.

`LAYERS` run on a GPU too. Published models are in `table.py`.
"""

import torch
from per_sample.harness import Net, frozen, weight
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

B = 5


def x(*shape):
    return torch.randn(B, *shape) * torch.linspace(0.1, 3, B).view(-1, *[1] * len(shape))


def tokens(*shape, high=6):
    return torch.randint(0, high, (B, *shape))


def padded_and_tied():
    """A parameter of its own around an embedding with padding, whose weight is used again."""
    held = {"embedding": nn.Embedding(6, 3, padding_idx=2), "head": nn.Linear(3, 6, bias=False)}
    model = Net(lambda m, index: m.head(m.embedding(index) * m.scale), scale=weight(3), **held)
    model.head.weight = model.embedding.weight
    return model


class Standardized(nn.Conv2d):
    """Standardizes its weight where torch lets subclasses do so. It is no plain convolution."""

    def _conv_forward(self, input, weight, bias):
        return super()._conv_forward(input, weight - weight.mean((1, 2, 3), keepdim=True), bias)


def bare():
    return Net(lambda m, x: m.inner(x * m.scale), scale=weight(3), inner=nn.Linear(3, 2))


def unused(layer, name):
    """A layer with a parameter that its forward does not use."""
    layer.register_parameter(name, weight(6))
    return layer


LAYERS = {
    "linear 2-D": (lambda: nn.Linear(3, 2), lambda: x(3)),
    "linear 3-D": (lambda: nn.Linear(3, 2), lambda: x(4, 3)),
    "linear 4-D": (lambda: nn.Linear(3, 2), lambda: x(2, 3, 3)),
    "linear 5-D": (lambda: nn.Linear(3, 2), lambda: x(2, 2, 2, 3)),
    "linear of one position": (lambda: nn.Linear(3, 2), lambda: x(1, 3)),
    "linear, gradients kept": (lambda: nn.Linear(3, 2), lambda: x(40, 3)),
    "linear, gradients formed in pieces": (lambda: nn.Linear(3, 2), lambda: x(7, 3)),
    "linear, Gram matrices": (lambda: nn.Linear(30, 20), lambda: x(4, 30)),
    "linear, Gram matrices in parts": (lambda: nn.Linear(200, 150), lambda: x(71, 200)),
    "linear, Gram matrices in parts of parts": (lambda: nn.Linear(300, 280), lambda: x(131, 300)),
    "linear, wider in than out": (lambda: nn.Linear(30, 2), lambda: x(4, 30)),
    "linear without bias": (lambda: nn.Linear(3, 2, bias=False), lambda: x(4, 3)),
    "linear, frozen weight": (lambda: frozen(nn.Linear(3, 2), "weight"), lambda: x(4, 3)),
    "linear, frozen bias": (lambda: frozen(nn.Linear(3, 2), "bias"), lambda: x(4, 3)),
    "linear twice": (lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), lambda: x(4, 3)),
    "linear, expanded input": (lambda: nn.Linear(3, 2), lambda: x(1, 3).expand(B, 4, 3)),
    "linear, strided input": (lambda: nn.Linear(3, 2), lambda: x(3, 4).transpose(1, 2)),
    "conv1d": (lambda: nn.Conv1d(3, 4, 3), lambda: x(3, 8)),
    "conv1d, strided and dilated": (lambda: nn.Conv1d(3, 4, 3, stride=2, dilation=2, padding=1), lambda: x(3, 9)),
    "conv2d": (lambda: nn.Conv2d(3, 4, 3), lambda: x(3, 6, 6)),
    "conv2d, one pixel wide": (lambda: nn.Conv2d(16, 6, 1), lambda: x(16, 3, 3)),
    "conv2d, one pixel wide, strided": (lambda: nn.Conv2d(16, 6, 1, stride=2), lambda: x(16, 5, 3)),
    "conv2d, few positions": (lambda: nn.Conv2d(9, 30, 3), lambda: x(9, 5, 5)),
    "conv2d, few positions and few channels": (lambda: nn.Conv2d(5, 60, 4), lambda: x(5, 5, 5)),
    "conv2d, gradients dropped": (lambda: nn.Conv2d(9, 20, 3), lambda: x(9, 4, 4)),
    "conv2d, many channels": (lambda: nn.Conv2d(9, 4, 3, padding=1), lambda: x(9, 6, 5)),
    "conv2d, uneven": (lambda: nn.Conv2d(3, 4, (3, 2), stride=(2, 1), padding=(1, 2)), lambda: x(3, 6, 5)),
    "conv2d, dilated": (lambda: nn.Conv2d(9, 4, 3, dilation=(2, 1), stride=2), lambda: x(9, 8, 7)),
    "conv2d, groups": (lambda: nn.Conv2d(4, 6, 3, groups=2, padding=1), lambda: x(4, 5, 5)),
    "conv2d, depthwise": (lambda: nn.Conv2d(8, 16, 3, groups=8), lambda: x(8, 5, 5)),
    "conv2d, depthwise, large kernel": (lambda: nn.Conv2d(6, 6, 7, padding=3, groups=6), lambda: x(6, 9, 8)),
    "conv2d, depthwise, large, dilated": (
        lambda: nn.Conv2d(6, 6, (5, 3), stride=2, dilation=(1, 2), groups=6),
        lambda: x(6, 11, 12),
    ),
    "conv2d, depthwise, large, circular": (
        lambda: nn.Conv2d(6, 6, 5, padding="same", padding_mode="circular", groups=6, bias=False),
        lambda: x(6, 7, 7),
    ),
    "conv1d, depthwise, large kernel": (lambda: nn.Conv1d(4, 4, 11, padding=5, groups=4), lambda: x(4, 13)),
    "conv3d, depthwise": (lambda: nn.Conv3d(3, 3, 3, padding=1, groups=3), lambda: x(3, 4, 5, 4)),
    "conv2d, standardized": (lambda: Standardized(2, 3, 3), lambda: x(2, 5, 5)),
    "conv2d, same with an even kernel": (lambda: nn.Conv2d(3, 4, 4, padding="same"), lambda: x(3, 6, 6)),
    "conv2d, same and dilated": (lambda: nn.Conv2d(9, 4, 2, padding="same", dilation=3), lambda: x(9, 6, 6)),
    "conv2d, valid": (lambda: nn.Conv2d(3, 4, 2, padding="valid"), lambda: x(3, 6, 6)),
    "conv2d, circular": (lambda: nn.Conv2d(3, 4, 3, padding=1, padding_mode="circular"), lambda: x(3, 6, 6)),
    "conv2d, reflect": (lambda: nn.Conv2d(9, 4, 3, padding=(1, 2), padding_mode="reflect"), lambda: x(9, 6, 6)),
    "conv2d, replicate": (lambda: nn.Conv2d(3, 4, 3, padding=1, padding_mode="replicate"), lambda: x(3, 6, 6)),
    "conv2d, same, circular, even": (
        lambda: nn.Conv2d(3, 4, 4, padding="same", padding_mode="circular"),
        lambda: x(3, 6, 6),
    ),
    "conv2d without bias": (lambda: nn.Conv2d(3, 4, 3, bias=False), lambda: x(3, 5, 5)),
    "conv2d, frozen weight": (lambda: frozen(nn.Conv2d(3, 4, 3), "weight"), lambda: x(3, 5, 5)),
    "conv2d twice": (lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 2)), lambda: x(3, 6, 6)),
    "conv2d, channels last": (lambda: nn.Conv2d(9, 4, 3), lambda: x(9, 5, 5).to(memory_format=torch.channels_last)),
    "conv3d": (lambda: nn.Conv3d(2, 3, 2, padding=1, stride=(1, 2, 1)), lambda: x(2, 3, 4, 4)),
    "conv3d, many channels": (lambda: nn.Conv3d(8, 3, (1, 2, 2)), lambda: x(8, 3, 4, 4)),
    "conv transpose 1d": (lambda: nn.ConvTranspose1d(3, 4, 3, stride=2), lambda: x(3, 5)),
    "conv transpose 2d": (lambda: nn.ConvTranspose2d(4, 6, 3, groups=2, padding=1), lambda: x(4, 5, 5)),
    "embedding": (lambda: nn.Embedding(6, 3), lambda: tokens(7)),
    "embedding, one index": (lambda: nn.Embedding(6, 3), lambda: tokens()),
    "embedding, one word": (lambda: nn.Embedding(6, 3), lambda: tokens(B, high=1)),
    "embedding, 3-D": (lambda: nn.Embedding(6, 3), lambda: tokens(2, 3)),
    "embedding, padding": (lambda: nn.Embedding(6, 3, padding_idx=2), lambda: tokens(9)),
    "embedding and linear": (lambda: nn.Sequential(nn.Embedding(6, 3), nn.Linear(3, 4)), lambda: tokens(7)),
    "bag, sum": (lambda: nn.EmbeddingBag(6, 3, mode="sum"), lambda: tokens(7)),
    "bag, mean": (lambda: nn.EmbeddingBag(6, 3), lambda: tokens(7)),
    "bag, mean with padding": (lambda: nn.EmbeddingBag(6, 3, padding_idx=1), lambda: tokens(7)),
    "layer norm": (lambda: nn.LayerNorm(6), lambda: x(4, 6)),
    "layer norm, 2-D": (lambda: nn.LayerNorm(6), lambda: x(6)),
    "layer norm of two dimensions": (lambda: nn.LayerNorm((4, 6)), lambda: x(3, 4, 6)),
    "layer norm without bias": (lambda: nn.LayerNorm(6, bias=False), lambda: x(4, 6)),
    "layer norm, nothing to train": (
        lambda: nn.Sequential(nn.LayerNorm(6, elementwise_affine=False), nn.Linear(6, 2)),
        lambda: x(4, 6),
    ),
    "layer norm, frozen bias": (lambda: frozen(nn.LayerNorm(6), "bias"), lambda: x(4, 6)),
    "layer norm behind linear": (lambda: nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6)), lambda: x(4, 6)),
    "rms norm": (lambda: nn.RMSNorm(6), lambda: x(4, 6)),
    "rms norm, eps": (lambda: nn.Sequential(nn.Linear(6, 6), nn.RMSNorm(6, eps=0.1)), lambda: x(4, 6)),
    "rms norm with a bias that it does not use": (lambda: unused(nn.RMSNorm(6), "bias"), lambda: x(4, 6)),
    "rms norm with a frozen bias": (lambda: frozen(unused(nn.RMSNorm(6), "bias"), "bias"), lambda: x(4, 6)),
    "group norm with a frozen parameter": (lambda: frozen(unused(nn.GroupNorm(2, 6), "a"), "a"), lambda: x(6, 4, 4)),
    "group norm": (lambda: nn.GroupNorm(2, 6), lambda: x(6, 4, 4)),
    "group norm, 2-D": (lambda: nn.GroupNorm(2, 6), lambda: x(6)),
    "group norm behind conv": (lambda: nn.Sequential(nn.Conv2d(3, 6, 3), nn.GroupNorm(3, 6)), lambda: x(3, 5, 5)),
    "instance norm 1d": (lambda: nn.InstanceNorm1d(4, affine=True), lambda: x(4, 6)),
    "instance norm 2d": (
        lambda: nn.Sequential(nn.Conv2d(3, 4, 2), nn.InstanceNorm2d(4, affine=True)),
        lambda: x(3, 5, 5),
    ),
    "instance norm 3d": (lambda: nn.InstanceNorm3d(4, affine=True), lambda: x(4, 3, 3, 3)),
    "prelu": (lambda: nn.Sequential(nn.Linear(3, 4), nn.PReLU(4)), lambda: x(3)),
    "lstm, batch first": (lambda: nn.LSTM(3, 4, batch_first=True), lambda: x(6, 3)),
    "lstm, two layers, both directions": (
        lambda: nn.LSTM(3, 4, num_layers=2, bidirectional=True, batch_first=True),
        lambda: x(5, 3),
    ),
    "gru": (lambda: nn.GRU(3, 4, batch_first=True), lambda: x(6, 3)),
    "rnn behind linear": (lambda: nn.Sequential(nn.Linear(3, 3), nn.RNN(3, 4, batch_first=True)), lambda: x(6, 3)),
    "bare parameters": (bare, lambda: x(3)),
    "bare parameters behind linear": (lambda: nn.Sequential(nn.Linear(4, 3), bare()), lambda: x(4)),
    "padding in a module with bare parameters": (padded_and_tied, lambda: tokens(9)),
    "transformer layer": (lambda: nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True), lambda: x(4, 8)),
    "weight norm": (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(3, 2)), lambda: x(4, 3)),
}


def tied():
    model = Net(
        lambda m, index: m.head(torch.tanh(m.middle(m.embedding(index)))),
        embedding=nn.Embedding(7, 4),
        middle=nn.Linear(4, 4),
        head=nn.Linear(4, 7, bias=False),
    )
    model.head.weight = model.embedding.weight
    return model


def one_weight():
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.LayerNorm(4))
    model[2].weight, model[3].bias = model[0].weight, model[0].bias
    return model


def two_embeddings():
    model = Net(
        lambda m, index: m.head(m.first(index).flatten(1)) + m.second(index).sum((1, 2))[:, None],
        first=nn.Embedding(6, 4),
        second=nn.Embedding(6, 4),
        head=nn.Linear(12, 2),
    )
    model.second.weight = model.first.weight
    return model


def twice(layer):
    return Net(lambda m, x: m.layer(torch.tanh(m.layer(x))), layer=layer)


def positions(shape):
    return Net(
        lambda m, index: m.head(m.words(index) + m.places(torch.arange(index.shape[1]).reshape(shape))),
        words=nn.Embedding(6, 4),
        places=nn.Embedding(9, 4),
        head=nn.Linear(4, 2),
    )


def overwritten(m, x):
    """A layer of which the bias alone trains stores no input."""
    x = x.clone()
    output = m.layer(x)
    x.zero_()
    return output


def of_gpt_2(inputs, outputs):
    """The linear layer of GPT-2, with its weight the other way round."""

    def forward(m, x):
        return torch.addmm(m.bias, x.view(-1, x.shape[-1]), m.weight).view(*x.shape[:-1], len(m.bias))

    return Net(forward, weight=weight(inputs, outputs), bias=weight(outputs))


def in_a_loop(cell, states):
    def forward(m, x):
        hidden = tuple(x.new_zeros(len(x), 4) for _ in range(states))
        for step in x.unbind(1):
            hidden = m.cell(step, hidden if states > 1 else hidden[0])
            hidden = hidden if states > 1 else (hidden,)
        return hidden[0]

    return Net(forward, cell=cell)


def causal(m, x):
    mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype)
    return m.attention(x, x, x, attn_mask=mask, is_causal=True)[0]


def of_patches(m, x):
    """A class token and positions as bare parameters at the top."""
    x = m.patches(x).flatten(2).transpose(1, 2)
    return m.head(m.encoder(torch.cat([m.token.expand(len(x), -1, -1), x], 1) + m.places)[:, 0])


def by_keyword(m, x):
    return m.groups(input=m.norm(input=m.conv(input=m.linear(input=x))))


def residual_attention(m, x):
    hidden = m.linear(x)
    return x + m.attention(hidden, hidden, hidden, need_weights=False)[0]


class Indexed(nn.Embedding):
    def forward(self, x):
        return self.weight[x]


def padded(padding):
    return Net(lambda m, x: F.embedding(x, m.weight, padding_idx=padding), weight=weight(6, 3))


def scaled(embedding):
    return Net(lambda m, x: m.embedding(x) * m.scale, embedding=embedding, scale=weight(3))


def with_padding_idx(*shape):
    use = (lambda m, x: x @ m.weight) if len(shape) > 1 else (lambda m, x: x * m.weight)
    return Net(use, weight=weight(*shape), padding_idx=0)


def some_padding():
    rows = torch.randint(1, 6, (B, 3))
    rows[:, 0] = 0
    return rows


def padding():
    result = torch.zeros(B, 6, dtype=torch.bool)
    result[:, -2:] = torch.rand(B, 2) < 0.5
    return result


def turned(m, x):
    return m.head(m.rnn(x.transpose(0, 1))[0].transpose(0, 1))


FAST = {"modes": ("auto", "low")}
FIRST = {"batch_first": False}
MODELS = {
    **{f"tied embedding and head, {length}": (tied, lambda n=length: tokens(n)) for length in (1, 6, 60)},
    **{
        f"{type(layer).__name__} called twice, {length}": (lambda m=layer: twice(m), lambda n=length: x(n, 3))
        for layer in (nn.Linear(3, 3), nn.LayerNorm(3), nn.RMSNorm(3))
        for length in (1, 4, 60)
    },
    "a convolution called twice": (lambda: twice(nn.Conv2d(3, 3, 3, padding=1)), lambda: x(3, 4, 4)),
    "a wide convolution called twice": (lambda: twice(nn.Conv2d(9, 9, 3, padding=1)), lambda: x(9, 8, 8)),
    "one weight in linear layers and norms": (one_weight, lambda: x(3, 4)),
    "two embeddings of one weight": (two_embeddings, lambda: tokens(3)),
    "activations in place": (
        lambda: nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace=True), nn.Linear(4, 2), nn.ELU(inplace=True)),
        lambda: x(3),
    ),
    "an activation in place behind a convolution": (
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(inplace=True)),
        lambda: x(3, 5, 5),
        FAST,
    ),
    **{
        f"positions of shape {shape}, {length}": (lambda s=shape: positions(s), lambda n=length: tokens(n))
        for shape in ((-1,), (1, -1))
        for length in (5, 7)
    },
    "linear layers of GPT-2": (lambda: nn.Sequential(of_gpt_2(3, 4), nn.GELU(), of_gpt_2(4, 2)), lambda: x(6, 3)),
    "an output that is not used": (
        lambda: Net(lambda m, x: (m.first(x), m.second(x))[1], first=nn.Linear(3, 3), second=nn.Linear(3, 2)),
        lambda: x(3),
    ),
    "a batch that counts from 0": (lambda: nn.Sequential(nn.Embedding(7, 3), nn.Linear(3, 2)), lambda: torch.arange(B)),
    "GRU cells": (lambda: in_a_loop(nn.GRUCell(3, 4), 1), lambda: x(6, 3)),
    "LSTM cells": (lambda: in_a_loop(nn.LSTMCell(3, 4), 2), lambda: x(4, 3)),
    "causal attention, as many positions as samples": (
        lambda: Net(causal, attention=nn.MultiheadAttention(8, 2, batch_first=True)),
        lambda: x(5, 8),
    ),
    "vision transformer": (
        lambda: Net(
            of_patches,
            patches=nn.Conv2d(3, 8, 2, 2),
            token=weight(1, 1, 8),
            places=weight(1, 5, 8),
            encoder=nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True),
            head=nn.Linear(8, 3),
        ),
        lambda: x(3, 4, 4),
    ),
    "last state of an LSTM": (
        lambda: Net(
            lambda m, index: m.head(m.lstm(m.embedding(index))[1][0][-1]),
            embedding=nn.Embedding(7, 4),
            lstm=nn.LSTM(4, 6, batch_first=True),
            head=nn.Linear(6, 2),
        ),
        lambda: tokens(6),
    ),
    "by keyword": (
        lambda: Net(
            by_keyword, linear=nn.Linear(3, 3), conv=nn.Conv1d(4, 4, 1), norm=nn.LayerNorm(3), groups=nn.GroupNorm(2, 4)
        ),
        lambda: x(4, 3),
    ),
    "an input that is overwritten": (
        lambda: Net(overwritten, layer=frozen(nn.Linear(6, 6), "weight")),
        lambda: x(3, 6),
        {"modes": ("auto", "low", "kept")},
    ),
    "in dicts": (
        lambda: Net(
            lambda m, x: m.layers["x"](x * m.scales["a"]),
            scales=nn.ParameterDict({"a": weight(3)}),
            layers=nn.ModuleDict({"x": nn.Linear(3, 2)}),
        ),
        lambda: x(3),
    ),
    "one use detached": (
        lambda: Net(lambda m, x: m.layer(x.detach()) + m.layer(torch.tanh(m.layer(x)).detach()), layer=nn.Linear(3, 3)),
        lambda: x(3),
    ),
    "some positions": (
        lambda: Net(lambda m, x: m.second(m.first(x)[:, :2]), first=nn.Linear(3, 4), second=nn.Linear(4, 2)),
        lambda: x(4, 3),
    ),
    "pooling": (
        lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 2)),
        lambda: x(3, 6, 6),
    ),
    "orthogonal weight": (lambda: parametrizations.orthogonal(nn.Linear(3, 3)), lambda: x(3)),
    "one sample": (lambda: nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 2)), lambda: torch.randint(0, 5, (1, 4))),
    "seventeen samples": (lambda: nn.Sequential(nn.Conv1d(8, 9, 3), nn.Conv1d(9, 4, 3)), lambda: torch.randn(17, 8, 7)),
    "encoder and decoder": (
        lambda: nn.Transformer(8, 2, 1, 1, 12, dropout=0.0, batch_first=True),
        lambda: (x(4, 8), x(3, 8)),
    ),
    "two inputs": (lambda: nn.Bilinear(3, 4, 2), lambda: (x(3), x(4))),
    "bag with weights": (
        lambda: nn.EmbeddingBag(6, 3, mode="sum"),
        lambda: (tokens(7), None, x(7)),
        {"modes": ("auto", "low", "kept")},
    ),
    "attention": (lambda: nn.MultiheadAttention(8, 2, batch_first=True), lambda: (x(4, 8), x(6, 8), x(6, 8))),
    "attention with padding": (
        lambda: nn.MultiheadAttention(8, 2, batch_first=True),
        lambda: (x(4, 8), x(6, 8), x(6, 8), padding()),
    ),
    "attention, sequences first": (
        lambda: Net(residual_attention, linear=nn.Linear(8, 8), attention=nn.MultiheadAttention(8, 2)),
        lambda: x(4, 8).transpose(0, 1),
        FIRST,
    ),
    **{
        f"{type(layer).__name__}, sequences first": (lambda m=layer: m, lambda: x(6, 3).transpose(0, 1), FIRST)
        for layer in (
            *(nn.Linear(3, 2), nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4))),
            *(nn.LSTM(3, 4), nn.GRU(3, 4), nn.RMSNorm(3)),
        )
    },
    "embedding, sequences first": (
        lambda: nn.Sequential(nn.Embedding(6, 3), nn.Linear(3, 2)),
        lambda: tokens(7).t(),
        FIRST,
    ),
    **{
        f"a recurrent network with its own order of dimensions, {count}": (
            lambda: Net(turned, rnn=nn.LSTM(3, 4), head=nn.Linear(4, 2)),
            lambda n=count: torch.randn(n, 5, 3),
        )
        for count in (4, 5)
    },
    "a first state of a recurrent network": (
        lambda: Net(
            lambda m, x: m.gru(x, m.h.expand(1, len(x), 4).contiguous())[0],
            h=weight(1, 1, 4),
            gru=nn.GRU(3, 4, batch_first=True),
        ),
        lambda: x(6, 3),
        FAST,
    ),
    **{f"padding in a function, {i}": (lambda i=i: padded(i), some_padding) for i in (0, -6, None)},
    "padding in an index": (lambda: Indexed(6, 3, padding_idx=0), some_padding),
    "padding in a module": (lambda: scaled(nn.Embedding(6, 3, padding_idx=0)), some_padding),
    "padding in a bag": (lambda: scaled(nn.EmbeddingBag(6, 3, padding_idx=0)), some_padding),
    **{
        f"an attribute called padding_idx, {shape}, {count}": (
            lambda s=shape: with_padding_idx(*s),
            lambda n=count: torch.randn(n, 3, 5),
        )
        for shape in ((5, 5), (5,))
        for count in (4, 5)
    },
}
