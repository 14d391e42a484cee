"""Function modes of the clipper: what sees the functions of torch that a block of code calls."""

from abc import ABC, abstractmethod
from typing import Any, final

import torch
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from torchzero_clip.compat import leave_uncompiled, never_a_frame


class Mode(TorchFunctionMode, ABC):
    """Sees the functions that run in its block. `torch.compile` compiles them, unless `replaces` is True."""

    @final
    @override
    @never_a_frame
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.compiler.is_compiling():
            if self.replaces(args, kwargs or {}):
                leave_uncompiled()
            return func(*args, **(kwargs or {}))
        return self.called(func, args, kwargs or {})

    @abstractmethod
    def called(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the output of a function."""

    def replaces(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """True if these arguments must be replaced. The function is then run uncompiled."""
        return False
