"""Centralization."""

from collections.abc import Sequence

import torch
from torch import Tensor
from typing_extensions import override

from torchzero_clip.core.kinds import Shifting
from torchzero_clip.core.step import Step
from torchzero_clip.functional.clip import centralize_
from torchzero_clip.functional.dtypes import widest
from torchzero_clip.functional.measure import Slicing
from torchzero_clip.functional.moments import means_of_each
from torchzero_clip.functional.scratch import Scratch
from torchzero_clip.types import Dim, Target


class Centralize(Shifting):
    """Subtracts the mean from every update, so that its elements add up to 0.

        u ← u - mean(u)

    By default each tensor has its own mean. Gradient centralization as published takes one mean per output
    channel, over all dimensions but the first: ``Centralize(dim=0, inverse_dims=True)``.

    **Guarantees.** Sums of more than 1024 elements are added up in float64, so the mean of the result is no larger than
    the rounding of single elements. Tensors do not influence each other, except with ``dim="global"``.

    Args:
        dim: The dimensions that one slice spans: None for all, one int or several (negative ones count from the end of
            each tensor), or "global" for all tensors of all param groups joined. A tensor whose slices span no
            dimension is left alone.
        inverse_dims: Slices span the dimensions that ``dim`` does not list.
        min_size: Slices of fewer elements are left alone. The default leaves out slices of one element, which would
            become 0. It has no effect with "global".
        target: What it acts on, see `Transform`.
        name: The name in the chain and in checkpoints; the class name in snake case if None.

    Raises:
        ValueError: For an unknown ``dim`` or ``target``, or a negative ``min_size``.
        TypeError: For an argument of the wrong type.

    | update | result |
    | --- | --- |
    | a scalar | unchanged, except with ``dim="global"`` |
    | one element, with ``min_size=1`` | 0 |
    | an inf or a NaN in the slice | all elements become inf or NaN |

    Examples:
        >>> import torch
        >>> from torchzero_clip import Centralize, Modular
        >>> weight = torch.nn.Parameter(torch.zeros(2, 2))
        >>> optimizer = Modular([weight], Centralize(dim=0, inverse_dims=True))
        >>> weight.grad = torch.tensor([[1.0, 3.0], [5.0, 5.0]])
        >>> optimizer.step()
        >>> weight.data
        tensor([[ 1., -1.],
                [ 0.,  0.]])

    Source: Yong, Huang, Hua, Zhang, [Gradient centralization: a new optimization technique for deep neural
    networks](https://arxiv.org/abs/2004.01461), 2020.
    """

    each_alone = pure = True

    def __init__(
        self,
        dim: Dim = None,
        inverse_dims: bool = False,
        min_size: int = 2,
        *,
        target: Target = "update",
        name: str | None = None,
    ) -> None:
        super().__init__({}, target=target, name=name)
        self.dim, self.inverse_dims, self.min_size = dim, inverse_dims, min_size
        self._slicing = Slicing.checked(1, dim, inverse_dims, min_size)

    @override
    def shifts(self, updates: list[Tensor], scratch: Scratch) -> Tensor | None:
        # an override of `apply_tensors` would not be called
        if self.dim is not None or self.inverse_dims or type(self).apply_tensors is not Centralize.apply_tensors:
            return None
        counts, acts, all_act = scratch.plan("means", updates, lambda: self._counted(updates), self.min_size)
        means = means_of_each(updates, counts, scratch)
        return means if all_act else torch.where(acts, means, 0.0)

    def _counted(self, updates: Sequence[Tensor]) -> tuple[Tensor, Tensor, bool]:
        """The number of elements of each update, whether it has a mean to subtract, and whether all have one."""
        sizes, device = list(map(Tensor.numel, updates)), updates[0].device
        acts = [u.ndim > 0 and size >= max(self.min_size, 1) for u, size in zip(updates, sizes, strict=True)]
        return torch.tensor(sizes, dtype=widest(device), device=device), torch.tensor(acts, device=device), all(acts)

    @override
    def apply_tensors(self, updates: list[Tensor], step: Step) -> Sequence[Tensor]:
        centralize_([] if step.tools.is_stand_in else updates, self._slicing, step.tools.process_group)
        return updates
