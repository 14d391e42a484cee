"""Writes the steps of a run to its file, and sends them to its logger, now and then."""

import os
import time
import uuid
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from torchzero_clip.compat import warn_user
from torchzero_clip.recorder import files
from torchzero_clip.recorder.live import EARLIER, Live
from torchzero_clip.recorder.record import Record
from torchzero_clip.recorder.recorded_params import By
from torchzero_clip.recorder.series import spikes_among

_REMEMBERED = 1000  # how many earlier joint norms are used to find spikes among the next ones
_BLOCK = 100  # steps whose layers are written as one line
WITH_LAYERS = 100  # for comparisons with other runs, the layers of this many first steps are written
_IN_A_ROW = 10  # in a series of spikes or refused steps, the layers of so many steps are written
_FIRST = 10  # after so many steps the first lines are written
SECONDS = 30.0

ReadLast: TypeAlias = Callable[[int], Record]
"""Reads as many of the last steps."""


class FirstProcess:
    """True in the first process of a group, even after the group is destroyed; False in a fork."""

    def __init__(self) -> None:
        self._process = os.getpid()
        self._rank = int(os.environ.get("RANK", "0"))  # torchrun sets it before there is a group

    def __bool__(self) -> bool:
        if dist.is_available() and dist.is_initialized():
            self._rank = dist.get_rank()
        return self._rank == 0 and os.getpid() == self._process


class StepFile:
    """Appends the steps of one run to a file, at most ``most`` at once; the last ``keep`` can be read again."""

    def __init__(self, path: Path, by: By, most: int, keep: int) -> None:
        self.path = path.resolve()
        self.is_lost = False  # True if another recorder of this process writes to the file now
        self._by: By = by
        self._most, self._keep = most, keep
        self._status: os.stat_result | None = None  # that of the file after the last write
        self._has_warned = False
        self.begin_anew(None)

    def begin_anew(self, parent: str | None) -> None:
        """Begin a run. If it resumes another one, its steps replace those that have the same or larger numbers."""
        self.run, self.parent = uuid.uuid4().hex[:12], parent
        self.is_new = True  # False if the file had lines before, and this run has not written or loaded anything yet
        self._header: tuple[list[str], float] | None = None  # the layers and the precision in the file
        # the last steps in the file: their joint norms, and whether one was refused, not finite or a jump
        self._seen: deque[tuple[int, float, bool]] = deque(maxlen=_REMEMBERED)
        self._with_layers: set[int] = set()  # the steps whose layers are in the file
        self._open = 0  # how many of the last steps in the file are in no complete block
        self._has_block = False
        self._count = 0  # how many steps were written

    @property
    def written_run(self) -> str | None:
        """The id of this run; before it has written anything, that of the run that it resumes."""
        return self.parent if self._header is None else self.run

    def write(self, read_last: ReadLast, count: int, losses: Mapping[int, float], *, is_end: bool) -> None:
        """Append the last ``count`` steps, late losses, and layers of spikes; the others are as in `Output.flush`."""
        if not self.is_new:
            self.is_new = True
            warn_user(
                f"{self.path} already has a record of another run. The new run is appended, and read_record now reads "
                "the new run. To continue the other run, call load_state_dict before the first step"
            )
        record = read_last(self._open + count)
        new = record.last(count)
        now = record.layers, record.precision if record.steps or self._header is None else self._header[1]
        lines = files.step_lines(new)
        lines += [{"kind": "loss", "step": step, "loss": files.json_number(loss)} for step, loss in losses.items()]
        lost = new.layer_norms.isfinite().logical_not().any(dim=1).tolist()
        jumped = {step for step, _ in new.jumps}
        bad = [s in jumped or bool(why) or no for s, why, no in zip(new.steps, new.reasons, lost, strict=True)]
        seen = [*self._seen, *zip(new.steps, new.norm.tolist(), bad, strict=True)]
        # if older steps are forgotten, a series of bad ones may have begun before
        in_series = _IN_A_ROW if len(self._seen) == _REMEMBERED else 0
        with_layers = _steps_with_layers(seen, in_series) | {ratios.step for ratios in new.ratios}
        with_layers |= set(new.steps[: max(WITH_LAYERS - self._count, 0)])
        with_layers -= self._with_layers
        # reading all steps takes five times as long, and is needed only for a spike that is found late
        is_old = len(with_layers) > 0 and (not record.steps or min(with_layers) < record.steps[0])
        lines += files.layer_lines(read_last(self._keep) if is_old else record, with_layers)
        blocks, rest = self._blocks(record, is_end)
        lines += blocks
        if lines and (self._is_new_file() or now != self._header):
            start = new.steps[0] if new.steps else max((step for step, *_ in seen), default=-1) + 1
            lines.insert(0, files.run_line(self.run, self.parent, start, self._by, record))
        if lines:
            files.append(self.path, files.encoded(lines, self.run))
            self._status = files.status(self.path)
        self._count += count
        self._has_block = self._has_block or rest < len(record.steps)
        self._header, self._open = now, rest
        self._seen.extend(seen[len(self._seen) :])
        first = self._seen[0][0] if self._seen else 0
        self._with_layers = {step for step in self._with_layers | with_layers if step >= first}

    def _is_new_file(self) -> bool:
        """True if the file lacks the first line of this run. Warn once if it was replaced since the last write."""
        now, before = files.status(self.path), self._status
        is_same = now and before and os.path.samestat(now, before) and now.st_size >= before.st_size
        if before is not None and not is_same and not self._has_warned:
            self._has_warned = True
            warn_user(
                f"{self.path} was replaced or shortened during the run. Later steps are appended to the file that is "
                "there now, which may lack earlier ones"
            )
        return now is None or not now.st_size or (before is not None and not is_same)

    def _blocks(self, record: Record, is_end: bool) -> tuple[list[files.Line], int]:
        """The blocks that are complete, and the number of steps that are in no complete block yet."""
        blocks: list[files.Line] = []
        first, end = 0, len(record.steps)
        while end - first >= _BLOCK or (end > first and (is_end or end - first + self._most > self._keep)):
            steps, norms = record.layer_steps[first : first + _BLOCK], record.layer_norms[first : first + _BLOCK]
            blocks.append(files.block_line(steps, norms))
            first += len(steps)
        if first == 0 and end and not self._has_block:
            # without it, a run that is killed early has no usual norms; a longer one from the same step replaces it
            blocks.append(files.block_line(record.layer_steps, record.layer_norms))
        return blocks, end - first


def _steps_with_layers(seen: list[tuple[int, float, bool]], series: int) -> set[int]:
    """Spikes, jumps and refused steps; at most `_IN_A_ROW` of a series, of which ``series`` came before."""
    norms = torch.tensor([norm for _, norm, _ in seen], dtype=torch.float64, device="cpu")
    steps = set[int]()
    for (step, _, is_bad), is_spike in zip(seen, spikes_among(norms).tolist(), strict=True):
        series = series + 1 if is_bad or is_spike else 0
        if 0 < series <= _IN_A_ROW:
            steps.add(step)
    return steps


class Output:
    """Decides when steps are written: at most ``every`` wait. The last ``keep`` steps can be read again."""

    def __init__(self, log: StepFile | None, live: Live | None, every: int, keep: int) -> None:
        self.log, self.live = log, live
        self.is_writer = FirstProcess()  # the only one of a group that writes and sends
        self.waiting = 0  # how many steps are not in the file
        self.older: list[Record] = []  # with other layers, and not in the file because it could not be written
        self.late: dict[int, Tensor] = {}  # losses of steps that are in the file
        self._every, self._keep = every, keep
        self._count = 0
        self._untried = 0  # how many steps were added since the last attempt to write the file
        self._tried_at = time.monotonic()
        self._warned = False

    def begin_anew(self, step: int, waiting: int, parent: str | None) -> None:
        """Begin a run that resumes another one at this step. The ``waiting`` steps before it are written again."""
        self.waiting, self._count = waiting, 0
        self.older.clear()
        self.late.clear()
        if self.live is not None:
            self.live.next = step
        if self.log is not None:
            self.log.begin_anew(parent)

    @property
    def is_lost(self) -> bool:
        """True if another recorder of this process has taken over the file."""
        return self.log is not None and self.log.is_lost

    def check(self) -> None:
        if self.log is not None and self.log.is_lost:
            raise RuntimeError(
                f"another Recorder of this process now writes to path={str(self.log.path)!r}. Give each Recorder its "
                "own path, or close() this Recorder"
            )

    def add(self) -> bool:
        """Count a step. Return True if it is time to write: before steps are lost, and not too often."""
        self.waiting += 1
        self._count += 1
        self._untried += 1
        if self.log is None and self.live is None:
            return False
        is_due = self._untried >= self._every or self._count == _FIRST or self.waiting == self._keep
        return is_due or time.monotonic() - self._tried_at > SECONDS

    def flush(self, read_last: ReadLast, *, warn: bool = False, is_end: bool = False) -> None:
        """Write and send the steps that wait; at the end also incomplete blocks and points."""
        # if the file cannot be written, the next flush tries again; with `warn`, this is one warning and no error
        try:
            self._flush(read_last, is_end)
            self._warned = False
        except OSError as error:
            if not warn:
                raise
            if not self._warned and self.log is not None:
                warn_user(f"the record could not be written to {self.log.path}, the next write tries again: {error}")
            self._warned = True

    def _flush(self, read_last: ReadLast, is_end: bool) -> None:
        self._untried, self._tried_at = 0, time.monotonic()
        if not self.is_writer:
            return
        count, log = self.waiting, self.log
        live = self.live if count or is_end else None
        most = 0 if live is None else EARLIER + (live.every or 0) + count
        if live is not None:
            read_last = _read_once(read_last, most)
        while self.older and log is not None:
            log.write(self.older[0].last, len(self.older[0].steps), {}, is_end=True)
            self.older.pop(0)
        if log is not None and not log.is_lost and (count or self.late or is_end):
            log.write(read_last, count, {step: float(loss) for step, loss in self.late.items()}, is_end=is_end)
        self.waiting = 0
        self.late.clear()
        if live is not None:
            live.send(read_last(most), is_end=is_end)


def _read_once(read_last: ReadLast, most: int) -> ReadLast:
    """As ``read_last``, but up to ``most`` steps are copied from the device once, now."""
    record = read_last(most)
    return lambda count: record.last(count) if count <= most else read_last(count)
