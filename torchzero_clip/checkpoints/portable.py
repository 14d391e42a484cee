"""State in a form that no `load_state_dict` changes, so that the optimizer of another package may store it.

`load_state_dict` casts floating point state to the dtype of its parameter. Under the key "step", torch casts nothing,
except to float32 for fused optimizers. Other packages have other rules. Bytes keep their values in any cast.
"""

from collections.abc import Container, Mapping
from typing import TypeAlias

import torch
from torch import Tensor

from torchzero_clip.compat import is_distributed
from torchzero_clip.types import State

_STEP = "step"
FIT_FLOAT32 = frozenset({torch.float32, torch.float16, torch.bfloat16})
"""The dtypes whose numbers are the same after a cast to float32 and back."""

Packed: TypeAlias = dict[str, object]
"""A value of state: ``{"step": value}``, or ``{"float64": {"step": bytes}}``."""


def packed(state: State, kept: Container[torch.dtype] | None) -> dict[str, Packed]:
    """State in the portable form: ``{"clip/prev": {"step": tensor}}``, in the same memory.

    Args:
        state: Numbers and tensors.
        kept: The dtypes whose tensors a load leaves as they are under the key "step"; None for all. Other tensors
            become ``{"float64": {"step": bytes}}``, where the bytes of each element are a new last dimension.
    """
    return {key: _packed(value, kept) for key, value in state.items()}


def _packed(value: object, kept: Container[torch.dtype] | None) -> Packed:
    # distributed tensors cannot be viewed as bytes
    if not isinstance(value, Tensor) or kept is None or value.dtype in kept or is_distributed(value):
        return {_STEP: value}
    return {str(value.dtype).removeprefix("torch."): {_STEP: value.unsqueeze(-1).view(torch.uint8)}}


def unpacked(saved: object) -> State:
    """The state in the portable form; other values are returned as they are. Raises ValueError if malformed."""
    if not isinstance(saved, Mapping):
        raise ValueError(f"the state of transforms must be a dict, got {type(saved).__name__}")
    return {str(key): _unpacked(str(key), value) for key, value in saved.items()}


def _unpacked(key: str, value: object) -> object:
    if not isinstance(value, Mapping):
        return value
    if list(value) == [_STEP]:
        return value[_STEP]
    name, inner = next(iter(value.items()), ("", None))
    dtype: object = getattr(torch, str(name), None)
    elements = inner.get(_STEP) if isinstance(inner, Mapping) else None
    if len(value) > 1 or not isinstance(dtype, torch.dtype) or not isinstance(elements, Tensor):
        raise ValueError(f"the state {key!r} of a transform is neither a value nor the bytes of one")
    if not elements.ndim or elements.shape[-1] != dtype.itemsize:
        raise ValueError(f"the state {key!r} of a transform has bytes of another dtype than {dtype}")
    return elements.to(torch.uint8).contiguous().view(dtype).squeeze(-1)
