"""The recorder of an optimizer."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from torchzero_clip.checks import count, instance, one_of, steps
from torchzero_clip.compat import warn_user
from torchzero_clip.core.kinds import Gate
from torchzero_clip.engine.reported_loss import ReportedLoss
from torchzero_clip.modular.modular import Modular
from torchzero_clip.modular.wrappers import unwrap
from torchzero_clip.other_optimizer.before_step import chain_of, hook_owner
from torchzero_clip.private_losses import refuse_loss
from torchzero_clip.recorder.data import step_number
from torchzero_clip.recorder.files import FilePath, check
from torchzero_clip.recorder.live import Live, Send
from torchzero_clip.recorder.output import FirstProcess, Output, StepFile
from torchzero_clip.recorder.reading import read_record
from torchzero_clip.recorder.record import Readable, Record
from torchzero_clip.recorder.recorded_params import By
from torchzero_clip.recorder.recording import Recording, take_over
from torchzero_clip.recorder.saved import checked_state
from torchzero_clip.recorder.step_hooks import StepHooks
from torchzero_clip.recorder.suggestion import LimitScope, Suggestion, suggested


class Recorder(Readable):
    """Records norms by layer, limits, what was clipped or skipped, and the loss of every step.

    With and without a recorder, the results of training and the checkpoints of the optimizer are bitwise the same. A
    copy or a pickle of the optimizer has no recorder. A copy or a pickle of the recorder is closed, but can be read.

    Steps are counted from 0, and skipped steps count. A step that `GradScaler` skips does not reach
    ``optimizer.step()`` and does not count, unless the optimizer is fused.

    Args:
        optimizer: A `Modular` or any other `torch.optim.Optimizer`, also in a wrapper of Accelerate or Lightning.
            Optimizers other than `Modular` have no limits and factors.
        by: What counts as a layer: each "parameter", each "module" (without its submodules) or each param "group".
        keep: How many steps are kept on the device. The memory is 8 bytes for each step and parameter tensor.
        path: A file, such as ``"run.jsonl"``, to which the recorder appends; None for no file. With several processes,
            only the first one writes. A new recorder takes over the file of an older one in the same process.
        ratios_every: The norms of parameters and of updates are recorded once in so many steps; 0 for never. Such a
            step copies the parameters and takes two more passes over them.
        model: Gives names to parameters that have none in the optimizer, such as those of ``model.parameters()``.
        flush_every: How many steps are recorded between two writes. Steps are also written at the tenth step, after 30
            seconds, at each checkpoint of a trainer, and when the process ends.
        log: Where the first process sends numbers when steps are written: a run of Weights & Biases or Trackio, a
            `SummaryWriter` of TensorBoard, a logger of Lightning, an ``Accelerator``, or a function
            ``log(step, values)``.
        log_every: How many steps one point sums up. For Weights & Biases it is all steps since the last point.

    Raises:
        TypeError: If ``optimizer`` is not an optimizer, or an argument is of the wrong type.
        ValueError: If the optimizer already has a recorder, if ``by`` is unknown, if ``keep``, ``flush_every`` or
            ``log_every`` is below 1, if the record cannot be written to ``path``, or if none of the parameters is in
            ``model``.
        RuntimeError: If the optimizer steps in the backward. Later, in ``optimizer.step()`` before anything changes, if
            another recorder has taken over the file.

    A step synchronizes with the GPU when steps are written or sent, and if its learning rate is 0. Reading does so
    once. If no transform measures the norm of each tensor, the recorder takes one more pass over the gradients.

    Examples:
        >>> import torch
        >>> from torchzero_clip import SGD, ClipNorm, Modular, Recorder
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = Modular(model, ClipNorm(1.0), SGD(0.1))
        >>> recorder = Recorder(optimizer)
        >>> for size in (1.0, 1.0, 50.0):
        ...     model(torch.full((1, 2), size)).sum().backward()
        ...     optimizer.step()
        ...     optimizer.zero_grad()
        >>> recorder.worst(step=2)
        name     norm  usual  ratio
        weight  70.71  1.414     50
        bias        1      1      1
    """

    def __init__(
        self,
        optimizer: object,
        by: By = "parameter",
        keep: int = 1000,
        path: FilePath | None = None,
        ratios_every: int = 100,
        model: nn.Module | None = None,
        *,
        flush_every: int = 100,
        log: Any = None,
        log_every: int = 10,
    ) -> None:
        inner = unwrap(optimizer)
        if not isinstance(inner, Optimizer):
            way_out = ": write Recorder(optimizer, model=model)" if isinstance(optimizer, nn.Module) else ""
            raise TypeError(f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}{way_out}")
        if isinstance(by, nn.Module):
            raise TypeError("by must be a string, got a module: write model=model")
        one_of("by", by, get_args(By))
        count("ratios_every", ratios_every)
        for name, number in (("keep", keep), ("flush_every", flush_every), ("log_every", log_every)):
            steps(name, number)
        if model is not None:
            instance("model", model, nn.Module)
            if set(model.parameters()).isdisjoint(p for g in inner.param_groups for p in g["params"]):
                raise ValueError("model has none of the parameters of the optimizer")
        if isinstance(inner, Modular) and inner.runner.parts is not None:
            raise RuntimeError(
                "a recorder needs all gradients at once, but this optimizer steps in the backward. First call remove() "
                "of the handle that step_in_backward returned"
            )
        if (inner.runner.listener if isinstance(inner, Modular) else hook_owner(inner, StepHooks)) is not None:
            raise ValueError("optimizer already has a recorder: call close() of that recorder first")
        flush_every = min(flush_every, keep)
        live = None if log is None else Live(log, min(log_every, keep))
        file = None
        if path is not None:
            file = StepFile(Path(path), by, flush_every, keep)
            take_over(file.path)
            file.is_new = not FirstProcess() or not check(Path(path))
        self.optimizer = inner  # the optimizer that is recorded, without its wrappers
        self._recording = Recording(by, keep, ratios_every, model, Output(file, live, flush_every, keep))
        self._log = file
        self.is_closed = False  # True after `close`
        self._hooks = None if isinstance(inner, Modular) else StepHooks(self._recording, inner)
        chain = chain_of(inner)
        if chain is not None:
            chain.runner.listener = self._recording

    @property
    def step(self) -> int:
        """The number of the next step."""
        self._recording.finish()
        return self._recording.step

    def report_loss(self, loss: Tensor | float, step: int | None = None) -> None:
        """Report the loss of the next step, before ``optimizer.step()``, or the loss of an earlier step.

        Args:
            loss: A number, or a tensor of one number, before a gradient scaler multiplies it. If the method is called
                several times before a step, the mean is recorded.
            step: The number of an earlier step, counted from 0. The loss replaces the one that was recorded.

        Raises:
            TypeError: If ``loss`` is not a number, or ``step`` not an integer.
            ValueError: If ``loss`` has several numbers, if ``step`` is negative or was not taken yet, or if a gate has
                judged that step without this loss.
            RuntimeError: If a `PrivateGradientClipper` trains one of the parameters, because the loss is private.
        """
        refuse_loss(self.optimizer.param_groups, "report_loss")
        step = None if step is None else step_number(step)
        if step is not None and self._is_late(step):
            ReportedLoss().add(loss)  # checks it
            self._recording.report_late(loss, step)
        elif (chain := chain_of(self.optimizer)) is not None:
            chain.report_loss(loss)
        elif self._hooks is not None:
            self._hooks.reported.add(loss)

    def report_norm(self, norm: Tensor | float) -> None:
        """Report the norm that the trainer computed. Call it before ``optimizer.step()``.

        It is recorded as the metric ``"reported_norm"``. If it differs from the recorded joint norm, `compare` and
        `worst` look for layers that it counts several times or leaves out. Both must be norms of the same gradients:
        if the trainer clips them before the step, set its limit to inf.

        Args:
            norm: A number, or a tensor of one number. This does not synchronize with the GPU.

        Raises:
            TypeError: If ``norm`` is not a number.
            ValueError: If ``norm`` has several numbers, or is a negative number.
            RuntimeError: If a `PrivateGradientClipper` trains one of the parameters.
        """
        refuse_loss(self.optimizer.param_groups, "report_norm")
        self._recording.report_norm(norm)

    def _is_late(self, step: int) -> bool:
        """True if a step was taken, so that only the record can still get its loss."""
        count("step", step)
        if step > self.step:
            raise ValueError(f"step must be at most {self.step}, the number of the next step, got {step}")
        chain = chain_of(self.optimizer)
        transforms = {} if chain is None else chain.transforms
        gates = [name for name, t in transforms.items() if isinstance(t, Gate) and t.needs_loss]
        if step < self.step and gates:
            raise ValueError(
                f"step={step} is too late for a loss, because {gates[0]!r} has judged that step without it: call "
                "report_loss before optimizer.step()"
            )
        return step < self.step

    @override
    def record(self) -> Record:
        """Return the last ``keep`` steps, on the CPU. The call synchronizes with the GPU once."""
        return self._recording.record(self.optimizer.param_groups)

    @override
    def _with_older(self) -> Record:
        latest, log = self.record(), self._log
        if log is None or not latest.steps or not latest.steps[0] or not self._recording.output.is_writer:
            return latest
        try:
            self.flush()
            return read_record(log.path, log.run).filled(latest)
        except (OSError, ValueError) as error:
            warn_user(f"older steps cannot be read from {log.path}: {error}")
            return latest

    @override
    def suggest_max_norm(self, share_clipped: float = 0.01, scope: LimitScope = "joint") -> Suggestion:
        one_of("scope", scope, get_args(LimitScope))
        self._recording.finish()
        tape = self._recording.tape
        if scope == "joint" or tape is None:
            return super().suggest_max_norm(share_clipped)
        norms, params, record = tape.norms(), tape.params, self.record()
        about = record.doubts(), record.skips()
        if scope == "parameter":
            return suggested({"parameter": norms.flatten()}, share_clipped, scope, *about)
        if len(set(params.groups)) > 1 and not params.has_group_names:
            raise ValueError('scope="group" needs names of groups: write "name" into each param group')
        groups, of_groups = params.joined(norms, "group")
        return suggested(dict(zip(groups, of_groups.unbind(dim=1), strict=True)), share_clipped, scope, *about)

    def flush(self, *, warn: bool = False) -> None:
        """Write all steps that are not in the file yet, and send the points that are complete.

        Args:
            warn: Warn if the file cannot be written, instead of raising an error.

        Raises:
            OSError: If the file cannot be written. The next call tries again.
        """
        self._recording.flush(warn=warn)

    def log_to(self, log: Send) -> None:
        """Send a step and a dict of numbers to a function whenever steps are written, if ``log=`` was not given."""
        if self._recording.output.live is None:
            self._recording.output.live = Live(log, None)

    def close(self, *, warn: bool = False) -> None:
        """Stop recording, and write the last steps to the file. The steps can still be read.

        Args:
            warn: As in `flush`.

        Raises:
            OSError: If the file cannot be written.
        """
        self._recording.finish()
        if self._hooks is not None:
            self._hooks.remove()
        chain = chain_of(self.optimizer)
        if chain is not None and chain.runner.listener is self._recording:
            chain.runner.listener = None
        self.is_closed = True
        self._recording.close(warn=warn)

    def state_dict(self) -> dict[str, Any]:
        """Return the number of the next step, and the last ``keep`` steps, as CPU tensors, numbers and strings."""
        return {**self._recording.state_dict()}

    def load_state_dict(self, state_dict: Mapping[str, object]) -> None:
        """Continue the record of a run that is resumed.

        If an earlier process wrote steps after this checkpoint to the file, these steps no longer count.

        Args:
            state_dict: What `state_dict` returned, for the same parameters.

        Raises:
            ValueError: If the dict belongs to other parameters, or was not returned by `state_dict`; the error names
                the key that is wrong. Then the recorder is unchanged.
        """
        self._recording.load_state_dict(checked_state(state_dict), self.optimizer.param_groups)
        if self._hooks is not None:
            self._hooks.reported.clear()

    def __getstate__(self) -> dict[str, object]:
        """A copy keeps what was recorded. It is closed, because its optimizer has no recorder."""
        self._recording.finish()
        return {**vars(self), "is_closed": True, "_hooks": None}

    def __repr__(self) -> str:
        path = "" if self._log is None else f", path={str(self._log.path)!r}"
        by, keep = self._recording.by, self._recording.keep
        return f"Recorder({type(self.optimizer).__name__}, by={by!r}, keep={keep}{path})"
