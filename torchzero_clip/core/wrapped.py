"""The optimizer inside the wrappers of trainers."""

from typing import Any

from torch.optim import Optimizer

_ATTRIBUTES = ("optimizer", "_optimizer")


def innermost(optimizer: Any) -> Any:
    """Follow ``optimizer`` and ``_optimizer``, as the wrappers of Accelerate and Lightning have, to the last optimizer.

    Lightning's wrapper is of a class that is derived from that of the optimizer, so that its type says nothing.
    """
    found, seen = optimizer, set[int]()
    while id(found) not in seen:
        seen.add(id(found))
        own = getattr(found, "__dict__", {})
        inner = (own.get(name) for name in _ATTRIBUTES)
        found = next((value for value in inner if isinstance(value, Optimizer)), found)
    return found
