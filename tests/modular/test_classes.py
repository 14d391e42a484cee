"""Classes that have their transforms already: `Modular.of`."""

import copy
import functools
import inspect
import pickle
import subprocess
import sys

import cloudpickle
import pytest
import torch
from contract.training import assert_equal, gradients, parameters, set_grads, train
from torch import nn
from versions import needs_compiler, needs_muon

from torchzero_clip import LR, SGD, AdamW, Chain, ClipNorm, ClipNormByEMA, Modular, Muon, SkipStep, Wrap

CHAIN = ClipNorm(0.5, dim="global"), AdamW(weight_decay=0.1)


def halved(step):
    return 0.5**step


def is_matrix(param):
    return param.ndim >= 2


class Doubled(Modular):
    """A class of a user, which takes twice the learning rate."""

    def __init__(self, params, *transforms, **options):
        super().__init__(params, *transforms, **options)
        for group in self.param_groups:
            group["lr"] *= 2


Clipped = Modular.of(*CHAIN)


class Named(Clipped):
    """A subclass with an argument of its own."""

    def __init__(self, params, lr=None, *, label="none", **settings):
        super().__init__(params, lr, **settings)
        self.label = label


CALLS = {
    "nothing": ({}, CHAIN),
    "lr": ({"lr": 0.01}, (CHAIN[0], AdamW(0.01, weight_decay=0.1))),
    "a tensor": ({"lr": torch.tensor(0.01)}, (CHAIN[0], AdamW(torch.tensor(0.01), weight_decay=0.1))),
    "a schedule": ({"lr": halved}, (CHAIN[0], AdamW(halved, weight_decay=0.1))),
    "settings": (
        {"lr": 0.01, "max_norm": 2.0, "betas": [0.8, 0.9], "weight_decay": 0.0},
        (ClipNorm(2.0, dim="global"), AdamW(0.01, betas=(0.8, 0.9), weight_decay=0.0)),
    ),
    "a scheduled setting": ({"max_norm": halved}, (ClipNorm(halved, dim="global"), CHAIN[1])),
}


@pytest.mark.parametrize("name", CALLS)
def test_keywords_are_the_arguments_of_the_transforms(name):
    settings, chain = CALLS[name]
    params, others = parameters(), parameters()
    optimizer, other = Clipped(params, **settings), Modular(others, *chain)
    assert optimizer.defaults == other.defaults
    rows = gradients(params, 4)
    train(optimizer, params, rows)
    train(other, others, rows)
    assert_equal(params, others)
    saved, expected = optimizer.state_dict(), other.state_dict()
    assert saved["param_groups"] == expected["param_groups"]
    twin = Clipped(parameters(), **settings)
    twin.load_state_dict(saved)
    assert twin.state_dict()["param_groups"] == expected["param_groups"]


RATES = {
    "of LR": ((ClipNorm(1), LR(0.5)), (ClipNorm(1), LR(0.01))),
    "of no optimizer": ((ClipNorm(1),), (ClipNorm(1), LR(0.01))),
    "named by the second": ((SGD().only(is_matrix), SGD(0.1).without(is_matrix)),) * 2,
    "in a nested chain": ((Chain(ClipNorm(1), Chain(SGD(0.5))),), (ClipNorm(1), SGD(0.01))),
    "before a clip": ((SGD(0.1), ClipNorm(1)), (SGD(0.01), ClipNorm(1))),
    "a wrapped optimizer": ((Wrap(torch.optim.Adagrad, lr=0.1),), (Wrap(torch.optim.Adagrad, lr=0.01),)),
}


@pytest.mark.parametrize("name", RATES)
def test_lr_is_that_of_the_transform_that_names_it(name):
    chain, expected = RATES[name]
    params, others = parameters(), parameters()
    optimizer, other = Modular.of(*chain)(params, lr=0.01), Modular(others, *expected)
    other.param_groups[0]["lr"] = 0.01
    train(optimizer, params, gradients(params, 3))
    train(other, others, gradients(params, 3))
    assert_equal(params, others)
    assert list(optimizer.transforms) == list(other.transforms)
    assert [group["lr"] for group in optimizer.param_groups] == [0.01]


def test_a_scheduled_setting_becomes_a_number():
    params = parameters()
    optimizer = Modular.of(ClipNorm(halved), SGD(halved))(params, lr=0.1, max_norm=3.0)
    train(optimizer, params, gradients(params, 3))
    assert (optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["max_norm"]) == (0.1, 3.0)
    assert "lr" not in optimizer.runner.schedules


def test_a_group_keeps_its_own_value():
    params = parameters()
    groups = [{"params": params[:1], "lr": 0.5, "clip_norm/max_norm": 4.0}, {"params": params[1:2]}]
    optimizer = Clipped(groups, lr=0.1, max_norm=2.0)
    optimizer.add_param_group({"params": params[2:3]})
    optimizer.add_param_group({"params": params[3:], "max_norm": 6.0})
    assert [(group["lr"], group["max_norm"]) for group in optimizer.param_groups] == [
        (0.5, 4.0),
        (0.1, 2.0),
        (0.1, 2.0),
        (0.1, 6.0),
    ]


def test_settings_under_qualified_names_and_inside_other_transforms():
    chain = Chain(ClipNorm(1), ClipNorm(2), target="update_difference"), ClipNorm(3), SkipStep(max_ratio=9.0), SGD(0.1)
    settings = {"max_norm": 0.1, "chain/clip_norm_2/max_norm": 0.2, "clip_norm/max_norm": 0.3}
    optimizer = Modular.of(*chain)(parameters(), **settings, **{"skip_step/max_ratio": 5.0})
    group = optimizer.param_groups[0]
    assert {key: group[key] for key in settings} == settings
    assert group["skip_step/max_ratio"] == 5.0
    assert optimizer.defaults["clip_norm/max_norm"] == 0.3
    assert chain[1].defaults == {"max_norm": 3}


def test_each_instance_has_its_own_settings():
    first, second = (Clipped(parameters(), lr=lr, max_norm=lr) for lr in (0.1, 0.2))
    third = Clipped(parameters())
    assert [o.defaults["max_norm"] for o in (first, second, third)] == [0.1, 0.2, 0.5]
    assert [o.param_groups[0]["lr"] for o in (first, second, third)] == [0.1, 0.2, 1e-3]


def test_options_are_those_of_modular():
    optimizer = Modular.of(*CHAIN, nonfinite="skip", max_consecutive_skips=3, keep_grads=True)(parameters())
    assert (optimizer.nonfinite, optimizer.runner.keep_grads) == ("skip", True)
    assert repr(optimizer).endswith("keep_grads=True,\n    nonfinite='skip',\n    max_consecutive_skips=3,\n)")


def test_the_text_of_an_optimizer_shows_its_settings():
    assert repr(Clipped(parameters())) == repr(Modular(parameters(), *CHAIN))
    shown = repr(Clipped(parameters(), lr=0.1, max_norm=2.0, betas=(0.5, 0.6))).split("\n    ")
    assert shown[1:] == [
        "{'params': <4 tensors, 28 elements>, 'lr': 0.1},",
        "ClipNorm(2.0, dim='global'),",
        "AdamW(betas=(0.5, 0.6), weight_decay=0.1),\n)",
    ]
    assert "AdamW(lr=0.1)" in repr(Modular.of(AdamW(1.0))(parameters(), lr=0.1))


def test_a_module_gives_its_names():
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    optimizer = Modular.of(ClipNorm(1).only("0"), SGD(0.1))(model, lr=0.2)
    assert optimizer.param_groups[0]["param_names"] == ["0.weight", "0.bias", "1.weight", "1.bias"]


def test_it_is_a_class_of_optimizers():
    optimizer = Clipped(parameters())
    assert issubclass(Clipped, Modular)
    assert issubclass(Clipped, torch.optim.Optimizer)
    assert isinstance(optimizer, Modular)
    assert repr(Clipped) == "<class Modular.of(ClipNorm(0.5, dim='global'), AdamW(weight_decay=0.1))>"
    assert (
        str(Modular.of(SGD(), nonfinite="skip", fast=False))
        == "<class Modular.of(SGD(), nonfinite='skip', fast=False)>"
    )
    assert repr(Named) == f"<class '{__name__}.Named'>"
    assert repr(optimizer).startswith("Modular(\n")


def test_the_signature_has_the_settings():
    assert str(inspect.signature(Clipped)) == (
        "(params: Any, lr: Any = None, *, max_norm=0.5, betas=(0.9, 0.999), eps=1e-08, weight_decay=0.1, "
        "**settings: Any)"
    )
    twice = inspect.signature(Modular.of(ClipNorm(halved), ClipNorm(2)))
    assert list(twice.parameters) == ["params", "lr", "max_norm", "settings"]
    assert twice.parameters["max_norm"].default is halved
    assert list(inspect.signature(Named).parameters) == ["params", "lr", "label", "settings"]


EQUAL = {
    "scopes": lambda: Modular.of(ClipNorm(1).only("a*", is_matrix).without(groups="head"), SGD()),
    "lists": lambda: Modular.of([ClipNorm(1), [Chain(SGD())]]),
    "options": lambda: Modular.of(SGD(), nonfinite="skip", fast=False),
    "schedules": lambda: Modular.of(ClipNorm(halved), SGD(halved)),
    "a wrapped optimizer": lambda: Modular.of(Wrap(torch.optim.Adagrad, lr=0.1, eps=1e-8)),
    "statistics": lambda: Modular.of(ClipNormByEMA(beta=0.9), SGD(momentum=0.9)),
    "a class of a user": lambda: Doubled.of(SGD(0.1)),
}


@pytest.mark.parametrize("name", EQUAL)
@pytest.mark.parametrize("module", [pickle, cloudpickle])
def test_equal_calls_give_one_class_also_after_a_pickle(name, module):
    made = EQUAL[name]()
    assert EQUAL[name]() is made
    assert copy.deepcopy(made) is made
    if name != "scopes":
        made(parameters())
    assert module.loads(module.dumps(made)) is made
    assert EQUAL[name]() is made


def test_the_order_of_options_and_of_calls_does_not_matter():
    assert Modular.of(SGD(), fast=False, maximize=True) is Modular.of(SGD(), maximize=True, fast=False)
    assert Modular.of([ClipNorm(1)], [[SGD()]]) is Modular.of(ClipNorm(1), SGD())


DIFFERENT = [
    (ClipNorm(1), SGD()),
    (ClipNorm(2), SGD()),
    (ClipNorm(True + 0.0), SGD()),
    (SGD(), ClipNorm(1)),
    (ClipNorm(1).only("a"), SGD()),
    (ClipNorm(1).only(lambda p: p.ndim == 1), SGD()),
    (ClipNorm(1).only(lambda p: p.ndim == 2), SGD()),
    (ClipNorm(1, name="other"), SGD()),
    (ClipNorm(1), SGD(nesterov=True, momentum=0.9)),
    (ClipNorm(1), SGD(momentum=0.9)),
]


def test_different_calls_give_different_classes():
    assert len({Modular.of(*chain) for chain in DIFFERENT}) == len(DIFFERENT)
    assert len({Modular.of(SGD()), Modular.of(SGD(), nonfinite="skip"), Doubled.of(SGD())}) == 3


def test_a_pickle_knows_its_class_although_no_other_call_is_equal():
    made = Modular.of(ClipNorm(functools.partial(max, 1)), SGD(torch.tensor(0.1)))
    assert pickle.loads(pickle.dumps(made)) is made
    assert Modular.of(ClipNorm(functools.partial(max, 1)), SGD(torch.tensor(0.1))) is not made
    scoped = Modular.of(ClipNorm(1).only(lambda p: p.ndim == 1), SGD())
    assert cloudpickle.loads(cloudpickle.dumps(scoped)) is scoped


@pytest.mark.parametrize("kind", [Clipped, Named, Doubled.of(*CHAIN)], ids=["made", "subclass", "of a user"])
@pytest.mark.parametrize(
    "copied",
    [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x)), lambda x: cloudpickle.loads(cloudpickle.dumps(x))],
    ids=["deepcopy", "pickle", "cloudpickle"],
)
def test_copies_of_an_optimizer_have_its_class_and_train_as_it_does(kind, copied):
    params = parameters()
    optimizer = kind(params, lr=0.1, max_norm=2.0)
    train(optimizer, params, gradients(params, 2))
    twin = copied(optimizer)
    assert type(twin) is kind
    twins = [param for group in twin.param_groups for param in group["params"]]
    train(optimizer, params, gradients(params, 3, seed=2))
    train(twin, twins, gradients(params, 3, seed=2))
    assert_equal(twins, params)


LOADS = """
import pickle, sys
from torchzero_clip import AdamW, ClipNorm, Modular
classes = [pickle.loads(bytes.fromhex(text)) for text in sys.argv[1:]]
assert classes == [Modular.of(ClipNorm(0.5, dim="global"), AdamW(weight_decay=0.1))] * len(classes)
print(classes[0])
"""


@pytest.mark.slow
def test_another_process_loads_the_class():
    pickles = [module.dumps(Clipped).hex() for module in (pickle, cloudpickle)]
    process = subprocess.run(
        [sys.executable, "-c", LOADS, *pickles], capture_output=True, text=True, timeout=120, check=True
    )
    assert process.stdout.strip() == repr(Clipped)


def test_subclasses():
    named = Named(parameters(), 0.1, label="head", max_norm=3.0)
    assert (named.label, named.param_groups[0]["lr"], named.param_groups[0]["max_norm"]) == ("head", 0.1, 3.0)
    assert pickle.loads(pickle.dumps(Named)) is Named
    doubled = Doubled.of(SGD(0.1))
    assert repr(doubled) == "<class Doubled.of(SGD(lr=0.1))>"
    assert doubled(parameters(), lr=0.3).param_groups[0]["lr"] == 0.6
    assert issubclass(doubled, Doubled)


@pytest.mark.parametrize(
    "argument",
    [
        {"weight_decay": 0.0},
        pytest.param({"nesterov": False}, marks=needs_muon),  # without it, only SGD has the argument
        {"foreach": True},
        {"fused": None},
    ],
)
def test_arguments_of_torch_without_effect_are_ignored(argument):
    """The registry of timm passes ``weight_decay=0.0`` to each class."""
    made = Modular.of(ClipNorm(1), LR(0.1))(parameters(), lr=0.5, **argument)
    assert repr(made) == repr(Modular.of(ClipNorm(1), LR(0.1))(parameters(), lr=0.5))
    assert not argument.keys() & made.param_groups[0].keys()


REFUSED = {
    "a setting": (
        lambda: Clipped(parameters(), lr=0.1, max_nrom=1.0),
        "no transform has a setting 'max_nrom'; did you",
    ),
    "a setting that none is like": (
        lambda: Clipped(parameters(), foo=1.0),
        "'foo'; there are: max_norm, betas, eps, weight_decay, lr",
    ),
    "structure": (
        lambda: Clipped(parameters(), dim=None),
        "no transform has a setting 'dim': write ClipNorm(dim=...) in Modular.of(...)",
    ),
    "an option": (
        lambda: Clipped(parameters(), nonfinite="skip"),
        "no transform has a setting 'nonfinite': write Modular.of(..., nonfinite=...)",
    ),
    "a structure of the optimizer": (
        lambda: Clipped(parameters(), fused=False),
        "write AdamW(fused=...) in Modular.of",
    ),
    "a weight decay": (
        lambda: Modular.of(SGD())(parameters(), weight_decay=0.1),
        "'weight_decay'; there are: momentum, dampening, lr. Put WeightDecay(...) after Adam",
    ),
    "a third argument": (lambda: Clipped(parameters(), 0.1, 0.9), "Modular takes at most 2 arguments without a name"),
    "several rates": (
        lambda: Modular.of(Muon(0.02).only(is_matrix), AdamW(3e-4).without(is_matrix))(parameters(), lr=0.1),
        "lr would be one learning rate for Muon(lr=0.02).only(is_matrix), Adam(lr=0.0003).without(is_matrix), "
        "which have their own: leave lr out",
    ),
    "options with another name": (lambda: Modular.of(SGD(), nonfinit="skip"), "did you mean 'nonfinite'?"),
    "a rate among the options": (lambda: Modular.of(*CHAIN, lr=0.1), "write AdamW(lr=...)"),
    "parameters": (lambda: Modular.of(nn.Linear(1, 1).parameters(), SGD()), "got generator"),
    "transforms twice": (lambda: Clipped.of(SGD()), "has its transforms already"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_wrong_call_raises_a_type_error_with_the_way_out(name):
    call, message = REFUSED[name]
    with pytest.raises(TypeError) as caught:
        call()
    assert message in str(caught.value)


def test_values_out_of_range_are_named():
    for settings, message in [({"lr": -1.0}, "lr must be >= 0"), ({"max_norm": -1.0}, "max_norm must be >= 0")]:
        with pytest.raises(ValueError, match=message):
            Clipped(parameters(), **settings)
    with pytest.raises(ValueError, match="at least one transform"):
        Modular.of()
    with pytest.raises(ValueError, match="one learning rate, got several"):
        Modular.of(SGD(0.1), LR(0.1))


OTHERS = {
    "keywords": lambda params: Modular(params, lr=0.1),
    "a partial": lambda params: functools.partial(Modular, ClipNorm(1), AdamW())(params, lr=0.1),
    "a partial without a rate": lambda params: functools.partial(Modular, ClipNorm(1), AdamW())(params),
    "a partial with options": lambda params: functools.partial(Modular, nonfinite="skip")(params, lr=0.1),
    "a transform": lambda params: AdamW(params, lr=0.1),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_a_framework_cannot_call_names_the_class_that_it_can(name):
    with pytest.raises(
        TypeError, match=r"takes the class Modular.of\(ClipNorm\(1\), |takes Modular.of\(\.\.\., AdamW"
    ) as caught:
        OTHERS[name](nn.Linear(2, 1).parameters())
    assert "AdamW(" in str(caught.value) or name == "a partial without a rate"


@pytest.mark.slow
@needs_compiler
def test_a_compiled_step_of_such_a_class():
    params, others = parameters(), parameters()
    optimizer, other = Clipped(params, lr=0.1), Modular(others, CHAIN[0], AdamW(0.1, weight_decay=0.1))
    rows = gradients(params, 3)
    train(other, others, rows)
    torch._dynamo.reset()
    step = torch.compile(optimizer.step, backend="eager")
    for row in rows:
        set_grads(params, row)
        step()
    torch.testing.assert_close(params, others, rtol=1e-5, atol=1e-6)
