"""The one learning rate of a chain, and several update rules with rates of their own."""

import pytest
import torch
from contract.entries import is_matrix
from contract.schedulers import SCHEDULERS, advance
from contract.training import gradients, stepped, train
from torch import nn
from versions import needs_muon

from torchzero_clip import LR, SGD, Adam, AdamW, Chain, ClipNorm, ClipValue, Modular, Muon, SkipStep, UpdateRule


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))


def chain():
    return [ClipNorm(1, dim="global"), Muon(lr=0.02).only(is_matrix), AdamW(lr=3e-4).without(is_matrix)]


@needs_muon
def test_it_is_each_optimizer_of_torch_on_its_own_parameters():
    module, other = model(), model()
    params, plain = list(module.parameters()), list(other.parameters())
    optimizer = Modular(module, *chain())
    muon = torch.optim.Muon([p for p in plain if is_matrix(p)], lr=0.02, weight_decay=0.0)
    adamw = torch.optim.AdamW([p for p in plain if not is_matrix(p)], lr=3e-4)
    assert [group["lr"] for group in optimizer.param_groups] == [0.02, 3e-4]
    assert [group["param_names"] for group in optimizer.param_groups] == [
        ["0.weight", "2.weight"],
        ["0.bias", "2.bias"],
    ]
    for row in gradients(params, 5):
        train(optimizer, params, [row])
        for param, grad in zip(plain, row, strict=True):
            param.grad = grad.clone()
        torch.nn.utils.clip_grad_norm_(plain, 1.0)
        muon.step()
        adamw.step()
    torch.testing.assert_close(params, plain, rtol=1e-3, atol=1e-4)  # Muon orthogonalizes in bfloat16


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("as_tensor", [False, True])
def test_schedulers_see_one_rate_per_group(name, as_tensor):
    def rate(value):
        return torch.tensor(value) if as_tensor else value

    module = model()
    params = list(module.parameters())
    rules = [SGD(rate(0.5)).only(is_matrix), Adam(rate(0.25)).without(is_matrix)]
    optimizer = Modular(module, *rules)
    reference = torch.optim.SGD([{"params": params[::2], "lr": rate(0.5)}, {"params": params[1::2], "lr": rate(0.25)}])
    schedulers = [SCHEDULERS[name](optimizer), SCHEDULERS[name](reference)]
    for row in gradients(params, 4):
        train(optimizer, params, [row])
        reference.step()
        for scheduler in schedulers:
            advance(scheduler)
        assert [float(g["lr"]) for g in optimizer.param_groups] == [float(g["lr"]) for g in reference.param_groups]


def test_a_rate_in_a_group_of_the_user_wins():
    module = model()
    groups = [{"params": list(module[0].parameters())}, {"params": list(module[2].parameters()), "lr": 0.125}]
    optimizer = Modular(groups, SGD(0.5).only(is_matrix), Adam(0.25).without(is_matrix))
    assert [(len(g["params"]), g["lr"]) for g in optimizer.param_groups] == [(1, 0.5), (1, 0.25), (2, 0.125)]
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1, 1))]})
    assert [group["lr"] for group in optimizer.param_groups[3:]] == [0.25, 0.5]


def test_rules_without_a_rate_have_their_default_beside_those_with_one():
    rules = [SGD(0.5).only("0"), Adam(0.25).only("2.bias"), Adam().only("2.weight")]
    optimizer = Modular(model(), *rules)
    assert {name: group["lr"] for group in optimizer.param_groups for name in group["param_names"]} == {
        "0.weight": 0.5, "0.bias": 0.5, "2.bias": 0.25, "2.weight": 1e-3,
    }  # fmt: skip


def test_one_named_rate_serves_all():
    rules = [SGD(0.5).only(is_matrix), Adam().without(is_matrix)]
    assert [group["lr"] for group in Modular(model(), *rules).param_groups] == [0.5]


@pytest.mark.filterwarnings("ignore:two optimizers act on")
def test_a_parameter_of_two_rates_is_refused():
    with pytest.raises(
        ValueError, match=r"0\.weight has several learning rates, those of SGD\(lr=0.5\), Adam\(lr=0.25"
    ):
        Modular(model(), SGD(0.5), Adam(0.25).only(is_matrix))
    assert [g["lr"] for g in Modular(model(), SGD(0.5), Adam(0.5)).param_groups] == [0.5]
    groups = [{"params": model().parameters(), "lr": 0.1}]
    assert [g["lr"] for g in Modular(groups, SGD(0.5), Adam(0.25)).param_groups] == [0.1]


def test_rates_may_be_functions_and_rules_stand_in_units():
    unit = Chain(SGD(lambda step: 0.5 / (step + 1)), target="update_difference").only(is_matrix)
    module = model()
    optimizer = Modular(module, unit, Adam(0.25).without(is_matrix))
    params = list(module.parameters())
    seen = []
    for row in gradients(params, 3):
        seen.append([group["lr"] for group in optimizer.param_groups])
        train(optimizer, params, [row])
    assert seen == [[0.5, 0.25], [0.25, 0.25], [pytest.approx(0.5 / 3), 0.25]]


@pytest.mark.parametrize("scoped", [False, True])
def test_tensor_rates_are_not_shared(scoped):
    rate = torch.tensor(0.5)
    rules = [SGD(rate).only(is_matrix), Adam(0.25).without(is_matrix)] if scoped else [SGD(rate)]
    first, second = Modular(model(), *rules), Modular(model(), *rules)
    first.param_groups[0]["lr"].fill_(9.0)
    first.add_param_group({"params": [("added", nn.Parameter(torch.zeros(1, 1)))]})
    assert [r.item() for r in (rate, second.param_groups[0]["lr"], first.param_groups[-1]["lr"])] == [0.5] * 3


def test_repr_shows_the_rate_of_each_rule():
    optimizer = Modular(model(), *chain())
    for group in optimizer.param_groups:
        group["lr"] *= 0.5
    text = repr(optimizer)
    assert "Muon(lr=0.01).only(is_matrix)" in text
    assert "AdamW(lr=0.00015).without(is_matrix)" in text


class NoRate(UpdateRule):
    """An update rule of a user, without a rate or a default."""

    def apply_tensors(self, updates, step):
        return updates


def test_a_rule_without_any_rate_takes_that_of_no_other():
    params = [nn.Parameter(torch.ones((2,) * ndim)) for ndim in (1, 2, 3)]
    first, second = SGD(0.3).only(lambda p: p.ndim == 1), SGD(0.02).only(lambda p: p.ndim == 2)
    optimizer = Modular(params, second, first, NoRate({}).only(lambda p: p.ndim == 3))
    assert [g["lr"] for g in optimizer.param_groups] == [0.3, 0.02, 1.0]


@pytest.mark.filterwarnings("ignore:two optimizers act on")
@pytest.mark.parametrize(
    ("make", "lr"),
    [
        (lambda: ClipNorm(1), 1.0),
        (lambda: Adam(), 1e-3),
        (lambda: SGD(), 1e-3),
        (lambda: [Adam(), SGD()], 1e-3),
        (lambda: Adam(0.5), 0.5),
        (lambda: [Adam(), SGD(0.25)], 0.25),
        (lambda: [LR(0.125), Adam()], 0.125),
        (lambda: Chain(LR(0.125), target="update_difference"), 0.125),
        (lambda: Chain(Adam(lr=0.5), ClipValue(0.1), target="update_difference"), 0.5),
    ],
)
def test_there_is_exactly_one_learning_rate(make, lr):
    optimizer = Modular([nn.Parameter(torch.zeros(1))], make())
    assert optimizer.param_groups[0]["lr"] == lr
    assert sum("lr" in key for key in optimizer.defaults) == 1


@pytest.mark.filterwarnings("ignore:two optimizers act on")
def test_default_learning_rates_that_differ_need_lr():
    class Slow(SGD):
        default_lr = 0.5

    weight = nn.Parameter(torch.zeros(1))
    with pytest.raises(ValueError, match=r"different default learning rates \[0.001, 0.5\]: add LR"):
        Modular([weight], Adam(), Slow())
    assert Modular([weight], Adam(), Slow(), LR(0.1)).param_groups[0]["lr"] == 0.1


def test_lr_scales_where_it_stands():
    assert stepped([LR(0.5), ClipNorm(1)], [3.0, 4.0])[0].tolist() == pytest.approx([-0.6, -0.8])
    assert stepped([ClipNorm(1), LR(0.5)], [3.0, 4.0])[0].tolist() == pytest.approx([-0.3, -0.4])


@pytest.mark.parametrize("fast", [True, False])
def test_the_place_of_a_gate_changes_no_rounding(fast):
    grad, results = torch.randn(1000), []
    for chain in ([LR(0.1), SkipStep(max_norm=1e9)], [SkipStep(max_norm=1e9), LR(0.1)], [LR(0.1)]):
        param = nn.Parameter(torch.linspace(-1, 1, 1000))
        param.grad = grad.clone()
        Modular([param], *chain, fast=fast).step()
        results.append(param)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])
