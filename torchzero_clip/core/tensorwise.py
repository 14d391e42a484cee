"""The base class of transforms that treat each tensor on its own."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, final

from torch import Tensor

from torchzero_clip.core.entering import Flags
from torchzero_clip.core.transform import Transform
from torchzero_clip.functional.measure import share
from torchzero_clip.types import Setting, State


class TensorwiseTransform(Transform):
    """A transform that treats each tensor on its own: subclasses implement `apply_tensor`.

    Args:
        defaults: As in `Transform`.
        lr: As in `Transform`.
        target: As in `Transform`.
        name: As in `Transform`.

    Examples:
        A whole transform. Its setting is validated, may differ by param group, can be scheduled, and is part of
        checkpoints; `rms` is safe from overflow and right under FSDP2.

        >>> import torch
        >>> from torchzero_clip import Modular, TensorwiseTransform, rms
        >>> from torchzero_clip.checks import positive
        >>> class ClipRMS(TensorwiseTransform):
        ...     checks = {"max_rms": positive}
        ...     def __init__(self, max_rms: float, *, target="update") -> None:
        ...         super().__init__({"max_rms": max_rms}, target=target)
        ...     def apply_tensor(self, tensor, param, grad, loss, state, setting):
        ...         return tensor.mul_((setting["max_rms"] / rms(tensor)).clamp(max=1.0))
        >>> weight = torch.nn.Parameter(torch.zeros(2))
        >>> optimizer = Modular([weight], ClipRMS(0.5))
        >>> weight.grad = torch.tensor([3.0, 3.0])
        >>> optimizer.step()
        >>> weight.data
        tensor([-0.5000, -0.5000])
        >>> ClipRMS(-1.0)
        Traceback (most recent call last):
        ...
        ValueError: max_rms must be > 0, got -1.0
    """

    flags: Flags
    """What the gradient of this tensor was before any transform; set while `apply_tensor` runs, if it
    `keeps_statistics`."""

    changed: list[Tensor]
    """`apply_tensor` may append how many elements of the local part it changed; `Modular.metrics` shows the share."""

    def __getattr__(self, name: str) -> Any:
        hint = ": set keeps_statistics = True to have it" if name == "flags" else ""
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{hint}")

    @abstractmethod
    def apply_tensor(
        self,
        tensor: Tensor,
        param: Tensor,
        grad: Tensor,
        loss: Tensor | float | None,
        state: State,
        setting: Setting,
    ) -> Tensor:
        """Return the new tensor; ``tensor`` may be modified in place. The arguments are as in `apply_tensors`."""

    @final
    def apply_tensors(
        self,
        tensors: list[Tensor],
        params: list[Tensor],
        grads: list[Tensor],
        loss: Tensor | float | None,
        states: Sequence[State],
        settings: Sequence[Setting],
    ) -> Sequence[Tensor]:
        """Apply `apply_tensor` to every tensor."""
        rows = zip(tensors, params, grads, states, settings, strict=True)
        flags = self.entering.flags() if self.keeps_statistics else None
        self.changed = []
        try:
            updates = [self._apply_row(i, flags, loss, *row) for i, row in enumerate(rows)]
            if self.changed:
                self.metrics["clipped"] = share(tensors, self.changed)
        finally:
            del self.changed
        return updates

    def _apply_row(
        self,
        index: int,
        flags: Flags | None,
        loss: Tensor | float | None,
        tensor: Tensor,
        param: Tensor,
        grad: Tensor,
        state: State,
        setting: Setting,
    ) -> Tensor:
        if flags is None:
            return self.apply_tensor(tensor, param, grad, loss, state, setting)
        self.flags = flags.of(index, tensor.device)
        try:
            return self.apply_tensor(tensor, param, grad, loss, state, setting)
        finally:
            del self.flags
