"""Stretches of equal items in a list, so that one operation serves each."""

from collections.abc import Callable, Sequence
from typing import Any


def stretches(items: Sequence[Any], same: Callable[[Any, Any], bool]) -> list[slice]:
    """Where neighbours are the same. A plain loop: `itertools.groupby` breaks the graphs of `torch.compile`."""
    found: list[slice] = []
    start = 0
    for i in range(1, len(items) + 1):
        if i == len(items) or not same(items[start], items[i]):
            found.append(slice(start, i))
            start = i
    return found
