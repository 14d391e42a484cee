"""Records the steps of a run on the device, and writes them to a file now and then."""

import atexit
import operator
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import takewhile
from pathlib import Path
from typing import TypeAlias
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary
from typing_extensions import override

from torchzero_clip.checks import number
from torchzero_clip.compat import may_be_template, never_compiled, warn_user
from torchzero_clip.core.kinds import Scaling, UpdateRule
from torchzero_clip.core.nodes import Node
from torchzero_clip.engine.listener import Listener, Seen
from torchzero_clip.functional import foreach
from torchzero_clip.functional.dtypes import widened, widest
from torchzero_clip.functional.lists import params_of
from torchzero_clip.functional.measure import L2, Effect
from torchzero_clip.functional.norms import norms_of_each
from torchzero_clip.functional.shards import local, summed
from torchzero_clip.recorder.measurable import Measurable
from torchzero_clip.recorder.output import Output
from torchzero_clip.recorder.precision import precision_of
from torchzero_clip.recorder.reading import last_run
from torchzero_clip.recorder.record import Record, joined
from torchzero_clip.recorder.recorded_params import By, Name, RecordedParams
from torchzero_clip.recorder.saved import SavedRecorder
from torchzero_clip.recorder.tape import PRECISION, Note, Tape
from torchzero_clip.recorder.two_runs import REPORTED
from torchzero_clip.types import Group

Groups: TypeAlias = Sequence[Group]
PRECISION_EVERY = 100  # steps
FAILED = "error"  # the reason of a step that raised an error


class Recording(Listener):
    """Writes each step on a `Tape`, which an `Output` writes to a file. It has no reference to the optimizer."""

    def __init__(self, by: By, keep: int, ratios_every: int, model: nn.Module | None, output: Output) -> None:
        self.by: By = by
        self.keep, self.model, self.output = keep, model, output
        self.step = 0  # the number of the next step
        self.tape: Tape | None = None
        self.finish: Callable[..., None] = nothing  # writes a step that was measured, but may not have been taken yet
        self.names: MutableMapping[Tensor, Name] = WeakIdKeyDictionary()  # of the parameters; they never change
        self._ratios_every = ratios_every
        self.measurable = Measurable()
        self._before: tuple[list[Tensor], list[Tensor]] | None = None  # parameters, and copies of them
        self._reported: dict[str, Tensor | float] = {}  # the norm that the trainer computed for the next step
        self._precision: Tensor | None = None
        self._joint: list[str] = []
        self._limited: list[Node] | None = None  # the transforms whose limit is a setting
        self._older: list[Record] = []  # the steps before parameters were added or removed
        self._param_ids: list[int] = []
        self._since_load = 0  # how many steps were recorded since the last load
        self._began_without_loss = False
        self._alarmed = False
        self._run_in_file: str | None = None  # the id of the run, once the record is closed
        self._loaded_until = 0
        OPEN.add(self)
        _close_at_exit()

    @override
    @never_compiled
    def begin(self, step: Seen) -> None:
        self.output.check()
        self.save_params(step.table.params, None if step.decisions is None else step.decisions.taken)

    @override
    @never_compiled
    def end(self, step: Seen) -> None:
        if self.output.is_lost:
            return
        note, passed = Note(self.step, " ".join(step.refused_by), self._limits(step)), None
        if step.decisions is not None and not step.refused_by:
            note.undecided, passed = step.decisions.names, step.decisions.passed
        table, numbers = step.table, {"loss": step.loss.value, **step.metrics}
        self.write(table.groups, table.params, step.gradient_norms.before, numbers, note, passed, step.effect)

    def _limits(self, step: Seen) -> dict[str, float]:
        """The limits that are settings with one value in all groups."""
        if self._limited is None:
            self._limited = [node for node in step.nodes if node.transform.limit_setting is not None]
            self._joint = _with_limits_of_all(list(step.nodes))
        limits: dict[str, float] = {}
        for node in self._limited:
            values = {setting[str(node.transform.limit_setting)] for setting in step.settings[node.path]}
            if len(values) == 1 and isinstance(value := values.pop(), int | float):
                limits[node.path] = float(value)
        return limits

    def save_params(self, params: Sequence[Tensor], taken: Tensor | None = None) -> None:
        """Copy the parameters if the step gets norms of updates. Find the precision in some of the steps.

        ``taken`` is the answer of the device, if it decides. Refused steps do not tell the precision.
        """
        grads = [p.grad for p in params if p.grad is not None] if self._since_load % PRECISION_EVERY == 0 else []
        if grads := self.measurable.among(grads):
            precision, before = precision_of(grads), self._precision
            precision = precision if taken is None else torch.where(taken, precision, torch.nan)
            self._precision = precision if before is None else torch.fmax(precision, before.to(precision.device))
        is_due = self._ratios_every and self.step % self._ratios_every == 0
        copied = self.measurable.among(params) if is_due else []
        self._before = (copied, foreach.clone(copied)) if copied else None

    def write(
        self,
        groups: Groups,
        params: Sequence[Tensor],
        norms: Tensor | None,
        numbers: Mapping[str, object],
        note: Note,
        passed: Tensor | None = None,
        effect: Effect | None = None,
        *,
        is_first: bool = False,
    ) -> None:
        """Write one step: the norms of the gradients of ``params``, if they were measured, and numbers by name.

        ``passed`` are the answers of the device, and ``effect`` is what the scaling has done, if nobody has read it.
        ``is_first`` is as in `may_be_template`: a step that only creates state for a checkpoint is not written.
        """
        before, self._before = self._before, None
        if norms is not None and may_be_template(groups, is_first=is_first) and not bool(norms.any()):
            return
        tape = self._tape_for(groups, norms)
        places = _places(groups, params) if norms is not None and len(params) != len(tape.params.names) else None
        written = {**numbers, **self._reported, PRECISION: self._precision}
        self._reported = {}
        tape.write(note, norms, places, _as_tensors(written, tape.device), passed)
        if effect is not None:
            tape.write_effect(effect)
        if before is not None and norms is not None and not note.refused_by:
            copied, copies = before
            places = _places(groups, copied) if len(copied) != len(tape.params.names) else None
            sizes = norms_of_each(copies)
            foreach.subtract_(copies, copied)
            tape.write_ratios(note.step, sizes, norms_of_each(copies), places)
        if self.measurable.has_news:
            warn_user(self.measurable.warning(list(zip(tape.params.names, params_of(groups), strict=True))))
        self._judge_loss(numbers["loss"] is not None)
        self.step += 1
        self._since_load += 1
        if "nonfinite" in note.refused_by and not self._alarmed:  # the policy has synchronized with the GPU
            self._recorded(tape)
        if self.output.add():
            self.flush(warn=True)

    def _judge_loss(self, has_loss: bool) -> None:
        if self._since_load == 1 and has_loss and self._began_without_loss:
            warn_user(
                "the first step was recorded without a loss, and the second step with a loss. If report_loss is called "
                "after optimizer.step(), each loss counts for the next step. Call it before step(), or write "
                "recorder.report_loss(loss, step=recorder.step - 1)"
            )
        self._began_without_loss = not self._since_load and not has_loss

    def report_norm(self, norm: Tensor | float) -> None:
        """Keep the norm that the trainer computed for the next step."""
        if isinstance(norm, Tensor):
            if norm.numel() != 1:
                raise ValueError(f"norm must be one number, got a tensor of shape {tuple(norm.shape)}")
            if norm.is_complex() or norm.dtype == torch.bool:
                raise TypeError(f"norm must be a real number, got a tensor of {norm.dtype}")
            self._reported = {REPORTED: local(summed(norm.detach())).reshape(())}
        else:
            number("norm", norm)
            if norm < 0:
                raise ValueError(f"norm must not be negative, got {norm}")
            self._reported = {REPORTED: float(norm)}

    def report_late(self, loss: Tensor | float, step: int) -> None:
        """Store the loss of a step that was recorded before."""
        device = torch.device("cpu") if self.tape is None else self.tape.device
        value = _as_tensors({"loss": loss}, device)["loss"]
        if self.tape is not None:
            self.tape.write_loss(step, value)
        for record in self._older:
            if step in record.steps:
                record.loss[record.index(step)] = value
        if self.output.log is not None and step < self.step - self.output.waiting:
            self.output.late[step] = value

    def _tape_for(self, groups: Groups, norms: Tensor | None) -> Tape:
        tape, ids = self.tape, list(map(id, params_of(groups)))
        is_on_device = norms is None or (tape is not None and norms.device == tape.device)
        if tape is not None and is_on_device and ids == self._param_ids:
            return tape
        self._param_ids = ids
        params = RecordedParams.of(groups, self.model, self.names)
        if tape is not None and is_on_device and tape.params == params:
            return tape
        if tape is not None:
            self.flush(warn=True, is_end=True)
            if self.output.log is not None and self.output.waiting:
                self.output.older.append(self._recorded(tape, self.output.waiting))
            self._older.append(self._recorded(tape))
            self._older = self._last_of_older(self.keep)
        device = _device_of(groups) if norms is None else norms.device
        self.tape = Tape(self.keep, params, device, () if tape is None else tape.used())
        self.output.waiting = 0
        return self.tape

    def record(self, groups: Groups) -> Record:
        self.finish()
        if self.tape is None:
            return Tape(1, RecordedParams.of(groups, self.model, self.names), torch.device("cpu")).record(self.by)
        latest = self._recorded(self.tape)
        return joined([*self._last_of_older(self.keep - len(latest.steps)), latest])

    def _recorded(self, tape: Tape, last: int | None = None) -> Record:
        record = replace(tape.record(self.by, last), joint=self._joint)
        if not self._alarmed and record.alarm(self._loaded_until):
            self._alarmed = True
            warn_user(str(tape.record(self.by).alarm(self._loaded_until)))  # with all usual norms
        return record

    def _last_of_older(self, count: int) -> list[Record]:
        """The last ``count`` of the steps from before parameters were added or removed."""
        records: list[Record] = []
        for record in reversed(self._older):
            records.insert(0, record.last(count))
            count -= len(records[0].steps)
        return [record for record in records if record.steps]

    def flush(self, *, warn: bool = False, is_end: bool = False) -> None:
        """Write and send the steps that wait; the arguments are those of `Output.flush`."""
        self.finish()
        if self.tape is not None:
            self.output.flush(partial(self._recorded, self.tape), warn=warn, is_end=is_end)

    def close(self, *, warn: bool = False) -> None:
        try:
            self.flush(warn=warn, is_end=True)
        finally:
            OPEN.discard(self)
            self._run_in_file = None if self.output.log is None else self.output.log.written_run
            self.output = Output(None, None, self.keep, self.keep)

    def __del__(self) -> None:
        # without a tape, `__init__` has raised an error
        if "tape" in vars(self) and self.output.waiting:  # nobody holds the optimizer any more
            self.flush(warn=True, is_end=True)

    def __getstate__(self) -> dict[str, object]:
        """Copies keep what was recorded, but do not write to the file."""
        of_optimizer = {"_before": None, "_param_ids": [], "_limited": None, "names": {}, "measurable": Measurable()}
        output = Output(None, None, self.keep, self.keep)
        return {**self.__dict__, **of_optimizer, "finish": nothing, "output": output}

    def state_dict(self) -> SavedRecorder:
        self.finish()
        tape, log = None if self.tape is None else self.tape.state_dict(), self.output.log
        state: SavedRecorder = {"step": self.step, "joint": list(self._joint), "tape": tape}
        run = self._run_in_file if log is None else log.written_run
        if run is not None:
            state["run"] = run
        return state

    def load_state_dict(self, state: SavedRecorder, groups: Groups) -> None:
        """Continue a record, and forget what was recorded before."""
        saved, tape, count = state["tape"], None, 0
        if saved is not None:
            params = RecordedParams.of(groups, self.model, self.names)
            if list(params.names) != saved["names"]:
                theirs, ours = set(saved["names"]) - set(params.names), set(params.names) - set(saved["names"])
                only = f"only the {'record' if theirs else 'optimizer'} has {sorted(theirs or ours)[:3]}"
                problem = only if theirs or ours else "they are in another order"
                raise ValueError(f"the parameters of the record differ from those of this optimizer: {problem}")
            count = min(len(saved["steps"]), saved["keep"])
            tape = Tape(max(self.keep, count), params, _device_of(groups))
            tape.load_state_dict(saved)
        step = operator.index(state["step"])
        self.finish = nothing
        self.step, self._joint = step, list(state["joint"])
        self.tape, self._older, self._param_ids = tape, [], []
        self._loaded_until, self._since_load = step, 0
        parent, log = state.get("run"), self.output.log
        if saved is None and parent is None and step and log is not None:
            parent = last_run(log.path)
        self.output.begin_anew(step, count, parent)
        if count >= self.keep:  # the next step would replace the oldest one
            self.flush(warn=True)


OPEN: WeakSet[Recording] = WeakSet()  # those that are not closed


@cache
def _close_at_exit() -> None:
    """Close the open runs when the process ends. It is registered with the first run."""
    atexit.register(_finish)


def _finish() -> None:
    for run in list(OPEN):
        try:
            run.close()
        except Exception as error:  # one file that cannot be written must not cost the others
            warn_user(f"the last steps of a record were not written: {error!r}")


def take_over(path: Path) -> None:
    """Let recordings of this process that use the file write their steps now, and none later."""
    for run in list(OPEN):
        log = run.output.log
        if log is not None and log.path == path and not log.is_lost:
            run.flush(warn=True, is_end=True)
            log.is_lost = True


def nothing(reason: str | None = None) -> None:
    """What `Recording.finish` is if no step was measured."""


def _with_limits_of_all(nodes: list[Node]) -> list[str]:
    """The names of transforms that limit the L2 norm of all gradients together."""
    before = takewhile(lambda node: not isinstance(node.transform, UpdateRule), nodes)
    scaling = [(node, node.transform.slicing) for node in before if isinstance(node.transform, Scaling)]
    return [n.path for n, s in scaling if s.dim == "global" and s.metric == L2 and not n.scope.limited]


def _device_of(groups: Groups) -> torch.device:
    return next((param.device for group in groups for param in group["params"]), torch.device("cpu"))


def _places(groups: Groups, params: Sequence[Tensor]) -> list[int]:
    """The places of parameters among those of all groups; a parameter that is listed twice has two."""
    ids = {id(param) for param in params}
    return [place for place, param in enumerate(params_of(groups)) if id(param) in ids]


def _as_tensors(numbers: Mapping[str, object], device: torch.device) -> dict[str, Tensor]:
    """The numbers as 0-d tensors. Values that are not one number are left out."""
    tensors: dict[str, Tensor] = {}
    for name, value in numbers.items():
        if isinstance(value, Tensor) and value.numel() == 1:
            tensors[name] = widened(value.detach().reshape(())) if value.ndim or name == "loss" else value
        elif isinstance(value, int | float):
            tensors[name] = torch.full((), float(value), dtype=widest(device), device=device)
    return tensors
