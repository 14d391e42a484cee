"""Names of gradients that are not finite, collected from all processes."""

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed import ProcessGroup

MOST = 10
BESIDE = 3


class BadGradients(NamedTuple):
    """The gradients that were not finite in one step, on all processes together."""

    names: tuple[str, ...]
    """The names of their parameters in order, at most ten."""
    total: int
    """The number of gradients that were not finite."""
    largest: dict[str, float]
    """The three largest norms of the other gradients, by name."""

    @property
    def listed(self) -> str:
        """The names as text."""
        more = f" and {self.total - len(self.names)} more" if self.total > len(self.names) else ""
        return f"{', '.join(self.names)}{more}"

    @property
    def beside(self) -> str:
        """The largest norms as a sentence; empty if there are none."""
        norms = ", ".join(f"{norm:.4g} ({name})" for name, norm in self.largest.items())
        return f". The largest norms of other gradients: {norms}" if norms else ""


def bad_gradients(
    names: Sequence[str], norms: Sequence[float], meshes: Iterable[ProcessGroup], group: ProcessGroup | None
) -> BadGradients:
    """Collect the bad gradients of all processes. All processes have to call this, and they wait for each other.

    Args:
        names: The names of the parameters of this process that have a gradient.
        norms: The norms of the gradients.
        meshes: The groups of processes that hold parts of the same parameters.
        group: The processes that hold other parameters.
    """
    own = dict(enumerate(zip(names, norms, strict=True)))
    for mesh in meshes:  # a plain gradient may be finite on one rank only
        for others in _from_all(own, mesh):
            own |= {i: pair for i, pair in others.items() if not own[i][1] >= pair[1]}
    pairs = [pair for part in ([own] if group is None else _from_all(own, group)) for pair in part.values()]
    found = [name for name, norm in pairs if not math.isfinite(norm)]
    # rounded, so that the order does not depend on how tensors are sharded
    finite = sorted((pair for pair in pairs if math.isfinite(pair[1])), key=lambda pair: -float(f"{pair[1]:.6g}"))
    return BadGradients(tuple(found[:MOST]), len(found), dict(finite[:BESIDE]))


def _from_all(own: Any, group: ProcessGroup) -> list[Any]:
    found: list[Any] = [None] * group.size()
    dist.all_gather_object(found, own, group=group)
    return found
