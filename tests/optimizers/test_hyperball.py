"""Hyperball, against its formula in float64, against HeavyBall, and by what it promises."""

import math
import warnings

import pytest
import ranks
import torch
import torch.distributed as dist
from contract.training import assert_equal, set_grads, values
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from torchzero_clip import (
    LR,
    SGD,
    Adam,
    AdamW,
    ClipNorm,
    Hyperball,
    Modular,
    Muon,
    step_in_backward,
)

SHAPES = [(4, 3), (3, 5), (2, 3, 2), (1, 6)]  # the second of two ranks has no row of the last one


def parameters(dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)) for shape in SHAPES]


def gradients(count, dtype=torch.float64):
    generator = torch.Generator().manual_seed(1)
    return [[torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in SHAPES] for _ in range(count)]


def length(tensor):
    return math.sqrt(sum(x * x for x in tensor.flatten().tolist()))


def moved(weight, update, radius, lr):
    """The formula, with Python's numbers."""
    w, u = weight.flatten().tolist(), update.flatten().tolist()
    share = lr * radius / length(update)
    w = [a - share * b for a, b in zip(w, u, strict=True)]
    size = math.sqrt(sum(x * x for x in w))
    return torch.tensor([radius * x / size for x in w], dtype=torch.float64).view_as(weight)


@pytest.mark.parametrize("fast", [True, False])
def test_it_is_the_formula_with_the_updates_of_the_rule_before(fast):
    params = parameters()
    groups = [{"params": params[:2]}, {"params": params[2:], "lr": torch.tensor(0.3)}]
    optimizer = Modular(groups, SGD(0.02, momentum=0.5), Hyperball(), fast=fast)
    expected, buffers = values(params), [torch.zeros_like(p) for p in params]
    radii = [length(p) for p in expected]
    for k, row in enumerate(gradients(5)):
        optimizer.param_groups[0]["lr"] = 0.02 * (k + 1)
        set_grads(params, row)
        optimizer.step()
        for i, grad in enumerate(row):
            buffers[i] = 0.5 * buffers[i] + grad
            expected[i] = moved(expected[i], buffers[i], radii[i], 0.3 if i >= 2 else 0.02 * (k + 1))
        torch.testing.assert_close(values(params), expected, rtol=1e-7, atol=1e-7)  # 0.3 is rounded to float32
    assert [optimizer.state[p]["hyperball/radius"].item() for p in params] == pytest.approx(radii)


@pytest.mark.slow
@pytest.mark.peers
@pytest.mark.filterwarnings("ignore")
def test_it_is_that_of_heavyball():
    heavyball = pytest.importorskip("heavyball", reason="heavyball is not installed")
    heavyball.utils.compile_mode = None
    params, other = parameters(torch.float32), parameters(torch.float32)
    optimizer = Modular(params, Adam(lr=0.01, betas=(0.0, 0.99)), Hyperball())
    reference = heavyball.HyperBallAdamW(other, lr=0.01, betas=(0.0, 0.99), weight_decay=0.0, gradient_clipping=None)
    for row in gradients(10, torch.float32):
        for own in (params, other):
            set_grads(own, row)
        optimizer.step()
        reference.step()
    torch.testing.assert_close(values(params), values(other), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 4e-3), (torch.float16, 5e-4)])
def test_norms_stay(dtype, tolerance):
    torch.manual_seed(0)
    param = nn.Parameter(torch.randn(40, 30).to(dtype))
    radius = param.detach().double().norm()
    optimizer = Modular([param], Adam(lr=0.02, state_dtype=torch.float32), Hyperball())
    for _ in range(300):
        param.grad = torch.randn(40, 30).to(dtype)
        optimizer.step()
    assert param.detach().double().norm() == pytest.approx(radius.item(), rel=tolerance)


def test_muon_and_adamw_have_rates_of_their_own_and_nothing_is_warned_of():
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    hidden = "0.weight"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer = Modular(
            model,
            ClipNorm(1, dim="global"),
            Muon(lr=0.02).only(hidden),
            AdamW(lr=3e-4).without(hidden),
            Hyperball().only(hidden),
        )
    assert [group["lr"] for group in optimizer.param_groups] == [0.02, 3e-4]
    before = [p.detach().clone() for p in model.parameters()]
    model(torch.randn(5, 3)).square().mean().backward()
    optimizer.step()
    weight, rest = model[0].weight.detach(), list(model.parameters())[1:]
    assert weight.norm() == pytest.approx(before[0].norm().item())
    turned = 2 * math.asin((weight - before[0]).norm().item() / (2 * weight.norm().item()))
    assert 0.015 < turned <= math.asin(0.02) + 1e-6  # the direct step is 0.02 long; its radial part is taken back
    assert all(not torch.equal(p, b) for p, b in zip(rest, before[1:], strict=True))


@pytest.mark.parametrize(("lr", "grad"), [(0.0, 1.0), (0.1, 0.0)])
def test_a_step_of_length_0_changes_no_bit(lr, grad):
    torch.manual_seed(0)
    param = nn.Parameter(torch.randn(7, 5))
    before = param.detach().clone()
    optimizer = Modular([param], SGD(lr), Hyperball())
    for _ in range(3):
        param.grad = torch.full_like(param, grad)
        optimizer.step()
    assert torch.equal(param, before)


def test_a_step_that_ends_at_0_is_survived():
    param = nn.Parameter(torch.tensor([[3.0, 4.0]]))
    optimizer = Modular([param], SGD(1.0), Hyperball())
    for grad in ([3.0, 4.0], [-1.0, 0.0]):
        param.grad = torch.tensor([grad])
        optimizer.step()
    torch.testing.assert_close(param.data, torch.tensor([[5.0, 0.0]]))


@pytest.mark.parametrize("size", [1e-30, 1e-20, 1e25, 1e37])
def test_updates_of_every_size_give_the_same_step(size):
    results = []
    for scale in (1.0, size):
        param = nn.Parameter(torch.tensor([[3.0, 4.0], [0.0, 1.0]]))
        param.grad = torch.tensor([[1.0, -2.0], [0.5, 3.0]]) * scale
        Modular([param], SGD(0.1), Hyperball()).step()
        results.append(param.detach())
    torch.testing.assert_close(results[1], results[0])


def test_a_bad_gradient_may_be_skipped():
    param = nn.Parameter(torch.tensor([[3.0, 4.0]]))
    optimizer = Modular([param], Adam(0.1), Hyperball(), nonfinite="skip")
    param.grad = torch.tensor([[math.nan, 1.0]])
    optimizer.step()
    assert param.tolist() == [[3.0, 4.0]]


@pytest.mark.parametrize(
    ("chain", "message"),
    [
        ([Adam(), Hyperball()], r"got bias of shape \(2,\): limit it, for example Hyperball\(\).only\("),
        ([Adam(), LR(0.1), Hyperball().only("weight")], r"LR\(0.1\) has to come after it"),
        ([Adam(), Hyperball().only("weight"), ClipNorm(1)], r"ClipNorm\(1\) has to come before it"),
        ([AdamW(), Hyperball().only("weight")], r"WeightDecay\(0.01\) would only turn.*use Adam in place of AdamW"),
    ],
)
def test_refusals(chain, message):
    with pytest.raises(ValueError, match=message):
        Modular(nn.Linear(3, 2), chain)


def test_weights_of_zeros_are_refused():
    layer = nn.Linear(3, 2)
    nn.init.zeros_(layer.weight)
    with pytest.raises(ValueError, match=r"norm of weight, which is 0.*initialize it.*without"):
        Modular(layer, Adam(), Hyperball().only("weight"))


def test_it_joins_a_run_by_new():
    params = parameters()
    optimizer = Modular(params, Adam(0.01))
    for row in gradients(2):
        set_grads(params, row)
        optimizer.step()
    resumed = Modular(params, Adam(), Hyperball())
    resumed.load_state_dict(optimizer.state_dict(), new=["hyperball"])
    radii = [length(p) for p in params]
    set_grads(params, gradients(1)[0])
    resumed.step()
    assert [length(p) for p in params] == pytest.approx(radii)


def test_steps_in_the_backward_are_the_same():
    results = []
    for in_backward in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4, bias=False), nn.Tanh(), nn.Linear(4, 2, bias=False))
        optimizer = Modular(model, Adam(0.01), Hyperball())
        if in_backward:
            step_in_backward(optimizer)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(5, 3)).square().mean().backward()
            optimizer.step()
        results.append([p.detach() for p in model.parameters()])
    assert_equal(*results)


def train_in_shards():
    """On a mesh of two, by rows and by columns; the second rank has no row of the first and the last parameter."""
    mesh = init_device_mesh("cpu", (2,))
    plain = [nn.Parameter(torch.ones(1, 4, dtype=torch.float64)), *parameters()]
    dims = [0, 0, 1, 2, 0]
    sharded = [nn.Parameter(distribute_tensor(p.detach(), mesh, [Shard(d)])) for p, d in zip(plain, dims, strict=True)]
    one, two = (Modular(p, SGD(0.1, momentum=0.5), Hyperball()) for p in (plain, sharded))
    for row in gradients(4):
        row = [torch.arange(4.0, dtype=torch.float64).view(1, 4), *row]
        set_grads(plain, row)
        set_grads(sharded, [distribute_tensor(g, mesh, [Shard(d)]) for g, d in zip(row, dims, strict=True)])
        one.step()
        two.step()
    torch.testing.assert_close([p.full_tensor() for p in values(sharded)], values(plain), rtol=1e-12, atol=1e-12)
    radii = [state["hyperball/radius"] for state in two.state.values()]
    everywhere = [torch.empty(len(radii), dtype=torch.float64) for _ in range(2)]
    dist.all_gather(everywhere, torch.stack(radii))
    assert torch.equal(*everywhere)


@pytest.mark.slow
def test_sharded_parameters_take_the_steps_of_one_process():
    ranks.run(train_in_shards, 2)
