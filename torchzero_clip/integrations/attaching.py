"""What the callbacks of trainers do with an optimizer when training starts."""

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.optim import Optimizer

from torchzero_clip.compat import warn_user
from torchzero_clip.core.chain import Transforms
from torchzero_clip.modular.wrappers import unwrap
from torchzero_clip.other_optimizer.before_step import BeforeStep, before_step, chain_of
from torchzero_clip.recorder.live import Send
from torchzero_clip.recorder.recorder import Recorder

ToAttach: TypeAlias = "Transforms | Callable[[Any], BeforeStep]"
"""Transforms, or a function that puts them before the steps of an optimizer."""

ToRecord: TypeAlias = Recorder | Callable[[Any], Recorder]
"""A recorder, or a function that makes one for an optimizer."""


def attached(
    transforms: ToAttach, handles: Collection[BeforeStep | None], optimizer: Optimizer, model: nn.Module
) -> BeforeStep:
    """Put transforms before the steps of an optimizer, unless one of ``handles`` has done so for an earlier run."""
    chain = chain_of(optimizer)
    if isinstance(chain, BeforeStep) and chain in handles:
        return chain
    handle = transforms(optimizer) if callable(transforms) else before_step(optimizer, transforms, model=model)
    if not isinstance(handle, BeforeStep):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(
            f"the function in transforms= must return a handle, got {type(handle).__name__}: write "
            "transforms=lambda optimizer: before_step(optimizer, ...)"
        )
    return handle


def check_recorder(recorder: object) -> None:
    """Raise if a callback cannot attach its argument ``recorder``."""
    if not isinstance(recorder, Recorder | None) and (not callable(recorder) or isinstance(recorder, nn.Module)):
        raise TypeError(
            f"recorder must be a Recorder or a function that makes one, got {type(recorder).__name__}: write "
            "functools.partial(Recorder, path=...). Transforms are passed as transforms=[...]"
        )


def started(
    to_record: ToRecord,
    earlier: Recorder | None,
    optimizer: Optimizer,
    model: nn.Module,
    *,
    log: Send,
    saved: Path | Mapping[str, object] | None,
    step: int,
) -> Recorder:
    """The recorder of a training that starts, or of one that a trainer resumes at ``step`` with a ``saved`` state."""
    if earlier is not None and earlier is not to_record:  # that training was interrupted
        earlier.close(warn=True)
    recorder = to_record if isinstance(to_record, Recorder) else to_record(optimizer)
    if recorder.optimizer is not unwrap(optimizer):
        raise ValueError("the recorder records another optimizer than the one that is trained")
    if recorder.is_closed:
        advice = 'Pass a function that makes a recorder, such as partial(Recorder, path="...")'
        raise ValueError(f"the recorder is closed. {advice}")
    if recorder._recording.model is None:  # as the argument ``model`` of a `Recorder`
        recorder._recording.model = model
    recorder.log_to(log)
    if saved is not None:
        try:
            recorder.load_state_dict(torch.load(saved, weights_only=True) if isinstance(saved, Path) else saved)
            return recorder
        except Exception as error:  # a run must not end because of its record
            what = saved if isinstance(saved, Path) else "the record in the checkpoint"
            warn_user(f"{what} cannot be read, the record continues at step {step}: {error!r}")
    if step > recorder.step:
        recorder.load_state_dict({"step": step, "tape": None})
    return recorder


def check_trained(optimizers: Sequence[Optimizer], model: nn.Module, *, raises: bool) -> None:
    """Warn of trainable parameters that the optimizers lack. With ``raises``, raise if they lack all of them."""
    trained = {id(param) for optimizer in optimizers for group in optimizer.param_groups for param in group["params"]}
    trainable = {name: id(param) for name, param in model.named_parameters() if param.requires_grad}
    left = [name for name, param in trainable.items() if param not in trained]
    shown = ", ".join(map(repr, left[:3])) + ", ..." * (len(left) > 3)
    of = f"of the {len(trainable)} trainable parameters of the model"
    if raises and left and len(left) == len(trainable):
        raise ValueError(
            f"the optimizer has none {of} ({shown}), so training would change nothing: make it of the model that is "
            "trained. With peft, call get_peft_model first, and pass its model to the trainer and to the optimizer"
        )
    if left:
        warn_user(f"the optimizer does not have {len(left)} {of}, which are not trained: {shown}")
