"""What one sample changes in private steps of models that mix samples: the limit at most, or the step is refused."""

import copy

import pytest
import torch
from per_sample.harness import Net, losses_of, weight
from torch import nn

from torchzero_clip import ConstantFlatClipper, PrivateGradientClipper

B, STEPS, OPENS, LIMIT = 5, 6, 3, 0.3
"""Step 3 is none of the steps 1, 2, 4, ... that are proved in any case."""


def private(model, **settings):
    given = {"noise_multiplier": 0.0, "expected_batch_size": 1.0, **settings}
    return PrivateGradientClipper(model, ConstantFlatClipper(LIMIT), **given)


def opens(m):
    return float(m.step >= OPENS)


def of_two_layers(middle):
    """A model with a function of samples between its layers, which gets the number of the step as ``m.step``."""
    forward = lambda m, x: m.last(middle(m, m.first(x)).tanh())  # noqa: E731
    return lambda: Net(forward, first=nn.Linear(4, 4), last=nn.Linear(4, 3), gate=weight(4, value=0.0), step=0)


def attends(m, h):
    others = torch.eye(len(h)) if m.step < OPENS else torch.ones(len(h), len(h))
    return (h @ h.T).masked_fill(others == 0, -torch.inf).softmax(-1) @ h


ATTACKS = {
    "a mean": lambda m, h: h - h.mean(0),
    "a mean, of a step": lambda m, h: h - h.mean(0) if opens(m) else h,
    "a mean behind a gate that opens": lambda m, h: h + opens(m) * h.mean(0),
    "a mean behind a parameter of 0": lambda m, h: h + m.gate * h.mean(0),
    "a mean behind a gate of relu": lambda m, h: h + (h * 0 + opens(m) - 0.5).relu() * h.mean(0),
    "a standard deviation": lambda m, h: h / (h.std(0) + 1),
    "the largest": lambda m, h: h / h.amax(0).abs(),
    "sums over earlier samples": lambda m, h: h.cumsum(0),
    "attention to other samples, of a step": attends,
    "attention to other samples": lambda m, h: (h @ h.T).softmax(-1) @ h,
    "values sorted over samples": lambda m, h: h.sort(0).values,
    "very little": lambda m, h: h + 1e-9 * h.mean(0),
    "very little, of a step": lambda m, h: h + 1e-9 * opens(m) * h.mean(0),
    "a product of a table with samples": lambda m, h: (torch.eye(len(h)) + opens(m)) @ h,
    "a sum where an index says so": lambda m, h: h.index_add(
        0, torch.arange(len(h)), h[torch.arange(len(h)).roll(int(opens(m)))]
    ),
    "a mean behind relu": lambda m, h: h + (h.mean(0) + 100 * opens(m) - 100).relu(),
    "a mean behind a mask": lambda m, h: h + h.mean(0).masked_fill(torch.tensor(m.step < OPENS), 0.0),
}
LATER = {"clamp": lambda m, h: h + (h.mean(0) + 100 * opens(m) - 100).clamp(-50, 50)}
"""A mean that no proof sees before it begins, because no gradient reaches the first layer until then."""


def changes(make, **settings):
    """The most that one sample changes the sums of each step in which neither of both batches is refused."""
    torch.manual_seed(0)
    first, largest, refused = make(), [], []
    for left_out in range(B):
        models = [copy.deepcopy(first) for _ in range(2)]
        clippers = [private(model, **settings) for model in models]
        for step in range(1, STEPS + 1):
            x = torch.randn(B, 4) * 3
            sums = []
            for model, clipper, rows in zip(models, clippers, (x, x[torch.arange(B) != left_out]), strict=True):
                model.step = step
                try:
                    clipper.backward(losses_of(model(rows)))
                    sums.append(
                        {name: clipper._sums.get(name, torch.zeros_like(p)) for name, p in model.named_parameters()}
                    )
                except RuntimeError:
                    refused.append(step)
                clipper.discard()
            if len(sums) == 2:
                change = [(sums[0][name] - sums[1][name]).double().flatten() for name in sums[0]]
                largest.append(torch.cat(change).norm().item())
    return max(largest, default=0.0), refused


@pytest.mark.parametrize("name", ATTACKS)
def test_one_sample_changes_the_sums_by_the_limit_at_most_whatever_the_model_mixes(name):
    largest, refused = changes(of_two_layers(ATTACKS[name]))
    assert largest <= LIMIT * (1 + 1e-5)
    assert {*refused} >= {*range(OPENS, STEPS + 1)}


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", LATER)
def test_what_begins_to_mix_where_no_gradient_arrived_is_held_by_always(name):
    largest, refused = changes(of_two_layers(LATER[name]), verify="always")
    assert largest <= LIMIT * (1 + 1e-5)
    assert {*refused} == {*range(OPENS, STEPS + 1)}
    assert 4 in changes(of_two_layers(LATER[name]))[1]  # or by the next proof


@pytest.mark.parametrize("gate", ["a parameter", "a mask", "a table", "a recurrent layer"])
def test_gates_between_samples_are_refused_before_they_open_unless_each_sample_runs_alone(gate):
    """The gradient of a gate of 0 has values of other samples, though no gradient passes it."""

    def forward(m, x):
        h = m.recurrent(x[:, None])[0][:, 0] if gate == "a recurrent layer" else m.linear(x)
        if gate == "a mask":
            return h + h.mean(0) * torch.zeros(3)
        if gate == "a table":
            return torch.eye(len(h)) @ h
        return h + h.mean(0) * m.gate

    model = Net(forward, linear=nn.Linear(4, 3), recurrent=nn.LSTM(4, 3, batch_first=True), gate=weight(3, value=0.0))
    model.linear.requires_grad_(gate != "a recurrent layer")
    model.gate.requires_grad_(gate == "a parameter")
    x = torch.randn(B, 4)
    with private(model) as clipper, pytest.raises(RuntimeError, match=r"behind a gate or a mask|gradient of one row"):
        clipper.backward(losses_of(model(x)))
    with private(model, whole=(Net,)) as clipper:
        clipper.backward(losses_of(model(x)))


@pytest.mark.parametrize("scale", [1e-33, 1e25], ids=["too small", "too large"])
@pytest.mark.parametrize("verify", ["first", "always"])
def test_rows_that_cannot_be_proved_are_refused(scale, verify):
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3)), torch.randn(B, 4)
    factors = torch.ones(B)
    factors[2] = scale
    with private(model, verify=verify) as clipper:
        with pytest.raises(
            RuntimeError, match=r"too large or too small\. In private .* each row has to be proved: scale"
        ):
            clipper.backward(losses_of(model(x)) * factors)
        assert not clipper._sums
        clipper.backward(losses_of(model(x)))


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_sample_that_is_not_finite_is_left_out_where_values_move_nothing_and_refused_elsewhere(value):
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3)), torch.randn(B, 4)
    factors = torch.ones(B)
    factors[2] = value
    with private(model) as clipper:
        assert clipper.backward(losses_of(model(x)) * factors).nonfinite.tolist() == [False, False, True, False, False]
        with pytest.raises(RuntimeError, match="In private training, each row has to be proved"):
            clipper.backward(losses_of(model(x)[torch.randperm(B)]) * factors)
