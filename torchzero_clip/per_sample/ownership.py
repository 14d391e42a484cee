"""What a clipper puts into a model leaves it again, at the latest when nobody holds the clipper any more."""

import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from torchzero_clip.per_sample.engine import Engine


class Shown:
    """Values that users read off parameters.

    Args:
        names: The attributes.
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
        """Take them off again."""
        for param in self._params:
            for name in self._names:
                vars(param).pop(name, None)
        self._params.clear()


def weak(method: Any) -> Callable[..., None]:
    """A bound method as long as its object lives, which this does not keep alive: the model holds the engine."""
    reference: weakref.WeakMethod[Callable[..., None]] = weakref.WeakMethod(method)

    def call(*args: Any) -> None:
        now = reference()
        if now is not None:
            now(*args)

    return call


def release_with(owner: object, engine: Engine, shown: Shown) -> None:
    """Leave the model as it was when the owner of the engine is gone, and the model is not."""
    engine.forgotten = shown.clear
    weakref.finalize(owner, _release, weakref.ref(engine)).atexit = False


def _release(engine: "weakref.ref[Engine]") -> None:
    alive = engine()
    if alive is not None:
        alive.detach()
