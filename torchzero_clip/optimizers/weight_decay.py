"""Weight decay."""

from collections.abc import Sequence

from torch import Tensor
from typing_extensions import override

from torchzero_clip.checks import non_negative
from torchzero_clip.compat import warn_user
from torchzero_clip.core.step import Step
from torchzero_clip.core.transform import Transform
from torchzero_clip.functional import foreach
from torchzero_clip.types import Schedule, Target


class WeightDecay(Transform):
    """Adds the parameters, times ``weight_decay``, to the updates.

        u ← u + weight_decay · p

    Its place decides which kind it is. Before an optimizer it is L2 regularization (the ``weight_decay`` of
    `torch.optim.Adam` and `SGD`). After one it is decoupled weight decay (that of `torch.optim.AdamW`). The learning
    rate scales both.

    Args:
        weight_decay: The share of a parameter that is taken off per unit of learning rate; a setting of the param
            groups.
        target: What it acts on, see `Transform`.
        name: The name in the chain and in checkpoints; the class name in snake case if None.

    Raises:
        ValueError: If ``weight_decay`` is negative or NaN, or for an unknown ``target``.
        TypeError: If ``weight_decay`` is not a number.

    Examples:
        >>> import torch
        >>> from torchzero_clip import Adam, Modular, WeightDecay
        >>> weight = torch.nn.Parameter(torch.tensor([2.0]))
        >>> optimizer = Modular([weight], Adam(lr=0.1), WeightDecay(0.5))
        >>> weight.grad = torch.zeros(1)
        >>> optimizer.step()
        >>> weight.data
        tensor([1.9000])

    Source: Loshchilov, Hutter, [Decoupled weight decay regularization](https://arxiv.org/abs/1711.05101), 2017.
    """

    checks = {"weight_decay": non_negative}
    each_alone = pure = True

    def __init__(self, weight_decay: float | Schedule, *, target: Target = "update", name: str | None = None) -> None:
        super().__init__({"weight_decay": weight_decay}, target=target, name=name)

    @override
    def check_chain(self, before: Sequence[Transform], after: Sequence[Transform]) -> None:
        others = [other for other in before if isinstance(other, WeightDecay) and other.defaults["weight_decay"]]
        if others and self.defaults["weight_decay"]:
            warn_user(
                f"the chain decays weights twice, by {others[0]!r} and {self!r}. AdamW has a decay of its own: "
                "write AdamW(weight_decay=0), or leave WeightDecay out"
            )

    @override
    def apply_tensors(self, updates: list[Tensor], step: Step) -> Sequence[Tensor]:
        for setting, span in step.by_setting():
            foreach.add_(updates[span], step.params[span], alpha=setting["weight_decay"])
        return updates
