"""Muon, against torch.optim.Muon and by what it promises."""

import warnings

import pytest
import torch
from optimizers.twins import same_gradients, two_of
from table import MATRICES
from torch import nn
from versions import TORCH, needs_muon, needs_spectral_unclamped

from torchzero_clip import LR, SGD, ClipNorm, Modular, Muon, Normalize, WeightDecay


@needs_muon
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (lambda: Muon(0.02), {"lr": 0.02}),
        (lambda: [Muon(), WeightDecay(0.1)], {"weight_decay": 0.1}),
        (lambda: Muon(0.02, 0.8, nesterov=False), {"lr": 0.02, "momentum": 0.8, "nesterov": False}),
        (
            lambda: Muon(0.02, adjust_lr_fn="match_rms_adamw", ns_steps=3),
            {"lr": 0.02, "adjust_lr_fn": "match_rms_adamw", "ns_steps": 3},
        ),
        pytest.param(
            lambda: Muon(0.02, adjust_lr_fn="spectral_unclamped"),
            {"lr": 0.02, "adjust_lr_fn": "spectral_unclamped"},
            marks=needs_spectral_unclamped,
        ),
    ],
    ids=["plain", "defaults and decay", "no nesterov", "match rms", "spectral"],
)
def test_equals_torch(ours, theirs, dtype):
    if dtype == torch.bfloat16 and theirs.get("nesterov") is False and TORCH < (2, 15):
        pytest.skip("this torch normalizes its momentum buffer in place")
    torch.manual_seed(0)
    params, other = two_of([torch.randn(shape).to(dtype) for shape in MATRICES])
    optimizer, reference = Modular(params, ours()), torch.optim.Muon(other, **{"weight_decay": 0.0, **theirs})
    for k in range(20):
        same_gradients(params, other, 0.0 if k == 3 else 10.0 ** (k % 5 - 2))
        optimizer.step()
        reference.step()
    tolerance = {torch.float32: 1e-5, torch.float64: 1e-9, torch.bfloat16: 2e-2}[dtype]
    torch.testing.assert_close(params, other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("adjust_lr_fn", "of_a_row", "of_a_column"),
    [(None, 1.0, 2.0), ("original", 1.0, 2.0), ("match_rms_adamw", 0.4, 0.4), ("spectral_unclamped", 0.5, 2.0)],
)
def test_each_shape_is_scaled_by_what_the_formula_says(adjust_lr_fn, of_a_row, of_a_column):
    # without iterations, a gradient of norm 2 in one element becomes 1 times the scale
    row, column = nn.Parameter(torch.zeros(1, 4)), nn.Parameter(torch.zeros(4, 1))
    row.grad, column.grad = torch.tensor([[0.0, 2.0, 0.0, 0.0]]), torch.tensor([[0.0], [0.0], [2.0], [0.0]])
    muon = Muon(1.0, momentum=0.0, nesterov=False, ns_steps=0, adjust_lr_fn=adjust_lr_fn)
    Modular([row, column], muon).step()
    torch.testing.assert_close(row.detach(), torch.tensor([[0.0, -of_a_row, 0.0, 0.0]]))
    torch.testing.assert_close(column.detach(), torch.tensor([[0.0], [0.0], [-of_a_column], [0.0]]))


@pytest.mark.parametrize("scale", [1e-30, 1e-4, 1.0, 1e25])
def test_singular_values_end_near_1_at_every_magnitude(scale):
    torch.manual_seed(0)
    param = nn.Parameter(torch.zeros(6, 4))
    param.grad = torch.randn(6, 4) * scale
    Modular([param], Muon(1.0, momentum=0.0, nesterov=False, eps=1e-38, adjust_lr_fn="match_rms_adamw")).step()
    values = torch.linalg.svdvals(param.detach()) / (0.2 * 6**0.5)
    assert values.max() < 1.6
    assert values.min() > 0.4


@pytest.mark.filterwarnings("ignore:no optimizer acts on")
def test_a_clip_after_muon_is_warned_of_once():
    params = [nn.Parameter(torch.zeros(2, 2)), nn.Parameter(torch.zeros(2))]
    matrices = [Muon().only(lambda p: p.ndim == 2), SGD().without(lambda p: p.ndim == 2)]
    with pytest.warns(UserWarning, match=r"ClipNorm\(1\) comes after Muon\(\).*Put it before") as caught:
        Modular(params, matrices, ClipNorm(1), Normalize())
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Modular(params, ClipNorm(1), matrices, LR(0.1))
        Modular(params, matrices, ClipNorm(1).only(lambda p: p.ndim == 1))


@pytest.mark.parametrize(
    ("construct", "error", "message"),
    [
        (
            lambda: Modular([nn.Parameter(torch.zeros(2))], Muon()),
            ValueError,
            r"Muon takes real matrices, got parameter 0",
        ),
        (
            lambda: Modular(nn.Linear(2, 2), Muon()),
            ValueError,
            r"got bias of shape \(2,\) .*only\(lambda p: p.ndim == 2\)",
        ),
        (lambda: Muon(momentum=-1), ValueError, r"momentum must be >= 0"),
        (lambda: Muon(ns_steps=-1), ValueError, r"ns_steps must be >= 0"),
        (lambda: Muon(eps=0), ValueError, r"eps must be > 0"),
        (lambda: Muon(ns_coefficients=(1, 2)), ValueError, r"ns_coefficients must be three numbers"),
        (lambda: Muon(adjust_lr_fn="none"), ValueError, r"adjust_lr_fn must be one of None, 'original'"),
        (lambda: Muon(nesterov=1), TypeError, r"nesterov must be True or False"),
    ],
)
def test_bad_arguments(construct, error, message):
    with pytest.raises(error, match=message):
        construct()
