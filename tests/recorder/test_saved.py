"""A state of a recorder that is not one raises with the key that is wrong, and changes nothing.

Every place of a good state is changed in every way that its kind allows.
"""

import copy
import re

import pytest
import torch
from contract.training import assert_same_checkpoint, gradients, parameters, set_grads

from torchzero_clip import AdamW, ClipNorm, ClipNormGrowth, Modular, Recorder, SkipStep

OPTIONAL = {("run",), ("joint",)}
WRONG = {
    "int": [None, "x", 1.5, True, -1, [], {}, torch.zeros(2)],
    "str": [None, 3, [], {}, b"x"],
    "float": [None, "x", [], {}],
    "list": [None, "x", 3, {}, torch.zeros(2)],
    "dict": [None, "x", 3, [], torch.zeros(2)],
    "Tensor": [None, "x", 3, [], {}, torch.zeros(()), torch.zeros(1, 1, 1), torch.zeros(0)],
}


def made():
    params = parameters()
    optimizer = Modular(params, SkipStep(max_norm=1e9), ClipNorm(1, dim="global"), ClipNormGrowth(), AdamW())
    recorder = Recorder(optimizer, ratios_every=2, keep=20)
    for row in gradients(params, 5):
        set_grads(params, row)
        optimizer.step()
    return optimizer, recorder


def places(value, path=()):
    """The path of every value in a state, the containers before their content."""
    yield path, value
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else ()
    for key, item in items:
        yield from places(item, (*path, key))


def changed(state, path, change):
    """A copy of a state in which ``change`` has changed the container at the end of a path."""
    state = copy.deepcopy(state)
    *above, last = path
    inner = state
    for key in above:
        if isinstance(inner[key], tuple):
            inner[key] = list(inner[key])
        inner = inner[key]
    change(inner, last)
    return state


def replaced(by):
    def change(container, key):
        container[key] = by

    return change


def without(container, key):
    del container[key]


def longer(container, key):
    container[key] = [*container[key], *container[key][-1:]]


def other_shapes(container, key):
    container[key] = torch.cat([container[key], container[key][-1:]])


def integers(container, key):
    container[key] = container[key].long()


def bad_states(state):
    """Every change of a state, with its path."""
    for path, value in places(state):
        if not path:
            continue
        kind = (
            "dict" if isinstance(value, dict) else "list" if isinstance(value, list | tuple) else type(value).__name__
        )
        # a dict of limits and the list of joint transforms may have any length, and the tape may be None
        for wrong in WRONG[kind]:
            if not (wrong is None and path == ("tape",)):
                yield path, changed(state, path, replaced(wrong))
        is_free = path[0] == "joint" or (len(path) == 4 and path[1] == "limits") or path[:2] == ("tape", "ratios")
        is_in_ratio = path[:2] == ("tape", "ratios") and len(path) != 3
        if path not in OPTIONAL and (is_in_ratio or not is_free):
            yield path, changed(state, path, without)
        if kind == "list" and value and not is_free:
            yield path, changed(state, path, longer)
        if kind == "Tensor":
            yield path, changed(state, path, other_shapes)
            yield path, changed(state, path, integers)


@pytest.mark.slow
def test_every_change_at_every_place():
    _, source = made()
    good = source.state_dict()
    _, recorder = made()
    before, count = recorder.state_dict(), 0
    for path, bad in bad_states(good):
        count += 1
        with pytest.raises(ValueError, match=r"Recorder\.state_dict\(\)|parameters of the record differ") as error:
            recorder.load_state_dict(bad)
        # a list of another length does not fit to the others, and the error may name one of them
        names = [re.escape(key) for key in path if isinstance(key, str)]
        assert re.search(rf"\b({'|'.join(names)})\b", str(error.value)), (path, str(error.value))
        assert_same_checkpoint(recorder.state_dict(), before)
    assert count > 350
    recorder.load_state_dict(good)
    assert_same_checkpoint(recorder.state_dict(), good)


@pytest.mark.parametrize("bad", [None, 3, "x", [], {}, {"step": 3}, {"tape": None}, torch.zeros(3)], ids=repr)
def test_something_else(bad):
    _, recorder = made()
    before = recorder.state_dict()
    with pytest.raises(ValueError, match=r"must come from Recorder\.state_dict\(\), with the keys 'step' and 'tape'"):
        recorder.load_state_dict(bad)
    assert_same_checkpoint(recorder.state_dict(), before)
