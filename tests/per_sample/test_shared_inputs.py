"""Inputs that all samples share are found by a proof, and a checkpoint runs its layers again as in the forward."""

import copy

import pytest
import torch
from per_sample.harness import (
    Net,
    assert_close,
    by_backward,
    by_classic_form,
    by_two_passes,
    loop,
    losses_of,
    norms_of,
    total_of,
    with_low_memory,
)
from torch import nn
from torch.utils.checkpoint import checkpoint

W = 4


def row(m, x):
    return x * m.of_row(torch.ones(1, 1, dtype=x.dtype))


def table(m, x):
    return x + m.of_table(m.buffer[: x.shape[1]])


def computed(m, x):
    return x + m.of_table(torch.arange(x.shape[1] * W, dtype=x.dtype).sin().view(-1, W))


def positions(m, x):
    return x + m.embedding(torch.arange(x.shape[1]))


def distances(m, x):
    places = torch.arange(x.shape[1])
    return x + m.embedding((places[:, None] - places).abs()).sum(1)


STEPS = [(5, 3, False), (5, 3, False), (4, 6, False), (3, 3, False), (5, 3, True), (2, 5, False)]
KINDS = [row, table, computed, positions, distances]
WAYS = [by_backward, by_classic_form, by_two_passes, with_low_memory]


def make(kind):
    net = Net(
        lambda m, x: m.head(checkpoint(kind, m, m.first(x), use_reentrant=False)),
        first=nn.Linear(W, W),
        of_row=nn.Linear(1, W),
        of_table=nn.Linear(W, W),
        embedding=nn.Embedding(9, W),
        head=nn.Linear(W, 3),
    )
    net.register_buffer("buffer", torch.randn(9, W))
    return net.double()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_they_may_be_in_a_checkpoint(kind, way):
    model = make(kind)
    step = way(model)
    # other lengths, as many positions as samples once, and frozen parameters
    for count, length, is_frozen in STEPS:
        model.first.requires_grad_(not is_frozen)
        x = torch.randn(count, length, W, dtype=torch.float64)
        expected = norms_of(loop(copy.deepcopy(model), (x,)))
        norms, param_norms = step(lambda model, x=x: losses_of(model(x)))
        assert_close(norms, total_of(expected))
        for name, norm in param_norms.items():
            assert_close(norm, expected[name])
