"""What a module under the generic rule stores on itself is that of the batch, and its gradients are right."""

import copy

import pytest
import torch
from per_sample.harness import check, close
from torch import nn

from torchzero_clip import ConstantFlatClipper, PerSampleGradientClipper


class Storing(nn.Module):
    """Stores what it computed: with a batch dimension, without one, in a list, detached."""

    def __init__(self, inner):
        super().__init__()
        self.scale, self.inner = nn.Parameter(torch.linspace(0.5, 2, 4)), inner
        self.penalty = self.seen = self.both = None

    def forward(self, x):
        h = self.inner(x * self.scale)
        h = h[0] if isinstance(h, tuple) else h
        self.penalty = h.square().mean()
        self.seen = h.detach()
        self.both = [h.sum((1, 2)), "two"]
        return h


class Penalized(nn.Module):
    """Its output is that of a storing module, and what that stored."""

    def __init__(self, inner):
        super().__init__()
        self.storing, self.head = Storing(inner), nn.Linear(4, 2)

    def forward(self, x):
        out = self.head(self.storing(x)).sum(1)
        penalty = self.storing.penalty.reshape(-1, 1).expand(len(out), 1)
        return torch.cat([out, penalty, self.storing.both[0][:, None]], 1)


INNER = {"by vmap": lambda: nn.Linear(4, 4), "one by one": lambda: nn.GRU(4, 4, batch_first=True)}


@pytest.mark.parametrize("how", INNER)
def test_gradients_of_what_was_stored_are_those_of_the_samples(how):
    check(Penalized(INNER[how]()), torch.randn(5, 3, 4))


@pytest.mark.parametrize("how", INNER)
def test_what_was_stored_can_be_read_as_without_a_clipper(how):
    model, x = Penalized(INNER[how]()), torch.randn(5, 3, 4)
    twin = copy.deepcopy(model)
    twin(x)
    with PerSampleGradientClipper(model, ConstantFlatClipper(1.0)):
        model(x)
    close(model.storing.seen, twin.storing.seen, rtol=1e-5, atol=1e-6)
    close(model.storing.both[0], twin.storing.both[0], rtol=1e-5, atol=1e-6)
    assert model.storing.both[1] == "two"
    close(model.storing.penalty.mean(), twin.storing.penalty, rtol=1e-5, atol=1e-6)
    assert model.storing.penalty.shape == (5,)  # without a batch dimension, there is one for each sample


def test_sequences_first_are_stored_as_they_are():
    model, x = Penalized(nn.Linear(4, 4)).storing, torch.randn(3, 5, 4)
    with PerSampleGradientClipper(model, ConstantFlatClipper(1.0), batch_first=False):
        model(x)
    close(model.seen, model.inner(x * model.scale), rtol=1e-5, atol=1e-6)


class Counting(nn.Module):
    """Keeps an average of its inputs, in a buffer."""

    def __init__(self, inner):
        super().__init__()
        self.scale, self.inner = nn.Parameter(torch.ones(4)), inner
        self.register_buffer("average", torch.zeros(()))

    def forward(self, x):
        self.average = 0.9 * self.average + 0.1 * x.mean()
        output = self.inner(x * self.scale)
        return output[0] if isinstance(output, tuple) else output


@pytest.mark.parametrize("how", INNER)
def test_statistics_in_buffers_are_refused_by_name_and_keep_their_values(how):
    model = Counting(INNER[how]())
    with PerSampleGradientClipper(model, ConstantFlatClipper(1.0)):
        with pytest.raises(ValueError, match=r"Counting sets its buffer 'average' to what depends on the samples"):
            model(torch.randn(5, 3, 4))
        assert model.average.item() == 0
