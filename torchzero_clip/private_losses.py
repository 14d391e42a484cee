"""Which parameters are trained privately, so that nobody reports a loss beside them, which is private too."""

import weakref
from collections.abc import Iterable
from typing import Protocol

from torch import Tensor
from torch.optim import Optimizer


class TrainsPrivately(Protocol):
    """Releases the gradients of parameters with noise."""

    def covers(self, params: Iterable[Tensor]) -> bool:
        """True if it releases the gradient of one of these parameters."""
        ...


_OWNERS: "weakref.WeakSet[TrainsPrivately]" = weakref.WeakSet()


def declare(owner: TrainsPrivately) -> None:
    """From now on, losses beside the parameters of this object raise. It ends when the object is deleted."""
    _OWNERS.add(owner)


def refuse_loss(optimizer: Optimizer, what: str) -> None:
    """Raise a RuntimeError if one of the parameters of an optimizer is trained privately.

    ``what`` brings the loss: the subject of a sentence.
    """
    if not _OWNERS:
        return
    params = [param for group in optimizer.param_groups for param in group["params"]]
    if any(owner.covers(params) for owner in _OWNERS):
        raise RuntimeError(
            f"{what} brings a loss, which is private, to an optimizer of parameters of a PrivateGradientClipper. "
            "What reads the loss is not covered by the guarantee: judge steps by .grad, such as SkipStep(max_norm=...)"
        )
