"""The worked cases of ``vectors.json`` on the simulated device."""

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from contract.test_vectors import TARGETS, arguments, tensor
from pretended.device import on_cuda
from torch import Tensor, nn

from torchzero_clip import LR, Modular

Agree: TypeAlias = Callable[..., None]
"""Compares two lists of tensors, of which it says what they are, up to the rounding of a dtype."""
Row: TypeAlias = list[Tensor | None]


def steps_of(case: dict[str, Any]) -> list[tuple[Row, Row]]:
    """The gradients of each step, and what is expected of it."""
    shapes = [shape or () for shape in case.get("shapes", [])]

    def tensors(row: list[Any]) -> Row:
        return [None if values is None else tensor(values, s) for values, s in zip(row, shapes, strict=True)]

    return [(tensors(row), tensors(wanted)) for row, wanted in zip(case["steps"], case["expected"], strict=True)]


def run(case: dict[str, Any], dtype: torch.dtype, agree: Agree) -> None:
    """Take the steps of a transform or of a function in a dtype, and compare each."""
    params = [nn.Parameter(on_cuda(torch.zeros(shape or (), dtype=dtype))) for shape in case.get("shapes", [])]
    target = TARGETS[case["target"]]
    optimizer = None
    if case["kind"] == "transform":
        settings = [arguments(over or {}) for over in case["overrides"] or [None] * len(params)]
        groups = [{"params": [p], **own} for p, own in zip(params, settings, strict=True)]
        optimizer = Modular(groups, target(**arguments(case["args"])), LR(1.0))
    for grads, expected in steps_of(case):
        for param, grad in zip(params, grads, strict=True):
            param.grad = None if grad is None else on_cuda(grad.to(dtype))
            nn.init.zeros_(param)
        if optimizer is None:
            target(params, **arguments(case["args"]))
            found = [param.grad for param in params]
        else:
            optimizer.step()
            found = [-param.detach() for param in params]
        pairs = [(f, w) for f, w in zip(found, expected, strict=True) if w is not None]
        agree([f for f, _ in pairs], [w for _, w in pairs], case["id"], dtype)
