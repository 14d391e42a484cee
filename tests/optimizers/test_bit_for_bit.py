"""Chains that end in Adam or SGD are torch's optimizers to the last bit, with an inactive clip before them."""

import pytest
import torch
from contract.training import assert_equal
from torch import nn

from torchzero_clip import LR, SGD, Adam, AdamW, ClipNorm, Modular, Muon, WeightDecay

REAL = [torch.float32, torch.float64, torch.bfloat16]
ALL = [*REAL, torch.complex64]

PAIRS = {
    "AdamW": (lambda: AdamW(0.01), lambda p: torch.optim.AdamW(p, 0.01), ALL),
    "AdamW amsgrad": (
        lambda: AdamW(0.01, (0.5, 0.6), eps=1e-3, weight_decay=0.1, amsgrad=True),
        lambda p: torch.optim.AdamW(p, 0.01, (0.5, 0.6), eps=1e-3, weight_decay=0.1, amsgrad=True),
        ALL,
    ),
    "AdamW written out": (lambda: [Adam(), WeightDecay(0.01), LR(0.1)], lambda p: torch.optim.AdamW(p, 0.1), ALL),
    "AdamW fused": (lambda: AdamW(0.01, fused=True), lambda p: torch.optim.AdamW(p, 0.01, fused=True), REAL),
    "AdamW foreach": (lambda: AdamW(0.01), lambda p: torch.optim.AdamW(p, 0.01, foreach=True), ALL),
    "AdamW tensor lr": (lambda: AdamW(torch.tensor(0.1)), lambda p: torch.optim.AdamW(p, torch.tensor(0.1)), ALL),
    "Adam": (lambda: Adam(0.01), lambda p: torch.optim.Adam(p, 0.01), ALL),
    "Adam L2": (
        lambda: [WeightDecay(0.1), Adam(0.01)],
        lambda p: torch.optim.Adam(p, 0.01, weight_decay=0.1),
        ALL,
    ),
    "SGD": (lambda: SGD(0.01), lambda p: torch.optim.SGD(p, 0.01), ALL),
    "SGD dampening": (
        lambda: SGD(0.01, 0.9, dampening=0.3),
        lambda p: torch.optim.SGD(p, 0.01, 0.9, dampening=0.3),
        ALL,
    ),
    "SGD nesterov L2": (
        lambda: [WeightDecay(0.1), SGD(0.01, 0.9, nesterov=True)],
        lambda p: torch.optim.SGD(p, 0.01, 0.9, weight_decay=0.1, nesterov=True),
        ALL,
    ),
}
CASES = [(name, dtype) for name, (_, _, dtypes) in PAIRS.items() for dtype in dtypes]


def twins(dtype):
    values = [torch.randn(shape, dtype=dtype) for shape in [(40, 33), (33,), (7, 5, 3), (), (0, 3)]]
    return tuple([nn.Parameter(value.clone()) for value in values] for _ in range(2))


def same_gradients(params, other, k):
    for a, b in zip(params, other, strict=True):
        a.grad = torch.randn_like(a) * (k % 3)  # all zero now and then
        b.grad = a.grad.clone()


@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize(("name", "dtype"), CASES, ids=lambda x: str(x))
def test_every_bit_is_torchs(name, dtype, maximize):
    ours, theirs, _ = PAIRS[name]
    params, other = twins(dtype)
    optimizer = Modular(params, ClipNorm(1e9, dim="global"), ours(), maximize=maximize)
    reference = theirs(other)
    reference.param_groups[0]["maximize"] = maximize
    schedulers = [torch.optim.lr_scheduler.CosineAnnealingLR(o, 20) for o in (optimizer, reference)]
    for k in range(12):
        same_gradients(params, other, k)
        optimizer.step()
        reference.step()
        assert_equal(params, other)
        for scheduler in schedulers:
            scheduler.step()


@pytest.mark.parametrize("fused", [False, True])
def test_every_bit_is_torchs_within_scopes_and_groups(fused):
    params, other = twins(torch.float32)
    wide, narrow = [0, 2], [1, 3, 4]
    groups = [{"params": params[:2]}, {"params": params[2:], "weight_decay": 0.5, "lr": 0.1}]
    is_wide = {id(params[i]) for i in wide}
    rest = AdamW(0.01, fused=fused).without(lambda p: id(p) in is_wide)
    optimizer = Modular(groups, SGD(momentum=0.9).only(lambda p: id(p) in is_wide), rest)
    sgd = torch.optim.SGD([{"params": other[0], "lr": 0.01}, {"params": other[2], "lr": 0.1}], momentum=0.9)
    small = [{"params": other[1]}, {"params": [other[3], other[4]], "lr": 0.1, "weight_decay": 0.5}]
    adamw = torch.optim.AdamW(small, 0.01, weight_decay=0.01, fused=fused)
    for k in range(6):
        same_gradients(params, other, k)
        optimizer.step()
        sgd.step()
        adamw.step()
        assert_equal([params[i] for i in [*wide, *narrow]], [other[i] for i in [*wide, *narrow]])


def test_a_later_transform_for_some_of_the_parameters_still_acts():
    """Clips the steps of the vectors only: Adam cannot take its parameters to the end of the chain by itself."""
    params, _ = twins(torch.float32)
    before = [param.detach().clone() for param in params]
    optimizer = Modular(params, Adam(), LR(0.1), ClipNorm(1e-3).only(lambda p: p.ndim == 1))
    same_gradients(params, params, 1)
    optimizer.step()
    moved = [(param.detach() - old).norm().item() for param, old in zip(params, before, strict=True)]
    assert moved[1] == pytest.approx(1e-3, rel=1e-4)
    assert moved[0] == pytest.approx(0.1 * (40 * 33) ** 0.5, rel=1e-3)


def test_muon_beside_adamw_is_torchs_muon_beside_torchs_adamw():
    params, other = twins(torch.float32)
    matrix = [Muon(adjust_lr_fn="match_rms_adamw").only(lambda p: p.ndim == 2)]
    optimizer = Modular(params[:4], *matrix, AdamW(0.02, weight_decay=0.0).without(lambda p: p.ndim == 2))
    muon = torch.optim.Muon([other[0]], 0.02, weight_decay=0.0, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW(other[1:4], 0.02, weight_decay=0.0)
    for k in range(6):
        same_gradients(params, other, k)
        optimizer.step()
        muon.step()
        adamw.step()
        assert_equal(params[1:4], other[1:4])
        torch.testing.assert_close(params[0], other[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_decay_rates_and_learning_rates_are_not_rounded_to_half_precision(dtype):
    """torch's foreach multiplication on CPU would make 0.999 a 1 in bfloat16: squares never decayed."""
    params = [nn.Parameter(torch.zeros(300, dtype=dtype)) for _ in range(2)]
    optimizer = Modular(params[:1], Adam(betas=(0.9, 0.99)), LR(1.0), ClipNorm(1e9))
    params[0].grad = torch.ones_like(params[0])
    optimizer.step()
    squares = optimizer.state[params[0]]["adam/exp_avg_sq"].copy_(torch.rand(300))
    expected = (squares.double() * 0.99).to(dtype)
    params[0].grad = torch.zeros_like(params[0])
    optimizer.step()
    assert_equal([squares], [expected])

    params[1].grad = torch.rand_like(params[1])
    Modular(params[1:], LR(0.9), ClipNorm(1e9)).step()
    assert_equal(params[1:], [-(params[1].grad.double() * 0.9).to(dtype)])


@pytest.mark.parametrize("fused", [False, True])
def test_every_bit_is_torchs_where_only_some_parameters_decay(fused):
    """The usual recipe: no decay for biases and norms."""
    params, other = twins(torch.float32)
    optimizer = Modular(params, Adam(0.1, fused=fused), WeightDecay(0.3).only(lambda p: p.ndim > 1))
    chosen = [p for p in other if p.ndim > 1], [p for p in other if p.ndim <= 1]
    groups = [{"params": chosen[0], "weight_decay": 0.3}, {"params": chosen[1], "weight_decay": 0.0}]
    reference = torch.optim.AdamW(groups, 0.1, fused=fused)
    for k in range(6):
        same_gradients(params, other, k)
        optimizer.step()
        reference.step()
        assert_equal(params, other)


def test_every_bit_is_torchs_beside_parameters_of_other_dtypes_and_layouts():
    values = [torch.randn(4, 4), torch.randn(3).half(), torch.randn(3, dtype=torch.complex64), torch.randn(8, 1, 3, 3)]
    params, other = ([nn.Parameter(value.clone()) for value in values] for _ in range(2))
    optimizer = Modular(params, AdamW(0.1, fused=True))
    reference = torch.optim.AdamW([other[0], other[3]], 0.1, fused=True)
    for k in range(1, 4):
        same_gradients(params, other, k)
        params[3].grad = params[3].grad.contiguous(memory_format=torch.channels_last)
        optimizer.step()
        reference.step()
        assert_equal([params[0], params[3]], [other[0], other[3]])


@pytest.mark.parametrize("chain", [lambda: Adam(), lambda: AdamW(fused=True), lambda: SGD(momentum=0.9)])
def test_a_model_may_change_its_dtype_between_steps(chain):
    model = nn.Linear(3, 2)
    optimizer = Modular(model, chain())
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        model.to(dtype)
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        optimizer.step()
        assert all(param.isfinite().all() for param in model.parameters())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", REAL, ids=str)
def test_every_bit_is_torchs_fused_kernels_on_cuda(dtype):
    params, other = ([nn.Parameter(p.detach().cuda()) for p in group] for group in twins(dtype))
    optimizer, reference = Modular(params, AdamW(0.01, fused=True)), torch.optim.AdamW(other, 0.01, fused=True)
    for k in range(6):
        same_gradients(params, other, k)
        optimizer.step()
        reference.step()
        assert_equal(params, other)
