"""Removes everything that a clipper has put into a model, at the latest when the clipper is deleted."""

import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from torchzero_clip.per_sample.engine import Engine


class ParamAttributes:
    """Values that users read as attributes of parameters.

    Args:
        names: The names of the attributes; all get the same value.
    """

    def __init__(self, *names: str) -> None:
        self._names = names
        self._params: list[nn.Parameter] = []

    def put(self, param: nn.Parameter, value: Tensor) -> None:
        """Set the attributes to a value."""
        for name in self._names:
            setattr(param, name, value)
        self._params.append(param)

    def clear(self) -> None:
        """Delete the attributes."""
        for param in self._params:
            for name in self._names:
                vars(param).pop(name, None)
        self._params.clear()


def weak(method: Any) -> Callable[..., None]:
    """Return a function that calls a bound method, or does nothing after its object was deleted.

    The function holds a weak reference, so that it does not keep the object alive.
    """
    reference: weakref.WeakMethod[Callable[..., None]] = weakref.WeakMethod(method)

    def call(*args: Any) -> None:
        now = reference()
        if now is not None:
            now(*args)

    return call


def release_with(owner: object, engine: Engine, shown: ParamAttributes) -> None:
    """Restore the model when the owner of the engine is deleted before the model."""
    engine.forgotten = shown.clear
    weakref.finalize(owner, _release, weakref.ref(engine)).atexit = False


def _release(engine: "weakref.ref[Engine]") -> None:
    alive = engine()
    if alive is not None:
        alive.detach()
