"""Recurrent networks and attention: the generic rule, with the batch dimensions that these modules define."""

from typing import Any

from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from typing_extensions import override

from torchzero_clip.per_sample.rules.generic import GenericRule
from torchzero_clip.per_sample.site import Site

LAYOUT = "layout"  # a key of Site.agreed: a batch of another size than the sequences was right


class RecurrentRule(GenericRule):
    """RNN, LSTM and GRU. Hidden states always have the samples in the second dimension."""

    @override
    def run(self, site: Site, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if any(isinstance(value, PackedSequence) for value in (*args, *kwargs.values())):
            raise ValueError(f"{site} got a PackedSequence, in which samples are mixed: use padded sequences")
        self._check_layout(site, args[0] if args else kwargs["input"])
        return super().run(site, args, kwargs)

    def _check_layout(self, site: Site, input: Tensor) -> None:
        """Raise if other layers could take a sequence for the batch, because both have the same size."""
        own: Any = site.module.batch_first
        if own == site.recorder.batch_first or input.ndim != 3:
            return
        if input.shape[0] != input.shape[1]:
            site.awaits = LAYOUT
        elif LAYOUT not in site.agreed:
            raise ValueError(
                f"{site} has batch_first={own}, the clipper batch_first={not own}, and there are as many positions as "
                "samples: layers behind it could take one for the other. Make them agree, or begin with a batch of "
                "another size"
            )

    @override
    def input_dim(self, site: Site, name: str, value: Any, size: int | None) -> int | None:
        if not isinstance(value, Tensor):
            return None
        if value.ndim != 3:
            raise ValueError(f"{site} got an input without a batch dimension: per-sample gradients need one")
        return self.output_dim(site, int(name != "input"))

    @override
    def output_dim(self, site: Site, index: int) -> int:
        return 0 if index == 0 and getattr(site.module, "batch_first", False) else 1


class AttentionRule(GenericRule):
    """MultiheadAttention. The batch dimension of sequences is that of `batch_first`; that of the padding mask is 0."""

    @override
    def input_dim(self, site: Site, name: str, value: Any, size: int | None) -> int | None:
        if name == "attn_mask" or not isinstance(value, Tensor):
            if isinstance(value, Tensor) and value.ndim == 3:
                raise ValueError(f"{site} got an attn_mask per head: use one for all, and key_padding_mask for samples")
            return None
        if name == "key_padding_mask":
            return 0
        if value.ndim != 3:
            raise ValueError(f"{site} got a {name} without a batch dimension: per-sample gradients need one")
        return self.output_dim(site, 0)

    @override
    def output_dim(self, site: Site, index: int) -> int:
        return 0 if index > 0 or getattr(site.module, "batch_first", False) else 1
