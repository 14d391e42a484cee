"""What torch itself does with an optimizer: schedulers, GradScaler, hooks, closures, groups, averaging."""

import gc
import math
import warnings

import pytest
import torch
from contract.entries import ENTRIES
from contract.schedulers import SCHEDULERS, advance
from contract.training import (
    assert_equal,
    assert_same_checkpoint,
    assert_same_state,
    gradients,
    parameters,
    set_grads,
    train,
    values,
)
from torch import nn
from torch.optim import lr_scheduler, swa_utils
from versions import needs_compiler

from torchzero_clip import LR, SGD, Adam, ClipNorm, Modular

pytestmark = pytest.mark.filterwarnings("ignore:the chain has no optimizer")


each_entry = pytest.mark.parametrize("entry", ENTRIES, ids=str)


# a chain reads what a scheduler wrote, whichever it was: each entry meets one of them, and each of them some entries
MEETINGS = [(entry, "OneCycleLR") for entry in ENTRIES]
MEETINGS += [(e, name) for e in ENTRIES if e.name in ("LR", "schedules", "ClipNorm+AdamW") for name in SCHEDULERS]


@pytest.mark.parametrize("as_tensor", [False, True], ids=["float", "tensor"])
@pytest.mark.parametrize(("entry", "name"), dict.fromkeys(MEETINGS), ids=str)
def test_schedulers_set_the_learning_rate(entry, name, as_tensor):
    params, other = parameters(), parameters()
    grads = gradients(params, 5)

    def lr():
        return torch.tensor(0.1) if as_tensor else 0.1

    optimizer, reference = Modular(params, entry.make()), torch.optim.SGD(other, lr=lr())
    by_hand_params = parameters()
    by_hand = Modular(by_hand_params, entry.make())
    optimizer.param_groups[0]["lr"] = lr()
    scheduler, reference_scheduler = SCHEDULERS[name](optimizer), SCHEDULERS[name](reference)
    for row in grads:
        train(optimizer, params, [row])
        by_hand.param_groups[0]["lr"] = optimizer.param_groups[0]["lr"]
        train(by_hand, by_hand_params, [row])
        reference.step()
        advance(scheduler)
        advance(reference_scheduler)
        assert float(optimizer.param_groups[0]["lr"]) == float(reference.param_groups[0]["lr"])
        assert isinstance(optimizer.param_groups[0]["lr"], torch.Tensor) == isinstance(
            reference.param_groups[0]["lr"], torch.Tensor
        )
    assert_equal(params, by_hand_params)
    optimizer.load_state_dict(optimizer.state_dict())  # the keys that schedulers add survive
    assert optimizer.param_groups[0].keys() >= reference.param_groups[0].keys() - set(reference.defaults)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [(lambda: Adam(), lambda p: torch.optim.Adam(p)), (lambda: SGD(0.1, 0.9), lambda p: torch.optim.SGD(p, 0.1, 0.9))],
    ids=["Adam", "SGD"],
)
@pytest.mark.parametrize(
    "make",
    [
        lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=20),
        lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=3),
    ],
    ids=["OneCycleLR", "CyclicLR"],
)
def test_schedulers_cycle_momentum(ours, theirs, make):
    params, other = parameters(torch.float64), parameters(torch.float64)
    optimizer, reference = Modular(params, ours()), theirs(other)
    schedulers = make(optimizer), make(reference)
    for row in gradients(params, 15):
        train(optimizer, params, [row])
        train(reference, other, [row])
        for scheduler in schedulers:
            scheduler.step()
    torch.testing.assert_close(params, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("nonfinite", ["propagate", "skip"])  # neither sees the step that the scaler leaves out
@each_entry
def test_grad_scaler(entry, nonfinite):
    params, plain = parameters(), parameters()
    grads = gradients(params, 3)
    optimizer, reference = Modular(params, entry.make(), nonfinite=nonfinite), Modular(plain, entry.make())
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=100)
    scaler.scale(torch.ones(()))
    for row in grads:
        for param, grad in zip(params, row, strict=True):
            param.grad = grad * 1024.0
        scaler.step(optimizer)
        scaler.update()
        train(reference, plain, [row])
    assert_equal(params, plain)

    before, state = values(params), optimizer.state_dict()
    for param in params:
        param.grad = torch.full_like(param, torch.inf)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 512.0
    assert_equal(params, before)
    assert_same_checkpoint(optimizer.state_dict(), state)


@each_entry
def test_hooks_run_once_each(entry):
    params = parameters()
    optimizer = Modular(params, entry.make())
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("step pre"))
    optimizer.register_step_post_hook(lambda *_: calls.append("step post"))
    optimizer.register_state_dict_pre_hook(lambda *_: calls.append("state pre"))
    optimizer.register_state_dict_post_hook(lambda *_: calls.append("state post"))
    optimizer.register_load_state_dict_pre_hook(lambda *_: calls.append("load pre"))
    optimizer.register_load_state_dict_post_hook(lambda *_: calls.append("load post"))
    train(optimizer, params, gradients(params, 1))
    optimizer.load_state_dict(optimizer.state_dict())
    assert calls == ["step pre", "step post", "state pre", "state post", "load pre", "load post"]


@each_entry
def test_load_hooks_may_change_the_checkpoint_and_see_the_result(entry):
    params = parameters(torch.bfloat16)
    optimizer = Modular(params, entry.make())
    train(optimizer, params, gradients(params, 2))
    saved = optimizer.state_dict()
    expected = [dict(state) for state in optimizer.state.values()]
    seen = []

    def renamed(_, state_dict):
        return {"state": state_dict["was"], "param_groups": state_dict["param_groups"]}

    optimizer.register_load_state_dict_pre_hook(renamed)
    optimizer.register_load_state_dict_post_hook(lambda o: seen.extend(dict(s) for s in o.state.values()))
    optimizer.load_state_dict({"was": saved["state"], "param_groups": saved["param_groups"]})
    torch.testing.assert_close(seen, expected, rtol=0, atol=0)


@each_entry
def test_closure_is_called_once_with_gradients_enabled(entry):
    params, plain = parameters(), parameters()
    calls = []

    def closure():
        calls.append(torch.is_grad_enabled())
        optimizer.zero_grad()
        loss = sum((p**2).sum() for p in params)
        loss.backward()
        return loss

    optimizer = Modular(params, entry.make())
    with torch.no_grad():
        loss = optimizer.step(closure=closure)
    train(Modular(plain, entry.make()), plain, [[2 * p.detach() for p in plain]])
    assert calls == [True]
    assert loss.item() == pytest.approx(sum((p**2).sum().item() for p in parameters()))
    assert_equal(params, plain)


@each_entry
def test_averaged_model(entry):
    model = nn.Linear(3, 2)
    optimizer = Modular(model, entry.make())
    averaged = swa_utils.AveragedModel(model)
    history = []
    for row in gradients(model.parameters(), 3):
        train(optimizer, list(model.parameters()), [row])
        averaged.update_parameters(model)
        history.append(model.weight.detach().clone())
    torch.testing.assert_close(averaged.module.weight.detach(), torch.stack(history).mean(0))


@pytest.mark.parametrize("entry", [entry for entry in ENTRIES if not entry.joint], ids=str)
def test_optimizer_in_backward(entry):
    params, plain = parameters(), parameters()
    optimizers = {param: Modular([param], entry.make()) for param in params}

    def step_now(param):
        optimizers[param].step()
        optimizers[param].zero_grad()

    for param in params:
        param.register_post_accumulate_grad_hook(step_now)
    reference = Modular(plain, entry.make())
    for _ in range(3):
        sum((p**2).sum() for p in params).backward()
        train(reference, plain, [[2 * p.detach() for p in plain]])
    assert_equal(params, plain)


@pytest.fixture
def no_collections():
    """The compiler makes objects by the million, and looking through them takes a sixth of its time."""
    gc.disable()
    yield
    gc.enable()


WITHOUT_STATE = {"ClipNormByEMA", "ClipValueGrowth", "ZClip", "SGD-momentum"}
"""Chains that create their state in different ways, and are compiled before they have any."""
ALIKE = {"ClipNorm-rows", "ClipNorm-std", "Centralize-global", "ClipValueByEMA-tfm", "ClipValueGrowth-none", "SGD"}
ALIKE |= {"ClipNormByEMA-joint", "ClipToUsual", "Adam+two clips", "statistics+Adam", "unit chain", "scoped unit", "LR"}
ALIKE |= {
    "ClipByWeights",
    "TrackJointNorm",
    "NormalizeByEMA",
    "Normalize",
    "SkipStep-sigma",
    "ClipNorm+AdamW",
    "LimitRMS",
    "target params",
    "Adam",
}
"""Chains for which the compiler finds the code of others."""


@pytest.mark.slow
@needs_compiler
@pytest.mark.usefixtures("no_collections")
@pytest.mark.parametrize("entry", [e for e in ENTRIES if not e.varies and e.name not in ALIKE], ids=str)
def test_compiled_step(entry):
    shapes = [(4, 3), ()] if entry.name in WITHOUT_STATE else [(4, 3)]  # each tensor costs time
    params, plain = parameters(torch.float64, shapes), parameters(torch.float64, shapes)
    grads = gradients(params, 3)
    optimizer, reference = Modular(params, entry.make()), Modular(plain, entry.make())
    train(reference, plain, grads)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    step = torch.compile(optimizer.step, backend="eager")
    first = 0 if entry.name in WITHOUT_STATE else 2  # compiling takes time, again once there is state
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for k, row in enumerate(grads):
            set_grads(params, row)
            (optimizer.step if k < first else step)()
    torch.testing.assert_close(params, plain, rtol=1e-12, atol=1e-12)
    if not entry.looks:
        assert not torch._dynamo.utils.counters["graph_break"]
    for group, expected in zip(optimizer.param_groups, reference.param_groups, strict=True):
        group.pop("capturable", None)  # the compiler may add it
        group["params"] = expected["params"] = []
        assert group.pop("chain") == expected.pop("chain")
        torch.testing.assert_close(group, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(optimizer.metrics(), reference.metrics(), rtol=1e-12, atol=1e-12)
    states = [optimizer.state.get(p, {}) for p in params], [reference.state.get(p, {}) for p in plain]
    torch.testing.assert_close(*states, rtol=1e-12, atol=1e-12)


@needs_compiler
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_inductor_compiles_a_whole_step_once_it_has_state():
    shapes = [(4, 3), ()]  # each tensor costs time
    params, plain = parameters(shapes=shapes), parameters(shapes=shapes)
    grads = gradients(params, 5)
    chain = [ClipNorm(0.5, dim="global"), Adam(lr=torch.tensor(0.01))]
    optimizer, reference = Modular(params, *chain), Modular(plain, *chain)
    train(reference, plain, grads)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    step = torch.compile(optimizer.step)
    for row in grads:
        set_grads(params, row)
        step()
    torch.testing.assert_close(params, plain, rtol=1e-5, atol=1e-6)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2  # before there is state, and after


def test_groups_are_plain_and_complete():
    params = parameters()
    optimizer = Modular([{"params": params[:2]}, {"params": params[2:], "max_norm": 0.1}], ClipNorm(1), Adam())
    for group in optimizer.param_groups:
        assert type(group) is dict
        assert group.keys() == {"params", "max_norm", "betas", "eps", "lr", "chain"}
    assert optimizer.defaults == {"max_norm": 1, "betas": (0.9, 0.999), "eps": 1e-8, "lr": 1e-3}
    assert [group["max_norm"] for group in optimizer.param_groups] == [1, 0.1]
    state_dict = optimizer.state_dict()
    assert state_dict.keys() == {"state", "param_groups"}
    assert [group["params"] for group in state_dict["param_groups"]] == [[0, 1], [2, 3]]


def test_named_parameters_and_modules():
    model = nn.Linear(3, 2)
    for given in (model, model.named_parameters()):
        assert Modular(given, ClipNorm(1)).param_groups[0]["param_names"] == ["weight", "bias"]


def test_a_parameter_that_is_listed_twice_moves_twice_and_is_clipped_once():
    weight = nn.Parameter(torch.zeros(2))
    with pytest.warns(UserWarning, match="duplicate parameters"):
        optimizer = Modular([weight, weight], SGD(1.0, 0.5))
    weight.grad = torch.ones(2)
    optimizer.step()
    assert weight.tolist() == [-2, -2]
    results = []
    for keep_grads in (False, True):
        with pytest.warns(UserWarning, match="duplicate parameters"):
            optimizer = Modular([weight, weight], ClipNorm(1), SGD(1.0), keep_grads=keep_grads)
        weight.data.zero_()
        weight.grad = torch.tensor([3.0, 4.0])
        optimizer.step()
        results.append(weight.tolist())
    assert results == [[pytest.approx(-1.2), pytest.approx(-1.6)]] * 2


def test_scheduler_state_and_lr_survive_loading_before_the_first_step():
    params = parameters()
    optimizer = Modular(params, ClipNorm(1), Adam(0.1))
    scheduler = lr_scheduler.StepLR(optimizer, 1, 0.5)
    optimizer.load_state_dict(optimizer.state_dict())  # what Accelerate does at once
    train(optimizer, params, gradients(params, 1))
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.05
    assert math.isclose(optimizer.param_groups[0]["initial_lr"], 0.1)


def test_attributes_that_trainers_look_for():
    optimizer = Modular(parameters(), ClipNorm(1), LR(0.1))
    for name in ("train", "eval", "_step_supports_amp_scaling"):
        assert not hasattr(optimizer, name)
    subclass = type("Strategy", (type(optimizer),), {})
    optimizer.__class__ = subclass  # as Lightning does
    assert_same_state(optimizer, optimizer)
