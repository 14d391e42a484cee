"""Recurrent networks and attention: the generic rule, with the batch dimensions that these modules define."""

import inspect
from abc import abstractmethod
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
    """Modules that define the batch dimension of each argument."""

    @override
    def dims(
        self, layer: CapturedLayer, args: tuple[Any, ...], kwargs: dict[str, Any], leaves: Sequence[Any]
    ) -> tuple[list[int | None], set[Any]]:
        indices = pytree.tree_unflatten(list(range(len(leaves))), pytree.tree_structure((args, kwargs)))
        signature = inspect.signature(MethodType(type(layer.module).forward, layer.module))
        named = signature.bind(*indices[0], **indices[1]).arguments
        names = {i: name for name, value in named.items() for i in pytree.tree_leaves(value)}
        return [self.input_dim(layer, names[i], leaf) for i, leaf in enumerate(leaves)], set()

    @abstractmethod
    def input_dim(self, layer: CapturedLayer, name: str, value: Any) -> int | None:
        """The batch dimension of an argument; None if it has none."""


class RecurrentRule(SequenceRule):
    """RNN, LSTM and GRU. Hidden states always have the samples in the second dimension."""

    @override
    def run(self, layer: CapturedLayer, /, *args: Any, **kwargs: Any) -> Any:
        if any(isinstance(value, PackedSequence) for value in (*args, *kwargs.values())):
            raise ValueError(
                f"{layer} got a PackedSequence, in which samples are mixed: use padded sequences{layer.way_out}"
            )
        return super().run(layer, *args, **kwargs)

    @override
    def input_dim(self, layer: CapturedLayer, name: str, value: Any) -> int | None:
        if not isinstance(value, Tensor):
            return None
        if value.ndim != 3:
            raise ValueError(f"{layer} got an input without a batch dimension: per-sample gradients need one")
        return self.output_dim(layer, int(name != "input"))

    @override
    def output_dim(self, layer: CapturedLayer, index: int) -> int:
        return 0 if index == 0 and getattr(layer.module, "batch_first", False) else 1


class AttentionRule(SequenceRule):
    """MultiheadAttention. The batch dimension of sequences is that of `batch_first`; that of the padding mask is 0."""

    @override
    def input_dim(self, layer: CapturedLayer, name: str, value: Any) -> int | None:
        if name == "attn_mask" or not isinstance(value, Tensor):
            if isinstance(value, Tensor) and value.ndim == 3:
                raise ValueError(
                    f"{layer} got an attn_mask per head: use one for all, and key_padding_mask for samples"
                )
            return None
        if name == "key_padding_mask":
            return 0
        if value.ndim != 3:
            raise ValueError(f"{layer} got a {name} without a batch dimension: per-sample gradients need one")
        return self.output_dim(layer, 0)

    @override
    def output_dim(self, layer: CapturedLayer, index: int) -> int:
        return 0 if index > 0 or getattr(layer.module, "batch_first", False) else 1
