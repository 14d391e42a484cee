"""Steps about which the device decides: the host does not wait, and reads the answers when it is asked.

A kernel changes nothing where ``found_inf`` is 1, and a step count grows by ``taken``. All counts are changed in place,
so that a captured step counts whenever it is replayed.
"""

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from operator import is_
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from torchzero_clip.core.kinds import Kernel
from torchzero_clip.functional.dtypes import widest

MOST_LATE = 16
"""How many steps an error may be late: then the host waits for the oldest counts that have not arrived."""


class Answers(NamedTuple):
    """What the device has decided since the host asked last."""

    taken: int
    skipped: int
    in_a_row: int  # steps skipped in a row, up to the last one
    refused_by: tuple[str, ...]  # who has refused the last one


class Arriving(Protocol):
    """Numbers on their way to the host."""

    def arrived(self) -> bool:
        """True if the numbers are on the host. It does not wait."""
        ...

    def read(self) -> list[float]:
        """The numbers as they were when they were sent. It waits until they have arrived."""
        ...


class Sent:
    """Numbers that were copied to pinned memory, with an event behind the copy."""

    def __init__(self, numbers: Tensor) -> None:
        self._numbers = torch.empty(numbers.shape, dtype=numbers.dtype, device="cpu", pin_memory=True)
        self._numbers.copy_(numbers, non_blocking=True)
        self._event = torch.cuda.Event()
        self._event.record()

    def arrived(self) -> bool:
        return self._event.query()

    def read(self) -> list[float]:
        self._event.synchronize()
        return self._numbers.tolist()


class DeviceDecisions:
    """The decision about the step that runs, and the counts of all steps about which the device has decided."""

    send: Callable[[Tensor], Arriving] = Sent
    """Sends numbers to the host without waiting. Tests on the CPU replace it."""

    def __init__(self, names: Sequence[str], device: torch.device) -> None:
        dtype = widest(device)
        self.names = names
        """Who may refuse a step."""
        self.counts = torch.zeros(3, dtype=dtype, device=device)
        """Steps taken, steps skipped, and steps skipped in a row."""
        self._taken_count, _, self._in_a_row = self.counts.unbind()
        self._skips = self.counts.narrow(0, 1, 2)
        self.found_inf = torch.zeros((), dtype=torch.float32, device=device)
        """1 if the step is refused, as kernels of torch read it."""
        self._refused = self.found_inf.view(1)
        self.taken = torch.ones((), dtype=torch.bool, device=device)
        """False if the step is refused."""
        self._passed = torch.ones(len(names), dtype=torch.bool, device=device)  # by name
        self.bad_params: list[Tensor] = []
        """The parameters whose gradients ``nonfinite`` has judged."""
        self._bad_norms = torch.zeros(0, dtype=dtype, device=device)
        self._read = (0.0, 0.0)  # steps taken and skipped when the host asked last
        self._known_in_a_row = 0  # as the host knows it
        self._is_new = False  # something was decided since the host asked last
        self.is_captured = False
        """True after a step was captured: from then on, replays may decide at any time."""
        self._on_their_way: deque[Arriving] = deque()

    def continue_from(self, in_a_row: int) -> None:
        """Continue from the count of the host, which may have decided about steps in between, or loaded it."""
        if in_a_row != self._known_in_a_row:
            self.forget_sent()
            self._in_a_row.fill_(in_a_row)
            self._known_in_a_row = in_a_row

    def decide(self, passed: Sequence[Tensor]) -> None:
        """Take the step if each of ``names`` lets it pass, by a 0-d boolean. Count it."""
        self._is_new = True
        if len(passed) > 1:
            torch.stack(list(passed), out=self._passed)
        self.taken = self._passed.all() if len(passed) > 1 else passed[0]
        torch.logical_not(self.taken, out=self.found_inf)
        self._taken_count.add_(self.taken)
        self._skips.add_(self.found_inf)
        self._in_a_row.mul_(self.found_inf)

    def uncount(self) -> None:
        """Take back the count of a step that has raised an error. If it ended skips in a row, their count stays 0."""
        self._taken_count.sub_(self.taken.to(self._taken_count.dtype))
        self._skips.sub_(self.found_inf)

    @property
    def passed(self) -> Tensor:
        """Whether each of ``names`` lets the step pass that was decided last: booleans, which the next step changes."""
        return self._passed if len(self.names) > 1 else self._refused == 0

    def refusable(self, kernel: Callable[..., None]) -> Kernel:
        """The kernel with its ``found_inf`` set, so that it changes nothing in a refused step."""
        return partial(kernel, found_inf=self.found_inf)

    def may_note_norms_of(self, params: list[Tensor]) -> bool:
        """False if norms of other parameters are noted, which new ones would replace."""
        bad = self.bad_params
        # `same_objects`, written out because a call in each step takes time
        return not bad or (len(params) == len(bad) and all(map(is_, params, bad)))

    def note_norms(self, finite: Tensor, norms: Tensor, params: list[Tensor]) -> None:
        """Store the norm of each gradient, unless they are ``finite``."""
        if len(norms) != len(self._bad_norms):
            self._bad_norms = torch.zeros_like(norms)
        self.bad_params = params
        torch.where(finite, self._bad_norms, norms, out=self._bad_norms)

    def bad_norms(self) -> list[float] | None:
        """The norms of the last refused gradients that were not finite, once; None without new ones. It waits."""
        norms = self._bad_norms.tolist()
        if all(norm < torch.inf for norm in norms):  # False for NaN
            return None
        self._bad_norms.zero_()
        return norms

    def skipped_steps(self, known: int) -> Tensor:
        """How many steps were skipped, of which ``known`` are counted on the host: a tensor on the device."""
        return (self.counts.select(0, 1) + (known - self._read[1])).to(torch.int64)

    def step_at(self, counts: Sequence[float], known: int) -> int:
        """The number of the step at which these counts were sent; ``known`` steps are counted on the host."""
        return known + int(counts[0] + counts[1] - sum(self._read))

    def answers(self) -> Answers | None:
        """The decisions since the last call; None without one. It reads the device only if there may be one."""
        if not (self._is_new or self.is_captured):
            return None
        self._is_new = False
        taken, skipped, in_a_row, *passed = torch.cat([self.counts, self.passed.to(self.counts.dtype)]).tolist()
        before, self._read = self._read, (taken, skipped)
        if before == self._read:
            return None
        self._known_in_a_row = int(in_a_row)
        refused_by = tuple(name for name, has_passed in zip(self.names, passed, strict=True) if not has_passed)
        return Answers(int(taken - before[0]), int(skipped - before[1]), int(in_a_row), refused_by)

    def post(self) -> None:
        """Send the counts to the host, for `arrived`."""
        self._on_their_way.append(self.send(self.counts))

    def forget_sent(self) -> None:
        """Forget counts that are on their way, which tell of the time before an error or a load."""
        self._on_their_way.clear()

    def arrived(self) -> list[float] | None:
        """The latest counts that are on the host; None without new ones. It waits only for those of 16 steps before."""
        latest = None
        while self._on_their_way and (len(self._on_their_way) >= MOST_LATE or self._on_their_way[0].arrived()):
            latest = self._on_their_way.popleft().read()
        return latest
