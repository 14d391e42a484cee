"""Parameters with gradients, and others with the same ones."""

import table
import torch
from torch import nn

SHAPES = [*table.SHAPES, (1,), (0, 2)]


def params_with_grads(dtype=torch.float32, shapes=SHAPES):
    params = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in shapes]
    for param in params:
        param.grad = torch.randn(param.shape).to(dtype)
    return params


def grads_of(params):
    return [param.grad.clone() for param in params]


def twins(params):
    """Other parameters with the same gradients."""
    others = [nn.Parameter(torch.zeros_like(param)) for param in params]
    for other, param in zip(others, params, strict=True):
        other.grad = param.grad.clone(memory_format=torch.contiguous_format)
    return others


def assert_same_grads(params, others, **tolerance):
    torch.testing.assert_close(grads_of(params), grads_of(others), **{"rtol": 0, "atol": 0, **tolerance})
