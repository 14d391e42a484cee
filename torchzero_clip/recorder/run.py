"""Records the steps of a run on the device, and writes them to a file after every ``keep`` steps."""

import atexit
import operator
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from typing_extensions import override

from torchzero_clip.compat import never_compiled
from torchzero_clip.core.kinds import Scaling, UpdateRule
from torchzero_clip.core.nodes import Node
from torchzero_clip.engine.listener import Listener
from torchzero_clip.engine.walk import Walk
from torchzero_clip.functional import foreach
from torchzero_clip.functional.measure import L2
from torchzero_clip.functional.norms import each_norm
from torchzero_clip.recorder.layout import By, Layout
from torchzero_clip.recorder.log import Log
from torchzero_clip.recorder.record import Record, joined
from torchzero_clip.recorder.tape import Note, Tape

FAILED = "error"
"""The reason of a step that raised an error."""


class Run(Listener):
    """Writes each step on a `Tape`, and the tape to a file when it is full. It does not know the optimizer.

    Args:
        by: What the norms are joined into.
        keep: How many steps are kept.
        log: The file; None for none.
        ratios_every: The norms of parameters and updates are taken once in so many steps; 0 for never.
        model: Gives names to parameters that have none.
    """

    def __init__(self, by: By, keep: int, log: Log | None, ratios_every: int, model: nn.Module | None) -> None:
        self.by: By = by
        self.keep = keep
        self.log = log
        self.model = model
        self.step = 0
        """The number of the next step."""
        self.tape: Tape | None = None
        self.finish: Callable[[], None] = nothing
        """Writes a step that was measured, but may not have been taken yet."""
        self._ratios_every = ratios_every
        self._before: list[Tensor] | None = None
        self._joint: list[str] = []
        self._limited: list[Node] | None = None
        self._older: list[Record] = []
        self._params: list[int] = []
        self._unwritten = 0
        if log is not None:
            OPEN.add(self)

    @override
    @never_compiled
    def begin(self, walk: Walk) -> None:
        self.save_params(walk.params)

    @override
    @never_compiled
    def end(self, walk: Walk) -> None:
        note = Note(self.step, " ".join(walk.refused_by), self._limits(walk))
        numbers = dict(walk.metrics) if walk.loss is None else {"loss": walk.loss, **walk.metrics}
        self.write(walk.groups, walk.params, walk.norms_before, numbers, note)

    def _limits(self, walk: Walk) -> dict[str, float]:
        """The limits that are settings with one value in all groups."""
        if self._limited is None:
            self._limited = [node for node in walk.nodes if node.transform.limit_setting is not None]
            self._joint = _with_limits_of_all(list(walk.nodes))
        found: dict[str, float] = {}
        for node in self._limited:
            values = {setting[str(node.transform.limit_setting)] for setting in walk.settings[node.path]}
            if len(values) == 1 and isinstance(value := values.pop(), int | float):
                found[node.path] = float(value)
        return found

    def save_params(self, params: Sequence[Tensor]) -> None:
        """Copy the parameters, if the norms of updates are taken in the next step."""
        wanted = self._ratios_every and self.step % self._ratios_every == 0
        self._before = foreach.clone(params) if wanted else None

    def write(
        self,
        groups: Sequence[dict[str, Any]],
        params: Sequence[Tensor],
        norms: Tensor | None,
        numbers: dict[str, Any],
        note: Note,
    ) -> None:
        """Write one step.

        Args:
            groups: The param groups.
            params: The parameters that have a gradient.
            norms: The norms of their gradients; None if they were not measured.
            numbers: 0-d tensors by name, and the loss in any form.
            note: What the host knows of the step.
        """
        before, self._before = self._before, None
        tape = self._tape_for(groups, norms)
        places = _places(groups, params) if norms is not None and len(params) != len(tape.layout.names) else None
        tape.write(note, norms, places, _as_tensors(numbers, tape.device))
        if before is not None and norms is not None and not note.refused_by:
            sizes = each_norm(before)
            foreach.subtract_(before, list(params))
            tape.write_ratios(note.step, sizes, each_norm(before), places)
        self.step += 1
        self._unwritten += 1
        if self.log is not None and self._unwritten % self.keep == 0:
            self._flush_or_warn()

    def _tape_for(self, groups: Sequence[dict[str, Any]], norms: Tensor | None) -> Tape:
        params = [id(param) for group in groups for param in group["params"]]
        tape = self.tape
        is_same = params == self._params
        if tape is not None and is_same and (norms is None or norms.device == tape.device):
            return tape
        self._params = params
        layout = Layout.of(groups, self.model)
        first = next((param for group in groups for param in group["params"]), None)
        device = norms.device if norms is not None else first.device if first is not None else torch.device("cpu")
        if tape is not None and tape.layout == layout and (norms is None or device == tape.device):
            return tape
        if tape is not None:
            self._flush_or_warn()
            self._older.append(self._recorded(tape))
            self._older = self._last_of_older(self.keep)
        self.tape = Tape(self.keep, layout, device)
        self._unwritten = 0
        return self.tape

    def record(self) -> Record | None:
        """The steps that are kept; None before the first."""
        self.finish()
        if self.tape is None:
            return None
        own = self._recorded(self.tape)
        return joined([*self._last_of_older(self.keep - len(own.steps)), own])

    def _recorded(self, tape: Tape) -> Record:
        return replace(tape.record(self.by), joint=self._joint)

    def _last_of_older(self, count: int) -> list[Record]:
        """The last ``count`` of the steps from before parameters were added or removed."""
        kept: list[Record] = []
        for record in reversed(self._older):
            part = record.last(count)
            count -= len(part.steps)
            kept.insert(0, part)
        return [record for record in kept if record.steps]

    def flush(self) -> None:
        """Write to the file the steps that are not in it yet."""
        self.finish()
        if self.log is None or self.tape is None or not self._unwritten:
            return
        record = self._recorded(self.tape)
        self.log.write(record, max(len(record.steps) - self._unwritten, 0))
        self._unwritten = 0

    def _flush_or_warn(self) -> None:
        try:
            self.flush()
        except OSError as error:
            path = None if self.log is None else self.log.path
            warnings.warn(
                f"the record could not be written to {path}, the next write tries again: {error}", stacklevel=2
            )

    def close(self) -> None:
        """Write the last steps to the file."""
        try:
            self.flush()
        finally:
            OPEN.discard(self)
            self.log, self._unwritten = None, 0

    def __del__(self) -> None:
        if self.__dict__.get("_unwritten") and self.__dict__.get("log"):  # nobody holds the optimizer any more
            self._flush_or_warn()

    def __getstate__(self) -> dict[str, Any]:
        """Copies keep what was recorded, but do not write to the file."""
        return self.__dict__ | {"log": None, "finish": nothing, "_before": None, "_params": [], "_limited": None}

    def state_dict(self) -> dict[str, Any]:
        """The number of steps, and those that are kept."""
        self.finish()
        tape = None if self.tape is None else self.tape.state_dict()
        return {"step": self.step, "joint": list(self._joint), "tape": tape}

    def load_state_dict(self, state: dict[str, Any], layout: Layout, device: torch.device) -> None:
        """Continue a record. The next write to the file replaces its steps from the first kept step on."""
        kept, tape = state["tape"], None
        if kept is not None:
            if list(layout.names) != kept["names"]:
                theirs, ours = set(kept["names"]) - set(layout.names), set(layout.names) - set(kept["names"])
                only = f"only the {'record' if theirs else 'optimizer'} has {sorted(theirs or ours)[:3]}"
                problem = only if theirs or ours else "they are in another order"
                raise ValueError(f"the record has other parameters than this optimizer: {problem}")
            tape = Tape(self.keep, layout, device)
            tape.load_state_dict(kept)
        self.flush()
        self.step, self._joint = operator.index(state["step"]), list(state.get("joint", []))
        self.tape, self._older, self._params = tape, [], []
        self._unwritten = 0 if tape is None else len(tape.notes)
        if self.log is not None:
            self.log.begin_anew()
            if self._unwritten == self.keep:
                self._flush_or_warn()


OPEN: WeakSet[Run] = WeakSet()
"""Runs that write to a file."""


@atexit.register
def _finish() -> None:
    for run in list(OPEN):
        try:
            run.close()
        except Exception as error:  # one file that cannot be written must not cost the others
            warnings.warn(f"the last steps of a record were not written: {error!r}", stacklevel=1)


def nothing() -> None:
    """Nothing was measured."""


def _with_limits_of_all(nodes: list[Node]) -> list[str]:
    """The names of transforms that limit the L2 norm of all gradients together."""
    found: list[str] = []
    for node in nodes:
        transform = node.transform
        if isinstance(transform, UpdateRule):
            break
        if isinstance(transform, Scaling) and transform.slicing.dim == "global" and not node.scope.limited:
            found += [node.path] if transform.slicing.metric == L2 else []
    return found


def _places(groups: Sequence[dict[str, Any]], params: Sequence[Tensor]) -> list[int]:
    """The places of parameters among those of all groups, in order; a parameter that is listed twice has two."""
    wanted = iter([id(param) for param in params])
    found: list[int] = []
    current = next(wanted, None)
    for place, param in enumerate(param for group in groups for param in group["params"]):
        if id(param) == current:
            found.append(place)
            current = next(wanted, None)
    return found


def _as_tensors(numbers: dict[str, Any], device: torch.device) -> dict[str, Tensor]:
    """The numbers as 0-d tensors. Values that are not one number are left out."""
    found: dict[str, Tensor] = {}
    for name, number in numbers.items():
        if isinstance(number, Tensor) and number.numel() == 1:
            found[name] = number.detach().reshape(()).double() if number.ndim or name == "loss" else number
        elif isinstance(number, int | float):
            found[name] = torch.full((), float(number), dtype=torch.float64, device=device)
    return found
