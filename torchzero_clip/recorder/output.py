"""Writes the steps of a run to its file, and sends them to its logger, now and then."""

import time
from collections.abc import Callable

from torch import Tensor

from torchzero_clip.compat import warn_user
from torchzero_clip.recorder.live import EARLIER, Live
from torchzero_clip.recorder.log import FirstProcess, Log
from torchzero_clip.recorder.record import Record

FIRST = 10
SECONDS = 30.0


class Output:
    """Knows which steps are in the file: all but ``every`` at most. The last ``keep`` steps can be read again."""

    def __init__(self, log: Log | None, live: Live | None, every: int, keep: int) -> None:
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
        """Begin a run at a step, which resumes another run. So many steps before it are written again."""
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
        is_due = self._untried >= self._every or self._count == FIRST or self.waiting == self._keep
        return is_due or time.monotonic() - self._tried_at > SECONDS

    def flush(self, kept: Callable[[int], Record], *, warn: bool = False, is_end: bool = False) -> None:
        """Write and send the steps that wait, which ``kept`` reads; at the end also incomplete blocks and points."""
        # if the file cannot be written, the next flush tries again; with `warn`, this is one warning and no error
        try:
            self._flush(kept, is_end)
            self._warned = False
        except OSError as error:
            if not warn:
                raise
            if not self._warned and self.log is not None:
                warn_user(f"the record could not be written to {self.log.path}, the next write tries again: {error}")
            self._warned = True

    def _flush(self, kept: Callable[[int], Record], is_end: bool) -> None:
        self._untried, self._tried_at = 0, time.monotonic()
        if not self.is_writer:
            return
        count, log = self.waiting, self.log
        live = self.live if count or is_end else None
        most = 0 if live is None else EARLIER + (live.every or 0) + count
        if live is not None:
            kept = _read_once(kept, most)
        while self.older and log is not None:
            log.write(self.older[0].last, len(self.older[0].steps), {}, is_end=True)
            self.older.pop(0)
        if log is not None and not log.is_lost and (count or self.late or is_end):
            log.write(kept, count, {step: float(loss) for step, loss in self.late.items()}, is_end=is_end)
        self.waiting = 0
        self.late.clear()
        if live is not None:
            live.send(kept(most), is_end=is_end)


def _read_once(kept: Callable[[int], Record], most: int) -> Callable[[int], Record]:
    """As ``kept``, but up to ``most`` steps are copied from the device once."""
    record = kept(most)
    return lambda count: record.last(count) if count <= most else kept(count)
