"""A load forgets what the checkpoint lacks: a used optimizer is then as an unused one that loads the same."""

import copy

import pytest
import torch
from contract.entries import ENTRIES
from contract.training import assert_equal, assert_same_checkpoint, gradients, parameters, train, values

from torchzero_clip import LR, ClipNormByEMA, Modular, Recorder, SkipStep, before_step
from torchzero_clip.core.chain import flatten
from torchzero_clip.core.kinds import UpdateRule

pytestmark = pytest.mark.filterwarnings("ignore:a max_norm of 0")


def as_chain(entry, params):
    return Modular(params, entry.make(), nonfinite="skip")


def in_front(entry, params):
    transforms = [t for t in flatten([entry.make()]) if not isinstance(t, UpdateRule | LR)]
    optimizer = torch.optim.SGD(params, 0.01, momentum=0.9)
    try:
        before_step(optimizer, *transforms, nonfinite="skip")
    except (TypeError, ValueError) as error:
        pytest.skip(f"before_step refuses this chain: {error}")
    return optimizer


@pytest.mark.quick_cases(10)
@pytest.mark.parametrize("steps", [0, 2], ids=["before the first step", "after two steps"])
@pytest.mark.parametrize("make", [as_chain, in_front])
@pytest.mark.parametrize("entry", ENTRIES, ids=str)
def test_a_used_optimizer_is_as_an_unused_one_after_a_load(entry, make, steps):
    params = parameters(torch.float32, [(4, 3), (3, 5)])
    source = make(entry, params)
    rows = gradients(params, 9)
    bad = [torch.full_like(grad, torch.nan) for grad in rows[0]]  # a step that is skipped and counted
    train(source, params, rows[:steps])
    saved = copy.deepcopy(source.state_dict())
    used, unused = parameters(torch.float32, [(4, 3), (3, 5)]), parameters(torch.float32, [(4, 3), (3, 5)])
    first, second = make(entry, used), make(entry, unused)
    train(first, used, [*rows[2:5], bad])
    for optimizer in (first, second):
        optimizer.load_state_dict(copy.deepcopy(saved))
    assert_same_checkpoint(first.state_dict(), saved)
    assert_same_checkpoint(second.state_dict(), saved)
    with torch.no_grad():
        for own, other in zip(used, unused, strict=True):
            own.copy_(other)
    train(first, used, rows[5:])
    train(second, unused, rows[5:])
    assert_equal(used, values(unused))
    assert_same_checkpoint(first.state_dict(), second.state_dict())


@pytest.mark.parametrize("steps", [0, 3])
def test_a_recorder_forgets_steps(steps):
    def made():
        params = parameters()
        optimizer = torch.optim.SGD(params, 0.01)
        before_step(optimizer, SkipStep(max_ratio=1e3), ClipNormByEMA())
        return params, optimizer, Recorder(optimizer)

    params, optimizer, recorder = made()
    rows = gradients(params, 9)
    train(optimizer, params, rows[:steps])
    saved = copy.deepcopy(recorder.state_dict())
    train(optimizer, params, rows[3:6])
    recorder.load_state_dict(saved)
    others, second, other = made()
    other.load_state_dict(copy.deepcopy(saved))
    for record in (recorder.record(), other.record()):
        assert len(record.norm) == steps
    train(optimizer, params, rows[6:])
    train(second, others, rows[6:])
    assert torch.equal(recorder.record().norm, other.record().norm)
