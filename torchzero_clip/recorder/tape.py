"""The last steps of a run, on the device of the parameters."""

from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from torchzero_clip.functional import foreach
from torchzero_clip.functional.dtypes import moved, widest
from torchzero_clip.functional.measure import Effect, effects
from torchzero_clip.recorder.arithmetic import joined_norms
from torchzero_clip.recorder.data import Ratios
from torchzero_clip.recorder.precision import FLOAT32_ROUNDING
from torchzero_clip.recorder.record import Record
from torchzero_clip.recorder.recorded_params import By, RecordedParams
from torchzero_clip.recorder.saved import SavedTape
from torchzero_clip.recorder.series import LATEST, jumps

PRECISION = "precision"  # the name of the column with the precision of gradients
_ABSENT = -1.0  # stands for the norm of a parameter without a gradient
PASSED = "passed "  # before the name of a gate: the column is 1 if it let the step pass about which the device decided


@dataclass
class Note:
    """What was recorded of a step on the CPU."""

    step: int
    refused_by: str = ""  # the name of the gate that refused the step; empty if the step was taken
    limits: Mapping[str, float] = field(default_factory=dict)  # those that are settings, by names of transforms
    undecided: Sequence[str] = ()  # who may have refused the step, until the answer of the device is read


class Tape:
    """The norms and numbers of the last steps of the same parameters, on the device.

    It stores more than the ``keep`` steps that can be read: the `LATEST` before them, with which they are compared, and
    up to `LATEST` that are overwritten next. ``used`` are the parameters that had gradients other than 0 in earlier
    steps.
    """

    def __init__(self, keep: int, params: RecordedParams, device: torch.device, used: Collection[str] = ()) -> None:
        self.params, self.device, self.keep = params, device, keep
        self._size = (-(-keep // LATEST) + 2) * LATEST
        self._hidden = set(params.frozen)  # the places of parameters that were frozen and have had no gradient since
        self.count = 0  # how many steps were written
        self.keys: list[str] = []
        self.notes: deque[Note] = deque(maxlen=self._size)
        self.ratios: deque[tuple[int, Tensor, Tensor]] = deque(maxlen=self._size)
        with torch.inference_mode(False):  # memory that is made in inference mode cannot be written to outside of it
            self._steps = torch.full((self._size, len(params.names)), torch.nan, dtype=widest(device), device=device)
            self._used = torch.tensor([name in used for name in params.names], dtype=torch.bool, device=device)
        self._absent = torch.full((len(params.names),), _ABSENT, dtype=widest(device), device=device)
        self._unknown = torch.full((), torch.nan, dtype=widest(device), device=device)
        self._effects: list[tuple[int, Effect]] = []  # of which steps the metrics of the scaling are computed later
        self._places: Sequence[int] = ()
        self._index = torch.empty(0, dtype=torch.long, device=device)

    def write(
        self,
        note: Note,
        norms: Tensor | None,
        places: Sequence[int] | None,
        numbers: dict[str, Tensor],
        passed: Tensor | None = None,
    ) -> None:
        """Write one step: the norms of the parameters at ``places``, None for all, and numbers (0-d) by name.

        ``passed`` has the answer of the device for each name of ``note.undecided``.
        """
        if norms is None:
            norms = self._absent
        elif places is not None:
            norms = self._spread(norms, places)
        elif self._hidden:
            self._hidden.clear()  # frozen parameters have gradients now, because the norms are of all
        if passed is not None:
            answers = passed.to(self._steps.dtype).unbind()
            named = {PASSED + name: answer for name, answer in zip(note.undecided, answers, strict=True)}
            numbers = {**numbers, **named}
        self._add_columns(numbers)
        waits = self.device.type == "cpu"
        device, dtype = self.device, self._steps.dtype
        columns = [numbers.get(key, self._unknown).to(device, dtype, non_blocking=not waits) for key in self.keys]
        torch.cat([norms, *(column.view(1) for column in columns)], out=self._row())
        self._append(note)

    def write_effect(self, effect: Effect) -> None:
        """Compute the metrics of the scaling of the last step later, for several steps at once."""
        if len(self._effects) == LATEST or any(effect.path != other.path for _, other in self._effects):
            self._compute()
        self._effects.append((self.count - 1, effect))

    def _compute(self) -> None:
        """Write the metrics that wait."""
        by_count: dict[int, list[tuple[int, Effect]]] = {}
        for waiting in self._effects:
            by_count.setdefault(len(waiting[1].factors), []).append(waiting)
        for waiting in by_count.values():
            path, rows = waiting[0][1].path, [count % self._size for count, _ in waiting]
            computed = {f"{path}/{key}": values for key, values in effects([e for _, e in waiting]).items()}
            self._add_columns(computed)
            places = [len(self.params.names) + self.keys.index(key) for key in computed]
            cells = [self._steps.select(0, row).select(0, place) for place in places for row in rows]
            foreach.copy_(cells, torch.cat(list(computed.values())).to(self._steps.dtype).unbind())
        self._effects.clear()

    def _row(self) -> Tensor:
        """The memory of the next step. What it overwrites counts in ``used`` first."""
        i = self.count % self._size
        if self.count >= self._size and i % LATEST == 0:
            self._used |= (self._norms(self._steps.narrow(0, i, LATEST)) > 0).any(dim=0)
        return self._steps.select(0, i)

    def _append(self, note: Note) -> None:
        self.notes.append(note)
        self.count += 1

    def _add_columns(self, keys: Iterable[str]) -> None:
        new = [key for key in keys if key not in self.keys]
        if new:
            self.keys += new
            with torch.inference_mode(False):
                more = self._steps.new_full((self._size, len(new)), torch.nan)
                self._steps = torch.cat([self._steps, more], dim=1)

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
        index = next((i for i, note in enumerate(self.notes) if note.step == step), None)
        if index is not None:
            self._add_columns(["loss"])
            values = self._steps.select(0, (self.count - len(self.notes) + index) % self._size)
            foreach.copy_([values.select(0, len(self.params.names) + self.keys.index("loss"))], [loss])

    def norms(self) -> Tensor:
        """The norms of the steps that are kept, on the CPU; `_ABSENT` if there is no gradient."""
        return self._read(self.keep)[0]

    def used(self) -> set[str]:
        """The parameters that had gradients other than 0. The call synchronizes with the GPU."""
        norms, _, _, used = self._read(self._size)
        are_used = torch.cat([norms, used]).gt(0).any(dim=0).tolist()
        return {name for name, is_used in zip(self.params.names, are_used, strict=True) if is_used}

    def _norms(self, steps: Tensor) -> Tensor:
        return steps.narrow(-1, 0, len(self.params.names))

    def _read(self, last: int) -> tuple[Tensor, dict[str, Tensor], list[tuple[int, Tensor]], Tensor]:
        """Norms, numbers, and norms of parameters and updates of the last steps in order, copied at once.

        The last result is 1 for each parameter that had a gradient other than 0 before these steps, else 0.
        """
        self._compute()
        kept = min(self.count, self._size, last)
        order = torch.arange(self.count - kept, self.count, device=self.device) % self._size
        earlier = torch.arange(max(self.count - self._size, 0), self.count - kept, device=self.device) % self._size
        used = self._used | (self._norms(self._steps[earlier]) > 0).any(dim=0)
        since = self.notes[-kept].step if kept else 0
        ratios = [ratio for ratio in self.ratios if kept and ratio[0] >= since]
        tensors = [self._steps[order], used.to(self._steps.dtype)[None], *(torch.stack(pair) for _, *pair in ratios)]
        copies = torch.cat([tensor.flatten() for tensor in tensors]).cpu().double().split([t.numel() for t in tensors])
        steps, used, *pairs = (copy.view(tensor.shape) for copy, tensor in zip(copies, tensors, strict=True))
        norms, numbers = steps.split([len(self.params.names), len(self.keys)], dim=1)
        columns = dict(zip(self.keys, numbers.unbind(dim=1), strict=True))
        refused = self._decided(columns)
        read = [(step, pair) for (step, *_), pair in zip(ratios, pairs, strict=True) if step not in refused]
        return norms, columns, read, used

    def _decided(self, columns: dict[str, Tensor]) -> set[int]:
        """Note who has refused the last steps, as the device has decided. Return the numbers of refused steps.

        A refused step has metrics of gates only.
        """
        passed = {key.removeprefix(PASSED): columns.pop(key) for key in list(columns) if key.startswith(PASSED)}
        count = len(next(iter(passed.values()), ()))
        refused: set[int] = set()
        for i, note in enumerate(list(self.notes)[len(self.notes) - count :]):
            by = [name for name in note.undecided if passed[name][i] == 0]
            if by:
                note.refused_by = " ".join(by)
                refused.add(note.step)
                for key, values in columns.items():
                    path, is_metric, _ = key.rpartition("/")
                    if is_metric and path not in note.undecided:
                        values[i] = torch.nan
        return refused

    def record(self, by: By, last: int | None = None) -> Record:
        """The last steps that are kept, on the CPU; None for all. The call synchronizes with the GPU.

        ``by`` says which layer each parameter belongs to.
        """
        last = self.keep if last is None else min(last, self.keep)
        norms, columns, pairs, used = self._read(last + LATEST)
        notes = list(self.notes)[len(self.notes) - len(norms) :]
        layers, of_layers = self.params.joined(torch.cat([used, norms]), by, self._hidden)
        used, of_layers = of_layers[0] > 0, of_layers[1:]
        for name in dict.fromkeys(name for note in notes for name in note.limits):
            columns[f"{name}/limit"] = norms.new_tensor([note.limits.get(name, torch.nan) for note in notes])
        unknown = norms.new_full((len(notes),), torch.nan)
        found_inf = columns.pop("found_inf", unknown) > 0
        reasons = [note.refused_by or ("found_inf" if inf else "") for note, inf in zip(notes, found_inf, strict=True)]
        loss, precision = columns.pop("loss", unknown), columns.pop(PRECISION, unknown)
        largest = max(precision[precision > 0].tolist(), default=FLOAT32_ROUNDING)
        steps = [note.step for note in notes]
        record = Record(
            steps,
            reasons,
            joined_norms(norms),
            loss,
            columns,
            layers,
            list(steps),
            of_layers,
            ratios=[Ratios(step, *self.params.joined(pair, by, self._hidden)[1]) for step, pair in pairs],
            precision=largest,
            jumps=[(steps[i], layers[k]) for i, k in jumps(of_layers, largest, used).nonzero().tolist()],
        )
        return record.last(last)

    def state_dict(self) -> SavedTape:
        norms, columns, ratios, used = self._read(self.keep + LATEST)
        notes = list(self.notes)[len(self.notes) - len(norms) :]
        return {
            "names": list(self.params.names),
            "steps": [note.step for note in notes],
            "refused_by": [note.refused_by for note in notes],
            "limits": [dict(note.limits) for note in notes],
            "keys": list(columns),
            "norms": norms,
            "numbers": torch.stack(list(columns.values()), 1) if columns else norms[:, :0],
            "ratios": ratios,
            "used": used[0] > 0,
            "keep": self.keep,
        }

    def load_state_dict(self, state: SavedTape) -> None:
        self._add_columns(state["keys"])
        self._hidden.difference_update((~(state["norms"] < 0)).any(dim=0).nonzero().flatten().tolist())
        values = moved(torch.cat([state["norms"], state["numbers"]], dim=1), self.device)
        steps = list(zip(state["steps"], state["refused_by"], state["limits"], values, strict=True))
        self._used |= state["used"].to(self.device)
        for step, refused_by, limits, of_step in steps[-self._size :]:
            foreach.copy_([self._row()], [of_step])
            self._append(Note(step, refused_by, limits))
        for step, pair in state["ratios"]:
            params, updates = moved(pair, self.device)
            self.ratios.append((step, params, updates))
