"""Embeddings and bags of embeddings."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from torchzero_clip.per_sample.captured_layer import CapturedLayer, Rule
from torchzero_clip.per_sample.gradients.contributions import Contribution
from torchzero_clip.per_sample.gradients.row_norms import wide
from torchzero_clip.per_sample.gradients.rows import SparseRows
from torchzero_clip.per_sample.samples.call import LayerInput, rows_first
from torchzero_clip.per_sample.samples.pattern import Place


class EmbeddingRule(Rule):
    """Weight: the gradient of a sample has the rows that the sample uses, except `padding_idx`."""

    @override
    def refusal(self, module: nn.Module) -> str | None:
        table: Any = module
        if table.scale_grad_by_freq:
            return "scale_grad_by_freq counts over the whole batch: the gradient of a sample depends on the others"
        if table.max_norm is not None:
            return "max_norm rescales the table in the forward: renormalize the weight after the step instead"
        if table.sparse:
            return "sparse gradients cannot be clipped per sample here: use sparse=False"
        return None

    @override
    def run(self, layer: CapturedLayer, input: Tensor) -> Tensor:
        module: Any = layer.module
        if layer.shared.are_positions(input):
            dim, count = layer.capture.batch_dim, layer.capture.forward.batch_size or 0
            each = input.expand(count, *input.shape).movedim(0, dim)
            found = LayerInput(each, input.ndim + 1, dim, is_shared=True)
        else:
            found = layer.find_samples(input, input.ndim)
        padding = module.padding_idx

        def contribute(where: Place, grad: Tensor, source: Tensor) -> list[Contribution]:
            index, grad = rows_first(where, source, grad)
            samples = torch.arange(len(index), device=index.device).repeat_interleave(index[:1].numel())
            return [_rows(layer, len(index), samples, index.reshape(-1), grad.reshape(-1, grad.shape[-1]), padding)]

        return layer.watch(
            F.embedding(found.tensor, module.weight.detach(), padding), [found.tensor], contribute, found
        )


class EmbeddingBagRule(EmbeddingRule):
    """Weight: as in an embedding, with each row multiplied by its weight in the bag."""

    @override
    def refusal(self, module: nn.Module) -> str | None:
        if module.mode == "max":
            return "mode='max' has no per-sample rule here: use 'sum' or 'mean', or an Embedding and amax"
        return super().refusal(module)

    @override
    def run(
        self,
        layer: CapturedLayer,
        input: Tensor,
        offsets: Tensor | None = None,
        per_sample_weights: Tensor | None = None,
    ) -> Tensor:
        module: Any = layer.module
        mode, padding = module.mode, module.padding_idx
        samples = _bags(input, offsets, include_last=module.include_last_offset)
        found = (
            layer.find_samples(input, 1)
            if offsets is None
            else LayerInput(offsets[:-1] if module.include_last_offset else offsets, 1)
        )
        scale = torch.ones_like(samples) if padding is None else (input.reshape(-1) != padding).int()
        if per_sample_weights is not None:
            scale = scale * per_sample_weights.detach().reshape(-1)

        def contribute(where: Place, grad: Tensor, index: Tensor, samples: Tensor, scale: Tensor) -> list[Contribution]:
            scale = scale.to(grad.dtype)
            if mode == "mean":
                sizes = scale.new_zeros(len(grad)).index_add_(0, samples, scale)
                scale = scale / sizes.clamp(min=1)[samples]
            return [_rows(layer, len(grad), samples, index.reshape(-1), grad[samples] * scale[:, None], padding)]

        output = F.embedding_bag(
            input,
            module.weight.detach(),
            offsets,
            mode=mode,
            per_sample_weights=per_sample_weights,
            include_last_offset=module.include_last_offset,
            padding_idx=padding,
        )
        return layer.watch(output, [input, samples, scale], contribute, found)


def _rows(
    layer: CapturedLayer, count: int, samples: Tensor, index: Tensor, values: Tensor, padding: int | None
) -> SparseRows:
    (values,) = wide(values)
    if padding is not None:
        values = values.masked_fill((index == padding)[:, None], 0)
    return SparseRows(layer.params["weight"], count, samples, index, values)


def _bags(input: Tensor, offsets: Tensor | None, *, include_last: bool) -> Tensor:
    """The bag that each index belongs to."""
    if offsets is None:
        return torch.arange(len(input), device=input.device).repeat_interleave(input[:1].numel())
    starts = offsets[:-1] if include_last else offsets
    return torch.bucketize(torch.arange(len(input), device=input.device), starts, right=True) - 1
