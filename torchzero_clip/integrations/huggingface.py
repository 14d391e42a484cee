"""A callback for the Trainer of Hugging Face."""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import TrainerControl, TrainerState, TrainingArguments
from typing_extensions import override

from torchzero_clip.compat import warn_user
from torchzero_clip.integrations.attaching import ToAttach, ToRecord, attached, check_recorder, check_trained, started
from torchzero_clip.integrations.measured import numbers, unwrapped
from torchzero_clip.other_optimizer.before_step import BeforeStep, chain_of
from torchzero_clip.recorder.arithmetic import finite_ones
from torchzero_clip.recorder.recorder import Recorder

SAVED = "recorder.pt"


class TrainerCallback(transformers.TrainerCallback):
    """Puts transforms before the steps of the Trainer's optimizer, logs their metrics, and checks that only they clip.

    The optimizer may also be a `Modular`, or have transforms already. Every ``logging_steps`` steps, the metrics of the
    last step are added to the logs. If the recorder has no ``log=``, its numbers are added too.

    ``TrainingArguments.max_grad_norm`` is 1.0 by default. The Trainer then scales the gradients before the transforms
    get them, so that a limit above 1 never acts and statistics store clipped norms.

    Args:
        recorder: A `Recorder` of the optimizer, or a function that makes one when training starts, such as
            ``functools.partial(Recorder, path="run.jsonl")``, for any optimizer. Each checkpoint saves the steps in
            ``recorder.pt``, and a run that is resumed from ``output_dir`` loads them. With ``logging_steps=1``, the
            losses of the logs are recorded. Otherwise call ``recorder.report_loss`` where the loss is computed.
        transforms: Transforms for `before_step`, such as ``[SkipStep(max_ratio=10.0), ZClip()]``, or a function of the
            optimizer that returns its handle. They stay after training: ``handle.remove()`` ends them.
        trainer: The Trainer, if it has ``report_to``. When training starts, the callback moves before the services, so
            that they get its numbers too. Write ``trainer.add_callback(TrainerCallback(trainer=trainer))``.

    Raises:
        ValueError: When training starts with transforms, if ``max_grad_norm`` is above 0, or the optimizer has none of
            the trainable parameters of the model. If the recorder is closed or records another optimizer.
        TypeError: For an argument of another type. When training starts, if there is neither recorder nor transform.
    """

    def __init__(
        self,
        recorder: ToRecord | None = None,
        *,
        transforms: ToAttach = (),
        trainer: transformers.Trainer | None = None,
    ) -> None:
        check_recorder(recorder)
        self._trainer = trainer
        self._to_record, self._transforms = recorder, transforms
        self.recorder = recorder if isinstance(recorder, Recorder) else None
        """The recorder. None if there is none, or before training if a function makes it."""
        self.handle: BeforeStep | None = None
        """The handle of ``transforms``; None before training."""
        self._live: dict[str, float] = {}  # numbers for the next log
        self._logged = -1  # the step of the last loss

    @override
    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Check that only one side clips, put the transforms in place, and begin or continue the record."""
        optimizer, model = kwargs["optimizer"], kwargs["model"]
        has_transforms = bool(self._transforms) or chain_of(optimizer) is not None or self._to_record is None
        if has_transforms and not self._transforms:
            unwrapped(optimizer)
        if (args.max_grad_norm or 0.0) > 0:
            clips = f"the Trainer clips gradients to max_grad_norm={args.max_grad_norm} before"
            if has_transforms:
                raise ValueError(
                    f"{clips} the optimizer gets them. Write TrainingArguments(max_grad_norm=0). For the same limit, "
                    'put ClipNorm(1.0, dim="global") into the chain or into transforms='
                )
            warn_user(f"{clips} they are recorded. For the norms before, set max_grad_norm=0")
        check_trained([optimizer], model, raises=has_transforms)
        if self._transforms:
            self.handle = attached(self._transforms, [self.handle], optimizer, model)
        self._come_first(args.report_to if isinstance(args.report_to, list) else [])
        self._live, self._logged = {}, -1
        if self._to_record is not None:
            path, step = _checkpoint(args, state) / SAVED, state.global_step
            saved = path if path.exists() else None
            self.recorder = started(
                self._to_record, self.recorder, optimizer, model, log=self._keep, saved=saved, step=step
            )

    def _keep(self, step: int, values: dict[str, float]) -> None:
        """Add the numbers of steps that are written to the file, which may happen several times between two logs."""
        for name, value in values.items():
            if name == "gradients/skipped":
                value += self._live.get(name, 0.0)
            elif name == "gradients/largest_norm" or (name.startswith("layers/") and name.endswith("/norm")):
                value = max(value, self._live.get(name, value))
            self._live[name] = value

    @override
    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        if self.recorder is not None:
            self.recorder.flush(warn=True)
            saved, place = self.recorder.state_dict(), _checkpoint(args, state) / SAVED
            if state.is_world_process_zero and place.parent.is_dir():
                torch.save(saved, place.with_suffix(".tmp"))
                place.with_suffix(".tmp").replace(place)

    @override
    def on_train_end(self, *args: object, **kwargs: object) -> None:
        if self.recorder is not None:
            self.recorder.close(warn=True)

    @override
    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        if logs is None or "loss" not in logs or kwargs.get("optimizer") is None:
            return
        named = {} if chain_of(kwargs["optimizer"]) is None else numbers(kwargs["optimizer"])
        if self.recorder is not None:
            last = self.recorder.step - 1
            is_of_step = args.logging_strategy == "steps" and args.logging_steps == 1
            stands_for_nan = args.logging_nan_inf_filter and logs["loss"] == 0
            if is_of_step and not stands_for_nan and last > self._logged:  # else a gradient scaler refused the step
                with suppress(ValueError):  # a gate has judged the step without this loss
                    self.recorder.report_loss(logs["loss"], step=last)
                self._logged = last
            self.recorder.flush(warn=True)
            named |= finite_ones(self._live)  # the Trainer writes its logs as JSON
            self._live = {}
        logs.update(named)
        if state.log_history and state.log_history[-1].get("step") == state.global_step:
            state.log_history[-1].update(named)

    def _come_first(self, services: Sequence[str]) -> None:
        """Move to the front of the Trainer's callbacks, where `on_log` runs before those that write logs."""
        if self._trainer is not None:
            callbacks: list[transformers.TrainerCallback] = self._trainer.callback_handler.callbacks
            if any(callback is self for callback in callbacks):  # else it is inside another callback
                callbacks[:] = [self, *(callback for callback in callbacks if callback is not self)]
        elif services:
            warn_user(
                f"{', '.join(services)} does not get the metrics, because the callback does not know the Trainer. "
                "Write trainer.add_callback(TrainerCallback(..., trainer=trainer))"
            )


def _checkpoint(args: TrainingArguments, state: TrainerState) -> Path:
    return Path(str(args.output_dir)) / f"checkpoint-{state.global_step}"
