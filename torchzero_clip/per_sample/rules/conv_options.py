"""The options of a convolution."""

from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Options:
    """The options of a convolution in one call. The attributes of the layer may change before the next.

    Args:
        kernel: The size of the kernel in each dimension.
        stride: The steps between positions of the kernel.
        dilation: The steps between elements of the kernel.
        groups: The number of groups of channels.
        sides: The padding before and after each dimension.
        mode: The padding mode.
    """

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    sides: tuple[tuple[int, int], ...]
    mode: str

    @classmethod
    def of(cls, module: Any) -> "Options":
        """The options of a module as it is now."""
        kernel, mode = tuple(module.weight.shape[2:]), module.padding_mode
        stride, dilation = (_each(value, len(kernel)) for value in (module.stride, module.dilation))
        if mode != "zeros":
            flat = module._reversed_padding_repeated_twice[::-1]  # torch too computes it only once
            sides = tuple((flat[2 * i + 1], flat[2 * i]) for i in range(len(kernel)))
        elif module.padding == "same":
            totals = [gap * (size - 1) for gap, size in zip(dilation, kernel, strict=True)]
            sides = tuple((total // 2, total - total // 2) for total in totals)
        else:
            padding = 0 if module.padding == "valid" else module.padding
            sides = tuple((side, side) for side in _each(padding, len(kernel)))
        return cls(kernel, stride, dilation, module.groups, sides, mode)

    def padded(self, input: Tensor) -> Tensor:
        """The input with its padding."""
        flat = [side for pair in reversed(self.sides) for side in pair]
        if not any(flat):
            return input
        return F.pad(input, flat) if self.mode == "zeros" else F.pad(input, flat, mode=self.mode)

    def padded_sizes(self, input: Tensor) -> list[int]:
        """The sizes of the padded input."""
        return [size + sum(pair) for size, pair in zip(input.shape[2:], self.sides, strict=True)]


def _each(value: Any, count: int) -> tuple[int, ...]:
    values = (value,) if isinstance(value, int) else tuple(value)
    return values * count if len(values) == 1 else values
