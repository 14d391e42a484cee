"""The file of a run, while it is written."""

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
"""So many joint norms that are in the file help to tell which of the next ones are spikes."""


class Log:
    """Appends steps to a file. Only the first process of a group writes, and no fork of it.

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
        """False in a fork of the process, and in all processes of a group but the first, also once it has ended."""
        if dist.is_available() and dist.is_initialized():
            self._rank = dist.get_rank()
        return self._rank == 0 and os.getpid() == self._process

    def begin_anew(self) -> None:
        """Let the next steps replace those in the file from the same number on."""
        self._layers = None

    def write(self, record: Record, first: int) -> None:
        """Append the steps from row ``first`` on, and the layers of earlier steps that turn out to be spikes."""
        if not record.steps or not self.is_writer:
            return
        layers = tuple(record.layers)
        lines: list[str] = []
        if self._layers is None and not record.steps[first] and self.path.exists() and self.path.stat().st_size:
            warnings.warn(f"{self.path} has a record already: this run begins at step 0 and replaces it", stacklevel=2)
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
