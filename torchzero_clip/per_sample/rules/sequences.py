"""Attention and recurrent networks: the generic rule, with the batch dimensions that these modules define."""

import inspect
from collections.abc import Sequence
from types import MethodType
from typing import Any

from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree as pytree
from typing_extensions import override

from torchzero_clip.per_sample.captured_layer import CapturedLayer
from torchzero_clip.per_sample.rules.generic import GenericRule


class SequenceRule(GenericRule):
    """MultiheadAttention, and RNN, LSTM and GRU in calls that `RecurrentRule` leaves to it.

    Their `batch_first` decides the batch dimension of sequences. That of others is given: 1 for the hidden states of a
    recurrent network, 0 for masks and weights of attention.
    """

    def __init__(self, of_others: int) -> None:
        self._of_others = of_others

    @override
    def dims(
        self, layer: CapturedLayer, args: tuple[Any, ...], kwargs: dict[str, Any], leaves: Sequence[Any]
    ) -> tuple[list[int | None], set[Any]]:
        if any(isinstance(value, PackedSequence) for value in (*args, *kwargs.values())):
            raise ValueError(
                f"{layer} got a PackedSequence, and runs sample by sample with proj_size, under autocast, in half or "
                f"mixed precision, or with dropout on a GPU: use padded sequences{layer.way_out}"
            )
        indices = pytree.tree_unflatten(list(range(len(leaves))), pytree.tree_structure((args, kwargs)))
        signature = inspect.signature(MethodType(type(layer.module).forward, layer.module))
        named = signature.bind(*indices[0], **indices[1]).arguments
        names = {i: name for name, value in named.items() for i in pytree.tree_leaves(value)}
        return [self._input_dim(layer, names[i], leaf) for i, leaf in enumerate(leaves)], set()

    @override
    def output_dim(self, layer: CapturedLayer, index: int) -> int:
        return self._of_others if index else 1 - int(getattr(layer.module, "batch_first", False))

    def _input_dim(self, layer: CapturedLayer, name: str, value: Any) -> int | None:
        if not isinstance(value, Tensor):
            return None
        if name == "attn_mask" and value.ndim == 3:
            raise ValueError(f"{layer} got an attn_mask per head: use one for all, and key_padding_mask for samples")
        if name == "attn_mask":
            return None
        if name != "key_padding_mask" and value.ndim != 3:
            raise ValueError(f"{layer} got a {name} without a batch dimension: per-sample gradients need one")
        return self.output_dim(layer, int(name in ("hx", "key_padding_mask")))
