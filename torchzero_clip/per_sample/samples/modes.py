"""The modes of the clipper, which see every call of a function of torch."""

from types import TracebackType

from torch.overrides import (
    TorchFunctionMode,
    _get_current_function_mode,  # pyright: ignore[reportPrivateUsage]
    _pop_mode,  # pyright: ignore[reportPrivateUsage]
    _push_mode,  # pyright: ignore[reportPrivateUsage]
)


class OwnMode(TorchFunctionMode):
    """A mode of the clipper. It costs a few microseconds for each function that is called, even if it ignores it."""


class WithoutOwnModes:
    """A block without the innermost modes of the clipper. Those outside of a mode of the user stay."""

    def __enter__(self) -> None:
        self._modes: list[OwnMode] = []
        while isinstance(_get_current_function_mode(), OwnMode):
            self._modes.append(_pop_mode())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self._modes:
            _push_mode(self._modes.pop())
