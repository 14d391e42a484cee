"""The one learning rate of a chain."""

import inspect
from collections.abc import Sequence

from torch import Tensor
from typing_extensions import override

from torchzero_clip.checks import scalar
from torchzero_clip.core.chain import Chain
from torchzero_clip.core.kinds import Retraction, UpdateRule
from torchzero_clip.core.nodes import Node, Nodes
from torchzero_clip.core.step import Step
from torchzero_clip.core.transform import Transform
from torchzero_clip.functional import foreach
from torchzero_clip.types import Schedule, Target


class LR(Transform):
    """Multiplies updates by the learning rate, at this place in the chain.

    The learning rate is the setting ``lr`` of the param groups, where torch's schedulers read and write it. A chain has
    exactly one ``LR``; `Modular` appends one if it is missing.

    Args:
        lr: A number >= 0, or a tensor of one element.
        target: What it acts on, see `Transform`.
        name: The name in the chain and in checkpoints; the class name in snake case if None.

    Raises:
        ValueError: If ``lr`` is negative or NaN, or a tensor of several elements.
        TypeError: If ``lr`` is neither a number nor a tensor.

    Examples:
        `ClipNorm` after ``LR`` clips the step itself, in units of the parameters:

        >>> import torch
        >>> from torchzero_clip import LR, Adam, ClipNorm, Modular
        >>> weight = torch.nn.Parameter(torch.zeros(4))
        >>> optimizer = Modular([weight], Adam(), LR(0.1), ClipNorm(0.02))
        >>> weight.grad = torch.ones(4)
        >>> optimizer.step()
        >>> weight.data
        tensor([-0.0100, -0.0100, -0.0100, -0.0100])
    """

    checks = {"lr": scalar}
    each_alone = pure = True

    def __init__(self, lr: float | Tensor | Schedule, *, target: Target = "update", name: str | None = None) -> None:
        super().__init__({"lr": lr}, target=target, name=name)

    @override
    def apply_tensors(self, updates: list[Tensor], step: Step) -> Sequence[Tensor]:
        for setting, span in step.by_setting():
            foreach.multiply_(updates[span], setting["lr"])
        return updates

    def subtract(self, updates: list[Tensor], step: Step) -> None:
        """Subtract the updates times the ``lr`` of each parameter from it, in one operation as torch does."""
        for setting, span in step.by_setting():
            lr = setting["lr"]
            if isinstance(lr, Tensor):
                steps = foreach.clone(updates[span])
                foreach.multiply_(steps, lr)
                foreach.subtract_(step.params[span], steps)
            else:
                foreach.add_(step.params[span], updates[span], alpha=-lr)


def with_learning_rate(transforms: Sequence[Transform]) -> list[Transform]:
    """The same transforms with exactly one `LR`, appended if it is missing."""
    # if several update rules name a learning rate, the appended `LR` has the first: see `rates_of`
    leaves = [node.transform for node in _in_chains(Chain(*transforms).nodes())]
    for transform in leaves:
        if "lr" in transform.defaults and not isinstance(transform, LR):
            raise ValueError(
                f"{transform!r} has a setting 'lr', which is the learning rate of the chain: derive it from UpdateRule "
                "and pass lr= to super().__init__, or choose another name"
            )
    owners = [t for t in leaves if isinstance(t, LR)]
    rules = [t for t in leaves if isinstance(t, UpdateRule)]
    for rule in rules if not owners else []:
        if rule.lr is None and getattr(inspect.signature(type(rule)).parameters.get("lr"), "default", None) is not None:
            raise ValueError(f"{rule!r} has not passed its lr on: write super().__init__(..., lr=lr) in its class")
    named = [t for t in rules if t.lr is not None]
    if len(owners) > 1 or (owners and named):
        listed = ", ".join(map(repr, [*named, *owners]))
        raise ValueError(
            f"a chain with LR has one learning rate, got several: {listed}. Keep one of them, or leave LR out and name "
            "the rates of several optimizers there"
        )
    if owners and owners[0].scope.limited:
        raise ValueError(f"{owners[0]!r} would leave other parameters at 1: give their param groups an lr of their own")
    if owners:
        return list(transforms)
    rates: list[float | Tensor | Schedule] = [t.lr for t in rules if t.lr is not None]
    defaults = sorted({t.default_lr for t in rules if t.default_lr is not None})
    if not rates and len(defaults) > 1:
        raise ValueError(f"the optimizers of this chain have different default learning rates {defaults}: add LR(...)")
    return [*transforms, LR([*rates, *defaults, 1.0][0])]


def rates_of(nodes: Nodes) -> list[tuple[Node, float | Tensor | Schedule | None]]:
    """The learning rate of each update rule, or its default. Empty unless several rules name a learning rate."""
    rules = update_rules(nodes)
    if sum(rule.lr is not None for _, rule in rules) < 2:
        return []
    return [(node, rule.default_lr if rule.lr is None else rule.lr) for node, rule in rules]


def update_rules(nodes: Nodes) -> list[tuple[Node, UpdateRule]]:
    """The optimizers that stand in chains, not in other composites."""
    chained = [(node, node.transform) for node in _in_chains(nodes)]
    return [(node, rule) for node, rule in chained if isinstance(rule, UpdateRule) and not isinstance(rule, Retraction)]


def _in_chains(nodes: Nodes) -> list[Node]:
    """The transforms in order, without the children of composites other than chains."""
    return [node for node in nodes if all(isinstance(outer, Chain) for outer in node.outer)]
