"""The recording of a run: every step on the device, and full rings in a file."""

import atexit
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from typing_extensions import override

from torchzero_clip.compat import never_compiled
from torchzero_clip.core.kinds import Scaling
from torchzero_clip.core.listener import Listener
from torchzero_clip.core.nodes import Node
from torchzero_clip.core.walk import Walk
from torchzero_clip.functional import foreach
from torchzero_clip.functional.norms import each_norm
from torchzero_clip.recorder.files import append, header, lines_of
from torchzero_clip.recorder.layout import By, Layout
from torchzero_clip.recorder.record import Record, joined
from torchzero_clip.recorder.tape import Note, Tape


class Run(Listener):
    """Writes each step on a `Tape`, and the tape to a file when it is full. It does not know the optimizer.

    Args:
        by: What the norms are joined into.
        keep: How many steps are kept.
        path: The file; None for none.
        ratios_every: Norms of parameters and updates are taken every so many steps; 0 for never.
        model: Gives names to parameters that have none.
    """

    def __init__(self, by: By, keep: int, path: Path | None, ratios_every: int, model: nn.Module | None) -> None:
        self.by: By = by
        self.keep = keep
        self.path = path
        self.model = model
        self.step = 0
        """The number of the next step."""
        self.tape: Tape | None = None
        self._ratios_every = ratios_every
        self._before: list[Tensor] | None = None
        self.joint: list[str] = []
        """The names of transforms that have one norm of all tensors."""
        self._limited: list[Node] | None = None
        self._older: list[Record] = []
        self._unwritten = 0
        self._header: tuple[str, ...] | None = None
        self._process = os.getpid()
        if path is not None:
            _UNFINISHED.add(self)

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
        """The limits that are settings, of transforms whose groups agree."""
        if self._limited is None:
            self._limited = [node for node in walk.nodes if node.transform.limit_setting is not None]
            scalings = [(node.path, node.transform) for node in walk.nodes if isinstance(node.transform, Scaling)]
            self.joint = [path for path, transform in scalings if transform.slicing.dim == "global"]
        found: dict[str, float] = {}
        for node in self._limited:
            values = {setting[str(node.transform.limit_setting)] for setting in walk.settings[node.path]}
            if len(values) == 1 and isinstance(value := values.pop(), int | float):
                found[node.path] = float(value)
        return found

    def save_params(self, params: Sequence[Tensor]) -> None:
        """Copy the parameters before a step after which the norms of updates are to be taken."""
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
        tape = self._tape_for(groups, norms)
        places = _places(groups, params) if norms is not None and len(params) != len(tape.layout.names) else None
        if "loss" in numbers:
            numbers = _with_number(numbers, tape.device)
        tape.write(note, norms, places, numbers)
        if self._before is not None and norms is not None and not note.refused_by:
            moved = foreach.subtract(self._before, list(params))
            tape.write_ratios(note.step, each_norm(self._before), each_norm(moved), places)
        self._before = None
        self.step += 1
        self._unwritten += 1
        if self.path is not None and self._unwritten == self.keep:
            self.flush()

    def _tape_for(self, groups: Sequence[dict[str, Any]], norms: Tensor | None) -> Tape:
        sizes = tuple([len(group["params"]) for group in groups])
        tape = self.tape
        if tape is not None and tape.layout.sizes == sizes and (norms is None or norms.device == tape.device):
            return tape
        if tape is not None:
            self.flush()
            self._older.append(self._recorded(tape))
        first = next((param for group in groups for param in group["params"]), None)
        device = norms.device if norms is not None else first.device if first is not None else torch.device("cpu")
        self.tape = Tape(self.keep, Layout.of(groups, self.model), device)
        self._unwritten = 0
        return self.tape

    def record(self) -> Record | None:
        """The steps that are kept; None before the first."""
        if self.tape is None:
            return None
        own = len(self.tape.notes)
        kept: list[Record] = []
        for record in reversed(self._older):
            if own >= self.keep:
                break
            part = record.last(self.keep - own)
            own += len(part.steps)
            kept.insert(0, part)
        self._older = kept
        return joined([*kept, self._recorded(self.tape)])

    def _recorded(self, tape: Tape, wanted: int | None = None) -> Record:
        return replace(tape.record(self.by, wanted), joint=self.joint)

    def flush(self) -> None:
        """Write the steps to the file that are not there yet. Only the first process does."""
        unwritten, self._unwritten = self._unwritten, 0
        if self.path is None or self.tape is None or not unwritten or not _is_first() or os.getpid() != self._process:
            return
        record = self._recorded(self.tape, unwritten)
        lines = lines_of(record)
        names = tuple(record.layers)
        if names != self._header:
            lines.insert(0, header(record.steps[0], self.by, record.layers, record.joint))
        append(self.path, lines)
        self._header = names

    def close(self) -> None:
        """Write the rest."""
        self.flush()
        _UNFINISHED.discard(self)

    def __del__(self) -> None:
        if getattr(self, "_unwritten", 0):  # nobody holds the optimizer any more
            self.flush()

    def state_dict(self) -> dict[str, Any]:
        """The number of steps, and those that are kept."""
        return {"step": self.step, "tape": None if self.tape is None else self.tape.state_dict()}

    def load_state_dict(self, state: dict[str, Any], layout: Layout, device: torch.device) -> None:
        """Continue a record. The file gets a new beginning at the next step."""
        self.flush()
        kept = state["tape"]
        tape = None
        if kept is not None:
            if list(layout.names) != kept["names"]:
                theirs, ours = set(kept["names"]) - set(layout.names), set(layout.names) - set(kept["names"])
                only = sorted(theirs or ours)[:3] or "in another order"
                raise ValueError(f"the record has other parameters than this optimizer: {only}")
            tape = Tape(self.keep, layout, device)
            tape.load_state_dict(kept)
        self.step, self.tape, self._older, self._unwritten, self._header = state["step"], tape, [], 0, None


_UNFINISHED: WeakSet[Run] = WeakSet()


@atexit.register
def _finish() -> None:
    for run in list(_UNFINISHED):
        run.close()


def _is_first() -> bool:
    return not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0


def _places(groups: Sequence[dict[str, Any]], params: Sequence[Tensor]) -> list[int]:
    """The place of each parameter among those of all groups."""
    places = {id(param): i for i, param in enumerate(param for group in groups for param in group["params"])}
    return [places[id(param)] for param in params]


def _with_number(numbers: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """The numbers with the loss as a 0-d tensor of float64; without it, if it is not one number."""
    loss = numbers["loss"]
    if isinstance(loss, Tensor) and loss.numel() == 1:
        return numbers | {"loss": loss.detach().reshape(()).double()}
    if isinstance(loss, int | float):
        return numbers | {"loss": torch.full((), float(loss), dtype=torch.float64, device=device)}
    return {name: number for name, number in numbers.items() if name != "loss"}
