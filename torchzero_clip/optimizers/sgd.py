"""SGD with momentum."""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor
from typing_extensions import override

from torchzero_clip.checks import boolean, non_negative, number, optional
from torchzero_clip.compat import FakeTensor, has_fused_kernels
from torchzero_clip.core.kinds import Fused, UpdateRule
from torchzero_clip.core.learning_rate import LR
from torchzero_clip.core.step import Step
from torchzero_clip.core.transform import Transform
from torchzero_clip.functional import foreach
from torchzero_clip.functional.shards import locals_of
from torchzero_clip.types import NewState, Schedule, Setting, State, Target


class SGD(UpdateRule):
    """Accumulates momentum, as `torch.optim.SGD` does. Without momentum updates pass unchanged.

        b ← momentum · b + (1 - dampening) · u      (b ← u in the first step)
        u ← b                                       (u + momentum · b with Nesterov)

    The learning rate is applied at the end of the chain, or where an `LR` stands.

    Args:
        lr: The learning rate of the chain: a number >= 0 or a tensor of one element. None for torch's default, 1e-3.
        momentum: The decay rate of the buffer, >= 0; a setting of the param groups.
        dampening: The share of each update that does not enter the buffer; a setting.
        nesterov: Look ahead by one step. It needs momentum and no dampening.
        fused: None or True allows torch's fused kernel, which makes one pass over memory. It is used if the rest of the
            chain is the `LR`, parameters are float32 or float64, and buffers are laid out like them and have their
            dtype. With False it is never used. Results differ by rounding.
        target: What it acts on, see `Transform`.
        name: The name in the chain and in checkpoints; the class name in snake case if None.

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
    each_alone = pure = True
    default_lr = 1e-3

    def __init__(
        self,
        lr: float | Tensor | Schedule | None = None,
        momentum: float | Schedule = 0.0,
        *,
        dampening: float | Schedule = 0.0,
        nesterov: bool = False,
        fused: bool | None = None,
        target: Target = "update",
        name: str | None = None,
    ) -> None:
        boolean("nesterov", nesterov)
        optional(boolean)("fused", fused)
        self.fused, self.nesterov = fused, nesterov
        super().__init__({"momentum": momentum, "dampening": dampening}, lr=lr, target=target, name=name)

    @override
    def check(self, setting: Setting) -> None:
        super().check(setting)
        if self.nesterov and not (setting.get("momentum", 1) > 0 and setting.get("dampening", 0) == 0):
            raise ValueError(f"nesterov needs momentum > 0 and dampening = 0, got {dict(setting)}")

    @override
    def possible_state(self, param: Tensor, setting: Setting) -> NewState:
        """The buffer, which is a copy of the first update to which momentum is applied, as in torch."""
        return {"momentum_buffer": torch.zeros_like(param)}

    @override
    def variant(self, setting: Setting) -> bool:
        """True if there are buffers."""
        return setting["momentum"] != 0

    @override
    def kernel(self, rest: Sequence[Transform], step: Step) -> Fused | None:
        # a class derived from LR may do more than the kernel
        if self.fused is False or [type(t) for t in rest] != [LR] or any(t.target != "update" for t in (self, *rest)):
            return None
        # in torch 2.13, the kernel leaves half precision as it is on CPU, and has no version for fake tensors
        first = step.params[0]
        is_computed = first.dtype in foreach.WIDE or (first.is_floating_point() and not first.is_cpu)
        if not is_computed or isinstance(first, FakeTensor) or not has_fused_kernels(first):
            return None
        kernel, loop = (partial(foreach.sgd_, fused=fused, nesterov=self.nesterov) for fused in (True, False))
        settings = [setting for setting, _ in step.by_setting()]
        if not self.variant(settings[0]):
            return Fused((), kernel, loop, takes_found_inf=True)
        if not step.has("momentum_buffer"):
            # a buffer of zeros becomes the update, as in torch, unless the update is dampened
            is_dampened = any(setting["dampening"] for setting in settings)
            if is_dampened or not foreach.fit_kernels([locals_of(step.params), locals_of(step.grads)]):
                return None
            for state, param in zip(step.states, step.params, strict=True):
                state.setdefault("momentum_buffer", torch.zeros_like(param))
        return Fused(("momentum_buffer",), kernel, loop, takes_found_inf=True)

    @override
    def apply_tensors(self, updates: list[Tensor], step: Step) -> Sequence[Tensor]:
        result: list[Tensor] = []
        for setting, span in step.by_setting():
            tensors = updates[span]
            if setting["momentum"]:
                tensors = self._momentum(tensors, step.params[span], step.states[span], setting)
            result += tensors
        return result

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
            return foreach.cast(updates, tensors)
        ahead = foreach.clone(tensors)
        foreach.add_(ahead, updates, alpha=momentum)
        return ahead
