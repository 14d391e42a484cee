"""Choices between tensors and numbers, without a launch for what is the same in each step."""

from collections.abc import Callable

import torch
from torch import Tensor

from torchzero_clip.compat import FakeTensor, is_capturing

_CONSTANTS: dict[tuple[object, ...], Tensor] = {}
"""Tensors that are never changed, one for each number or size, on each device."""


def where(condition: Tensor, value: Tensor | float, other: Tensor | float) -> Tensor:
    """`torch.where` of a tensor and a number, in one launch on a device.

    There, torch makes a new tensor of the number in each call, which takes a launch of its own.
    """
    if _takes_numbers(condition):
        return torch.where(condition, value, other)
    tensor = value if isinstance(value, Tensor) else other
    if not isinstance(tensor, Tensor):
        raise TypeError("where needs a tensor beside the condition")
    chosen, rest = (x if isinstance(x, Tensor) else _number(x, tensor) for x in (value, other))
    return torch.where(condition, chosen, rest)


def at_most_one(ratios: Tensor) -> Tensor:
    """The ratios, and 1 for larger ones and for NaN, such as 0 / 0: one launch on a device."""
    if _takes_numbers(ratios):
        return torch.where(ratios < 1, ratios, 1.0)
    return torch.fmin(ratios, _number(1.0, ratios))


def clamped(x: Tensor, limit: float, dtype: torch.dtype) -> Tensor:
    """A tensor in another dtype, clamped to [-limit, limit]: one launch on a device."""
    if _takes_numbers(x):
        return x.clamp(-limit, limit).to(dtype)
    return torch.clamp(x, _number(-limit, x), _number(limit, x), out=torch.empty_like(x, dtype=dtype))


def places(vector: Tensor) -> Tensor:
    """The indices of the elements of a vector."""
    size, device = len(vector), vector.device
    if _takes_numbers(vector):
        return torch.arange(size, device=device)
    known = _CONSTANTS.get((size, device))
    return _made(lambda: torch.arange(size, device=device), size, device) if known is None else known


def _takes_numbers(tensor: Tensor) -> bool:
    return tensor.is_cpu or torch.compiler.is_compiling() or isinstance(tensor, FakeTensor)


def _number(number: float, like: Tensor) -> Tensor:
    key = str(number), like.dtype, like.device  # as text, because NaN is not equal to itself
    known = _CONSTANTS.get(key)  # without a call, because each step asks
    return _made(lambda: torch.full((), number, dtype=key[1], device=key[2]), *key) if known is None else known


def _made(make: Callable[[], Tensor], *key: object) -> Tensor:
    with torch.inference_mode(False):  # autograd cannot save a tensor of inference
        made = make()
    if not (made.is_cuda and is_capturing()):  # a captured graph fills it only when it is replayed
        _CONSTANTS[key] = made
    return made
