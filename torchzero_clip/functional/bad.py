"""Names of gradients that are not finite, collected from all processes."""

import json
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from torchzero_clip.functional.processes import gathered_texts

_MOST = 10
BESIDE = 3


@dataclass(frozen=True)
class BadGradients:
    """The gradients that were not finite in one step, on all processes together.

    A parameter without a name is described by its position among all parameters and its shape. If parameters of one
    process have the same name, their positions are added, as in ``"bias (parameter 3)"``. If parameters of several
    processes of a ``process_group`` have the same name, their ranks in this group are added, as in
    ``"bias (rank 1 of process_group)"``.

    Args:
        names: The names of their parameters in order, at most ten.
        total: The number of gradients that were not finite.
        largest: The three largest norms of the other gradients, by name, to six digits.

    Examples:
        >>> import torch
        >>> from torchzero_clip import SGD, Modular
        >>> weight = torch.nn.Parameter(torch.zeros(2))
        >>> optimizer = Modular([weight], SGD(0.1), nonfinite="skip")
        >>> weight.grad = torch.tensor([torch.nan, 1.0])
        >>> optimizer.step()
        >>> optimizer.bad_gradients
        BadGradients(names=('parameter 0 of shape (2,)',), total=1, largest={})
    """

    names: tuple[str, ...]
    total: int
    largest: dict[str, float]

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


def labels(kind: str, named: Iterable[tuple[str | None, Tensor]]) -> dict[Tensor, str]:
    """The label of each tensor: its name, with its position if others share it; or its position and shape."""
    # positions among all tensors are equal on all ranks of a mesh; among those with a gradient they may differ
    places: dict[Tensor, tuple[int, str | None]] = {}
    for i, (name, tensor) in enumerate(named):
        places.setdefault(tensor, (i, name))
    times = Counter(name for _, name in places.values())
    label_of: dict[Tensor, str] = {}
    for tensor, (i, name) in places.items():
        unnamed = f"{kind} {i} of shape {tuple(tensor.shape)}"
        label_of[tensor] = unnamed if not name else name if times[name] == 1 else f"{name} ({kind} {i})"
    return label_of


def bad_gradients(
    norms: dict[str, float], meshes: Iterable[ProcessGroup], group: ProcessGroup | None, device: torch.device
) -> BadGradients:
    """The bad gradients of all processes, from the norms on this process by label. All processes have to call this.

    Processes send from the device.
    """
    # a mesh holds parts of the same parameters, the group holds other parameters
    for mesh in meshes:  # the largest: a plain gradient may be missing, or finite, on one rank only
        worst: dict[str, float] = {}
        for name, norm in (pair for of_rank in _from_all(norms, mesh, device) for pair in of_rank.items()):
            before = worst.get(name, norm)
            worst[name] = before if math.isnan(before) or before > norm else norm
        norms = worst
    parts = [norms] if group is None else _from_all(norms, group, device)
    times = Counter(name for part in parts for name in part)
    pairs = [
        (name if times[name] == 1 else f"{name} (rank {rank} of process_group)", norm)
        for rank, part in enumerate(parts)
        for name, norm in part.items()
    ]
    names = [name for name, norm in pairs if not math.isfinite(norm)]
    # rounded, so that the order does not depend on how tensors are sharded or measured
    finite = sorted(((name, float(f"{x:.6g}")) for name, x in pairs if math.isfinite(x)), key=lambda pair: -pair[1])
    return BadGradients(tuple(names[:_MOST]), len(names), dict(finite[:BESIDE]))


def _from_all(norms: dict[str, float], group: ProcessGroup, device: torch.device) -> list[dict[str, float]]:
    return list(map(json.loads, gathered_texts(json.dumps(norms), group, device)))
