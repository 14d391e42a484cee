"""Clipping by value."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from torchzero_clip.checks import scalar
from torchzero_clip.core.elements import Elements
from torchzero_clip.core.elementwise import Elementwise
from torchzero_clip.functional.clip import unread_limit
from torchzero_clip.functional.foreach import usable_limit
from torchzero_clip.types import Schedule, Setting, Target


class ClipValue(Elementwise):
    """Clamps every element of the updates to [-value, value].

        u ← min(max(u, -value), value)

    Unlike a norm clip it changes the direction of an update, because it shortens only the elements above the limit.

    **Guarantees.** Elements within the limit are bitwise unchanged. No finite element exceeds the limit, as rounded to
    the dtype of the update.

    Args:
        value: The largest magnitude allowed, a setting of the param groups: a number >= 0, or a tensor of one element,
            which is not read on the host: a negative one gives NaN.
        target: What it acts on, see `Transform`.
        name: The name in the chain and in checkpoints; the class name in snake case if None.

    Raises:
        ValueError: For a negative number, NaN or a tensor of several elements, or an unknown ``target``.
        TypeError: If ``value`` is neither a number nor a tensor.

    | element | result |
    | --- | --- |
    | inf, -inf | value, -value |
    | NaN | NaN |
    | any, with ``value=0`` | 0 |

    Examples:
        >>> import torch
        >>> from torchzero_clip import ClipValue, Modular
        >>> weight = torch.nn.Parameter(torch.zeros(3))
        >>> optimizer = Modular([weight], ClipValue(1.0))
        >>> weight.grad = torch.tensor([3.0, -4.0, 0.5])
        >>> optimizer.step()
        >>> weight.data
        tensor([-1.0000,  1.0000, -0.5000])

    Source: Mikolov, [Statistical language models based on neural
    networks](https://www.fit.vut.cz/study/phd-thesis/283/), 2012.
    """

    pure = True
    checks = {"value": scalar}
    limit_setting = "value"
    keeps_finite = True

    def __init__(self, value: float | Tensor | Schedule, *, target: Target = "update", name: str | None = None) -> None:
        super().__init__({"value": value}, target=target, name=name)

    @override
    def formula(self, x: Tensor, state: Sequence[Tensor], setting: Setting) -> tuple[Tensor, Sequence[Tensor]]:
        value = _limit(setting, x)
        return x.clamp(-value, value), ()

    @override
    def change(self, x: Tensor, result: Tensor, state: Sequence[Tensor], setting: Setting, at: Elements) -> Tensor:
        value = _limit(setting, x)
        size = torch.abs(x, out=at.memory("size", x))
        count = at.count(at.compare(torch.gt, size, value, size))
        at.clamp(x, -value, value, result)
        return count


def _limit(setting: Setting, x: Tensor) -> Any:
    value = setting["value"]
    return unread_limit(value, x) if isinstance(value, Tensor) else usable_limit(value, x.dtype)
