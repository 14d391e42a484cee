"""RMSprop."""

from collections.abc import Sequence

import torch
from torch import Tensor
from typing_extensions import override

from torchzero_clip.checks import boolean, non_negative
from torchzero_clip.core.kinds import UpdateRule
from torchzero_clip.core.step import Step
from torchzero_clip.functional import foreach
from torchzero_clip.types import NewState, Schedule, Setting, State, Target


class RMSprop(UpdateRule):
    """Divides updates by an average of their size, as `torch.optim.RMSprop` does.

        v ← alpha · v + (1 - alpha) · u²
        u ← u / (√v + eps)                         (√(v - m²) if centered, m the average of u)
        b ← momentum · b + u;  u ← b               (with momentum)

    Args:
        lr: The learning rate of the chain: a number >= 0 or a tensor of one element. None for torch's default, 1e-2.
        alpha: The decay rate of the average, >= 0; a setting of the param groups.
        eps: Added to the denominator, in units of the gradient; a setting.
        momentum: The decay rate of the buffer, >= 0; a setting.
        centered: Divide by the standard deviation instead of the root mean square.
        target: What it acts on, see `Transform`.
        name: The name in the chain and in checkpoints; the class name in snake case if None.

    Raises:
        ValueError: For a setting out of range.
        TypeError: For an argument of the wrong type.

    Examples:
        >>> import torch
        >>> from torchzero_clip import Modular, RMSprop
        >>> weight = torch.nn.Parameter(torch.zeros(1))
        >>> optimizer = Modular([weight], RMSprop(lr=0.1, alpha=0.75))
        >>> weight.grad = torch.tensor([3.0])
        >>> optimizer.step()
        >>> weight.data
        tensor([-0.2000])

    Source: Hinton, [Neural networks for machine learning, lecture
    6e](https://www.cs.toronto.edu/~tijmen/csc321/slides/lecture_slides_lec6.pdf), 2012; Graves, [Generating sequences
    with recurrent neural networks](https://arxiv.org/abs/1308.0850), 2013, for ``centered``.
    """

    checks = {"alpha": non_negative, "eps": non_negative, "momentum": non_negative}
    each_alone = pure = True
    default_lr = 1e-2

    def __init__(
        self,
        lr: float | Tensor | Schedule | None = None,
        alpha: float | Schedule = 0.99,
        eps: float | Schedule = 1e-8,
        momentum: float | Schedule = 0.0,
        *,
        centered: bool = False,
        target: Target = "update",
        name: str | None = None,
    ) -> None:
        boolean("centered", centered)
        super().__init__({"alpha": alpha, "eps": eps, "momentum": momentum}, lr=lr, target=target, name=name)
        self.centered = centered

    @override
    def init_state(self, param: Tensor, setting: Setting) -> NewState:
        return {key: torch.zeros_like(param) for key in ("square_avg", *(["grad_avg"] if self.centered else []))}

    @override
    def possible_state(self, param: Tensor, setting: Setting) -> NewState:
        """The averages and the buffer, which is made when momentum is first used."""
        return {**self.init_state(param, setting), "momentum_buffer": torch.zeros_like(param)}

    @override
    def apply_tensors(self, updates: list[Tensor], step: Step) -> Sequence[Tensor]:
        result: list[Tensor] = []
        for setting, span in step.by_setting():
            tensors, params, states = updates[span], step.params[span], step.states[span]
            scaled = self._scaled(tensors, states, setting)
            if setting["momentum"]:
                buffers = [_buffer(state, param) for state, param in zip(states, params, strict=True)]
                foreach.multiply_(buffers, setting["momentum"])
                foreach.add_(buffers, scaled)
                scaled = buffers
            result += foreach.cast(scaled, tensors)
        return result

    def _scaled(self, tensors: list[Tensor], states: Sequence[State], setting: Setting) -> list[Tensor]:
        squares = [state["square_avg"] for state in states]
        inputs = foreach.cast(tensors, squares)
        foreach.decay_squares_(squares, inputs, setting["alpha"])
        spreads = squares
        if self.centered:
            means = [state["grad_avg"] for state in states]
            foreach.lerp_(means, inputs, 1 - setting["alpha"])
            spreads = foreach.subtract_squares(squares, means)
        denominators = foreach.square_roots(foreach.at_least_float32(spreads))
        foreach.add_number_(denominators, setting["eps"])
        return foreach.divide(inputs, denominators)


def _buffer(state: State, param: Tensor) -> Tensor:
    if "momentum_buffer" not in state:
        state["momentum_buffer"] = torch.zeros_like(param)
    return state["momentum_buffer"]
