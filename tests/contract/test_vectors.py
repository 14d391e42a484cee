"""The worked cases of ``vectors.json``: inputs and outputs computed in NumPy float64 from the definitions."""

import json
import math
from pathlib import Path

import pytest
import torch
from contract.entries import EMA, Mul
from torch import nn

import torchzero_clip
from torchzero_clip import LR, Centralize, Modular

CASES = json.loads(Path(__file__).parents[1].joinpath("vectors.json").read_text())["vectors"]
TARGETS = {"Mul": Mul} | {name: getattr(torchzero_clip, name) for name in dir(torchzero_clip)}
EMA_TFMS = {"mul": Mul, "ema": EMA, "centralize": lambda args: Centralize(**args)}


def cases(kind):
    chosen = [case for case in CASES if case["kind"] == kind]
    return pytest.mark.parametrize("case", chosen, ids=lambda case: case["id"])


def number(value):
    if isinstance(value, list):
        return [number(item) for item in value]
    return float(value) if value in ("inf", "-inf", "nan") else value


def argument(key, value):
    if key == "ema_tfm":
        return [EMA_TFMS[name](given) for item in value for name, given in item.items()]
    return tuple(value) if isinstance(value, list) else number(value)


def arguments(args):
    return {key: argument(key, value) for key, value in args.items()}


def tensor(value, shape=None):
    result = torch.tensor(number(value), dtype=torch.float64)
    return result if shape is None else result.reshape(shape)


def parameters_with(grads, shapes):
    params = [nn.Parameter(torch.zeros(shape or (), dtype=torch.float64)) for shape in shapes]
    for param, grad in zip(params, grads, strict=True):
        param.grad = None if grad is None else tensor(grad, param.shape)
    return params


def assert_agrees(actual, expected):
    """The tolerance that the cases state."""
    largest = max((a.abs().max().item() for a in actual if a is not None and a.numel()), default=0.0)
    largest = largest if math.isfinite(largest) else 0.0
    for a, e in zip(actual, expected, strict=True):
        assert (a is None) == (e is None)
        if a is not None:
            torch.testing.assert_close(a, tensor(e, a.shape), rtol=1e-9, atol=1e-14 * largest, equal_nan=True)


@cases("transform")
def test_transform(case):
    shapes = case["shapes"]
    params = [nn.Parameter(torch.zeros(shape or (), dtype=torch.float64)) for shape in shapes]
    overrides = case["overrides"] or [None] * len(shapes)
    groups = [{"params": [p], **arguments(own or {})} for p, own in zip(params, overrides, strict=True)]
    optimizer = Modular(groups, TARGETS[case["target"]](**arguments(case["args"])), LR(1.0))
    for updates, expected in zip(case["steps"], case["expected"], strict=True):
        for param, update in zip(params, updates, strict=True):
            nn.init.zeros_(param)
            param.grad = tensor(update, param.shape)
        optimizer.step()
        assert_agrees([-param.detach() for param in params], expected)


@pytest.mark.filterwarnings("ignore:none of the parameters has a gradient")
@cases("function")
def test_function(case):
    for grads, expected in zip(case["steps"], case["expected"], strict=True):
        params = parameters_with(grads, case["shapes"])
        TARGETS[case["target"]](params, **arguments(case["args"]))
        assert_agrees([param.grad for param in params], expected)


@cases("per_example")
def test_per_example(case):
    grads = [tensor(values, shape) for values, shape in zip(case["grads"], case["shapes"], strict=True)]
    sums, counts = TARGETS[case["target"]](grads, **arguments(case["args"]))
    assert_agrees(sums, case["expected_sums"])
    assert counts == case["expected_counts"]


@cases("target")
def test_target(case):
    chain = [TARGETS[name](**arguments(args), target=target) for name, args, target in case["chain"]]
    params = [nn.Parameter(tensor(value)) for value in case["params"]]
    grads = [tensor(value) for value in case["grads"]]

    def closure():
        optimizer.zero_grad()
        loss = sum((p * g).sum() for p, g in zip(params, grads, strict=True))
        loss.backward()
        return loss

    optimizer = Modular(params, chain)
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad.clone()
    optimizer.step(closure if case["closure"] else None)
    assert_agrees([param.detach() for param in params], case["expected"]["params"])
    if case["expected"]["grad"] is not None:
        assert_agrees([param.grad for param in params], case["expected"]["grad"])
