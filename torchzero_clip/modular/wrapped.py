"""The optimizer inside the wrappers of trainers."""

from typing import Any

from torch.optim import Optimizer

_ATTRIBUTES = ("optimizer", "_optimizer")


def unwrap(optimizer: Any) -> Any:
    """Follow ``optimizer`` and ``_optimizer``, as wrappers of Accelerate and Lightning have, to the last optimizer."""
    # a wrapper of Lightning has a class that is derived from that of the optimizer, so its type says nothing
    innermost, found, seen = optimizer, optimizer, set[int]()
    while found is not None and id(found) not in seen:
        seen.add(id(found))
        innermost = found if isinstance(found, Optimizer) else innermost
        inner = (getattr(found, name, None) for name in _ATTRIBUTES)
        found = next((value for value in inner if value is not None), None)
    return innermost
