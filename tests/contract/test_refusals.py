"""Bad input is refused with a message that names it, and nothing has changed then."""

import copy

import pytest
import torch
from contract.entries import LimitRMS, TrackJointNorm
from contract.training import (
    assert_equal,
    assert_same_checkpoint,
    gradients,
    parameters,
    through_file,
    train,
    trained,
    values,
)
from torch import nn

from torchzero_clip import (
    LR,
    SGD,
    Adam,
    AdamW,
    Centralize,
    Chain,
    ClipNorm,
    ClipNormByEMA,
    ClipNormGrowth,
    ClipValue,
    ClipValueByEMA,
    ClipValueGrowth,
    Modular,
    Normalize,
    NormalizeByEMA,
    RMSprop,
    SkipStep,
    WeightDecay,
    Wrap,
)

nan = float("nan")
WEIGHT, OTHER = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))

WRONG_VALUES = [
    (lambda: ClipNorm(-1.0), r"max_norm must be >= 0, got -1.0"),
    (lambda: ClipNorm(nan), r"max_norm must be >= 0, got nan"),
    (lambda: ClipNorm(10**400), r"max_norm must be less than 2\*\*63 if it is an int, got a larger int"),
    (lambda: LR(torch.tensor(1j)), r"lr must have one element if it is a tensor, dense and of a floating"),
    (lambda: Adam(torch.ones(1).to_sparse()), r"lr must have one element .*sparse_coo"),
    (lambda: ClipNorm(1, name="a/b"), r"name must have letters, and neither of '/', '.' and ':', got 'a/b'"),
    (lambda: ClipNorm(1, name=""), r"name must have letters"),
    (lambda: ClipNorm(1, "l5"), r"ord must be a number or one of 'l0', .*got 'l5'"),
    (lambda: ClipNorm(1, nan), r"ord must not be NaN"),
    (lambda: ClipNorm(1, dim="all"), r"dim must be None, an int, a sequence of ints or 'global', got 'all'"),
    (lambda: ClipNorm(1, min_size=-1), r"min_size must be >= 0"),
    (lambda: ClipNorm(1, target="updates"), r"target must be one of 'update', 'grad'"),
    (lambda: ClipValue(-0.5), r"value must be >= 0, got -0.5"),
    (lambda: ClipValue(nan), r"value must be >= 0"),
    (lambda: Normalize(-1.0), r"norm_value must be >= 0, got -1.0"),
    (lambda: Normalize(float("inf")), r"norm_value must be finite, got inf"),
    (lambda: Normalize(nan), r"norm_value must be >= 0, got nan"),
    (lambda: Normalize(1, "l5"), r"ord must be a number or one of"),
    (lambda: Normalize(dim="all"), r"dim must be None, an int"),
    (lambda: Centralize("rows"), r"dim must be None, an int"),
    (lambda: Centralize(min_size=-1), r"min_size must be >= 0"),
    (lambda: Centralize(target="up"), r"target must be one of"),
    *(
        case
        for by_ema in (ClipNormByEMA, NormalizeByEMA)
        for case in (
            (lambda t=by_ema: t(1.5), r"beta must be in \[0, 1\], got 1.5"),
            (lambda t=by_ema: t(nan), r"beta must be in \[0, 1\], got nan"),
            (lambda t=by_ema: t(ord="l5"), r"ord must be a number or one of"),
            (lambda t=by_ema: t(eps=-1e-6), r"eps must be >= 0"),
            (lambda t=by_ema: t(max_ema_growth=0), r"max_ema_growth must be > 0, got 0"),
            (lambda t=by_ema: t(ema_init="ones"), r"ema_init must be one of 'zeros', 'update', got 'ones'"),
            (lambda t=by_ema: t(target="up"), r"target must be one of"),
        )
    ),
    (lambda: ClipValueByEMA(-0.1), r"beta must be in \[0, 1\], got -0.1"),
    (lambda: ClipValueByEMA(ema_init=0), r"ema_init must be one of"),
    *(
        case
        for growth in (ClipNormGrowth, ClipValueGrowth)
        for case in (
            (lambda t=growth: t(add=-1.0), r"add must be >= 0, got -1.0"),
            (lambda t=growth: t(mul=0.0), r"mul must be > 0, got 0.0"),
            (lambda t=growth: t(mul=nan), r"mul must be > 0, got nan"),
            (lambda t=growth: t(min_value=-1), r"min_value must be >= 0"),
            (lambda t=growth: t(max_decay=0.5), r"max_decay must be >= 1, got 0.5"),
            (lambda t=growth: t(target="up"), r"target must be one of"),
        )
    ),
    (lambda: ClipNormGrowth(ord="l5"), r"ord must be a number or one of"),
    (lambda: Adam(betas=(0.9, 1.0)), r"betas\[1\] must be in \[0, 1\), got 1.0"),
    (lambda: Adam(betas=(nan, 0.9)), r"betas\[0\] must be in"),
    (lambda: Adam(eps=-1e-8), r"eps must be >= 0"),
    (lambda: Adam(-0.1), r"lr must be >= 0, got -0.1"),
    (lambda: Adam(torch.ones(2)), r"lr must have one element"),
    (lambda: SGD(momentum=-0.1), r"momentum must be >= 0"),
    (lambda: SGD(nesterov=True), r"nesterov needs momentum > 0 and dampening = 0"),
    (lambda: SGD(0.1, 0.9, dampening=0.1, nesterov=True), r"nesterov needs momentum > 0"),
    (lambda: WeightDecay(-0.1), r"weight_decay must be >= 0"),
    (lambda: LR(-1), r"lr must be >= 0"),
    (lambda: LR(torch.ones(2)), r"lr must have one element"),
    (lambda: LimitRMS(0), r"max_rms must be > 0, got 0"),
    (lambda: Chain(ClipNorm(1, target="closure"), target="grad"), r"target='closure' cannot stand inside"),
    (lambda: Modular([WEIGHT]), r"Modular needs at least one transform"),
    (lambda: Modular([WEIGHT], []), r"Modular needs at least one transform"),
    (lambda: ClipNorm(1).set_param_groups([{"max_norm": 1}]), r"must be a dict with 'params'"),
    (lambda: Adam().set_param_groups([{"params": [WEIGHT], "lr": 1}]), r"is the lr of their param group"),
    (lambda: Modular([WEIGHT], Adam(0.1), LR(0.1)), r"one learning rate, got several: Adam\(lr=0.1\), LR"),
    (lambda: Modular([WEIGHT], LR(0.1), LR(0.2)), r"one learning rate, got several"),
    (lambda: Modular([WEIGHT], Adam(0.1), SGD(0.2)), r"has several learning rates, those of Adam"),
    (
        lambda: Modular([WEIGHT], Chain(Adam(0.5), ClipValue(0.1), target="update_difference"), SGD(0.1)),
        r"a parameter of shape \(2,\) has several learning rates, those of Adam\(lr=0.5",
    ),
    (lambda: ClipNorm(1).set_param_groups([{"params": [WEIGHT], "dim": 0}]), r"ClipNorm has no setting 'dim'"),
    (lambda: ClipNorm(1).set_param_groups([{"params": [WEIGHT], "max_norm": -1}]), r"max_norm must be >= 0"),
    (lambda: AdamW().set_param_groups([{"params": [WEIGHT], "lr": 1}]), r"no transform has a setting 'lr'"),
    (lambda: Modular([WEIGHT], Adam(lambda step: 0.1), LR(0.1)), r"one learning rate"),
    (lambda: ClipNorm(lambda step: -0.5), r"max_norm must be >= 0, got -0.5"),
    (lambda: Modular([{"params": [WEIGHT]}, {"params": [WEIGHT]}], ClipNorm(1)), r"more than one parameter group"),
    (lambda: Modular([], ClipNorm(1)), r"empty parameter list"),
    (lambda: Modular([("weight", WEIGHT), OTHER], ClipNorm(1)), r"with/without names"),
    (lambda: ClipNorm(1).only(), "needs at least one pattern"),
    (
        lambda: Modular([("a", WEIGHT), ("b", OTHER)], Chain(Adam(), LR(0.1)).only("a"), SGD().without("a")),
        r"LR\(0.1\).only\('a'\) would leave other parameters at 1",
    ),
    (lambda: Modular([WEIGHT], SGD(), nonfinite="ignore"), r"nonfinite must be one of 'propagate', 'raise', 'skip'"),
    (lambda: Modular([WEIGHT], SGD(), nonfinite="skip", max_consecutive_skips=-1), r"must be >= 0"),
    (lambda: Modular([WEIGHT], SGD(), max_consecutive_skips=3), r"needs nonfinite='skip' or a gate"),
    (lambda: SkipStep(), r"SkipStep needs max_norm, max_ratio or sigma"),
    (lambda: SkipStep(-1.0), r"max_norm must be >= 0"),
    (lambda: SkipStep(max_ratio=0.5), r"max_ratio must be >= 1"),
    (lambda: SkipStep(1.0, beta=2), r"beta must be in \[0, 1\]"),
    (lambda: SkipStep(1.0, target="grad"), r"target must be 'update'"),
    (lambda: Modular([WEIGHT], Chain(SkipStep(1.0), target="grad")), r"it cannot stand inside another"),
    (
        lambda: Modular([{"params": [WEIGHT]}, {"params": [OTHER], "skip_step/max_norm": 2.0}], SkipStep(1.0)),
        r"max_norm must be the same in every param group",
    ),
]

WRONG_TYPES = [
    (lambda: ClipNorm("1"), r"max_norm must be a number, got '1' \(str\)"),
    (lambda: ClipNorm(True), r"max_norm must be a number"),
    (lambda: ClipNorm(None), r"max_norm must be a number"),
    (lambda: ClipNorm(1, name=3), r"name must be a string, got 3"),
    (lambda: ClipNorm(1, None), r"ord must be a number"),
    (lambda: ClipNorm(1, torch.ones(2)), r"ord must be a number, a 0-d tensor"),
    (lambda: ClipNorm(1, dim=0.5), r"dim must be None, an int"),
    (lambda: ClipNorm(1, dim=(0, "1")), r"dim must be None, an int"),
    (lambda: ClipNorm(1, inverse_dims=1), r"inverse_dims must be True or False"),
    (lambda: ClipNorm(1, min_size=1.5), r"min_size must be an int"),
    (lambda: ClipNorm(1, max_nrom=1), r"max_nrom"),
    (lambda: Centralize(inverse_dims=None), r"inverse_dims must be True or False"),
    (lambda: ClipNormByEMA(tensorwise=1), r"tensorwise must be True or False"),
    (lambda: NormalizeByEMA(tensorwise=1), r"tensorwise must be True or False"),
    (lambda: ClipValueByEMA(ema_tfm=Adam), r"got the class Adam: write Adam\(...\)"),
    (lambda: ClipValueByEMA(ema_tfm=2.0), r"a chain takes transforms .*got float"),
    (lambda: ClipNormGrowth(mul="2"), r"mul must be a number, got '2'"),
    (lambda: ClipValueGrowth(mul="2"), r"mul must be a number, got '2'"),
    (lambda: ClipNormGrowth(parameterwise=0), r"parameterwise must be True or False"),
    (lambda: Adam(betas=0.9), r"betas must be a pair of numbers"),
    (lambda: Adam(amsgrad=1), r"amsgrad must be True or False"),
    (lambda: Adam(state_dtype=torch.int64), r"state_dtype must be a floating point dtype"),
    (lambda: Adam(state_dtype="float32"), r"state_dtype must be a floating point dtype"),
    (lambda: LR("1"), r"lr must be a number"),
    (lambda: Adam(lambda step: "a"), r"lr must be a number, got 'a'"),
    (lambda: Chain(Adam), r"got the class Adam: write Adam\(...\)"),
    (lambda: Modular([WEIGHT], torch.optim.Adam([WEIGHT])), r"got Adam of torch: write Wrap\(torch.optim.Adam, ...\)"),
    (lambda: Modular([WEIGHT], torch.optim.Adam), r"got Adam of torch: write Wrap\(torch.optim.Adam, ...\)"),
    (lambda: Modular(WEIGHT, ClipNorm(1)), r"should be an iterable"),
    (lambda: Modular([WEIGHT], ClipNorm(1), maximize=1), r"maximize must be True or False"),
    (
        lambda: Modular(torch.optim.AdamW([WEIGHT]), ClipNorm(1), [SkipStep(10.0)]),
        r"params is an optimizer, AdamW: write before_step\(optimizer, ClipNorm\(1\), SkipStep\(max_norm=10.0\)\)",
    ),
    (
        lambda: Modular(torch.optim.AdamW([WEIGHT]), ClipNorm(1), AdamW()),
        r"write Modular\(optimizer.param_groups, ClipNorm\(1\), AdamW\(\)\)",
    ),
    (lambda: Modular(ClipNorm(1), Adam()), r"params come first, as in Modular\(model.parameters\(\), ClipNorm"),
    (lambda: Modular([WEIGHT], ClipNorm(1)).add_param_group(3), r"param_group must be a dict"),
    (lambda: Modular([WEIGHT], ClipNorm(1)).add_param_group([OTHER]), r"param_group must be a dict"),
    (lambda: ClipNorm(1).set_param_groups({"params": [WEIGHT]}), r"must be a list of dicts"),
    (lambda: ClipNorm(1).only(3), "patterns for names and functions of a parameter, got int"),
    (lambda: ClipNorm(1).only(nn.Linear(1, 1)), "got Linear"),
    (lambda: ClipNorm(1).only(nn.ReLU), "got type"),
    (lambda: ClipNorm(1).only(groups=[None]), "groups must be the names of param groups"),
    (lambda: ClipNorm(1).without(nn.Linear(1, 1).weight), "got Parameter"),
    (lambda: Modular([WEIGHT], SGD(), nonfinite="skip", max_consecutive_skips=1.5), r"must be an int"),
]

GROUPS = [
    ({"max_nrom": 1.0}, r"no transform has a setting 'max_nrom'; did you mean 'max_norm'\?"),
    ({"max_norm": -1.0}, r"max_norm must be >= 0"),
    ({"clip_norm/max_norm": -1.0}, r"max_norm must be >= 0"),
    ({"max_norm": 1.0, "clip_norm/max_norm": 1.0}, r"'max_norm' is given twice"),
    ({"adam_2/betas": (0.9, 0.99)}, r"no transform has a setting 'adam_2/betas'"),
    ({"dim": 0}, r"'dim' of ClipNorm\(1\) cannot differ between param groups"),
    ({"lr": -1.0}, r"lr must be >= 0"),
    ({"lr": torch.ones(2)}, r"lr must have one element"),
    ({"betas": (0.9, 2.0)}, r"betas\[1\] must be in"),
]


@pytest.mark.parametrize(
    ("construct", "message", "error"),
    [*((*case, ValueError) for case in WRONG_VALUES), *((*case, TypeError) for case in WRONG_TYPES)],
)
def test_constructors(construct, message, error):
    with pytest.raises(error, match=message):
        construct()


@pytest.mark.parametrize(("settings", "message"), GROUPS)
def test_groups(settings, message):
    params = parameters()
    with pytest.raises(ValueError, match=message):
        Modular([{"params": params, **settings}], ClipNorm(1), Adam())
    optimizer = Modular(params[:1], ClipNorm(1), Adam())
    with pytest.raises(ValueError, match=message):
        optimizer.add_param_group({"params": params[1:], **settings})
    assert len(optimizer.param_groups) == 1


def test_a_group_that_fails_halfway_adds_nothing():
    first, second = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    clip = ClipNorm(1).set_param_groups([{"params": second, "max_norm": 0.5}])
    optimizer = Modular([second], clip)
    with pytest.raises(ValueError, match="more than one parameter group"):
        optimizer.add_param_group({"params": [first, second]})
    assert [group["params"] for group in optimizer.param_groups] == [[second]]


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [("max_norm", -1.0, "max_norm"), ("betas", (0.9, nan), "betas"), ("lr", torch.ones(3), "lr")],
)
def test_settings_that_went_bad_are_refused_by_the_next_step(key, value, message):
    params = parameters()
    before = values(params)
    optimizer = Modular(params, ClipNorm(1), Adam())
    optimizer.param_groups[0][key] = value
    grads = gradients(params, 1)
    with pytest.raises(ValueError, match=message):
        train(optimizer, params, grads)
    assert_equal(params, before)
    assert_equal([p.grad for p in params], grads[0])
    assert not optimizer.state


def test_a_closure_target_without_closure_is_refused_before_anything():
    params = parameters()
    before = values(params)
    with pytest.raises(ValueError, match=r"needs a closure: call step\(closure\)"):
        train(Modular(params, ClipNorm(1, target="closure")), params, gradients(params, 1))
    assert_equal(params, before)


@pytest.mark.filterwarnings("ignore:the chain has no optimizer")
def test_sparse_gradients_are_refused_by_name():
    embedding = nn.Embedding(4, 2, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match="weight has a sparse gradient"):
        Modular(embedding, ClipNorm(1)).step()
    with pytest.raises(RuntimeError, match="parameter 0 of its group, of shape \\(4, 2\\)"):
        Modular(embedding.parameters(), ClipNorm(1)).step()


def with_state(checkpoint, key, value):
    checkpoint["state"][0][key] = value
    return checkpoint


def without_state(checkpoint, key):
    del checkpoint["state"][0][key]
    return checkpoint


def with_setting(checkpoint, key, value):
    return {**checkpoint, "param_groups": [{**checkpoint["param_groups"][0], key: value}]}


HOSTILE = {
    "a parameter twice": lambda c: with_setting(c, "params", [0, 0, 1, 2]),
    "an int beyond floats": lambda c: with_setting(c, "lr", 10**400),
    "a complex rate": lambda c: with_setting(c, "lr", torch.tensor(1j)),
    "a sparse rate": lambda c: with_setting(c, "lr", torch.ones(1).to_sparse()),
    "a rate of integers": lambda c: with_setting(c, "lr", torch.ones(1, dtype=torch.int64)),
    "a complex limit": lambda c: with_setting(c, "max_norm", 1j),
    "names that are a number": lambda c: with_setting(c, "param_names", 7),
    "names that are a string": lambda c: with_setting(c, "param_names", "abcd"),
    "too few names": lambda c: with_setting(c, "param_names", ["a"]),
    "names of numbers": lambda c: with_setting(c, "param_names", [1, 2, 3, 4]),
    "a limit is missing": lambda c: {
        **c,
        "param_groups": [{k: v for k, v in c["param_groups"][0].items() if k != "max_norm"}],
    },
    "a NaN average": lambda c: with_state(c, "clip_norm_by_ema/ema", torch.full((4, 3), nan)),
    "an infinite norm": lambda c: with_state(c, "clip_norm_by_ema/prev", torch.tensor(torch.inf, dtype=torch.float64)),
    "no dict": lambda c: [],
    "no state": lambda c: {"param_groups": c["param_groups"]},
    "state is a list": lambda c: c | {"state": []},
    "groups are a number": lambda c: c | {"param_groups": 3},
    "params of lists": lambda c: c | {"param_groups": [c["param_groups"][0] | {"params": [[0]]}]},
    "group without params": lambda c: c | {"param_groups": [{}]},
    "other group sizes": lambda c: c | {"param_groups": [c["param_groups"][0] | {"params": [0]}]},
    "one more group": lambda c: c | {"param_groups": c["param_groups"] * 2},
    "unlisted parameter": lambda c: c | {"state": {**c["state"], 99: {}}},
    "parameter state is a list": lambda c: c | {"state": {**c["state"], 0: []}},
    "negative setting": lambda c: c | {"param_groups": [c["param_groups"][0] | {"eps": -1.0}]},
    "betas of three": lambda c: c | {"param_groups": [c["param_groups"][0] | {"betas": (0.1, 0.2, 0.3)}]},
    "lr is a string": lambda c: c | {"param_groups": [c["param_groups"][0] | {"lr": "0.1"}]},
    "wrong shape": lambda c: with_state(c, "adam/exp_avg", torch.zeros(5)),
    "complex numbers": lambda c: with_state(c, "adam/exp_avg", torch.zeros(4, 3, dtype=torch.complex64)),
    "booleans": lambda c: with_state(c, "adam/exp_avg", torch.zeros(4, 3, dtype=torch.bool)),
    "an average beyond float32": lambda c: with_state(
        c, "clip_norm_by_ema/ema", torch.full((4, 3), 1e300, dtype=torch.float64)
    ),
    "integers": lambda c: with_state(c, "adam/exp_avg", torch.zeros(4, 3, dtype=torch.int64)),
    "sparse": lambda c: with_state(c, "adam/exp_avg", torch.zeros(4, 3).to_sparse()),
    "number for a tensor": lambda c: with_state(c, "adam/exp_avg", 1.0),
    "string for a tensor": lambda c: with_state(c, "adam/exp_avg", "garbage"),
    "None for a tensor": lambda c: with_state(c, "adam/step", None),
    "missing key": lambda c: without_state(c, "adam/exp_avg"),
    "half of a state that may begin later": lambda c: without_state(c, "clip_norm_growth/prev"),
    "extra key": lambda c: with_state(c, "other/exp_avg", torch.zeros(4, 3)),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_checkpoints_change_nothing(name):
    optimizer = trained(ClipNorm(1), ClipNormByEMA(), ClipNormGrowth(), Adam(), steps=2)
    checkpoint = HOSTILE[name](copy.deepcopy(optimizer.state_dict()))
    before = copy.deepcopy(optimizer.state_dict())
    groups = optimizer.param_groups
    with pytest.raises(ValueError, match=r"."):
        optimizer.load_state_dict(checkpoint)
    assert optimizer.param_groups is groups
    assert_same_checkpoint(optimizer.state_dict(), before)
    optimizer.step()  # no hook of a failed load is left behind
    optimizer.load_state_dict(before)


@pytest.mark.filterwarnings("ignore:two optimizers act on")
@pytest.mark.parametrize(
    ("saver", "loader", "call"),
    [
        (SGD(0.1, 0.9), Adam(), r"new=\['adam'\], dropped=\['sgd'\]"),
        ([ClipNorm(1), Adam()], [Adam(), SGD(momentum=0.9)], r"new=\['sgd'\], dropped=\['clip_norm'\]"),
        (Adam(), Adam(amsgrad=True), r"adam: Adam\(\); .*adam: Adam\(amsgrad=True\).* dropped=\['adam'\]"),
        (
            [Adam(), Adam(0.1)],
            Adam(),
            r"dropped=\['adam'\] .*\. But adam and adam_2 have the same structure: name the one that is gone",
        ),
        (Adam(), Adam(state_dtype=torch.float64), r"Adam\(state_dtype=torch.float64\)"),
    ],
)
def test_a_changed_chain_names_the_difference_and_the_call_that_resolves_it(saver, loader, call):
    optimizer = trained(saver, steps=1)
    with pytest.raises(ValueError, match=rf"belongs to another chain\. .*{call}"):
        Modular(parameters(), loader).load_state_dict(optimizer.state_dict())


@pytest.mark.parametrize("other", [torch.optim.AdamW, torch.optim.SGD])
@pytest.mark.parametrize("steps", [0, 1])
def test_a_checkpoint_of_another_optimizer_is_named_as_such(other, steps):
    params = parameters()
    old = other(params)
    train(old, params, gradients(params, steps))
    with pytest.raises(ValueError, match=r"load_state_dict\(from_torch_optim\(state_dict, optimizer\)\)"):
        Modular(params, AdamW()).load_state_dict(old.state_dict())


def test_infinite_limits_and_moments_load():
    optimizer = trained(ClipNorm(torch.inf), Adam(), steps=1)
    param = optimizer.param_groups[0]["params"][0]
    optimizer.state[param]["adam/exp_avg"].fill_(torch.inf)  # as torch's own does
    optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer.param_groups[0]["max_norm"] == torch.inf
    assert optimizer.state[param]["adam/exp_avg"].isinf().all()


def test_what_is_loaded_has_no_graph():
    optimizer = trained(ClipNormByEMA(tensorwise=False), Adam(torch.tensor(0.1)), steps=1)
    saved = copy.deepcopy(optimizer.state_dict())
    tracked = torch.ones((), requires_grad=True)
    saved["state"][0]["adam/exp_avg"] = saved["state"][0]["adam/exp_avg"] * tracked
    saved["param_groups"][0]["lr"] = saved["param_groups"][0]["lr"] * tracked
    saved["param_groups"][0]["clip_norm_by_ema/prev"] = saved["param_groups"][0]["clip_norm_by_ema/prev"] * tracked
    optimizer.load_state_dict(saved)
    twin = copy.deepcopy(optimizer)
    assert not twin.state[twin.param_groups[0]["params"][0]]["adam/exp_avg"].requires_grad
    assert not any(v.requires_grad for v in optimizer.param_groups[0].values() if isinstance(v, torch.Tensor))


@pytest.mark.parametrize("value", [(0.9,), (), (0.9, "a"), {"a": 1}, (10**400, 0.9), None])
def test_settings_that_a_wrapped_optimizer_chokes_on(value):
    optimizer = trained(Wrap(torch.optim.NAdam), steps=1)
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match=r"Wrap\(NAdam|does not fit|betas"):
        optimizer.load_state_dict(with_setting(copy.deepcopy(before), "betas", value))
    assert_same_checkpoint(optimizer.state_dict(), before)


@pytest.mark.parametrize("first", [0.0, 0.9])
def test_state_that_came_with_a_setting_which_has_changed_since_is_taken(first):
    params = parameters()
    optimizer = Modular([{"params": params, "momentum": first}], RMSprop(momentum=0.5))
    for momentum in (first, 0.9, 0.0, 0.5):
        optimizer.param_groups[0]["momentum"] = momentum
        for _ in range(2):  # before the step that sees the setting, and after it
            saved = copy.deepcopy(optimizer.state_dict())
            optimizer.load_state_dict(saved)
            assert_same_checkpoint(optimizer.state_dict(), saved)
            train(optimizer, params, gradients(params, 1))


@pytest.mark.slow
@pytest.mark.parametrize("at_construction", [None, 1.5])
@pytest.mark.parametrize("growth", [ClipNormGrowth, ClipValueGrowth])
@pytest.mark.parametrize(
    "chain",
    [
        lambda growth: [growth, Adam()],
        lambda growth: [Chain(growth, target="update_difference"), SGD(0.1, 0.9)],
        lambda growth: [ClipValueByEMA(ema_tfm=growth), Adam()],
        lambda growth: [growth.only(lambda p: p.ndim), RMSprop()],
    ],
)
def test_a_limit_that_came_and_went_leaves_a_checkpoint_that_loads_and_goes_on_alike(chain, growth, at_construction):
    def made(params):
        return Modular(params, chain(growth(mul=at_construction)))

    params = parameters()
    optimizer = made(params)
    key = next(key for key in optimizer.param_groups[0] if key.endswith("mul"))
    for i, mul in enumerate((None, 1.5, None, 1.5)):
        # the limit changes before the first gradient, and between the gradients of some parameters only
        for acting in ((0, 1), (2, 3), (0, 1, 2, 3)):
            optimizer.param_groups[0][key] = mul
            saved = through_file(optimizer.state_dict())
            twins = [nn.Parameter(value) for value in values(params)]
            second = made(twins)
            second.load_state_dict(saved)
            assert_same_checkpoint(second.state_dict(), saved)
            row = gradients(params, 1, seed=i)[0]
            for own, either in ((params, optimizer), (twins, second)):
                for k, param in enumerate(own):
                    param.grad = row[k].clone() if k in acting else None
                either.step()
            assert_equal(twins, params)
            assert_same_checkpoint(second.state_dict(), optimizer.state_dict())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"average": torch.zeros(2, dtype=torch.float64)}, "the state 'track_joint_norm/average' of the chain"),
        ({"average": torch.zeros((), dtype=torch.int64)}, "the state 'track_joint_norm/average' of the chain"),
        ({"average": 1.0}, r"is a dense tensor in this chain, got 1\.0 \(float\)"),
        ({"unit": "one"}, "is a number in this chain, got str"),
        ({}, "lacks the state 'track_joint_norm/average' of the chain"),
    ],
)
def test_state_of_the_chain_is_checked_too(change, message):
    optimizer = Modular(parameters(), TrackJointNorm())
    checkpoint = optimizer.state_dict()
    (group,) = checkpoint["param_groups"]
    group.update({f"track_joint_norm/{key}": value for key, value in change.items()})
    if not change:
        del group["track_joint_norm/average"]
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(checkpoint)
