"""A callback for the Trainer of Hugging Face."""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.trainer_callback import CallbackHandler
from typing_extensions import override

from torchzero_clip.integrations import metrics
from torchzero_clip.recorder.recorder import Recorder, attached

SAVED = "recorder.pt"


class TrainerCallback(transformers.TrainerCallback):
    """Logs what the transforms of a `Modular` measured, and stops a run that the Trainer would clip as well.

    ```py
    Trainer(
        model, TrainingArguments(..., max_grad_norm=0), optimizers=(optimizer, schedule), callbacks=[TrainerCallback()]
    )
    ```

    The metrics join the logs of every ``logging_steps``: ``trainer.state.log_history``, and whatever the Trainer
    reports to, such as TensorBoard and Weights & Biases. They are those of the last step that was taken before the log.

    ``TrainingArguments.max_grad_norm`` is 1.0 by default. The Trainer then scales the gradients before the optimizer
    gets them, so that a limit above 1 never acts and statistics learn clipped norms. The ``grad_norm`` in its logs is
    the norm before it clips.

    Args:
        recorder: A `Recorder` of the optimizer, or a function that makes one when training starts, such as
            ``functools.partial(Recorder, path="run.jsonl")``. Its steps are saved in each checkpoint, as
            ``recorder.pt``, and loaded from there if the run is resumed; from a checkpoint in another folder than
            ``output_dir`` only the number of the step is. The Trainer tells no loss: call ``optimizer.report_loss``
            where it is computed.

    Raises:
        ValueError: When training starts, if ``max_grad_norm`` is above 0, or the recorder records another optimizer.
        TypeError: When training starts, if the optimizer is not a `Modular`.
    """

    def __init__(self, recorder: Recorder | Callable[[Any], Recorder] | None = None) -> None:
        self._given = recorder
        self.recorder = recorder if isinstance(recorder, Recorder) else None
        """The recorder, once there is one."""

    @override
    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Check that only one side clips."""
        if args.max_grad_norm is not None and args.max_grad_norm > 0:
            raise ValueError(
                f"the Trainer clips gradients to max_grad_norm={args.max_grad_norm} before the optimizer gets them: "
                'write TrainingArguments(max_grad_norm=0), and ClipNorm(1.0, dim="global") in the chain for a limit '
                "like the Trainer's"
            )
        metrics(kwargs["optimizer"])
        self._come_first()
        if self._given is not None:
            self.recorder = self._given = attached(self._given, kwargs["optimizer"])
            saved = _checkpoint(args, state) / SAVED
            if saved.exists():
                self.recorder.load_state_dict(torch.load(saved, weights_only=True))
            elif state.global_step > self.recorder.step:  # resumed from another folder, which is not told
                self.recorder.load_state_dict({"step": state.global_step, "tape": None})

    @override
    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Save the record beside the state of the optimizer."""
        if self.recorder is not None:
            saved = self.recorder.state_dict()
            if state.is_world_process_zero and _checkpoint(args, state).is_dir():
                torch.save(saved, _checkpoint(args, state) / SAVED)

    @override
    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write the rest of the record to its file."""
        if self.recorder is not None:
            self.recorder.flush()

    @override
    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Add the metrics to the logs of training."""
        if logs is None or "loss" not in logs or kwargs.get("optimizer") is None:
            return
        found = metrics(kwargs["optimizer"])
        numbers = torch.stack([value.double().cpu() for value in found.values()]).tolist() if found else []
        named = dict(zip(found, numbers, strict=True))
        logs.update(named)
        if state.log_history and state.log_history[-1].get("step") == state.global_step:
            state.log_history[-1].update(named)

    def _come_first(self) -> None:
        """Move to the front of the Trainer's callbacks, where `on_log` runs before those that write logs.

        A callback gets neither the Trainer nor the other callbacks, so the caller's frames are searched.
        """
        frame = inspect.currentframe()
        while frame is not None:
            handler = frame.f_locals.get("self")
            if isinstance(handler, CallbackHandler) and any(callback is self for callback in handler.callbacks):
                handler.callbacks[:] = [self, *(callback for callback in handler.callbacks if callback is not self)]
                return
            frame = frame.f_back


def _checkpoint(args: Any, state: Any) -> Path:
    """The folder of the checkpoint of this step."""
    return Path(args.output_dir) / f"checkpoint-{state.global_step}"
