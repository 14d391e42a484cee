"""One warning if many steps in a row have no gradients, or only gradients of 0."""

import copy
import pickle
import random
import warnings

import pytest
import torch
from contract.training import parameters
from torch import nn

from torchzero_clip import (
    SGD,
    AdamW,
    ClipNorm,
    ClipNormByEMA,
    ClipValue,
    ClipValueByEMA,
    Modular,
    Recorder,
    SkipStep,
    ZClip,
    before_step,
    step_in_backward,
)


def modular(params, *chain, **options):
    return Modular(params, *chain, AdamW(), **options)


def readable(params, *chain, **options):
    return modular(params, *chain, fast=False, **options)


def before(params, *chain, **options):
    optimizer = torch.optim.AdamW(params)
    before_step(optimizer, *chain, **options)
    return optimizer


each_host = pytest.mark.parametrize("host", [modular, readable, before])
CHAINS = {
    "joint": lambda: [ClipNorm(1, dim="global")],
    "each": lambda: [ClipNorm(1)],
    "linf": lambda: [ClipNorm(1, "linf")],
    "statistic": lambda: [ClipNormByEMA()],
    "joint statistic": lambda: [ZClip()],
    "elements": lambda: [ClipValueByEMA()],
    "gate": lambda: [SkipStep(max_ratio=10.0), ClipValue(1)],
}
each_chain = pytest.mark.parametrize("chain", CHAINS.values(), ids=CHAINS)
NONE, ZERO = "no parameter had a gradient in the last 20 steps", "all gradients were 0 in the last 20 steps"


def step(optimizer, params, gradient):
    """Take one step, and return the texts of its warnings."""
    for param in params:
        param.grad = None if gradient is None else torch.full_like(param, gradient)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer.step()
    return [str(warning.message) for warning in caught]


@each_host
@each_chain
def test_no_gradients_for_20_steps_give_one_warning(host, chain):
    params = parameters(shapes=[(2,), (1,)])
    optimizer = host(params, *chain())
    said = {k: texts for k in range(1, 60) if (texts := step(optimizer, params, None))}
    assert list(said) == [20]
    assert said[20][0].startswith(NONE)


@each_host
@each_chain
def test_gradients_of_zero_for_20_steps_give_one_warning(host, chain):
    params = parameters(shapes=[(2,), (1,)])
    optimizer = host(params, *chain())
    said = {k: texts for k in range(1, 60) if (texts := step(optimizer, params, 0.0))}
    assert list(said) == [20]
    assert said[20][0].startswith(ZERO)


@each_host
@pytest.mark.parametrize("count", [1, 7, 30])
@each_chain
def test_gradients_that_become_zero_later(host, chain, count):
    params = parameters(shapes=[(2,), (1,)])
    optimizer = host(params, *chain())
    assert [step(optimizer, params, 1.0) for _ in range(count)] == [[]] * count
    said = {k: texts for k in range(1, 60) if (texts := step(optimizer, params, 0.0))}
    ((k, (text,)),) = said.items()
    assert text.startswith(ZERO)
    assert 20 <= k <= 52  # planned steps do not look at the norms of each tensor in every step


@each_host
@pytest.mark.parametrize("options", [{}, {"nonfinite": "skip"}], ids=str)
@each_chain
def test_zeros_that_a_decision_has_seen_count_at_once(host, chain, options):
    params = parameters(shapes=[(2,), (1,)])
    optimizer = host(params, *([] if options else [SkipStep(max_ratio=10.0)]), *chain(), **options)
    assert [step(optimizer, params, 1.0) for _ in range(40)] == [[]] * 40
    said = {k: texts for k in range(1, 60) if (texts := step(optimizer, params, 0.0))}
    assert list(said) == [20]


@pytest.mark.slow
@pytest.mark.parametrize("host", [modular, readable])
@pytest.mark.parametrize("options", [{}, {"nonfinite": "skip"}], ids=str)
def test_random_runs_of_a_joint_clip(host, options):
    draw = random.Random(0)
    warned = 0
    for _ in range(40):  # the oracle counts the events
        params = parameters(shapes=[(2,), (1,)])
        optimizer = host(params, ClipNorm(1, dim="global"), **options)
        row, last, expected, said = 0, 1.0, [], []
        for k in range(70):
            event = draw.choice([None, 0.0, 1.0, 1e-30]) if draw.random() < 0.05 or row == 0 else last
            row, last = (row + 1 if event == last else 1), event
            said += [k] * len(step(optimizer, params, event))
            if row == 20 and event in (None, 0.0) and not expected:
                expected = [k]
        assert said == expected
        warned += len(said)
    assert 5 < warned < 35


@each_host
def test_a_step_with_gradients_or_a_refused_one_begins_a_new_row(host):
    params = parameters(shapes=[(2,)])
    optimizer = host(params, SkipStep(max_norm=10.0), ClipNorm(1))
    for gradient in [None] * 19 + [1.0] + [0.0] * 19 + [99.0] + [0.0] * 19 + [None] * 19:
        assert step(optimizer, params, gradient) == []
    assert len(step(optimizer, params, None)) == 1


@each_host
def test_no_warning_where_all_parameters_are_frozen(host):
    params = parameters(shapes=[(2,)])
    optimizer = host(params, ClipNorm(1))
    params[0].requires_grad_(False)
    assert [step(optimizer, params, None) for _ in range(60)] == [[]] * 60
    params[0].requires_grad_(True)
    assert sum(len(step(optimizer, params, None)) for _ in range(60)) == 1


@pytest.mark.parametrize("chain", [list, lambda: [ClipNorm(1).only("head")], lambda: [ClipNorm(1, "sum")]])
def test_no_warning_where_no_norm_of_all_gradients_is_measured(chain):
    """The warning needs a norm that is measured anyway, and that is 0 only if all gradients are."""
    params = parameters(shapes=[(2,), (1,)])
    optimizer = Modular(list(zip(["body", "head"], params, strict=True)), *chain(), SGD())
    for _ in range(40):
        params[0].grad, params[1].grad = torch.tensor([1.0, -1.0]), torch.zeros(1)
        optimizer.step()  # a warning would be an error
    assert optimizer.steps_taken == 40


def test_the_norm_of_later_transforms_says_nothing_about_the_gradients():
    params = parameters(shapes=[(2,)])
    optimizer = Modular(params, ClipValue(0.0), ClipNorm(1.0), SGD())
    assert [step(optimizer, params, 1.0) for _ in range(40)] == [[]] * 40


def test_a_recorder_beside_the_chain():
    params = parameters(shapes=[(2,)])
    optimizer = Modular(params, ClipNorm(1, dim="global"), AdamW())
    recorder = Recorder(optimizer)
    said = [k for k in range(1, 60) if step(optimizer, params, 0.0)]
    assert said == [20]
    recorder.close()


def test_a_step_in_the_backward_whose_backward_is_missing():
    model = nn.Linear(2, 1)
    optimizer = Modular(model, ClipNorm(1), AdamW())
    step_in_backward(optimizer)
    for _ in range(30):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    assert [k for k in range(1, 60) if step(optimizer, list(model.parameters()), None)] == [20]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda optimizer: pickle.loads(pickle.dumps(optimizer))])
def test_copies_warn_too(copied):
    params = parameters(shapes=[(2,)])
    optimizer = copied(Modular(params, ClipNorm(1), AdamW()))
    assert [k for k in range(1, 60) if step(optimizer, optimizer.param_groups[0]["params"], None)] == [20]
