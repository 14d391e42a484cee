"""Memory that is used again from step to step."""

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


class Scratch:
    """Memory for intermediate results, and plans of how to use it.

    What the memory holds has no meaning after a call. It belongs to one optimizer: two threads that shared it would
    write over each other's numbers.
    """

    def __init__(self) -> None:
        self._memory: dict[Hashable, Tensor] = {}
        self._plans: dict[str, tuple[Hashable, Any]] = {}

    def memory(self, name: str, count: int, like: Tensor) -> Tensor:
        """A vector of ``count`` elements, of the dtype and on the device of ``like``, with any values."""
        key = name, like.dtype, like.device
        kept = self._memory.get(key)
        if kept is None or kept.numel() < count:
            kept = self._memory[key] = torch.empty(count, dtype=like.dtype, device=like.device)
        return kept.narrow(0, 0, count)

    def plan(self, name: str, key: Hashable, make: Callable[[], T]) -> T:
        """What ``make`` returns, made again if ``key`` is another one than in the last call with this name."""
        kept = self._plans.get(name)
        if kept is None or kept[0] != key:
            kept = self._plans[name] = key, make()
        return kept[1]
