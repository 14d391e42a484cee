"""The last steps of a run, on the device of the parameters."""

from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from torchzero_clip.functional import foreach
from torchzero_clip.functional.dtypes import widest
from torchzero_clip.recorder.data import Ratios
from torchzero_clip.recorder.layout import By, Layout
from torchzero_clip.recorder.numbers import joined_norms
from torchzero_clip.recorder.precision import FLOAT32
from torchzero_clip.recorder.record import Record
from torchzero_clip.recorder.series import LATEST, jumps

PRECISION = "precision"  # the name of the column
ABSENT = -1.0  # stands for the norm of a parameter without a gradient


@dataclass
class Note:
    """What is known about a step without reading the device."""

    step: int
    refused_by: str = ""  # the name of the gate that refused the step; empty if the step was taken
    limits: Mapping[str, float] = field(default_factory=dict)  # those that are settings, by names of transforms


class Tape:
    """The norms and numbers of the last steps, as rows on the device, all with the same layout.

    It has more steps than can be read: `LATEST` with which these are compared, and the next ones that are forgotten.
    ``used`` are the parameters that had gradients other than 0 in earlier steps.
    """

    def __init__(self, keep: int, layout: Layout, device: torch.device, used: Collection[str] = ()) -> None:
        self.layout, self.device, self.keep = layout, device, keep
        self._size = (-(-keep // LATEST) + 2) * LATEST
        self._hidden = set(layout.frozen)  # the places of those that were frozen at the start and had no gradient since
        self.count = 0  # how many steps were written
        self.keys: list[str] = []
        self.notes: deque[Note] = deque(maxlen=self._size)
        self.ratios: deque[tuple[int, Tensor, Tensor]] = deque(maxlen=self._size)
        with torch.inference_mode(False):  # memory that is made in inference mode cannot be written to outside of it
            self._rows = torch.full((self._size, len(layout.names)), torch.nan, dtype=widest(device), device=device)
            self._used = torch.tensor([name in used for name in layout.names], dtype=torch.bool, device=device)
        self._absent = torch.full((len(layout.names),), ABSENT, dtype=widest(device), device=device)
        self._unknown = torch.full((), torch.nan, dtype=widest(device), device=device)
        self._places: Sequence[int] = ()
        self._index = torch.empty(0, dtype=torch.long, device=device)

    def write(self, note: Note, norms: Tensor | None, places: Sequence[int] | None, numbers: dict[str, Tensor]) -> None:
        """Write one step: the norm of each gradient, if there are any, into these columns, and 0-d tensors by name."""
        if norms is None:
            norms = self._absent
        elif places is not None:
            norms = self._spread(norms, places)
        elif self._hidden:
            self._hidden.clear()
        self._add_columns(numbers)
        waits = self.device.type == "cpu"
        found = [
            numbers.get(key, self._unknown).to(self.device, self._rows.dtype, non_blocking=not waits)
            for key in self.keys
        ]
        self._write(note, torch.cat([norms, torch.stack(found)]) if found else norms)

    def _write(self, note: Note, row: Tensor) -> None:
        place = self.count % self._size
        if self.count >= self._size and place % LATEST == 0:
            self._used |= (self._norms(self._rows.narrow(0, place, LATEST)) > 0).any(dim=0)
        foreach.copy_([self._rows.select(0, place)], [row])
        self.notes.append(note)
        self.count += 1

    def _add_columns(self, keys: Iterable[str]) -> None:
        new = [key for key in keys if key not in self.keys]
        if new:
            self.keys += new
            with torch.inference_mode(False):
                more = self._rows.new_full((self._size, len(new)), torch.nan)
                self._rows = torch.cat([self._rows, more], dim=1)

    def write_ratios(self, step: int, params: Tensor, updates: Tensor, places: Sequence[int] | None) -> None:
        """Write the norms of parameters and of what was subtracted from them; ``places`` is as in `write`."""
        if places is not None:
            params, updates = self._spread(params, places), self._spread(updates, places)
        self.ratios.append((step, params, updates))

    def _spread(self, norms: Tensor, places: Sequence[int]) -> Tensor:
        if places != self._places:
            self._places = places
            self._hidden.difference_update(places)
            # CUDA copies up to 64 KB to the device without waiting, also from memory that is not pinned
            self._index = torch.tensor(places, device="cpu").to(self.device, non_blocking=True)
        return self._absent.index_copy(0, self._index, norms)

    def write_loss(self, step: int, loss: Tensor) -> None:
        """Write the loss of a step that was written before; no effect if it is no longer kept."""
        places = [i for i, note in enumerate(self.notes) if note.step == step]
        if places:
            self._add_columns(["loss"])
            row = self._rows.select(0, (self.count - len(self.notes) + places[0]) % self._size)
            foreach.copy_([row.select(0, len(self.layout.names) + self.keys.index("loss"))], [loss])

    def norms(self) -> Tensor:
        """The norms on the CPU, a row for each step that is kept; `ABSENT` if there is no gradient."""
        return self._read(self.keep)[0]

    def used(self) -> set[str]:
        """The parameters that had gradients other than 0. The call waits for the device."""
        norms, _, _, used = self._read(self._size)
        are_used = torch.cat([norms, used]).gt(0).any(dim=0).tolist()
        return {name for name, is_used in zip(self.layout.names, are_used, strict=True) if is_used}

    def _norms(self, rows: Tensor) -> Tensor:
        return rows.narrow(-1, 0, len(self.layout.names))

    def _read(self, last: int) -> tuple[Tensor, Tensor, list[tuple[int, Tensor]], Tensor]:
        """Norms, numbers, and norms of parameters and updates of the last steps in order, copied at once.

        The last result is a row with 1 for each parameter that had a gradient other than 0 before, else 0.
        """
        kept = min(self.count, self._size, last)
        order = torch.arange(self.count - kept, self.count, device=self.device) % self._size
        earlier = torch.arange(max(self.count - self._size, 0), self.count - kept, device=self.device) % self._size
        used = self._used | (self._norms(self._rows[earlier]) > 0).any(dim=0)
        since = self.notes[-kept].step if kept else 0
        ratios = [ratio for ratio in self.ratios if kept and ratio[0] >= since]
        parts = [self._rows[order], used.to(self._rows.dtype)[None], *(torch.stack(pair) for _, *pair in ratios)]
        copied = torch.cat([part.flatten() for part in parts]).cpu().double().split([part.numel() for part in parts])
        rows, used, *pairs = (part.view(own.shape) for part, own in zip(copied, parts, strict=True))
        norms, numbers = rows.split([len(self.layout.names), len(self.keys)], dim=1)
        return norms, numbers, [(step, pair) for (step, *_), pair in zip(ratios, pairs, strict=True)], used

    def record(self, by: By, last: int | None = None) -> Record:
        """The last steps that are kept, on the CPU; None for all. The call waits for the device."""
        last = self.keep if last is None else min(last, self.keep)
        norms, numbers, pairs, used = self._read(last + LATEST)
        notes = list(self.notes)[len(self.notes) - len(norms) :]
        layers, of_layers = self.layout.joined(torch.cat([used, norms]), by, self._hidden)
        used, of_layers = of_layers[0] > 0, of_layers[1:]
        columns = {key: numbers[:, k] for k, key in enumerate(self.keys)}
        for name in dict.fromkeys(name for note in notes for name in note.limits):
            columns[f"{name}/limit"] = norms.new_tensor([note.limits.get(name, torch.nan) for note in notes])
        unknown = norms.new_full((len(notes),), torch.nan)
        found_inf = columns.pop("found_inf", unknown) > 0
        reasons = [note.refused_by or ("found_inf" if inf else "") for note, inf in zip(notes, found_inf, strict=True)]
        loss, precision = columns.pop("loss", unknown), columns.pop(PRECISION, unknown)
        known = max(precision[precision > 0].tolist(), default=FLOAT32)
        found = jumps(of_layers, known, used).nonzero().tolist()
        jumped = [(notes[row].step, layers[k]) for row, k in found]
        steps = [note.step for note in notes]
        ratios = [Ratios(step, *self.layout.joined(pair, by, self._hidden)[1]) for step, pair in pairs]
        own = steps, reasons, joined_norms(norms), loss, columns, layers, list(steps), of_layers
        return Record(*own, ratios=ratios, precision=known, jumps=jumped).last(last)

    def state_dict(self) -> dict[str, Any]:
        norms, numbers, ratios, used = self._read(self.keep + LATEST)
        kept = list(self.notes)[len(self.notes) - len(norms) :]
        steps, refused_by = [note.step for note in kept], [note.refused_by for note in kept]
        notes = {"steps": steps, "refused_by": refused_by, "limits": [dict(note.limits) for note in kept]}
        names, keys = list(self.layout.names), list(self.keys)
        own = {"norms": norms, "numbers": numbers, "ratios": ratios, "used": used[0] > 0, "keep": self.keep}
        return {"names": names, **notes, "keys": keys, **own}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._add_columns(state["keys"])
        self._hidden.difference_update((~(state["norms"] < 0)).any(dim=0).nonzero().flatten().tolist())
        rows = torch.cat([state["norms"], state["numbers"]], dim=1).to(self.device)
        steps = list(zip(state["steps"], state["refused_by"], state["limits"], rows, strict=True))
        self._used |= state["used"].to(self.device)
        for *note, row in steps[-self._size :]:
            self._write(Note(*note), row)
        for step, pair in state["ratios"]:
            self.ratios.append((step, *pair.to(self.device).unbind()))
