"""A callback for the Trainer of Lightning."""

import importlib
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from torchzero_clip.compat import warn_user
from torchzero_clip.integrations.attaching import ToAttach, ToRecord, attached, check_recorder, check_trained, started
from torchzero_clip.modular.modular import Modular
from torchzero_clip.modular.wrappers import unwrap
from torchzero_clip.other_optimizer.before_step import BeforeStep, chain_of
from torchzero_clip.recorder.recorder import Recorder

if TYPE_CHECKING:
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.loggers import Logger
else:  # one library under two names
    try:
        Callback = importlib.import_module("lightning.pytorch").Callback
    except ModuleNotFoundError:
        Callback = importlib.import_module("pytorch_lightning").Callback


class LightningCallback(Callback):
    """Puts transforms before the steps of the optimizers, logs their metrics, and checks that only they clip.

    Optimizers may also be a `Modular`, or have transforms already. The metrics are logged as by ``self.log`` in the
    module. With several optimizers, their names begin with the index of the optimizer, as in ``"1/clip_norm/norm"``.
    Metrics that are absent, inf or NaN, such as the norms of a refused step, are logged as NaN. If the
    recorder has no ``log=``, it sends its numbers to the loggers of the Trainer.

    Args:
        recorder: A `Recorder` of an optimizer of the module, or a function that makes one when training starts, such as
            ``functools.partial(Recorder, path="run.jsonl")``. With several optimizers, this function gets the first
            one with transforms, or the first optimizer if none has them. The checkpoints of the Trainer contain the
            steps. In automatic optimization, the recorder also gets the loss, except with ``precision="16-mixed"``.
        transforms: Transforms for `before_step`, such as ``[SkipStep(max_ratio=10.0), ZClip()]``, or a function of the
            optimizer that returns its handle. With several optimizers, they stand before each, and each has a state of
            its own. They stay after training: ``remove()`` of each of ``handles`` ends them.

    Raises:
        ValueError: When fitting starts with transforms, if ``Trainer(gradient_clip_val=...)`` is above 0, or the module
            overrides ``configure_gradient_clipping``, because either may clip the gradients before the transforms get
            them. If the optimizers have none of the trainable parameters of the module. When training starts, if the
            recorder is closed or records another optimizer.
        TypeError: For an argument of another type. When training starts, if there is neither recorder nor transform.
    """

    def __init__(self, recorder: ToRecord | None = None, *, transforms: ToAttach = ()) -> None:
        check_recorder(recorder)
        self._to_record, self._transforms = recorder, transforms
        self.recorder = recorder if isinstance(recorder, Recorder) else None
        """The recorder. None if there is none, or before training if a function makes it."""
        self.handles: list[BeforeStep] = []
        """The handles of ``transforms``, one for each optimizer; empty before fitting."""
        self._loaded: dict[str, object] | None = None
        self._logged: dict[str, Tensor] = {}  # the names of the numbers that were logged

    @override
    def on_fit_start(self, trainer: "Trainer", pl_module: "LightningModule") -> None:
        """Check that only one side clips, and put the transforms in place before a checkpoint is loaded."""
        limit = trainer.gradient_clip_val
        clips = f"the Trainer clips gradients by gradient_clip_val={limit} before" if limit and limit > 0 else ""
        if self._to_record is not None and not self._transforms and not _chains(trainer.optimizers):
            if clips:  # the Trainer has to clip for other optimizers
                warn_user(f"{clips} they are recorded. For the norms before, set it to None")
            return
        if clips:
            raise ValueError(
                f"{clips} the optimizer gets them. Write Trainer(gradient_clip_val=None). For a limit, put "
                'ClipNorm(1.0, dim="global") into the chain or into transforms='
            )
        if pl_module.automatic_optimization and not _is_lightnings(pl_module.configure_gradient_clipping):
            raise ValueError(
                f"{type(pl_module).__name__}.configure_gradient_clipping may change gradients before the optimizer "
                "gets them. Remove the method, and do the same by transforms"
            )
        if self._transforms:
            transforms, handles = self._transforms, self.handles
            self.handles = [attached(transforms, handles, optimizer, pl_module) for optimizer in trainer.optimizers]

    @override
    def on_train_start(self, trainer: "Trainer", pl_module: "LightningModule") -> None:
        """Check that there is something to log, and begin the record."""
        chains = _chains(trainer.optimizers)
        if not chains and self._to_record is None:
            kinds = ", ".join(type(optimizer).__name__ for optimizer in trainer.optimizers)
            expected = "a Modular, so that LightningCallback has metrics to log"
            raise TypeError(f"configure_optimizers must return {expected}, got {kinds}: or pass transforms=[...]")
        check_trained(trainer.optimizers, pl_module, raises=bool(chains))
        if self._to_record is None:
            return
        inner = [*map(unwrap, chains.values()), *map(unwrap, trainer.optimizers)]
        recorded = self._to_record.optimizer if isinstance(self._to_record, Recorder) else inner[0]
        optimizer = next((one for one in inner if one is recorded), inner[0])
        log, step = partial(_log, trainer.loggers), trainer.global_step if len(trainer.optimizers) == 1 else 0
        self.recorder = started(
            self._to_record, self.recorder, optimizer, pl_module, log=log, saved=self._loaded, step=step
        )
        self._loaded = None

    @override
    def on_train_end(self, *args: object, **kwargs: object) -> None:
        if self.recorder is not None:
            self.recorder.close(warn=True)

    @override
    def state_dict(self) -> dict[str, Any]:
        if self.recorder is None:
            return {}
        self.recorder.flush(warn=True)
        return self.recorder.state_dict()

    @override
    def load_state_dict(self, state_dict: dict[str, object]) -> None:
        """Continue the record, once there is a recorder."""
        self._loaded = state_dict or None

    @override
    def on_train_batch_end(
        self, trainer: "Trainer", pl_module: "LightningModule", *args: object, **kwargs: object
    ) -> None:
        # in float64, because float32 may not hold a norm; counts are ints
        measured = {
            prefix + name: value if value.is_floating_point() else value.float()
            for prefix, chain in _chains(trainer.optimizers).items()
            for name, value in chain.metrics().items()
        }
        # a number that was logged before is NaN now if it is absent: else the Trainer logs the last one again
        absent = torch.full((), torch.nan, device=pl_module.device)
        finite = {name: torch.where(value.isfinite(), value, torch.nan) for name, value in measured.items()}
        self._logged = dict.fromkeys([*self._logged, *finite], absent)
        pl_module.log_dict({**self._logged, **finite})


def _log(loggers: Sequence["Logger"], step: int, values: dict[str, float]) -> None:
    for logger in loggers:
        logger.log_metrics(values, step=step)


def _is_lightnings(hook: Callable[..., None]) -> bool:
    """True if a bound method is the one that modules inherit from Lightning."""
    modules = [sys.modules.get(name) for name in ("lightning.pytorch", "pytorch_lightning")]
    inherited = [module.LightningModule.configure_gradient_clipping for module in modules if module is not None]
    return getattr(hook, "__func__", None) in inherited


def _chains(optimizers: Sequence[Optimizer]) -> dict[str, Modular | BeforeStep]:
    """The transforms of each optimizer by the prefix of their metrics; optimizers without them are left out."""
    chains = {f"{i}/" if len(optimizers) > 1 else "": chain_of(optimizer) for i, optimizer in enumerate(optimizers)}
    return {prefix: chain for prefix, chain in chains.items() if chain is not None}
