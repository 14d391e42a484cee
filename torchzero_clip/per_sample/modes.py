"""The modes of the clipper, which see every function of torch that runs."""

from types import TracebackType

from torch.overrides import (
    TorchFunctionMode,
    _get_current_function_mode,  # pyright: ignore[reportPrivateUsage]
    _pop_mode,  # pyright: ignore[reportPrivateUsage]
    _push_mode,  # pyright: ignore[reportPrivateUsage]
)


class OwnMode(TorchFunctionMode):
    """A mode of the clipper, which costs a few microseconds for each function, also where it has nothing to see."""


class WithoutOwnModes:
    """A block without the modes of the clipper that are innermost. Those around a mode of the user stay."""

    def __init__(self) -> None:
        self._modes: list[OwnMode] = []

    def __enter__(self) -> None:
        while isinstance(_get_current_function_mode(), OwnMode):
            self._modes.append(_pop_mode())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self._modes:
            _push_mode(self._modes.pop())
