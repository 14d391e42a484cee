"""A callback for the Trainer of Lightning."""

import importlib
import sys
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from torchzero_clip.integrations import metrics, unwrapped

if TYPE_CHECKING:
    from lightning.pytorch import Callback
else:  # one library under two names
    try:
        Callback = importlib.import_module("lightning.pytorch").Callback
    except ModuleNotFoundError:
        Callback = importlib.import_module("pytorch_lightning").Callback


class LightningCallback(Callback):
    """Logs what the transforms of a `Modular` measured, and stops a run that the Trainer would clip as well.

    ```py
    Trainer(callbacks=[LightningCallback()])
    ```

    The metrics are logged as by ``self.log`` in the module: in ``trainer.callback_metrics``, and every
    ``log_every_n_steps`` in the Trainer's logger, such as TensorBoard. With several optimizers their names begin with
    the index of the optimizer, as in ``"1/clip_norm/norm"``. Optimizers that are no `Modular` are left out.

    Raises:
        ValueError: When fitting begins, if ``Trainer(gradient_clip_val=...)`` is above 0, or the module overrides
            ``configure_gradient_clipping``: the gradients would be clipped before the optimizer gets them.
        TypeError: When training begins, if no optimizer is a `Modular`.
    """

    @override
    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Check that only one side clips."""
        limit = trainer.gradient_clip_val
        if limit is not None and limit > 0:
            raise ValueError(
                f"the Trainer clips gradients by gradient_clip_val={limit} before the optimizer gets them: write "
                'Trainer(gradient_clip_val=None), and ClipNorm(1.0, dim="global") in the chain for such a limit'
            )
        if pl_module.automatic_optimization and not _is_lightnings(pl_module.configure_gradient_clipping):
            raise ValueError(
                f"{type(pl_module).__name__}.configure_gradient_clipping may change gradients before the optimizer "
                "gets them: remove the method, and put what it does into the chain"
            )

    @override
    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Check that there is something to log."""
        if not any(map(_is_chain, trainer.optimizers)):
            kinds = ", ".join(type(optimizer).__name__ for optimizer in trainer.optimizers)
            raise TypeError(f"configure_optimizers must return a Modular for LightningCallback to log, got {kinds}")

    @override
    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any, **kwargs: Any) -> None:
        """Log the metrics of the last step."""
        for i, optimizer in enumerate(trainer.optimizers):
            prefix = f"{i}/" if len(trainer.optimizers) > 1 else ""
            if _is_chain(optimizer):
                pl_module.log_dict({f"{prefix}{name}": value.float() for name, value in metrics(optimizer).items()})


def _is_lightnings(hook: Any) -> bool:
    """Whether a bound method is the one that modules inherit from Lightning."""
    modules = [sys.modules.get(name) for name in ("lightning.pytorch", "pytorch_lightning")]
    own = [module.LightningModule.configure_gradient_clipping for module in modules if module is not None]
    return getattr(hook, "__func__", None) in own


def _is_chain(optimizer: Any) -> bool:
    try:
        unwrapped(optimizer)
    except TypeError:
        return False
    return True
