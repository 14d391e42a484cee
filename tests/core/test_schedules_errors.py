"""A setting that is a function with another signature raises with the name of the setting, at every place."""

import inspect

import pytest
import torch
from torch import nn

import torchzero_clip
from torchzero_clip import AdamW, ClipNorm, Modular, SkipStep, Transform, Wrap, before_step

NEEDED = {"value": 1.0, "max_norm": 1.0, "limit": 1.0, "lr": 0.1, "weight_decay": 0.1}


def concrete():
    """The transforms that a user makes."""
    exported = {name: getattr(torchzero_clip, name) for name in torchzero_clip.__all__}
    kinds = [kind for kind in exported.values() if inspect.isclass(kind) and issubclass(kind, Transform)]
    return [
        kind for kind in kinds if not inspect.isabstract(kind) and kind.__name__ not in ("Chain", "Wrap", "Elementwise")
    ]


def settings():
    """Every setting of every transform, by the argument of its constructor, also learning rates."""
    for kind in concrete():
        arguments = inspect.signature(kind).parameters
        given = {name: NEEDED[name] for name, p in arguments.items() if p.default is p.empty and name in NEEDED}
        given = {"max_norm": 1.0} if kind is SkipStep else given
        made = kind(**given)
        nodes = list(getattr(made, "transforms", {}).values()) or [made]
        keys = {key for transform in nodes for key in transform.defaults}
        for key in arguments:
            if key in keys or key == "lr":
                yield pytest.param(kind, given, key, id=f"{kind.__name__}-{key}")


each_setting = pytest.mark.parametrize(("kind", "given", "key"), list(settings()))


def wrong():
    return 1.0


@each_setting
@pytest.mark.parametrize("schedule", [wrong, lambda step, more: 1.0], ids=["none", "two"])
def test_every_setting_of_every_transform(kind, given, key, schedule):
    with pytest.raises(TypeError, match=f"^{key} is a function that cannot be called with one argument"):
        kind(**{**given, key: schedule})


def fails(step):
    raise KeyError("of the user")


@each_setting
def test_an_error_in_the_function_names_the_setting_too(kind, given, key):
    with pytest.raises(KeyError) as error:
        kind(**{**given, key: fails})
    assert f"in the schedule of {key}, " in error.value.__notes__[0]


PLACES = {
    "a group": lambda p: Modular([{"params": [p], "max_norm": wrong}], ClipNorm(1), AdamW()),
    "a rate": lambda p: Modular([{"params": [p], "max_norm": wrong, "lr": 1.0}], ClipNorm(1), AdamW()),
    "a later group": lambda p: Modular([nn.Parameter(torch.ones(1))], ClipNorm(1)).add_param_group(
        {"params": [p], "max_norm": wrong}
    ),
    "set_param_groups": lambda p: ClipNorm(1).set_param_groups([{"params": [p], "max_norm": wrong}]),
    "a class": lambda p: Modular.of(ClipNorm(1), AdamW())([p], max_norm=wrong),
    "before_step": lambda p: before_step(torch.optim.SGD([p]), ClipNorm(wrong)),
}


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
def test_every_place_where_a_setting_is_given(place):
    with pytest.raises(TypeError, match="max_norm is a function that cannot be called with one argument"):
        place(nn.Parameter(torch.ones(1)))


def test_an_optimizer_in_a_wrap():
    with pytest.raises(TypeError, match="lr is a function that cannot be called with one argument"):
        Wrap(torch.optim.Adam, lr=wrong)
