"""Writes the file of a run."""

import os
import uuid
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import torch.distributed as dist

from torchzero_clip.compat import warn_user
from torchzero_clip.recorder import files
from torchzero_clip.recorder.layout import By
from torchzero_clip.recorder.record import Record
from torchzero_clip.recorder.series import spikes_among

REMEMBERED = 1000  # how many earlier joint norms are used to find spikes among the next ones
BLOCK = 100
IN_A_ROW = 10  # in a series of spikes or refused steps, the layers of so many steps are written


class FirstProcess:
    """True in the first process of a group, even after the group is destroyed; False in a fork."""

    def __init__(self) -> None:
        self._process = os.getpid()
        self._rank = int(os.environ.get("RANK", "0"))  # torchrun sets it before there is a group

    def __bool__(self) -> bool:
        if dist.is_available() and dist.is_initialized():
            self._rank = dist.get_rank()
        return self._rank == 0 and os.getpid() == self._process


class Log:
    """Appends the steps of one run to a file, at most ``most`` at once; the last ``keep`` can be read again."""

    def __init__(self, path: Path, by: By, most: int, keep: int) -> None:
        self.path = path.resolve()
        self.is_lost = False  # True if another recorder of this process writes to the file now
        self._by: By = by
        self._most, self._keep = most, keep
        self.begin_anew(None)

    def begin_anew(self, parent: str | None) -> None:
        """Begin a run. If it resumes another one, its steps replace those that have the same or larger numbers."""
        self.run, self.parent = uuid.uuid4().hex[:12], parent
        self.is_new = True  # False if the file had lines before, and this run has not written or loaded anything yet
        self._header: tuple[list[str], float] | None = None  # the layers and the precision in the file
        # the last steps in the file: their joint norms, and whether one was refused, not finite or a jump
        self._seen: deque[tuple[int, float, bool]] = deque(maxlen=REMEMBERED)
        self._whole: set[int] = set()  # the steps whose layers are in the file
        self._open = 0  # how many of the last steps in the file are in no complete block
        self._has_block = False

    @property
    def written_run(self) -> str | None:
        """The id of this run. If it has written nothing yet, the id of the run that it resumes."""
        return self.parent if self._header is None else self.run

    def write(self, kept: Callable[[int], Record], count: int, losses: Mapping[int, float], *, is_end: bool) -> None:
        """Append the last ``count`` steps, late losses, and layers of spikes; the others are as in `Output.flush`."""
        if not self.is_new:
            self.is_new = True
            warn_user(
                f"{self.path} already has a record of another run. The new run is appended, and read_record now reads "
                "the new run. To continue the other run, call load_state_dict before the first step"
            )
        record = kept(self._open + count)
        new = record.last(count)
        now = record.layers, record.precision if record.steps or self._header is None else self._header[1]
        rows = files.rows_of_steps(new)
        rows += [{"kind": "loss", "step": step, "loss": files.finite(loss)} for step, loss in losses.items()]
        lost = new.layer_norms.isfinite().logical_not().any(dim=1).tolist()
        jumped = {step for step, _ in new.jumps}
        bad = [s in jumped or bool(why) or no for s, why, no in zip(new.steps, new.reasons, lost, strict=True)]
        seen = [*self._seen, *zip(new.steps, new.norm.tolist(), bad, strict=True)]
        # if older steps are forgotten, a series of bad ones may have begun before
        whole = _in_whole(seen, IN_A_ROW if len(self._seen) == REMEMBERED else 0) | {r.step for r in new.ratios}
        if is_end and not self._has_block and len(record.steps) <= BLOCK:
            whole |= set(record.steps)  # a short run
        whole -= self._whole
        # reading all steps takes five times as long, and is needed only for a spike that is found late
        is_old = len(whole) > 0 and (not record.steps or min(whole) < record.steps[0])
        rows += files.rows_of_layers(kept(self._keep) if is_old else record, whole)
        blocks, rest = self._blocks(record, is_end)
        rows += blocks
        if rows and (now != self._header or not self.path.exists() or not self.path.stat().st_size):
            start = new.steps[0] if new.steps else max((step for step, *_ in seen), default=-1) + 1
            rows.insert(0, files.header(self.run, self.parent, start, self._by, record))
        if rows:
            files.append(self.path, files.encoded(rows, self.run))
        self._has_block = self._has_block or rest < len(record.steps)
        self._header, self._open = now, rest
        self._seen.extend(seen[len(self._seen) :])
        first = self._seen[0][0] if self._seen else 0
        self._whole = {step for step in self._whole | whole if step >= first}

    def _blocks(self, record: Record, is_end: bool) -> tuple[list[files.Row], int]:
        """The blocks that are complete, and the number of steps that are in no complete block yet."""
        blocks: list[files.Row] = []
        first, end = 0, len(record.steps)
        while end - first >= BLOCK or (end > first and (is_end or end - first + self._most > self._keep)):
            own = slice(first, first + BLOCK)
            blocks.append(files.block(record.layer_steps[own], record.layer_norms[own]))
            first += len(record.layer_steps[own])
        if first == 0 and end and not self._has_block:
            # without it, a run that is killed early has no usual norms; a longer one from the same step replaces it
            blocks.append(files.block(record.layer_steps, record.layer_norms))
        return blocks, end - first


def _in_whole(seen: list[tuple[int, float, bool]], series: int) -> set[int]:
    """Spikes, jumps and refused steps; of a series, only the first `IN_A_ROW`, and ``series`` of these came before."""
    norms = torch.tensor([norm for _, norm, _ in seen], dtype=torch.float64, device="cpu")
    found = set[int]()
    for (step, _, is_bad), is_spike in zip(seen, spikes_among(norms).tolist(), strict=True):
        series = series + 1 if is_bad or is_spike else 0
        if 0 < series <= IN_A_ROW:
            found.add(step)
    return found
