"""Steps that are skipped because the norm or the loss is far above the last ones."""

import math

import numpy
import pytest
import torch
from torch import nn

from torchzero_clip import SGD, Modular, SkipStep

USUAL = [1.0, 1.1, 0.9, 1.05, 0.95, 1.0, 1.1, 0.9]


def optimizer_for(**settings):
    param = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    return param, Modular([param], SkipStep(**{"sigma": 4.0, "window": 8, **settings}), SGD(1e-3))


def skips(values, *, losses=None, **settings):
    """The indices of the steps that were skipped."""
    param, optimizer = optimizer_for(**settings)
    skipped = []
    for t, value in enumerate(values):
        before = optimizer.metrics()["skipped_steps"].item()
        param.grad = torch.tensor([value], dtype=torch.float64)
        if losses is not None and losses[t] is not None:
            optimizer.report_loss(losses[t])
        optimizer.step()
        if optimizer.metrics()["skipped_steps"].item() > before:
            skipped.append(t)
    return skipped


def by_hand(values, sigma, window):
    """The rule in a loop of its own, for finite values."""
    stored, skipped, skips = [], [], []
    for t, value in enumerate(values):
        large = False
        if len(stored) >= max(2, window // 2 - 1):
            window_of_values = torch.tensor(stored[-window:], dtype=torch.float64)
            deviation = max(window_of_values.std().item(), window_of_values.mean().item() / 1000)
            large = value > window_of_values.mean().item() + sigma * deviation
        if large:
            skips.append(t)
            skipped.append(value)
            if len(skipped) >= max(3, window // 8):
                stored, skipped = skipped, []
        else:
            stored, skipped = [*stored, value][-window:], []
    return skips


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(("sigma", "window"), [(2.0, 4), (2.5, 9), (3.0, 32)])
def test_it_is_the_rule(seed, sigma, window):
    generator = torch.Generator().manual_seed(seed)
    values = torch.rand(120, generator=generator, dtype=torch.float64) + 0.5
    values[torch.randint(0, 120, (8,), generator=generator)] *= 20
    values[60:] *= 3
    skipped = skips(values.tolist(), sigma=sigma, window=window)
    assert skipped == by_hand(values.tolist(), sigma, window)
    assert skipped


def test_a_second_spike_is_skipped_too():
    """In the reference, the first one widens the window."""
    assert skips([*USUAL, 9.0, 1.0, 9.0, 1.0]) == [8, 10]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_value_that_is_not_finite_is_skipped_and_forgotten(bad):
    """In the reference, one NaN loss skips 129 steps."""
    assert skips([*USUAL, bad, 1.0, 9.0, 1.0]) == [8, 10]
    losses = [*USUAL, bad, 1.0, 9.0, 1.0]
    assert skips([1.0] * 12, losses=losses) == [8, 10]


def test_a_lasting_change_is_followed():
    assert skips([*USUAL, *[1.6 * x for x in USUAL * 3]], window=8) == [8, 9, 10]
    assert skips([1.0] * 32, losses=[*USUAL, *[3 + x for x in USUAL * 3]], window=8) == [8, 9, 10]


def test_constant_norms_are_not_judged_by_rounding():
    assert skips([1.0] * 10 + [1.003] + [1.0, 1.01]) == [12]


def test_zeros_before_the_first_gradient_are_not_stored():
    assert skips([0.0] * 19 + USUAL) == []


def test_it_stands_beside_the_other_limits():
    assert skips([*USUAL, 2.0, 1.0], max_norm=1.5, sigma=100.0) == [8]
    assert skips([*USUAL, 2.0, 1.0], max_ratio=1.5, sigma=100.0) == [8]


def test_the_loss_of_a_closure_counts():
    param, optimizer = optimizer_for()
    for loss in [*USUAL, 9.0]:
        param.grad = torch.ones(1, dtype=torch.float64)
        assert optimizer.step(lambda loss=loss: torch.tensor(loss)).item() == pytest.approx(loss)
    assert optimizer.metrics()["skipped_steps"] == 1


def test_the_loss_of_a_step_is_the_mean_of_its_reports():
    param, optimizer = optimizer_for()
    for loss in [*USUAL, 9.0]:
        optimizer.zero_grad()
        for part in (0.5 * loss, torch.tensor([1.5 * loss], requires_grad=True)):
            optimizer.report_loss(part)
        param.grad = torch.ones(1, dtype=torch.float64)
        optimizer.step()
    assert optimizer.metrics()["skipped_steps"] == 1
    state = optimizer.state_dict()["param_groups"][0]
    assert state["skip_step/losses"][:8].tolist() == pytest.approx(USUAL)


def test_the_loss_of_a_step_that_was_never_taken_leaves_nothing():
    """A gradient scaler does not call step() after an overflow."""
    param, optimizer = optimizer_for()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for t, loss in enumerate([*USUAL, 1.0, 1.0]):
        optimizer.zero_grad()
        overflow = t in (3, 8)
        optimizer.report_loss(math.inf if overflow else loss)
        scaler.scale((param * (math.inf if overflow else 1.0)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    assert optimizer.metrics()["skipped_steps"] == 0
    assert optimizer.state_dict()["param_groups"][0]["skip_step/losses_stored"] == 8


def test_a_report_is_forgotten_by_every_step():
    param, optimizer = optimizer_for(max_norm=5.0)
    for gradient in (1.0, 100.0):  # taken, and skipped
        optimizer.report_loss(math.inf if gradient == 100.0 else 1.0)
        param.grad = torch.full((1,), gradient, dtype=torch.float64)
        optimizer.step()
        param.grad = torch.ones(1, dtype=torch.float64)
        optimizer.step()
    assert optimizer.metrics()["skipped_steps"] == 1
    optimizer.report_loss(math.inf)
    with pytest.raises(ZeroDivisionError):
        optimizer.step(lambda: 1 / 0)
    optimizer.step()
    assert optimizer.metrics()["skipped_steps"] == 1


def test_a_report_without_anybody_who_asks_has_no_effect():
    param = nn.Parameter(torch.zeros(1))
    optimizer = Modular([param], SGD(1.0))
    optimizer.report_loss(math.nan)
    param.grad = torch.ones(1)
    optimizer.step()
    assert param.item() == -1


@pytest.mark.parametrize("loss", ["1", None, True, (1.0, 2.0), {"loss": 1.0}, torch.ones(2)], ids=str)
def test_losses_that_are_not_numbers_are_refused(loss):
    param, optimizer = optimizer_for()
    param.grad = torch.ones(1, dtype=torch.float64)
    shape = r", got a tensor of shape \(2,\)" if isinstance(loss, torch.Tensor) else ""
    with pytest.raises(ValueError if shape else TypeError, match=f"loss must be a number or a 0-d tensor{shape}"):
        optimizer.report_loss(loss)
    if loss is not None:  # which a closure may return
        with pytest.raises(ValueError if shape else TypeError, match="loss must be a number"):
            optimizer.step(lambda: loss)
    optimizer.report_loss(numpy.float32(1.0))
    optimizer.step()


def test_sigma_cannot_come_later():
    param = nn.Parameter(torch.zeros(1))
    optimizer = Modular([param], SkipStep(1.0), SGD())
    optimizer.param_groups[0]["skip_step/sigma"] = 3.0
    param.grad = torch.ones(1)
    with pytest.raises(ValueError, match="sigma cannot be set later"):
        optimizer.step()
