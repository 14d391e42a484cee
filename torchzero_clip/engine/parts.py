"""A step that is taken in parts: what was updated, and the metrics of all parts together."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NoReturn

import torch
from torch import Tensor

from torchzero_clip.core.nodes import Nodes
from torchzero_clip.engine.joint_metrics import joint_metrics, path_of, vector_of
from torchzero_clip.functional.lists import params_of
from torchzero_clip.functional.processes import device_of
from torchzero_clip.types import Group


class Parts:
    """The parts of one step, which `Modular.step` ends. ``attach`` is called when parameters were added."""

    def __init__(self, attach: Callable[[], None]) -> None:
        self.attach = attach
        self.updated: dict[int, Tensor] = {}  # the parameters that were updated, in order, by id
        self._numbers: list[Mapping[str, Tensor]] = []  # a `Company.numbers` for each part
        self._metrics: dict[str, Tensor] = {}

    def add(self, numbers: Mapping[str, Tensor], metrics: dict[str, Tensor], params: Iterable[Tensor]) -> None:
        """Note that parameters were updated. Of metrics that transforms set themselves, the last ones stay."""
        self._numbers.append(numbers)
        self._metrics.update(metrics)
        self.updated.update({id(param): param for param in params})

    def refuse_second(self, params: Iterable[Tensor]) -> None:
        """Raise if a parameter was updated already."""
        if any(id(param) in self.updated for param in params):
            raise second_gradient()

    def refuse_scaler(self) -> NoReturn:
        """Raise, because a gradient scaler cannot divide the gradients of this step."""
        raise RuntimeError(
            "step_in_backward cannot be used with GradScaler: the backward has updated parameters by gradients that "
            "the scaler multiplied. Use bfloat16, which needs no scaler, or take ordinary steps"
        )

    def end(self, nodes: Nodes, groups: Sequence[Group]) -> dict[str, Tensor]:
        """Return the metrics of all parts as those of one step, and forget the parts."""
        device = device_of(params_of(groups))
        parts, metrics = self._numbers, self._metrics
        self._numbers, self._metrics, self.updated = [], {}, {}
        joint = joint_metrics(nodes, torch.stack([vector_of(numbers, nodes, device) for numbers in parts]))
        paths = set[str]().union(*parts)
        metrics |= {key: value for key, value in joint.items() if path_of(key) in paths}
        return {key: metrics[key] for node in nodes for key in metrics if path_of(key) == node.path}


def second_gradient() -> RuntimeError:
    """The error for a parameter that was updated already, and got another gradient in the same step."""
    return RuntimeError(
        "a parameter got a second gradient before optimizer.step(), and the backward has applied the first. Call "
        "optimizer.zero_grad() and then optimizer.step() to drop the second one and end the step. From then on call "
        "optimizer.step() after each backward, or take ordinary steps to accumulate gradients. Checkpoints of "
        "activations need use_reentrant=False"
    )
