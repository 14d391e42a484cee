"""Writes the file of a run."""

import os
import warnings
from collections import deque
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from torchzero_clip.recorder.files import append, header, lines_of
from torchzero_clip.recorder.layout import By
from torchzero_clip.recorder.record import Record

REMEMBERED = 1000
"""How many earlier joint norms are used to find spikes among the next ones."""


class Log:
    """Appends steps to a file. Only the first process of a group writes; its forks do not write.

    Args:
        path: The file.
        by: What a layer is.
    """

    def __init__(self, path: Path, by: By) -> None:
        self.path = path.absolute()
        self._by: By = by
        self._layers: tuple[str, ...] | None = None
        self._norms: deque[tuple[int, float]] = deque(maxlen=REMEMBERED)
        self._whole: set[int] = set()
        """The steps whose layers are in the file."""
        self._process = os.getpid()
        self._rank = 0

    @property
    def is_writer(self) -> bool:
        """True in the first process of a group, also after the group was destroyed; False in a fork."""
        if dist.is_available() and dist.is_initialized():
            self._rank = dist.get_rank()
        return self._rank == 0 and os.getpid() == self._process

    def begin_anew(self) -> None:
        """Let the next steps replace the steps of the file that have the same or larger numbers."""
        self._layers = None

    def write(self, record: Record, first: int) -> None:
        """Append the steps from row ``first`` on, and the layers of earlier steps that are spikes, as is known now."""
        if not record.steps or not self.is_writer:
            return
        layers = tuple(record.layers)
        lines: list[str] = []
        if self._layers is None and not record.steps[first] and self.path.exists() and self.path.stat().st_size:
            warnings.warn(f"{self.path} already has a record: this run begins at step 0 and replaces it", stacklevel=2)
        if layers != self._layers or not self.path.exists() or not self.path.stat().st_size:
            lines.append(header(record.steps[first], self._by, layers, record.joint))
        before = [norm for step, norm in self._norms if step < record.steps[0]]
        spikes = set(record.spikes_after(_vector(before)))
        own, whole = lines_of(record, first, spikes, self._whole)
        append(self.path, lines + own)
        self._layers = layers
        self._norms.extend(zip(record.steps[first:], record.norm[first:].tolist(), strict=True))
        self._whole = {step for step in self._whole | whole if step >= record.steps[0]}


def _vector(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, device="cpu")
