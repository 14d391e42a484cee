"""Which tensors can be measured. Subclasses of tensors, such as int8 weights, may not support what norms need."""

from collections.abc import Sequence

from torch import Tensor, nn

from torchzero_clip.compat import is_distributed
from torchzero_clip.functional import foreach
from torchzero_clip.functional.norms import norms_of_each
from torchzero_clip.recorder.precision import precision_of

ORDINARY = {Tensor, nn.Parameter, nn.Buffer}
_SHOWN = 3  # names in a warning


class Measurable:
    """Tries the tensors of each class once."""

    def __init__(self) -> None:
        self._errors: dict[type, Exception | None] = {}
        self._has_said = False

    def among(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Those tensors that can be copied, subtracted and measured."""
        if ORDINARY.issuperset(map(type, tensors)):
            return list(tensors)
        return [tensor for tensor in tensors if self._error_of(tensor) is None]

    @property
    def has_news(self) -> bool:
        """True if something cannot be measured, and `warning` was not called."""
        return bool(self._errors) and not self._has_said and any(self._errors.values())

    def warning(self, named: Sequence[tuple[str, Tensor]]) -> str:
        """The text of the warning about parameters and gradients that cannot be measured."""
        weights = [(name, self._error_of(param)) for name, param in named]
        grads = [(name, self._error_of(param.grad)) for name, param in named if param.grad is not None]
        missing: list[str] = []
        for what, errors in (("gradients", grads), ("weights and updates", weights)):
            names = [repr(name) for name, error in errors if error is not None]
            if names:
                missing.append(f"{what} of {', '.join(names[:_SHOWN])}{', ...' if len(names) > _SHOWN else ''}")
        error = next((error for _, error in [*grads, *weights] if error is not None), None)
        self._has_said = True
        return f"the record has no norms of {' and of '.join(missing)}, which cannot be measured: {error!r}"

    def _error_of(self, tensor: Tensor) -> Exception | None:
        kind = type(tensor)
        if kind in ORDINARY or is_distributed(tensor):
            return None
        if kind not in self._errors:
            self._errors[kind] = _tried(tensor)
        return self._errors[kind]


def _tried(tensor: Tensor) -> Exception | None:
    """The error of measuring a tensor and its update; None if there is none."""
    try:
        copies = foreach.clone([tensor.detach()])
        norms_of_each(copies)
        precision_of(copies)
        foreach.subtract_(copies, [tensor.detach()])
    except Exception as error:  # which one depends on the class
        return error.with_traceback(None)  # whose frames would keep the copies alive
    return None
