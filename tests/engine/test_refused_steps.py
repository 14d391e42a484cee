"""What a run says of refused steps: warnings of many in a row, and metrics that are not those of an earlier step."""

import math
import random
import warnings

import pytest
import torch
from contract.entries import ENTRIES
from contract.training import gradients, parameters, set_grads, through_file
from torch import nn

from torchzero_clip import SGD, AdamW, ClipNorm, Gate, Modular, Recorder, SkipStep, ZClip, before_step

COUNTS = {"skipped_steps"}


def modular(params, *chain, **options):
    optimizer = Modular(params, *chain, SGD(0.1), **options)
    return optimizer, optimizer


def readable(params, *chain, **options):
    return modular(params, *chain, fast=False, **options)


def before(params, *chain, **options):
    optimizer = torch.optim.SGD(params, 0.1)
    return optimizer, before_step(optimizer, *chain, **options)


each_host = pytest.mark.parametrize("host", [modular, readable, before])


def step(optimizer, params, gradient):
    """Take one step, and return the texts of its warnings."""
    for param in params:
        param.grad = torch.full_like(param, gradient)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer.step()
    return [str(warning.message) for warning in caught]


@each_host
def test_a_lasting_change_warns_at_20_refused_steps_and_at_every_doubling(host):
    params = parameters(shapes=[(1,)])
    optimizer, handle = host(params, SkipStep(max_ratio=10.0), ClipNorm(1, dim="global"))
    for _ in range(3):
        assert step(optimizer, params, 2.0) == []
    said = {k: texts for k in range(1, 171) if (texts := step(optimizer, params, 300.0))}
    assert list(said) == [20, 40, 80, 160]
    for k, (text,) in said.items():
        assert text.startswith(f"{k} steps in a row were skipped. 'skip_step' refused the last one: ")
        assert "the norm of the gradients was 300, and its limit is 20" in text
    assert handle.metrics()["skipped_steps"].item() == 170


@each_host
def test_a_gradient_that_is_not_finite_in_every_step_is_named(host):
    params = parameters(shapes=[(2,), (1,)])
    named = [("body", params[0]), ("head", params[1])]
    optimizer, _ = host(named, ClipNorm(1), nonfinite="skip")
    texts = [text for _ in range(45) for text in step(optimizer, params, math.nan)]
    assert [text.partition(" ")[0] for text in texts] == ["20", "40"]
    for text in texts:
        assert "nonfinite='skip' refused the last one: these gradients were not finite: body, head" in text


@each_host
def test_with_a_largest_number_of_skips_there_is_an_error_instead(host):
    params = parameters(shapes=[(1,)])
    optimizer, _ = host(params, SkipStep(max_norm=1.0), max_consecutive_skips=25)
    assert [step(optimizer, params, 9.0) for _ in range(25)] == [[]] * 25
    with pytest.raises(RuntimeError, match="26 steps in a row"):
        step(optimizer, params, 9.0)


@each_host
def test_a_step_that_is_taken_begins_a_new_row(host):
    params = parameters(shapes=[(1,)])
    optimizer, _ = host(params, SkipStep(max_norm=1.0))
    for gradient in [9.0] * 19 + [1.0] + [9.0] * 19:
        assert step(optimizer, params, gradient) == []
    assert len(step(optimizer, params, 9.0)) == 1


@each_host
def test_the_row_goes_on_after_a_resume(host):
    params = parameters(shapes=[(1,)])
    optimizer, _ = host(params, SkipStep(max_norm=1.0))
    assert [step(optimizer, params, 9.0) for _ in range(19)] == [[]] * 19
    resumed, _ = host(params, SkipStep(max_norm=1.0))
    resumed.load_state_dict(through_file(optimizer.state_dict()))
    (text,) = step(resumed, params, 9.0)
    assert text.startswith("20 steps in a row")


def test_a_window_says_which_value_was_too_large_and_its_limit():
    params = parameters(shapes=[(1,)])
    optimizer = Modular(params, SkipStep(sigma=2.0, window=256))
    for _ in range(128):
        optimizer.report_loss(1.0)
        assert step(optimizer, params, 2.0) == []
    texts = []
    for _ in range(20):
        optimizer.report_loss(5.0)
        texts += step(optimizer, params, 2.0)
    # a standard deviation counts as at least a thousandth of the mean
    assert len(texts) == 1
    assert "'skip_step' refused the last one: the loss was 5, and its limit is 1.002. " in texts[0]
    assert "norm" not in texts[0].partition(". If")[0]


def test_a_loss_that_is_not_finite():
    params = parameters(shapes=[(1,)])
    optimizer = Modular(params, SkipStep(sigma=2.0, window=4))
    texts = []
    for _ in range(20):
        optimizer.report_loss(math.nan)
        texts += step(optimizer, params, 2.0)
    assert len(texts) == 1
    assert "'skip_step' refused the last one: the loss was nan. " in texts[0]


class Never(Gate):
    """An author's gate, which does not say why."""

    def __init__(self):
        super().__init__({})

    def refuses(self, norm, step):
        return norm > -1

    def accept(self, norm, step):
        pass


@each_host
def test_a_gate_of_an_author_is_named_with_the_norm(host):
    params = parameters(shapes=[(1,)])
    optimizer, _ = host(params, Never(), SkipStep(max_norm=2.0))
    texts = [text for _ in range(20) for text in step(optimizer, params, 3.0)]
    assert len(texts) == 1
    assert "'never' refused the last one: the norm of the gradients was 3; 'skip_step' refused it too: " in texts[0]
    assert "the norm of the gradients was 3, and its limit is 2. " in texts[0]


def test_a_scaler_that_skips_every_step_of_a_fused_optimizer():
    param = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([param], 0.1, fused=True)
    handle = before_step(optimizer, ClipNorm(1))
    assert step(optimizer, [param], 2.0) == []
    assert handle.metrics()["clip_norm/norm"].item() == 2
    optimizer.found_inf, optimizer.grad_scale = torch.ones(()), torch.ones(())
    texts = [text for _ in range(45) for text in step(optimizer, [param], math.inf)]
    assert [text.partition(" ")[0] for text in texts] == ["20", "40"]
    assert "'found_inf' refused the last one: the gradient scaler has found gradients that are not finite" in texts[0]
    assert handle.metrics() == {}
    optimizer.found_inf, optimizer.grad_scale = torch.zeros(()), torch.ones(())
    assert step(optimizer, [param], 3.0) == []
    assert handle.metrics()["clip_norm/norm"].item() == 3


EVENTS = ("taken", "taken", "taken", "gate", "nonfinite", "no gradients")


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("host", [modular, before])
def test_no_metric_is_that_of_an_earlier_step(host, fast):
    """In random runs. The norm of the gradients is the number of the step, so that an older one is seen."""
    draw = random.Random(0)
    for _ in range(6):
        params = parameters(shapes=[(1,), (1,)])
        gate = SkipStep(max_norm=1000.0)
        optimizer, handle = host(params, gate, ZClip(warmup_steps=2), ClipNorm(2), nonfinite="skip", fast=fast)
        for k in range(1, 60):
            event = draw.choice(EVENTS) if k > 9 else "taken"
            values = {"taken": k, "gate": 1000.0 + k, "nonfinite": math.inf, "no gradients": 0}
            params[0].grad, params[1].grad = torch.full((1,), float(values[event])), torch.zeros(1)
            if event == "no gradients":
                params[0].grad = params[1].grad = None
            optimizer.step()
            metrics = {name: value.item() for name, value in handle.metrics().items() if name not in COUNTS}
            if event == "taken":
                assert metrics["z_clip/norm"] == k
                continue
            assert set(metrics) <= {"skip_step/mean"}
            assert event in ("gate", "nonfinite") or not metrics


@pytest.mark.parametrize("entry", ENTRIES, ids=str)
def test_a_refused_step_of_every_transform_has_no_numbers_of_an_earlier_one(entry):
    params = parameters()
    optimizer = Modular(params, SkipStep(max_norm=1e6, name="gate"), entry.make(), nonfinite="skip")
    gates = {name for name, transform in optimizer.transforms.items() if isinstance(transform, Gate)}
    for bad in (math.nan, 1e9):
        for row in gradients(params, 4):
            set_grads(params, row)
            optimizer.step()
        params[0].grad = torch.full_like(params[0], bad)
        optimizer.step()
        assert optimizer.skipped_by
        names = optimizer.metrics().keys() - COUNTS
        assert {name.rpartition("/")[0] for name in names} <= gates


def test_a_recorder_has_no_numbers_for_a_refused_step():
    params = parameters(shapes=[(1,)])
    optimizer = Modular(params, SkipStep(max_norm=10.0), ClipNorm(1), AdamW())
    recorder = Recorder(optimizer)
    for gradient in [2.0] * 8 + [20.0] + [3.0]:
        step(optimizer, params, gradient)
    record = recorder.record()
    norms = record.metrics["clip_norm/norm"].tolist()
    assert norms[:8] + norms[9:] == [2.0] * 8 + [3.0]
    assert math.isnan(norms[8])
    assert record.reasons[8] == "skip_step"
    assert record.norm.tolist()[8] == 20


@pytest.mark.parametrize("gradient", [math.nan, 20.0])
def test_a_skip_too_many_has_no_numbers_of_an_earlier_step_and_another_error_changes_nothing(gradient):
    params = parameters(shapes=[(1,)])
    if math.isnan(gradient):
        optimizer = Modular(params, ClipNorm(1), AdamW(), nonfinite="raise")
    else:
        optimizer = Modular(params, SkipStep(max_norm=10.0), ClipNorm(1), AdamW(), max_consecutive_skips=0)
    for _ in range(6):
        step(optimizer, params, 2.0)
    before = optimizer.metrics()
    with pytest.raises(RuntimeError, match=r"not finite|steps in a row"):
        step(optimizer, params, gradient)
    if math.isnan(gradient):  # an error of the gradients changes nothing, and a skip is counted
        assert optimizer.metrics() == before
    else:
        assert optimizer.metrics().keys() <= COUNTS


@each_host
@pytest.mark.parametrize("gate", [SkipStep(max_ratio=3.0), SkipStep(sigma=6.0), SkipStep(max_norm=1.0)], ids=repr)
@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_a_norm_that_is_not_finite_is_a_reason_before_there_is_a_limit(host, gate, value):
    params = parameters(shapes=[(1,)])
    optimizer, _ = host(params, gate)
    texts = [text for _ in range(20) for text in step(optimizer, params, value)]
    assert f"'skip_step' refused the last one: the norm of the gradients was {value}" in texts[-1]
