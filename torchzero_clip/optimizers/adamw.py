"""AdamW."""

import inspect
from collections.abc import Iterator

import torch
from torch import Tensor
from typing_extensions import override

from torchzero_clip.core.chain import Chain
from torchzero_clip.optimizers.adam import Adam
from torchzero_clip.optimizers.weight_decay import WeightDecay
from torchzero_clip.types import Schedule


class AdamW(Chain):
    """The chain ``Adam(...), WeightDecay(...)``, as `torch.optim.AdamW` computes it.

    In a longer chain it is the same as these two written there: `Modular.transforms` lists them as ``adam`` and
    ``weight_decay``.

    Args:
        lr: The learning rate of the chain: a number >= 0 or a tensor of one element. None for torch's default, 1e-3.
        betas: As in `Adam`.
        eps: As in `Adam`.
        weight_decay: The share of a parameter that is taken off per unit of learning rate; a setting of the param
            groups.
        amsgrad: As in `Adam`.
        fused: As in `Adam`.
        state_dtype: As in `Adam`.
        name: The name of the Adam in the chain and in checkpoints; that of the weight decay is
            ``"<name>_weight_decay"``.

    Raises:
        ValueError: For a setting out of range.
        TypeError: For an argument of the wrong type.

    Examples:
        >>> import torch
        >>> from torchzero_clip import AdamW, ClipNorm, Modular
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = Modular(model, ClipNorm(1, dim="global"), AdamW(lr=3e-4, weight_decay=0.1))
        >>> list(optimizer.transforms)
        ['clip_norm', 'adam', 'weight_decay', 'lr']

    Source: Loshchilov, Hutter, [Decoupled weight decay regularization](https://arxiv.org/abs/1711.05101), 2017.
    """

    def __init__(
        self,
        lr: float | Tensor | Schedule | None = None,
        betas: tuple[float, float] | Schedule = (0.9, 0.999),
        *,
        eps: float | Schedule = 1e-8,
        weight_decay: float | Schedule = 1e-2,
        amsgrad: bool = False,
        fused: bool | None = None,
        state_dtype: torch.dtype | None = None,
        name: str | None = None,
    ) -> None:
        adam = Adam(lr, betas, eps=eps, amsgrad=amsgrad, fused=fused, state_dtype=state_dtype, name=name)
        super().__init__(adam, WeightDecay(weight_decay, name=None if name is None else f"{name}_weight_decay"))

    @override
    def _arguments(self) -> Iterator[str]:
        adam, decay = self.written
        yield from adam._arguments()
        value = decay.schedules.get("weight_decay", decay.defaults["weight_decay"])
        if value != inspect.signature(AdamW).parameters["weight_decay"].default:
            yield f"weight_decay={value!r}"
