"""Recurrent networks and attention: the generic rule, with the batch dimensions that these modules define."""

from typing import Any

from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from typing_extensions import override

from torchzero_clip.per_sample.captured_layer import CapturedLayer
from torchzero_clip.per_sample.rules.generic import GenericRule

LAYOUT = "layout"  # a key of CapturedLayer.agreed: a batch of another size than the sequences was right


class RecurrentRule(GenericRule):
    """RNN, LSTM and GRU. Hidden states always have the samples in the second dimension."""

    @override
    def run(self, layer: CapturedLayer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if any(isinstance(value, PackedSequence) for value in (*args, *kwargs.values())):
            raise ValueError(f"{layer} got a PackedSequence, in which samples are mixed: use padded sequences")
        self._check_layout(layer, args[0] if args else kwargs["input"])
        return super().run(layer, args, kwargs)

    def _check_layout(self, layer: CapturedLayer, input: Tensor) -> None:
        """Raise if other layers could take a sequence for the batch, because both have the same size."""
        own: Any = layer.module.batch_first
        if own == layer.recorder.batch_first or input.ndim != 3:
            return
        if input.shape[0] != input.shape[1]:
            layer.awaits = LAYOUT
        elif LAYOUT not in layer.agreed:
            raise ValueError(
                f"{layer} has batch_first={own}, the clipper batch_first={not own}, and there are as many positions as "
                "samples: layers behind it could take one for the other. Make them agree, or begin with a batch of "
                "another size"
            )

    @override
    def input_dim(self, layer: CapturedLayer, name: str, value: Any, size: int | None) -> int | None:
        if not isinstance(value, Tensor):
            return None
        if value.ndim != 3:
            raise ValueError(f"{layer} got an input without a batch dimension: per-sample gradients need one")
        return self.output_dim(layer, int(name != "input"))

    @override
    def output_dim(self, layer: CapturedLayer, index: int) -> int:
        return 0 if index == 0 and getattr(layer.module, "batch_first", False) else 1


class AttentionRule(GenericRule):
    """MultiheadAttention. The batch dimension of sequences is that of `batch_first`; that of the padding mask is 0."""

    @override
    def input_dim(self, layer: CapturedLayer, name: str, value: Any, size: int | None) -> int | None:
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
