"""Updates that are large relative to the weights are early signs; smooth schedules and usual noise are not."""

import math

import pytest
import torch
from recorder.records import column, made
from torch import nn

from torchzero_clip import AdamW, Modular, Recorder
from torchzero_clip.recorder.data import Ratios
from torchzero_clip.recorder.series import early_signs

NAMES = [f"layer {k}" for k in range(100)]


def signs(ratios):
    """The early signs among ratios, with the numbers of rows as steps."""
    ratios = torch.as_tensor(ratios, dtype=torch.float64)
    if ratios.ndim == 1:
        ratios = ratios[:, None]
    found = early_signs(range(len(ratios)), NAMES, ratios)
    assert all(sign.ratio == pytest.approx(sign.value / sign.usual) for sign in found)
    return [(sign.step, sign.layer, sign.value, sign.usual) for sign in found]


def test_a_ratio_above_twice_the_median_of_equal_ratios_is_a_sign():
    assert signs([1e-3] * 8 + [1.99e-3]) == []
    (sign,) = signs([1e-3] * 8 + [2.01e-3, 1e-3])
    assert sign == (8, "layer 0", 2.01e-3, pytest.approx(1e-3))


def test_the_border_is_six_deviations_above_the_median():
    """The logarithms have the median 0, and the median distance to it is 0.2."""
    logs = [-0.4, 0.0, 0.2, -0.2, 0.4] * 3
    border = 6 * 1.4826 * 0.2
    assert signs(torch.tensor([*logs, border - 0.01], dtype=torch.float64).exp()) == []
    ((step, *_),) = signs(torch.tensor([*logs, border + 0.01], dtype=torch.float64).exp())
    assert step == 15


def test_fewer_than_eight_ratios_give_no_sign():
    assert signs([1.0] * 7 + [50.0]) == []
    assert signs([0.0] + [1.0] * 7 + [50.0]) == []
    assert signs([math.nan] + [1.0] * 7 + [50.0]) == []


def test_a_ratio_is_compared_with_the_last_three_and_the_last_twenty():
    assert [sign[0] for sign in signs([1.0] * 20 + [10.0, 1.0, 15.0, 1.0, 1.0, 1.0, 15.0])] == [20, 26]
    assert signs([10.0] * 11 + [1.0] * 9 + [5.0]) == []
    assert [sign[0] for sign in signs([10.0] * 11 + [1.0] * 20 + [5.0])] == [31]


def test_the_layers_of_a_step_are_in_the_order_of_their_ratios_to_the_usual_one():
    ratios = torch.tensor([1.0, 2.0, 0.5, math.nan], dtype=torch.float64).repeat(10, 1)
    ratios[9] = torch.tensor([4.0, 6.0, 5.0, 1.0])
    assert signs(ratios) == [
        (9, "layer 2", 5.0, pytest.approx(0.5)),
        (9, "layer 0", 4.0, pytest.approx(1.0)),
        (9, "layer 1", 6.0, pytest.approx(2.0)),
    ]


SCHEDULES = {
    "constant": lambda x: 1.0,
    "linear warm-up": lambda x: min(1.0, x / 0.3),
    "long warm-up": lambda x: x,
    "exponential": lambda x: 10 ** (4 * x - 4),
    "warm-up and cosine": lambda x: x / 0.1 if x < 0.1 else 0.505 + 0.495 * math.cos(math.pi * (x - 0.1) / 0.9),
    "warm-up, stable, decay": lambda x: min(1.0, x / 0.2, (1.001 - x) / 0.2),
    "restarts": lambda x: 0.505 + 0.495 * math.cos(math.pi * (4 * x % 1)),
    "steps down": lambda x: 0.1 ** int(4 * x),
    "triangles": lambda x: 0.1 + 0.9 * (1 - abs(8 * x % 2 - 1)),
    "a late rise": lambda x: 1 + 4 * min(max(x - 0.4, 0) / 0.4, 1),
}


@pytest.mark.parametrize("count", [20, 50, 200])
@pytest.mark.parametrize("name", SCHEDULES)
def test_learning_rates_that_rise_and_fall_give_no_sign(name, count):
    rates = column([SCHEDULES[name](k / count) for k in range(count)])
    noise = torch.randn(count, 40, generator=torch.Generator().manual_seed(count), dtype=torch.float64)
    assert signs(rates * 1e-3) == []
    assert signs(rates[:, None] * 1e-3 * (0.05 * noise).exp()) == []


@pytest.mark.parametrize("noise", [0.1, 0.3, 0.6])
def test_among_a_hundred_layers_noise_gives_few_signs(noise):
    generator = torch.Generator().manual_seed(0)
    own = torch.randn(300, 100, generator=generator, dtype=torch.float64)
    common = torch.randn(300, 1, generator=generator, dtype=torch.float64)
    assert len({sign[0] for sign in signs((noise * (own + common)).exp())}) <= 3


def test_ratios_may_be_extreme():
    assert signs([1.0] * 10 + [math.inf]) == [(10, "layer 0", math.inf, 1.0)]
    assert signs([0.0] * 30) == signs([math.inf] * 30) == signs([math.nan] * 30) == []
    assert signs(torch.zeros(30, 0)) == signs([]) == []


def train(rate):
    """300 steps with the learning rate that ``rate`` returns for each."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = Modular(net, AdamW())
    recorder = Recorder(optimizer, ratios_every=5)
    for step in range(300):
        optimizer.param_groups[0]["lr"] = 3e-3 * rate(step)
        data = torch.randn(32, 4)
        optimizer.zero_grad()
        (net(data)[:, 0] - data.sum(dim=1)).square().mean().backward()
        optimizer.step()
    return recorder


@pytest.mark.slow
def test_a_training_with_warm_up_and_decay_has_no_sign():
    def rate(step):
        return min(step / 60, 1) * (0.5 + 0.5 * math.cos(math.pi * max(step - 60, 0) / 240))

    assert train(rate).early_signs() == []


@pytest.mark.slow
def test_an_update_that_is_too_large_is_among_the_spikes_although_the_norm_is_usual():
    recorder = train(lambda step: 30.0 if step == 200 else 1.0)
    found = recorder.early_signs()
    assert {sign.step for sign in found} == {200}
    assert all(sign.ratio > 2 and sign.number == "update_ratio" for sign in found)
    assert 200 in recorder.spikes()
    assert 200 not in recorder.record().norm_spikes()


def test_signs_of_a_record_have_the_names_of_its_layers():
    ratios = [Ratios(10 * k, column([2.0, 0.0]), column([0.5 if k == 9 else 0.01, 1.0])) for k in range(10)]
    record = made([1.0] * 100, ("weight", "bias"), ratios=ratios)
    assert record.early_signs() == [(90, "weight", "update_ratio", 0.25, pytest.approx(0.005), pytest.approx(50))]
    assert record.spikes() == [90]
    assert made([1.0] * 100).early_signs() == []
