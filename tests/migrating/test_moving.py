"""A run moves from an optimizer of torch to a chain and back. `fast/test_moving` compares the bits of its steps."""

import copy

import pytest
import torch
from contract.training import (
    assert_equal,
    assert_same_checkpoint,
    gradients,
    parameters,
    train,
)
from defaults import DEFAULTS
from migrating.moves import PAIRS, moved_to, ran, twin
from torch import nn, optim
from versions import needs_muon

from torchzero_clip import (
    LR,
    SGD,
    Adam,
    AdamW,
    Chain,
    ClipNorm,
    ClipNormByEMA,
    ClipValueByEMA,
    Modular,
    Muon,
    RMSprop,
    WeightDecay,
    Wrap,
    adapt_state_dict,
    before_step,
    from_torch_optim,
    to_torch_optim,
)

pytestmark = pytest.mark.filterwarnings("ignore:the chain decays weights twice")


MATRICES = [(4, 3), (2, 5)]  # all that Muon takes


@pytest.mark.parametrize(
    ("make", "chain"),
    [
        (lambda p: optim.RMSprop(p, 0.1, momentum=0.5, centered=True), RMSprop(centered=True)),
        pytest.param(lambda p: optim.Muon(p, 0.1, weight_decay=0.3), [Muon(), WeightDecay(0.0)], marks=needs_muon),
    ],
    ids=["RMSprop", "Muon"],
)
def test_others_go_on_within_rounding(make, chain):
    params = parameters(torch.float64, MATRICES)
    old = make(params)
    grads = gradients(params, 6)
    train(old, params, grads[:3])
    moved, optimizer = moved_to(params, old, ClipNorm(1e9), chain)
    again = twin(params)
    back = make(again)
    back.load_state_dict(to_torch_optim(optimizer, back))
    for o, p in ((old, params), (optimizer, moved), (back, again)):
        train(o, p, grads[3:])
    assert_equal(again, params)
    for a, b in zip(moved, params, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)  # Muon orthogonalizes in bfloat16


def test_what_the_rest_of_the_chain_remembers_begins_anew():
    params = parameters()
    old = optim.AdamW(params, 0.1)
    grads = gradients(params, 4)
    train(old, params, grads[:2])

    def build(given):
        joint = ClipNormByEMA(0.5, tensorwise=False)
        inner = ClipValueByEMA(0.5, ema_tfm=SGD(momentum=0.9, dampening=0.5))
        return Modular(given, joint, inner, ClipNorm(lambda step: 1.0 + step), AdamW(), LR(0.1), nonfinite="skip")

    used_params, fresh_params = twin(params), twin(params)
    used, fresh = build(used_params), build(fresh_params)
    train(used, used_params, gradients(params, 5, seed=7))
    train(used, used_params, [[torch.full_like(p, torch.nan) for p in params]])
    with torch.no_grad():
        for param, value in zip(used_params, params, strict=True):
            param.copy_(value)
    for optimizer in (used, fresh):
        optimizer.load_state_dict(from_torch_optim(old.state_dict(), optimizer))
    assert used.param_groups[0]["max_norm"] == 1.0
    assert used.metrics()["skipped_steps"].item() == 0
    train(used, used_params, grads[2:])
    train(fresh, fresh_params, grads[2:])
    assert_equal(used_params, fresh_params)
    assert_same_checkpoint(used.state_dict(), fresh.state_dict())
    assert used.state[used_params[0]]["adam/step"].item() == 4


def test_nothing_is_changed_by_converting():
    params, old = ran(lambda p: optim.AdamW(p, 0.1), 2)
    optimizer = Modular(twin(params), ClipNorm(1), AdamW())
    saved = old.state_dict()
    before = copy.deepcopy((saved, optimizer.state_dict()))
    from_torch_optim(saved, optimizer)
    to_torch_optim(optimizer, old)
    assert_same_checkpoint((saved, optimizer.state_dict()), before)
    assert_same_checkpoint(old.state_dict(), before[0])


def test_parameters_without_state_and_before_the_first_step():
    params = parameters()
    old = optim.AdamW(params, 0.1)
    params[0].grad = torch.ones_like(params[0])
    optimizer = Modular(params, ClipNorm(1), AdamW())
    assert from_torch_optim(old.state_dict(), optimizer)["state"] == {}
    old.step()
    optimizer.load_state_dict(from_torch_optim(old.state_dict(), optimizer))
    assert list(optimizer.state) == [params[0]]
    assert list(to_torch_optim(optimizer, old)["state"]) == [0]


def test_checkpoints_of_older_versions():
    """Steps were numbers once, and groups did not say whether decay is decoupled."""
    params, old = ran(lambda p: optim.AdamW(p, 0.1, weight_decay=0.2), 2)
    saved = old.state_dict()
    for state in saved["state"].values():
        state["step"] = int(state["step"])
    del saved["param_groups"][0]["decoupled_weight_decay"]
    for chain, key in (([Adam(), WeightDecay(0.0)], "after"), ([WeightDecay(0.0), Adam()], "before")):
        optimizer = Modular(params, chain)
        optimizer.load_state_dict(from_torch_optim(saved, optimizer))
        assert optimizer.param_groups[0]["weight_decay"] == 0.2, key
        assert optimizer.state[params[0]]["adam/step"].item() == 2


def test_keys_of_schedulers_and_trainers_and_names_come_along():
    model = nn.Linear(3, 2)
    old = optim.AdamW(model.named_parameters(), 0.1)
    old.param_groups[0].update(name="all", initial_lr=0.5, my_tag="x", rho=0.05)  # SAM's, not Adadelta's
    optimizer = Modular(model, ClipNorm(1), AdamW())
    converted = from_torch_optim(old.state_dict(), optimizer)["param_groups"][0]
    assert (converted["name"], converted["initial_lr"], converted["my_tag"]) == ("all", 0.5, "x")
    assert converted["rho"] == 0.05
    assert converted["param_names"] == ["weight", "bias"]
    optimizer.load_state_dict(from_torch_optim(old.state_dict(), optimizer))
    assert to_torch_optim(optimizer, old)["param_groups"][0]["initial_lr"] == 0.5


def test_transforms_before_the_old_optimizer_are_not_those_of_the_chain():
    params, old = parameters(), optim.SGD(parameters())
    handle = before_step(old, ClipNormByEMA())
    moved, carried = Modular(params, SGD()), Modular(old.param_groups, SGD())
    moved.load_state_dict(from_torch_optim(old.state_dict(), moved))
    for optimizer, own in ((moved, params), (carried, old.param_groups[0]["params"])):
        assert "before_step" not in optimizer.param_groups[0]
        train(optimizer, own, gradients(own, 1))  # a warning would raise
    with pytest.raises(ValueError, match=r"checkpoint is of a chain, .*to_torch_optim"):
        old.load_state_dict(moved.state_dict())
    assert "chain" not in old.param_groups[0]
    old.load_state_dict(to_torch_optim(moved, old))
    train(old, old.param_groups[0]["params"], gradients(params, 1))
    assert handle.steps_taken == 1


OTHER = r"not from torch\.optim|torch's optimizer has|which .* does not"


@pytest.mark.filterwarnings("ignore:two optimizers act on")
@pytest.mark.parametrize(
    ("make", "chain", "message"),
    [
        (lambda p: optim.AdamW(p), Adam(), r"weight_decay=0.01: put WeightDecay\(0.01\) after 'adam'"),
        (lambda p: optim.Adam(p, weight_decay=0.1), AdamW(), r"put WeightDecay\(0.1\) before 'adam'"),
        (lambda p: optim.SGD(p, weight_decay=0.1), [SGD(), WeightDecay(0.1)], "before 'sgd'"),
        (
            lambda p: optim.AdamW(p),
            [Adam(), WeightDecay(0.1).only(lambda p: len(p) > 2)],
            "after 'adam', for all parameters of this group",
        ),
        (lambda p: optim.AdamW(p), [Adam(), LR(0.1), WeightDecay(0.0)], "put LR at the end"),
        (lambda p: optim.Adam(p, weight_decay=0.1), [WeightDecay(0.1), LR(0.1), Adam()], "put LR at the end"),
        (lambda p: optim.AdamW(p, amsgrad=True), AdamW(), r"has amsgrad=True, and Adam\(\) amsgrad=False"),
        (lambda p: optim.AdamW(p, maximize=True), AdamW(), "maximize=True, and Modular maximize=False"),
        (lambda p: optim.Adagrad(p), Adam(), "it lacks amsgrad, betas; has initial_accumulator_value, lr_decay. At"),
        (lambda p: optim.SGD(p, momentum=0.9), Adam(), "not from torch.optim.Adam"),
        (lambda p: optim.RMSprop(p), SGD(), "not from torch.optim.SGD"),
        (lambda p: optim.AdamW(p), ClipNorm(1), "needs exactly one of Adam, SGD, RMSprop, (Muon, )?Wrap"),
        (lambda p: optim.AdamW(p), [AdamW(), SGD(0.1)], "needs exactly one of"),
        (
            lambda p: optim.AdamW(p),
            [AdamW().only(lambda p: len(p) > 2), SGD(0.1).without(lambda p: len(p) > 2)],
            "exactly one",
        ),
        (lambda p: optim.AdamW(p[:1]), AdamW(), r"param groups of \[1\] parameters, this optimizer of \[2\]"),
        (lambda p: optim.RAdam(p, decoupled_weight_decay=True, weight_decay=0.3), Wrap(optim.RAdam), OTHER),
        (lambda p: optim.RAdam(p, weight_decay=0.3), Wrap(optim.RAdam, decoupled_weight_decay=True), OTHER),
        pytest.param(lambda p: optim.Muon(p, adjust_lr_fn="match_rms_adamw"), Muon(), OTHER, marks=needs_muon),
        (lambda p: optim.Adam(p, weight_decay=0.3), Wrap(optim.AdamW), OTHER),
        (lambda p: optim.AdamW(p, weight_decay=0.3), Wrap(optim.Adam), OTHER),
        (lambda p: optim.RAdam(p), Wrap(optim.Adam), OTHER),
        (lambda p: optim.RAdam(p), Wrap(optim.NAdam), OTHER),
        (lambda p: optim.Adam(p), Wrap(optim.RAdam), OTHER),
        (lambda p: optim.RAdam(p), Wrap(optim.Adamax), OTHER),
        (lambda p: optim.NAdam(p), Adam(), OTHER),
        (lambda p: optim.RAdam(p, weight_decay=0.1), AdamW(), OTHER),
        (lambda p: optim.Adam(p, maximize=True), Wrap(optim.Adam), OTHER),
    ],
)
def test_what_does_not_fit_is_refused(make, chain, message):
    params, old = ran(make, 1, MATRICES)
    optimizer = Modular(params, chain)
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(from_torch_optim(old.state_dict(), optimizer))
    assert_same_checkpoint(optimizer.state_dict(), before)


@pytest.mark.parametrize(
    ("chain", "make", "message"),
    [
        (AdamW(), lambda p: optim.SGD(p), "stands for torch.optim.Adam, not SGD"),
        (Wrap(optim.NAdam), lambda p: optim.Adam(p), "stands for torch.optim.NAdam, not Adam"),
        (AdamW(), lambda p: optim.Adam(p), "cannot decay weights as this chain"),
        ([WeightDecay(0.1), Adam()], lambda p: optim.AdamW(p), "cannot decay weights as this chain"),
        ([AdamW(), WeightDecay(0.1)], lambda p: optim.AdamW(p), "cannot decay weights as this chain"),
        (
            [Adam(), WeightDecay(0.1).only(lambda p: p.ndim > 1)],
            lambda p: optim.AdamW(p),
            "cannot decay weights as this chain",
        ),
        ([Adam(), LR(0.1), WeightDecay(0.1)], lambda p: optim.AdamW(p), "put LR at the end"),
        ([WeightDecay(0.1), Wrap(optim.AdamW)], lambda p: optim.AdamW(p), "cannot decay weights as this chain"),
        (Wrap(optim.Adam), lambda p: optim.AdamW(p), "stands for torch.optim.Adam, not AdamW"),
        (Adam(state_dtype=torch.float64), lambda p: optim.Adam(p), "torch would round it"),
        (AdamW(amsgrad=True), lambda p: optim.AdamW(p), "amsgrad=False, and Adam"),
        (Chain(AdamW(), target="update_difference"), lambda p: optim.AdamW(p), "exactly one"),
    ],
)
def test_what_torch_cannot_continue_is_refused(chain, make, message):
    params = parameters()
    optimizer = Modular(params, ClipNorm(1), chain)
    train(optimizer, params, gradients(params, 1))
    with pytest.raises(ValueError, match=message):
        to_torch_optim(optimizer, make(params))


def test_wrong_types_are_refused():
    params = parameters()
    optimizer, adamw = Modular(params, AdamW()), optim.AdamW(params)
    with pytest.raises(TypeError, match="optimizer must be of class Modular"):
        from_torch_optim(adamw.state_dict(), adamw)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="optimizer must be of class Modular"):
        from_torch_optim(optimizer, adamw.state_dict())  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match=r"got AdamW: before_step has arguments new and dropped"):
        adapt_state_dict(adamw, adamw.state_dict(), new=["clip_norm"])  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match=r"target must be of class Optimizer, got <class 'torch.optim.adamw.AdamW'>"):
        to_torch_optim(optimizer, optim.AdamW)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("make", "chain"),
    [
        (lambda p: optim.Adam(p, 0.1), AdamW(weight_decay=1.0)),
        (lambda p: optim.AdamW(p, 0.1, weight_decay=0.0), [WeightDecay(1.0), Adam()]),
        (lambda p: optim.AdamW(p, 0.1, weight_decay=0.5), [WeightDecay(1.0), AdamW()]),
        (lambda p: optim.AdamW(p, 0.1, weight_decay=0.5), [Adam(), WeightDecay(1.0), WeightDecay(1.0)]),
        (lambda p: optim.AdamW(p, 0.1, weight_decay=0.5), [WeightDecay(1.0), Wrap(optim.AdamW)]),
        (lambda p: optim.Rprop(p, 0.1), [WeightDecay(1.0), Wrap(optim.Rprop)]),
    ],
)
def test_all_decay_is_that_of_the_checkpoint_whatever_the_constructors_say(make, chain):
    params = parameters(torch.float64)
    old = make(params)
    grads = gradients(params, 5)
    train(old, params, grads[:2])
    moved, optimizer = moved_to(params, old, ClipNorm(1e9), chain)
    train(old, params, grads[2:])
    train(optimizer, moved, grads[2:])
    torch.testing.assert_close(moved, params, rtol=1e-12, atol=1e-12)


def test_empty_groups_tensor_rates_and_incomplete_checkpoints():
    params, old = ran(lambda p: optim.AdamW([{"params": p}, {"params": []}], torch.tensor(0.1)), 1)
    optimizer = Modular([{"params": params}, {"params": []}], ClipNorm(1), AdamW())
    optimizer.load_state_dict(from_torch_optim(old.state_dict(), optimizer))
    back = to_torch_optim(optimizer, old)
    assert back["param_groups"][0]["lr"] is not optimizer.param_groups[0]["lr"]
    saved = old.state_dict()
    del saved["state"][0]["exp_avg_sq"]
    with pytest.raises(ValueError, match=r"lacks the state 'exp_avg_sq' of a parameter, which Adam\(\) has"):
        from_torch_optim(saved, optimizer)
    groups = [{"params": [0, 1, 2, 3], "lr": 1.0}, {"params": []}]
    with pytest.raises(ValueError, match="it lacks amsgrad, betas, eps"):
        from_torch_optim({"state": {}, "param_groups": groups}, optimizer)


def test_scopes_keep_the_names_of_the_model():
    model = nn.Linear(3, 2)
    old = optim.SGD([(f"module.{name}", p) for name, p in model.named_parameters()], 0.1)
    optimizer = Modular(model, ClipNorm(0.5).only("weight"), SGD())
    optimizer.load_state_dict(from_torch_optim(old.state_dict(), optimizer))
    assert optimizer.param_groups[0]["param_names"] == ["weight", "bias"]


@pytest.mark.parametrize("default", DEFAULTS)
@pytest.mark.parametrize("name", ["AdamW", "SGD momentum", "RMSprop"])
def test_defaults_of_the_process_do_not_matter(name, default):
    make, chain = {**PAIRS, "RMSprop": (optim.RMSprop, RMSprop)}[name]
    params, grads = parameters(), gradients(parameters(), 2)

    def results():
        moved = twin(params)
        optimizer = Modular(moved, ClipNorm(0.5), chain())
        train(optimizer, moved, grads[:1])
        saved = to_torch_optim(optimizer, make(moved))
        optimizer.load_state_dict(from_torch_optim(saved, optimizer))
        train(optimizer, moved, grads[1:])
        return saved["state"], moved

    expected = results()
    with DEFAULTS[default]():
        found = results()
    assert_same_checkpoint(found[0], expected[0])
    assert_equal(found[1], expected[1])
