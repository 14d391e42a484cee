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
            found = LayerInput(each, input.ndim + 1, dim, is_shared=True, takes_positions=True)
        else:
            found = layer.find_samples(input, input.ndim, takes_positions=True)
        padding = module.padding_idx

        def contribute(where: Place | Tensor, grad: Tensor, source: Tensor) -> list[Contribution]:
            index, grad = rows_first(where, source, grad)
            return [_of_rows(layer, index, grad, padding)]

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
        if offsets is not None:
            return self._run_flat(layer, input, offsets, per_sample_weights)
        module: Any = layer.module
        mode, padding = module.mode, module.padding_idx
        found = layer.find_samples(input, 1)
        weights = per_sample_weights
        if weights is not None and found.is_shared:
            weights = weights.expand(len(found.tensor) // len(weights), *weights.shape).flatten(0, 1)
        output = F.embedding_bag(
            found.tensor, module.weight.detach(), mode=mode, per_sample_weights=weights, padding_idx=padding
        )

        def contribute(where: Place | Tensor, grad: Tensor, index: Tensor, scale: Tensor) -> list[Contribution]:
            index, scale, grad = rows_first(where, index, scale.to(grad.dtype), grad)
            if mode == "mean":
                scale = scale / scale.sum(-1, keepdim=True).clamp(min=1)
            return [_of_rows(layer, index, grad.unsqueeze(-2) * scale.unsqueeze(-1), padding)]

        inputs = [found.tensor, _scale(found.tensor, weights, padding)]
        return layer.watch(output, inputs, contribute, found)

    def _run_flat(self, layer: CapturedLayer, input: Tensor, offsets: Tensor, weights: Tensor | None) -> Tensor:
        """Run bags of several lengths, which stand one after the other in a vector. Samples cannot share them."""
        module: Any = layer.module
        mode, padding = module.mode, module.padding_idx
        starts = offsets[:-1] if module.include_last_offset else offsets
        bags = torch.bucketize(torch.arange(len(input), device=input.device), starts, right=True) - 1

        def contribute(
            where: Place | Tensor, grad: Tensor, index: Tensor, bags: Tensor, scale: Tensor
        ) -> list[Contribution]:
            scale = scale.to(grad.dtype)
            if mode == "mean":
                sizes = scale.new_zeros(len(grad)).index_add_(0, bags, scale)
                scale = scale / sizes.clamp(min=1)[bags]
            return [_rows(layer, len(grad), bags, index, grad[bags] * scale[:, None], padding)]

        output = F.embedding_bag(
            input,
            module.weight.detach(),
            offsets,
            mode=mode,
            per_sample_weights=weights,
            include_last_offset=module.include_last_offset,
            padding_idx=padding,
        )
        inputs = [input, bags, _scale(input, weights, padding)]
        return layer.watch(output, inputs, contribute, LayerInput(starts, 1), on_shared=lambda: False)


def _scale(index: Tensor, weights: Tensor | None, padding: int | None) -> Tensor:
    """By what each entry of a bag is multiplied, apart from a mean."""
    scale = torch.ones_like(index) if padding is None else (index != padding).int()
    return scale if weights is None else scale * weights.detach()


def _of_rows(layer: CapturedLayer, index: Tensor, values: Tensor, padding: int | None) -> SparseRows:
    """The contribution of rows of indices, samples first, and of the gradient at each index."""
    samples = torch.arange(len(index), device=index.device).repeat_interleave(index[:1].numel())
    return _rows(layer, len(index), samples, index.reshape(-1), values.reshape(-1, values.shape[-1]), padding)


def _rows(
    layer: CapturedLayer, count: int, samples: Tensor, index: Tensor, values: Tensor, padding: int | None
) -> SparseRows:
    (values,) = wide(values)
    if padding is not None:
        values = values.masked_fill((index == padding)[:, None], 0)
    return SparseRows(layer.params["weight"], count, samples, index, values)
