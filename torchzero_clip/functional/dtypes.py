"""The widest floating point dtype of each device: GPUs of Apple, and many that have their own backend, lack float64."""

import math

import torch
from torch import Tensor

from torchzero_clip.checks import instance, one_of
from torchzero_clip.compat import FakeTensor

_SQUARABLE = {torch.float64: 1e150, torch.float32: 1e18}

_EXPONENT = 0x7F800000
"""The bits of a float32 that hold its exponent; of inf and NaN they are all set."""

_has_float64: dict[str, bool] = {}
"""Whether norms on a kind of device are float64, for the kinds that were asked."""


def set_norm_dtype(device_type: str, dtype: torch.dtype) -> None:
    """Choose the dtype of norms and statistics on devices of one kind. Call it before the first step.

    They are float64 where the device has it. Float32 may be faster on GPUs that compute float64 slowly, such as
    consumer GPUs. Gradients are then read twice, and divided by a power of two close to their largest magnitude. So
    norms are still right to 2e-6, finite for finite gradients, and 0 only for zeros. A norm above 3.4e38, the largest
    number of float32, counts as 3.4e38, and what is clipped by it may exceed the limit.

    Args:
        device_type: The kind, such as ``"cuda"``. On a CPU, norms are always float64.
        dtype: `torch.float32`, or `torch.float64`, which restores the default.

    Raises:
        ValueError: For another dtype, for a CPU, or if ``device_type`` is no kind of device, such as ``"cuda:0"``.
        TypeError: If an argument has the wrong type.

    Examples:
        >>> import torch
        >>> from torchzero_clip import set_norm_dtype
        >>> set_norm_dtype("cuda", torch.float32)
        >>> set_norm_dtype("cuda", torch.float64)
    """
    instance("device_type", device_type, str, 'write "cuda"')
    one_of("dtype", dtype, (torch.float32, torch.float64))
    try:
        kind = torch.device(device_type)
    except RuntimeError as error:
        raise ValueError(f"device_type must be a kind of device, such as 'cuda', got {device_type!r}") from error
    if ":" in device_type:
        raise ValueError(f"device_type must be a kind of device without a number, got {device_type!r}")
    if kind.type == "cpu":
        raise ValueError("device_type must not be 'cpu', where norms are float64")
    _has_float64.pop(kind.type, None)
    if dtype == torch.float32:
        _has_float64[kind.type] = False


def widest(device: torch.device) -> torch.dtype:
    """The dtype of norms and statistics: float64, or float32 on a device without it, such as a GPU of Apple."""
    if device.type not in _has_float64:
        try:
            asked = torch.zeros((), dtype=torch.float64, device=device)
        except torch.OutOfMemoryError:  # which says nothing of the device, and neither does a fake tensor
            raise
        except (TypeError, RuntimeError):
            _has_float64[device.type] = False
        else:
            if isinstance(asked, FakeTensor):
                return torch.float64
            _has_float64[device.type] = True
    return torch.float64 if _has_float64[device.type] else torch.float32


def widest_of(x: Tensor) -> torch.dtype:
    """The dtype of norms and statistics of a tensor. Fake tensors pretend to be on a device that has float64."""
    if x.is_cpu or isinstance(x, FakeTensor) or _has_float64.get(x.device.type):
        return torch.float64
    return widest(x.device)


def widened(x: Tensor) -> Tensor:
    """A real tensor in the `widest` dtype of its device."""
    return x.to(widest_of(x))


def is_narrow(x: Tensor) -> bool:
    """True on a device without float64. There, sums and powers need more care."""
    return widest_of(x) == torch.float32


def bias_correction(beta: float, count: Tensor) -> Tensor:
    """``1 - beta**count``; in float32 by other means, because a difference would lose five digits of 1 - 0.999."""
    if count.dtype == torch.float64 or not beta:
        return 1 - beta**count
    return torch.expm1(count * math.log(beta)).neg()


def moved(x: Tensor, device: torch.device) -> Tensor:
    """A tensor on another device, in a dtype that it has. Finite numbers stay finite, and positive ones positive."""
    if x.device == device:
        return x
    if x.dtype != torch.float64 or widest(device) == torch.float64:
        return x.to(device)
    most = torch.finfo(torch.float32).max
    fitting = torch.where(x.isfinite(), x.clamp(-most, most), x)
    return torch.where(x > 0, fitting.clamp(min=2.0**-149), fitting).to(device, torch.float32)


def squarable(x: Tensor) -> float:
    """The largest norm in the dtype of ``x`` of which many squares have a finite sum."""
    return _SQUARABLE[x.dtype]


def power_of_two(x: Tensor) -> Tensor:
    """The largest power of two that is at most ``x``, for float32 numbers >= 0, so that dividing by it is exact.

    It is 2**-126 for 0 and for subnormal numbers, and 2**127 for inf and NaN.
    """
    exponents = (x.view(torch.int32) & _EXPONENT).view(torch.float32)
    # some devices take subnormal numbers for 0, so that dividing by one would be NaN
    return exponents.clamp(2.0**-126, 2.0**127)
