"""MultiheadAttention: the generic rule, with the batch dimensions that this module defines."""

import inspect
from collections.abc import Hashable, Sequence
from typing import Any

from torch import Tensor, nn
from typing_extensions import override

from torchzero_clip.compat import pytree
from torchzero_clip.per_sample.broadcast_row import BroadcastRow
from torchzero_clip.per_sample.captured_layer import CapturedLayer
from torchzero_clip.per_sample.rules.generic import GenericRule

SIGNATURE = inspect.signature(nn.MultiheadAttention.forward)


class AttentionRule(GenericRule):
    """The `batch_first` of the module decides the batch dimension of sequences. Masks and weights have it first."""

    is_checked = False  # torch's attention mixes no samples, and does not run again

    @override
    def dims(
        self, layer: CapturedLayer, args: tuple[object, ...], kwargs: dict[str, object], leaves: Sequence[object]
    ) -> tuple[list[int | None], set[Hashable]]:
        # bind the indices of the leaves, which tells the argument of each
        indices = pytree.tree_unflatten(list(range(len(leaves))), pytree.tree_structure((args, kwargs)))
        names = {i: name for name, i in SIGNATURE.bind(None, *indices[0], **indices[1]).arguments.items()}
        dims = [self._input_dim(layer, names[i], leaf) for i, leaf in enumerate(leaves)]
        if all(dim is None or isinstance(leaf, BroadcastRow) for dim, leaf in zip(dims, leaves, strict=True)):
            return [None] * len(leaves), set()  # all samples share all of them, so no dimension has samples
        return dims, set()

    @override
    def output_dim(self, layer: CapturedLayer, index: int) -> int:
        module: Any = layer.module
        return 0 if index else 1 - int(module.batch_first)

    def _input_dim(self, layer: CapturedLayer, name: str, value: object) -> int | None:
        if not isinstance(value, Tensor):
            return None
        if name == "attn_mask" and value.ndim == 3:
            raise ValueError(f"{layer} got an attn_mask per head: use one for all, and key_padding_mask for samples")
        if name == "attn_mask":
            return None
        if name != "key_padding_mask" and value.ndim != 3:
            raise ValueError(f"{layer} got a {name} without a batch dimension: per-sample gradients need one")
        return self.output_dim(layer, int(name == "key_padding_mask"))
