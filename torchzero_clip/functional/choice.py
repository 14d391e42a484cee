"""A choice between a tensor and a number, without a launch for the number."""

import torch
from torch import Tensor

from torchzero_clip.compat import FakeTensor, is_capturing

_NUMBERS: dict[tuple[str, torch.dtype, torch.device], Tensor] = {}
"""Numbers on devices, as 0-d tensors that are never changed."""


def where(condition: Tensor, value: Tensor | float, other: Tensor | float) -> Tensor:
    """`torch.where` of a tensor and a number, in one launch on a device.

    There, torch makes a new tensor of the number in each call, which takes a launch of its own.
    """
    if condition.is_cpu or torch.compiler.is_compiling() or isinstance(condition, FakeTensor):
        return torch.where(condition, value, other)
    tensor = value if isinstance(value, Tensor) else other
    if not isinstance(tensor, Tensor):
        raise TypeError("where needs a tensor beside the condition")
    chosen, rest = (x if isinstance(x, Tensor) else _number(x, tensor) for x in (value, other))
    return torch.where(condition, chosen, rest)


def _number(number: float, like: Tensor) -> Tensor:
    key = str(number), like.dtype, like.device  # as text, because NaN is not equal to itself
    known = _NUMBERS.get(key)
    if known is None:
        with torch.inference_mode(False):
            known = torch.full((), number, dtype=like.dtype, device=like.device)
        if not (like.is_cuda and is_capturing()):  # a captured graph fills it only when it is replayed
            _NUMBERS[key] = known
    return known
