"""Function modes of the clipper: what sees the functions of torch that a block of code calls."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, final

import torch
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from torchzero_clip.compat import leave_uncompiled, never_a_frame


def attribute_read(func: Any) -> str | None:
    """The name of the attribute of a tensor that a function reads, such as shape; None for any other function."""
    # torch passes the reading of x.shape as `Tensor.shape.__get__`: a method of a descriptor, which has the name
    return func.__self__.__name__ if getattr(func, "__name__", "") == "__get__" else None


def sets_data(func: Any) -> bool:
    """True for ``x.data = ...``."""
    return getattr(func, "__name__", "") == "__set__" and func.__self__.__name__ == "data"


class Mode(TorchFunctionMode, ABC):
    """Sees the functions that run in its block. `torch.compile` compiles them, unless `replaces` is True."""

    @final
    @override
    @never_a_frame
    def __torch_function__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        if torch.compiler.is_compiling():
            if self.replaces(args, kwargs or {}):
                leave_uncompiled()
            return func(*args, **(kwargs or {}))
        return self.called(func, args, kwargs or {})

    @abstractmethod
    def called(self, func: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object]) -> Any:
        """Return the output of a function."""

    def replaces(self, args: tuple[object, ...], kwargs: dict[str, object]) -> bool:
        """True if these arguments must be replaced. The function is then run uncompiled."""
        return False
