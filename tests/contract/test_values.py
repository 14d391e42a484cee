"""A transform is a value: `only`, `without` and `set_param_groups` return a new one and leave the old one as it was."""

import copy
import pickle

import pytest
from contract.entries import ENTRIES
from contract.training import assert_equal, gradients, parameters, train

from torchzero_clip import LR, Modular
from torchzero_clip.core.chain import Chain, Composite, as_written

NAMES = ["a.weight", "a.bias", "b.weight", "b.bias"]
HALVES = {"a": 0.5, "b": 0.25}


def limited(transform, half, params):
    return transform.only(half)


def excluded(transform, half, params):
    return transform.without(half)


def set_apart(transform, half, params):
    """With another value of the first setting that may have it."""
    defaults = Chain(transform).nodes().defaults()
    for key, value in defaults.items():
        if isinstance(value, int | float) and not isinstance(value, bool):
            try:
                return transform.set_param_groups([{"params": params, key: value * HALVES[half]}])
            except (TypeError, ValueError):  # a check that takes other numbers
                continue
    return transform


ALTERATIONS = [limited, excluded, set_apart]


def written(entry):
    return list(as_written([entry.make()]))


def altered(transforms, alter, half, params):
    return [t if isinstance(t, LR) else alter(t, half, params) for t in transforms]


def looks(transform):
    """What can be read off a transform and those inside it."""
    inside = [node.transform for node in transform.nodes()] if isinstance(transform, Composite) else []
    return [
        (
            repr(t),
            t.scope,
            t.structure(),
            t.defaults,
            [{**own, "params": list(map(id, own["params"]))} for own in t.overrides],
        )
        for t in (transform, *inside)
    ]


def run(transforms, params):
    optimizer = Modular(list(zip(NAMES, params, strict=True)), transforms)
    train(optimizer, params, gradients(params, 2))
    return optimizer


@pytest.mark.filterwarnings("ignore:no optimizer acts on")
@pytest.mark.parametrize("alter", ALTERATIONS)
@pytest.mark.parametrize("entry", ENTRIES, ids=str)
def test_two_uses_of_a_transform_are_two_transforms(entry, alter):
    shared = written(entry)
    before = list(map(looks, shared))
    uses = {half: parameters() for half in HALVES}
    chains = {half: altered(shared, alter, half, params) for half, params in uses.items()}
    made = list(map(looks, chains["a"]))
    altered(chains["a"], excluded, "b", [])
    assert list(map(looks, shared)) == before
    assert list(map(looks, chains["a"])) == made
    for half, params in uses.items():
        run(chains[half], params)
        fresh = parameters()
        run(altered(written(entry), alter, half, fresh), fresh)
        assert_equal(params, fresh)
    params, fresh = parameters(), parameters()
    run(shared, params)
    run(written(entry), fresh)
    assert_equal(params, fresh)


@pytest.mark.filterwarnings("ignore:no optimizer acts on")
@pytest.mark.parametrize("entry", ENTRIES, ids=str)
def test_copies_and_pickles_of_a_new_transform_act_as_it_does(entry):
    params = parameters()
    chain = altered(altered(written(entry), set_apart, "a", params), limited, "a", params)
    copied, copied_params = copy.deepcopy((chain, params))
    pickled, pickled_params = pickle.loads(pickle.dumps((chain, params)))
    run(chain, params)
    for again, own in ((copied, copied_params), (pickled, pickled_params)):
        run(again, own)
        assert_equal(own, params)
