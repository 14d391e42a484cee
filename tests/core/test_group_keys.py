"""Param groups of others: which keys a chain takes, stores and refuses."""

import inspect
import math

import pytest
import torch
from contract.training import gradients, parameters, train
from torch import nn, optim
from versions import needs_muon

from torchzero_clip import (
    SGD,
    Adam,
    AdamW,
    AdaptiveGradientClip,
    ClipNorm,
    ClipValueByEMA,
    Modular,
    Muon,
    WeightDecay,
    Wrap,
)
from torchzero_clip.core.group_keys import torchs_arguments

TORCHS = [k for k in vars(optim).values() if isinstance(k, type) and issubclass(k, optim.Optimizer)]
TORCHS.remove(optim.Optimizer)


class LayerDecay:
    """What timm's schedulers do: they write a rate times the ``lr_scale`` of the group."""

    def __init__(self, optimizer):
        self.optimizer = optimizer
        for group in optimizer.param_groups:
            group.setdefault("initial_lr", group["lr"])

    def step(self, number):
        for group in self.optimizer.param_groups:
            lr = group["initial_lr"] * (1 + math.cos(number)) / 2
            group["lr"] = lr * group["lr_scale"] if "lr_scale" in group else lr


def layer_groups(params):
    """Groups as `timm.optim.param_groups_layer_decay` makes them."""
    scales = [0.25, 0.5, 1.0]
    decays = [0.0, 0.3, 0.3]
    return [
        {"lr_scale": scale, "weight_decay": decay, "param_names": [f"p{i}"], "params": [param]}
        for i, (scale, decay, param) in enumerate(zip(scales, decays, params, strict=True))
    ]


def test_layer_decay_trains_as_in_timm():
    shapes = [(4, 3), (3,), (2, 2)]
    params, other = parameters(torch.float64, shapes), parameters(torch.float64, shapes)
    optimizer = Modular(layer_groups(params), ClipNorm(0.5, dim="global"), AdamW(lr=0.1))
    theirs = optim.AdamW(layer_groups(other), lr=0.1)
    assert [group["lr_scale"] for group in optimizer.param_groups] == [0.25, 0.5, 1.0]
    schedulers = LayerDecay(optimizer), LayerDecay(theirs)
    for number, row in enumerate(gradients(params, 6)):
        for scheduler in schedulers:
            scheduler.step(number)
        train(optimizer, params, [row])
        norm = torch.linalg.vector_norm(torch.cat([grad.flatten() for grad in row]))
        train(theirs, other, [[grad * (0.5 / norm).clamp(max=1) for grad in row]])
    torch.testing.assert_close(params, other, rtol=1e-9, atol=1e-9)
    assert [group["lr"] for group in optimizer.param_groups] == [group["lr"] for group in theirs.param_groups]
    assert len({group["lr"] for group in optimizer.param_groups}) == 3


class SAM(optim.Optimizer):
    """Sharpness-aware minimization, as github.com/davda54/sam builds its base optimizer from its own groups."""

    def __init__(self, params, base, rho=0.05, **settings):
        super().__init__(params, {"rho": rho, "adaptive": False, **settings})
        self.base = base(self.param_groups)
        self.param_groups = self.base.param_groups
        self.defaults.update(self.base.defaults)

    @torch.no_grad()
    def step(self, closure):
        params = [param for group in self.param_groups for param in group["params"]]
        with torch.enable_grad():
            closure()
        norm = torch.linalg.vector_norm(torch.cat([param.grad.flatten() for param in params]))
        moved = [param.grad * (self.param_groups[0]["rho"] / norm) for param in params]
        for param, by in zip(params, moved, strict=True):
            param.add_(by)
        with torch.enable_grad():
            closure()
        for param, by in zip(params, moved, strict=True):
            param.sub_(by)
        self.base.step()


def test_the_groups_of_sam():
    results = []
    for base in (lambda groups: Modular(groups, ClipNorm(1e9), SGD()), optim.SGD):
        params = parameters(torch.float64)
        optimizer = SAM(params, base, lr=0.1, momentum=0.9)

        def closure(params=params, optimizer=optimizer):
            optimizer.zero_grad()
            sum((param**2 * (1 + param)).sum() for param in params).backward()

        for _ in range(3):
            optimizer.step(closure)
        group = optimizer.param_groups[0]
        assert (group["rho"], group["adaptive"], group["lr"], group["momentum"]) == (0.05, False, 0.1, 0.9)
        results.append(params)
    torch.testing.assert_close(results[0], results[1], rtol=1e-12, atol=1e-12)


OTHERS = {"lr_scale": 0.5, "rho": 0.05, "param_group": "bn", "use_muon": True, "d": 1.0, "is_last_layer": False}
IDLE = {"weight_decay": 0.0, "momentum": 0, "maximize": False, "foreach": True, "fused": True}
REFUSED = [
    ({"weight_decay": 0.1}, "no transform has a setting 'weight_decay'; there are: lr, max_norm. Put WeightDecay"),
    ({"maximize": True}, "no transform has a setting 'maximize'; .* It is an argument of Modular"),
    ({"momentum": 0.9, "nesterov": True}, "no transform has a setting 'momentum' or 'nesterov'; there are: lr"),
    ({"percentile": 10.0}, "no transform has a setting 'percentile'"),
    ({"max_nrom": 1.0}, r"no transform has a setting 'max_nrom'; did you mean 'max_norm'\?"),
    ({"clip_norm_2/max_norm": 1.0}, "no transform has a setting 'clip_norm_2/max_norm'"),
    ({"dim": 0}, r"'dim' of ClipNorm\(1\) cannot differ between param groups"),
]


@pytest.mark.parametrize(("keys", "message"), REFUSED)
def test_what_would_be_lost_is_refused_with_one_message_in_all_places(keys, message):
    first, second = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    with pytest.raises(ValueError, match=message):
        Modular([{"params": [first], **keys}], ClipNorm(1))
    optimizer = Modular([first], ClipNorm(1))
    with pytest.raises(ValueError, match=message):
        optimizer.add_param_group({"params": [second], **keys})
    saved = optimizer.state_dict()
    saved["param_groups"][0].update(keys)
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0].keys().isdisjoint(keys)
    optimizer.param_groups[0].update(keys)
    first.grad = torch.ones(1)
    with pytest.warns(UserWarning, match=message):
        optimizer.step()
    optimizer.step()  # warnings are errors


def test_keys_of_others_are_stored_and_saved_and_loaded():
    first, second = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    optimizer = Modular([{"params": [first], **OTHERS}], ClipNorm(1))
    optimizer.add_param_group({"params": [second], **OTHERS, "lr_scale": 0.25})
    for group in optimizer.param_groups:
        assert {key: group[key] for key in OTHERS} == OTHERS | {"lr_scale": group["lr_scale"]}
    resumed = Modular([{"params": [first]}, {"params": [second]}], ClipNorm(1))
    resumed.load_state_dict(optimizer.state_dict())
    assert [group["lr_scale"] for group in resumed.param_groups] == [0.5, 0.25]
    assert resumed.param_groups[1]["param_group"] == "bn"
    first.grad = torch.ones(1)
    resumed.step()  # without a warning


def test_arguments_without_effect_are_left_out():
    param = nn.Parameter(torch.zeros(1))
    optimizer = Modular([{"params": [param], **IDLE}], ClipNorm(1))
    assert optimizer.param_groups[0].keys().isdisjoint(IDLE)
    saved = optimizer.state_dict()
    saved["param_groups"][0].update(IDLE)
    optimizer.load_state_dict(saved)


def test_a_function_of_another_package_is_no_schedule():
    param = nn.Parameter(torch.zeros(1))
    optimizer = Modular([{"params": [param], "lr_lambda": len, "max_norm": lambda step: 2.0 + step}], ClipNorm(1))
    assert optimizer.param_groups[0]["lr_lambda"] is len
    assert optimizer.param_groups[0]["max_norm"] == 2.0


@pytest.mark.parametrize("kind", TORCHS, ids=lambda kind: kind.__name__)
def test_a_group_of_torchs_optimizer_has_all_its_arguments(kind):
    group = kind([nn.Parameter(torch.zeros(2, 2))]).param_groups[0]
    assert inspect.signature(kind).parameters.keys() <= group.keys()
    assert torchs_arguments(group) == group.keys() - {"params"}


BUILT = [
    (lambda p: optim.AdamW(p, 0.1, (0.8, 0.9), weight_decay=0.3, fused=True), [AdamW()]),
    (lambda p: optim.Adam(p, 0.1, eps=1e-3, weight_decay=0.3), [WeightDecay(0.0), Adam()]),
    (lambda p: optim.Adam(p, 0.1, amsgrad=True), [AdamW(weight_decay=1.0, amsgrad=True)]),
    (lambda p: optim.AdamW(p, 0.1, eps=1e-3), [AdaptiveGradientClip(1e9, eps=0.1), AdamW()]),
    (lambda p: optim.SGD(p, 0.1, 0.9, nesterov=True), [SGD(momentum=0.5, nesterov=True)]),
    pytest.param(
        lambda p: optim.Muon(p, 0.1, weight_decay=0.3, momentum=0.8), [Muon(), WeightDecay(0.0)], marks=needs_muon
    ),
    (lambda p: optim.NAdam(p, 0.1, momentum_decay=0.1), [Wrap(optim.NAdam)]),
    (lambda p: optim.AdamW(p, 0.1, weight_decay=0.3), [Wrap(optim.AdamW)]),
    (lambda p: optim.RAdam(p, 0.1, weight_decay=0.3, decoupled_weight_decay=True), [
        Wrap(optim.RAdam, decoupled_weight_decay=True)
    ]),
]  # fmt: skip


@pytest.mark.quick_cases(len(BUILT))
@pytest.mark.parametrize(("build", "chain"), BUILT)
def test_groups_of_an_optimizer_that_was_built(build, chain):
    params, other = parameters(torch.float64, [(4, 3), (2, 5)]), parameters(torch.float64, [(4, 3), (2, 5)])
    built = build(params)
    built.param_groups[0]["initial_lr"] = 0.1
    optimizer, theirs = Modular(built.param_groups, ClipNorm(1e9), chain), build(other)
    grads = gradients(params, 4)
    train(optimizer, params, grads)
    train(theirs, other, grads)
    for ours, reference in zip(params, other, strict=True):
        torch.testing.assert_close(ours, reference, rtol=1e-3, atol=1e-3 if "Muon" in repr(chain) else 1e-9)
    assert optimizer.param_groups[0].keys() == {
        *optimizer.runner.nodes.storage_keys.values(),
        "params",
        "chain",
        "initial_lr",
    }


LOST = [
    (lambda p: optim.AdamW(p, weight_decay=0.1), [Adam()], "no transform has a setting 'weight_decay'"),
    (lambda p: optim.SGD(p, momentum=0.9), [AdamW()], "no transform has a setting 'momentum'"),
    (lambda p: optim.AdamW(p, amsgrad=True), [AdamW()], r"'amsgrad' of Adam\(\) cannot differ"),
    (lambda p: optim.AdamW(p), [AdamW(amsgrad=True)], r"'amsgrad' of Adam\(amsgrad=True\) cannot differ"),
    (lambda p: optim.AdamW(p, maximize=True), [AdamW()], "'maximize'.* It is an argument of Modular"),
    (lambda p: optim.Adadelta(p), [AdamW()], "no transform has a setting 'rho'"),
    (lambda p: optim.RMSprop(p), [SGD()], "no transform has a setting 'alpha' or 'eps'"),
    (lambda p: optim.Rprop(p), [SGD()], "no transform has a setting 'etas' or 'step_sizes'"),
    (lambda p: optim.Adam(p, weight_decay=0.1), [AdamW()], "'decoupled_weight_decay'.* otherwise before it"),
    (lambda p: optim.AdamW(p), [WeightDecay(0.1), Adam()], "'decoupled_weight_decay'.* after the optimizer"),
    (lambda p: optim.RAdam(p), [Wrap(optim.RAdam, decoupled_weight_decay=True)], "cannot differ between param groups"),
    (lambda p: optim.NAdam(p, weight_decay=0.1, decoupled_weight_decay=True), [Wrap(optim.NAdam)], "A Wrap takes it"),
    (lambda p: optim.AdamW(p), [Wrap(optim.Adam)], "A Wrap takes it"),
]


@pytest.mark.quick_cases(len(LOST))
@pytest.mark.parametrize(("build", "chain", "message"), LOST)
def test_what_a_chain_cannot_take_of_a_built_optimizer_is_named(build, chain, message):
    built = build([nn.Parameter(torch.zeros(2, 2))])
    with pytest.raises(ValueError, match=message):
        Modular(built.param_groups, ClipNorm(1), chain)


def test_the_eps_of_a_built_optimizer_is_that_of_the_rule():
    built = optim.AdamW([nn.Parameter(torch.ones(2, 2))], eps=1e-5)
    group = Modular(built.param_groups, AdaptiveGradientClip(), AdamW()).param_groups[0]
    assert (group["eps"], group["adam/eps"]) == (AdaptiveGradientClip().defaults["eps"], 1e-5)
    group = Modular([{"params": [nn.Parameter(torch.ones(2, 2))], "eps": 1e-5}], AdaptiveGradientClip(), AdamW())
    assert (group.param_groups[0]["eps"], group.param_groups[0]["adam/eps"]) == (1e-5, 1e-8)


def test_a_momentum_of_zero_is_not_meant_for_a_transform_inside_another():
    built = optim.SGD([nn.Parameter(torch.ones(2))])
    chain = ClipValueByEMA(ema_tfm=SGD(momentum=0.9)), AdamW()
    with pytest.raises(ValueError, match="write 'clip_value_by_ema/ema_tfm/sgd/momentum'"):
        Modular([{**built.param_groups[0], "momentum": 0.5}], chain)
    inner = Modular(built.param_groups, chain).param_groups[0]["clip_value_by_ema/ema_tfm/sgd/momentum"]
    assert inner == 0.9


@pytest.mark.parametrize("kind", [optim.AdamW, optim.Adamax, optim.SGD], ids=lambda kind: kind.__name__)
def test_the_rho_of_sam_beside_all_arguments_of_another_optimizer(kind):
    """Adamax and AdamW have all other arguments of Adadelta."""
    built = kind([nn.Parameter(torch.ones(2))])
    chain = ClipNorm(1), SGD() if kind is optim.SGD else AdamW()
    group = Modular([{**built.param_groups[0], "rho": 0.05}], *chain).param_groups[0]
    assert group["rho"] == 0.05
