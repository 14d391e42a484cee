"""Which indices of an embedding are samples, and which are positions that all samples share."""

import pytest
import torch
from per_sample.harness import Net, clip
from torch import nn


def distances(m, x):
    """Attention scores with a bias for each distance between two positions, as in T5."""
    positions = torch.arange(x.shape[1])
    bias = m.bias((positions[:, None] - positions[None]).clamp(-4, 4) + 4)
    return (x @ m.head(x).transpose(1, 2) + bias.permute(2, 0, 1)).flatten(1).sum(1)


@pytest.mark.parametrize(("count", "length"), [(4, 4), (4, 6)])
def test_biases_of_distances_are_refused_whatever_the_size_of_the_batch(count, length):
    model = Net(distances, bias=nn.Embedding(9, 1), head=nn.Linear(3, 3))
    with clip(model) as clipper, pytest.raises(ValueError, match=r"'bias' \(Embedding\)"):
        clipper.backward(model(torch.randn(count, length, 3)))


def test_tokens_that_are_all_the_same_are_tokens():
    model = nn.Embedding(5, 2)
    with clip(model) as clipper:
        assert clipper.backward(model(torch.ones(3, 3, dtype=torch.int64)).sum((1, 2))).norms.shape == (3,)
