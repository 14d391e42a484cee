"""The optimizer inside the wrappers of trainers."""

from typing import Any

from torch.optim import Optimizer

_TRAINERS = "accelerate", "lightning", "lightning_fabric", "pytorch_lightning"


def unwrap(optimizer: object) -> Any:
    """Follow ``optimizer`` and ``_optimizer``, as wrappers of Accelerate and Lightning have, to the last optimizer."""
    # by attributes, because the class of a wrapper of Lightning is derived from that of the optimizer
    innermost, wrapped, seen = optimizer, optimizer, set[int]()
    while wrapped is not None and id(wrapped) not in seen:
        seen.add(id(wrapped))
        innermost = wrapped if isinstance(wrapped, Optimizer) else innermost
        inner = (getattr(wrapped, name, None) for name in ("optimizer", "_optimizer"))
        wrapped = next((value for value in inner if value is not None), None)
    return innermost


def without_wrappers(optimizer: object) -> Any:
    """The optimizer in wrappers of Accelerate and Lightning. Other wrappers may change gradients or count steps."""
    while type(optimizer).__module__.partition(".")[0] in _TRAINERS:
        if (inner := getattr(optimizer, "optimizer", None)) is None:
            break
        optimizer = inner
    return optimizer
