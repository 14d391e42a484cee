"""SGD with momentum."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from torchzero_clip.checks import boolean, non_negative, number
from torchzero_clip.core.settings import runs
from torchzero_clip.core.transform import Transform
from torchzero_clip.functional import foreach
from torchzero_clip.types import Schedule, Setting, State, Target


class SGD(Transform):
    """Accumulates momentum, as `torch.optim.SGD` does; without momentum updates pass unchanged.

        b ← momentum · b + (1 - dampening) · u      (b ← u in the first step)
        u ← b                                       (u + momentum · b with Nesterov)

    The learning rate is applied at the end of the chain, or where an `LR` stands.

    Args:
        lr: The learning rate of the chain: a number >= 0 or a tensor of one element. None for torch's default, 1e-3.
        momentum: The decay rate of the buffer, >= 0; a setting of the param groups.
        dampening: The share of each update that does not enter the buffer; a setting.
        nesterov: Look ahead by one step. It needs momentum and no dampening.
        target: What it acts on, see `Transform`.

    Raises:
        ValueError: For a setting out of range, or ``nesterov`` without momentum or with dampening.
        TypeError: For an argument of the wrong type.

    Examples:
        >>> import torch
        >>> from torchzero_clip import SGD, Modular
        >>> weight = torch.nn.Parameter(torch.zeros(1))
        >>> optimizer = Modular([weight], SGD(lr=1.0, momentum=0.5))
        >>> for _ in range(2):
        ...     weight.grad = torch.ones(1)
        ...     optimizer.step()
        >>> weight.data
        tensor([-2.5000])

    Source: Sutskever, Martens, Dahl, Hinton, [On the importance of initialization and momentum in deep
    learning](https://proceedings.mlr.press/v28/sutskever13.html), 2013.
    """

    checks = {"momentum": non_negative, "dampening": number}
    default_lr = 1e-3
    pure = True
    makes_own_state = True

    def __init__(
        self,
        lr: float | Tensor | Schedule | None = None,
        momentum: float | Schedule = 0.0,
        *,
        dampening: float | Schedule = 0.0,
        nesterov: bool = False,
        target: Target = "update",
    ) -> None:
        boolean("nesterov", nesterov)
        self.nesterov = nesterov
        super().__init__({"momentum": momentum, "dampening": dampening}, lr=lr, target=target)

    @override
    def check(self, settings: Setting) -> None:
        """Raise if a setting is out of range, or does not go with ``nesterov``."""
        super().check(settings)
        if self.nesterov and not (settings.get("momentum", 1) > 0 and settings.get("dampening", 0) == 0):
            raise ValueError(f"nesterov needs momentum > 0 and dampening = 0, got {dict(settings)}")

    @override
    def init_state(self, param: Tensor, setting: Setting) -> dict[str, Any]:
        """The buffer, where momentum is or has been in use."""
        return {"momentum_buffer": torch.zeros_like(param)}

    @override
    def apply_tensors(
        self,
        tensors: list[Tensor],
        params: list[Tensor],
        grads: list[Tensor],
        loss: Tensor | float | None,
        states: Sequence[State],
        settings: Sequence[Setting],
    ) -> Sequence[Tensor]:
        """Update the buffers and return new tensors, or the given ones without momentum."""
        updates: list[Tensor] = []
        for setting, own in runs(settings):
            given = tensors[own]
            updates += self._momentum(given, params[own], states[own], setting) if setting["momentum"] else given
        return updates

    def _momentum(
        self, tensors: list[Tensor], params: list[Tensor], states: Sequence[State], setting: Setting
    ) -> list[Tensor]:
        momentum = setting["momentum"]
        begun = [(s["momentum_buffer"], t) for s, t in zip(states, tensors, strict=True) if "momentum_buffer" in s]
        if begun:
            buffers, inputs = map(list, zip(*begun, strict=True))
            foreach.multiply_(buffers, momentum)
            foreach.add_(buffers, inputs, alpha=1 - setting["dampening"])
        for state, tensor, param in zip(states, tensors, params, strict=True):
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = tensor.to(param.dtype, copy=True)

        updates = [state["momentum_buffer"] for state in states]
        if not self.nesterov:
            return [update.to(t.dtype, copy=True) for update, t in zip(updates, tensors, strict=True)]
        ahead = foreach.clone(tensors)
        foreach.add_(ahead, updates, alpha=momentum)
        return ahead
