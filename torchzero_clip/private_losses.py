"""Which parameters are trained privately, so that nobody reports a loss beside them, which is private too."""

import weakref
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Protocol

from torch import Tensor


class TrainsPrivately(Protocol):
    """Releases the gradients of parameters with noise."""

    def released_params(self) -> Collection[Tensor]:
        """The parameters."""
        ...


_OWNERS: "weakref.WeakSet[TrainsPrivately]" = weakref.WeakSet()


def declare(owner: TrainsPrivately) -> None:
    """From now on, losses beside the parameters of this object raise. It ends when the object is deleted."""
    _OWNERS.add(owner)


def private_ids() -> set[int]:
    """The ids of all parameters that are trained privately."""
    return {id(param) for owner in _OWNERS for param in owner.released_params()}


def refuse_loss(groups: Iterable[Mapping[str, Any]], what: str) -> None:
    """Raise a RuntimeError if one of the parameters of some param groups is trained privately.

    ``what`` brings the loss: the subject of a sentence.
    """
    private = private_ids()
    if private and any(id(param) in private for group in groups for param in group["params"]):
        raise RuntimeError(
            f"{what} brings a loss, which is private, to an optimizer of parameters of a PrivateGradientClipper. "
            "What reads the loss is not covered by the guarantee: judge steps by .grad, such as SkipStep(max_norm=...)"
        )
