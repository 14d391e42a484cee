"""Norms that float32 cannot hold: functions return float64 on the CPU, and limits and metrics stay exact."""

import math

import pytest
import torch
from contract.entries import ENTRIES
from contract.training import parameters
from torch import nn

from torchzero_clip import Modular, Recorder, clip_grad_norm_, clip_grads_with_norm_, get_total_norm, normalize_grads_

LARGE, SMALL = torch.finfo(torch.float32).max, torch.finfo(torch.float32).tiny
DTYPES = (torch.float32, torch.bfloat16)
ORDS = (1, 2, 3, math.inf, 0.5, "mad", "std", "var", "sum", 0)


def by_hand(values, ord):
    """The metric of Python numbers, without overflow: of numbers that are divided by the largest of them."""
    scale = max(map(abs, values))
    x = [value / scale for value in values]
    mean = math.fsum(x) / len(x)
    var = math.fsum((v - mean) ** 2 for v in x) / (len(x) - 1)
    return {
        "mad": lambda: scale * math.fsum(map(abs, x)) / len(x),
        "std": lambda: scale * math.sqrt(var),
        "var": lambda: scale * scale * var,
        "sum": lambda: scale * abs(math.fsum(x)),
        0: lambda: float(len(x)),
        math.inf: lambda: scale,
    }.get(ord, lambda: scale * math.fsum(abs(v) ** ord for v in x) ** (1 / ord))()


def grads_of(size, dtype):
    """Gradients of two parameters, and their elements."""
    generator = torch.Generator().manual_seed(0)
    params = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in ((7, 5), (40,))]
    for param in params:
        signs = torch.rand(param.shape, generator=generator) * 0.5 + 0.5
        if dtype == torch.bfloat16:
            size = min(max(size, 1e-37), LARGE / 2)
        param.grad = (signs * size).to(dtype)
    return params, [x for param in params for x in param.grad.double().flatten().tolist()]


SIZES = [LARGE, LARGE / 3, 1e30, 1.0, 1e-20, SMALL, 1e-41]


@pytest.mark.parametrize("ord", ORDS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_every_function_returns_the_norm(size, dtype, ord):
    for function in (
        lambda params: get_total_norm([param.grad for param in params], ord),
        lambda params: clip_grad_norm_(params, math.inf, ord, dim="global"),
        lambda params: clip_grad_norm_(params, math.inf, ord),
        lambda params: normalize_grads_(params, 1.0, ord),
    ):
        params, values = grads_of(size, dtype)
        expected = by_hand(values, ord)
        found = function(params)
        assert found.item() == pytest.approx(expected, rel=1e-5)
        assert found.dtype == (torch.float32 if SMALL <= expected <= LARGE or not expected else torch.float64)


@pytest.mark.parametrize("size", [LARGE, 1e38, 1.0, SMALL])
@pytest.mark.parametrize("ord", [1, 2, 3, math.inf])
def test_clipping_in_two_calls_is_clipping_in_one(size, ord):
    limit = size / 100
    params, _ = grads_of(size, torch.float32)
    clip_grads_with_norm_(params, limit, get_total_norm([param.grad for param in params], ord))
    after = by_hand([x for param in params for x in param.grad.double().flatten().tolist()], ord)
    assert after == pytest.approx(limit, rel=1e-5)


@pytest.mark.parametrize("entry", ENTRIES, ids=str)
def test_no_metric_of_a_transform_is_cut_off(entry):
    """The same steps with gradients that are 2**100 times as large give norms that are as much larger, in float64."""
    found = []
    for power in (0, 100):
        params = parameters()
        optimizer = Modular(params, entry.make())
        recorder = Recorder(optimizer)
        for param in params:
            param.grad = torch.ones_like(param) * 2.0**27 * 2.0**power
        optimizer.step()
        recorder.close()
        metrics = {name: value for name, value in optimizer.metrics().items() if value.is_floating_point()}
        assert all(value.dtype == torch.float64 for value in metrics.values())
        found.append((recorder.record().norm.item(), metrics))
    (norm, _), (large, metrics) = found
    assert large == pytest.approx(norm * 2.0**100, rel=1e-6)
    assert large > LARGE
    assert not any(value.item() == LARGE for value in metrics.values())
