"""A checkpoint in which the part of the transforms is damaged: a readable error, and an unchanged optimizer."""

import copy

import pytest
import torch
from contract.training import assert_equal, assert_same_checkpoint, gradients, parameters, train, values

from torchzero_clip import AutoClip, ClipNorm, ClipNormByEMA, SkipStep, ZClip, before_step

VALUES = [None, 3, -1.5, "text", {}, {"step": 1}, [], [1], torch.zeros(7), torch.tensor(torch.nan), b"x", object]
CHAIN = [SkipStep(max_ratio=1e3), ZClip(warmup_steps=2), ClipNormByEMA(0.5), AutoClip(50.0, window=3)]
CHAIN += [ClipNorm(lambda step: 1.0 + step)]


def made(fused):
    params = parameters()
    return params, torch.optim.AdamW(params, fused=fused)


def places(value, path=()):
    """All places inside of the dicts of a value, and the value itself."""
    yield path
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from places(inner, (*path, key))


def damaged(saved, where, path, value):
    """A copy with another value at a place; ``...`` removes it."""
    found = copy.deepcopy(saved)
    owner = found[where][0]
    *outer, last = ("before_step", *path)
    for key in outer:
        owner = owner[key]
    if value is ...:
        del owner[last]
    else:
        owner[last] = value
    return found


@pytest.mark.quick_cases(1)
@pytest.mark.filterwarnings("ignore:.* in the checkpoint and .* in the constructor")
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("where", ["param_groups", "state"])
def test_the_error_of_a_damaged_checkpoint_has_words_and_changes_nothing(where, fused):
    params, optimizer = made(fused)
    handle = before_step(optimizer, *CHAIN)
    train(optimizer, params, gradients(params, 4))
    saved = copy.deepcopy(optimizer.state_dict())
    before, weights, settings = copy.deepcopy(saved), values(params), dict(handle.param_groups[0])
    refused = 0
    for path in places(saved[where][0]["before_step"]):
        for value in (..., *VALUES):
            late = refused % 2  # the load comes before the call
            if late:
                _, other = made(fused)
            try:
                if late:
                    other.load_state_dict(damaged(saved, where, path, value))
                    before_step(other, *CHAIN)
                else:
                    optimizer.load_state_dict(damaged(saved, where, path, value))
            except (ValueError, TypeError) as error:
                refused += 1
                text = str(error)
                assert len(text) > 25, (path, value, text)
                assert not text.startswith("the checkpoint does not fit: '"), (path, value, text)  # a KeyError's
                if late:
                    assert not other._optimizer_step_pre_hooks
                    continue
                assert_same_checkpoint(optimizer.state_dict(), before)
                assert handle.param_groups[0] == settings
            else:
                if not late:
                    optimizer.load_state_dict(copy.deepcopy(saved))
                    settings = dict(handle.param_groups[0])
            assert_equal(params, weights)
    assert refused > 60
