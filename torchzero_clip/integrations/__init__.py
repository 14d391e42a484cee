"""Callbacks for trainers, and the metrics of an optimizer that a trainer has wrapped."""

import importlib
from typing import TYPE_CHECKING

from torchzero_clip.integrations.measured import metrics as metrics
from torchzero_clip.integrations.measured import numbers as numbers
from torchzero_clip.integrations.measured import unwrapped as unwrapped

if TYPE_CHECKING:
    from torchzero_clip.integrations.huggingface import TrainerCallback as TrainerCallback
    from torchzero_clip.integrations.lightning import LightningCallback as LightningCallback

CALLBACKS = {"TrainerCallback": "transformers", "LightningCallback": "lightning"}
"""The callbacks, and the packages that they need."""


def __getattr__(name: str) -> object:
    """Import a callback, and the trainer's package with it, when it is first asked for."""
    if name not in CALLBACKS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        # written out, because `tests/test_layers.py` reads the names
        if name == "TrainerCallback":
            return importlib.import_module("torchzero_clip.integrations.huggingface").TrainerCallback
        return importlib.import_module("torchzero_clip.integrations.lightning").LightningCallback
    except ModuleNotFoundError as error:
        package = CALLBACKS[name]
        if error.name and error.name.partition(".")[0] in (package, "pytorch_lightning"):
            raise ModuleNotFoundError(f"{name} needs {package}: pip install {package}", name=error.name) from error
        raise
