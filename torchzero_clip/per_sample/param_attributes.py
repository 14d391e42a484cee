"""Values that users read as attributes of parameters: gradients and norms of samples."""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from typing_extensions import override

from torchzero_clip.per_sample.norm_sample import norm_sample


class ParamAttributes:
    """What users read as attributes of parameters; nothing in this base class.

    Args:
        of_mean: Whether gradients that arrive are those of the mean over samples.
    """

    names: ClassVar[tuple[str, ...]] = ()
    """The names of the attributes; all get the same value."""
    needs_gradients: ClassVar[bool] = False
    """Whether per-sample gradients are formed, for `gradients_formed`."""
    replaces_clipping: ClassVar[bool] = False
    """Whether gradients that were shown may be dropped by the next forward."""

    def __init__(self, *, of_mean: bool = False) -> None:
        self.of_mean = of_mean
        self._params: list[nn.Parameter] = []

    def gradients_formed(self, param: Any, grads: Tensor) -> None:
        """The per-sample gradients of one use of a parameter, (B, *shape), have arrived."""

    def backward_ended(self, recording: Any) -> None:
        """All gradients of a backward have arrived."""

    def put(self, param: nn.Parameter, value: Tensor) -> None:
        """Set the attributes to a value."""
        for name in self.names:
            setattr(param, name, value)
        self._params.append(param)

    def clear(self) -> None:
        """Delete the attributes."""
        for param in self._params:
            for name in self.names:
                vars(param).pop(name, None)
        self._params.clear()

    def scale(self, count: int) -> float:
        """The factor between the gradients that arrive and those of the losses of single samples."""
        return float(count) if self.of_mean else 1.0


class GradSamples(ParamAttributes):
    """``p.grad_sample``: the per-sample gradients."""

    names = ("grad_sample",)
    needs_gradients = True

    @override
    def gradients_formed(self, param: Any, grads: Tensor) -> None:
        grads = grads * self.scale(len(grads)) if self.of_mean else grads
        earlier = getattr(param, "grad_sample", None)
        self.put(param, grads if earlier is None else earlier + grads)


class NormSamples(ParamAttributes):
    """``p.norm_sample``: the norms of the per-sample gradients. It also holds the norms over all parameters."""

    names = ("norm_sample", "_norm_sample")
    replaces_clipping = True

    def __init__(self, *, of_mean: bool = False) -> None:
        super().__init__(of_mean=of_mean)
        self.norms: Tensor | None = None

    @override
    def backward_ended(self, recording: Any) -> None:
        gathered = recording.gathered(None)
        for param in recording.params.values():
            if id(param) in gathered:
                squares = gathered[id(param)][1]
                self.put(param, norm_sample(param, squares.sqrt() * self.scale(len(squares)), len(squares)))

    @override
    def clear(self) -> None:
        super().clear()
        self.norms = None

    def read(self, recording: Any) -> Tensor:
        """The norms of the gradients that have arrived, or those that were read before.

        Raises:
            RuntimeError: If there was no backward since the last forward.
        """
        if recording.waits:
            squares = torch.stack([squares for _, squares in recording.gathered(None).values()]).sum(0)
            self.norms = squares.sqrt().mul_(self.scale(len(squares))).to(recording.norm_dtype())
            recording.consume()
        if self.norms is None:
            raise RuntimeError("there are no norms: call backward() on a loss of this module's output first")
        return self.norms
