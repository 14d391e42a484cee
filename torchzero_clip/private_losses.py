"""Which parameters are trained privately. Their loss is private too, so reporting it raises an error."""

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


def refuse_losses_of(owner: TrainsPrivately) -> None:
    """Refuse losses of the parameters of this object until it is deleted."""
    _OWNERS.add(owner)


def private_ids() -> set[int]:
    """The ids of all parameters that are trained privately."""
    return {id(param) for owner in _OWNERS for param in owner.released_params()}


def refuse_loss(groups: Iterable[Mapping[str, Any]], what: str) -> None:
    """Raise a RuntimeError if a parameter of these param groups is trained privately.

    ``what`` is the subject of the error: who reports the loss.
    """
    private = private_ids()
    if private and any(id(param) in private for group in groups for param in group["params"]):
        raise RuntimeError(
            f"{what} brings a loss, which is private, to an optimizer of parameters of a PrivateGradientClipper. "
            "What reads the loss is not covered by the guarantee: judge steps by .grad, such as SkipStep(max_norm=...)"
        )
