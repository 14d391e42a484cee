"""Per-sample gradients with a few non-zero rows: those of the weights of embeddings."""

import torch
from torch import Tensor
from typing_extensions import override

from torchzero_clip.per_sample.gradients.contributions import Contribution, Reserve
from torchzero_clip.per_sample.gradients.products import Products
from torchzero_clip.per_sample.gradients.squared_norms import squared_norms


class SparseRows(Contribution):
    """Row v of the gradient of sample i is the sum of the values of sample i that have the index v.

    Each of the N values (N, width) has a sample and an index, (N,), in a table of shape (rows, width).
    """

    def __init__(self, param: Tensor, batch_size: int, samples: Tensor, index: Tensor, values: Tensor) -> None:
        super().__init__(param, batch_size)
        self.samples = samples
        self.index = index
        self.values = values

    @override
    def measured(self, reserve: Reserve) -> tuple[Contribution, Tensor]:
        # rows are added up first, because a Gram matrix would lose digits where they cancel
        cells, inverse = (self.samples * self.param.shape[0] + self.index).unique(return_inverse=True)
        rows = self.values.new_zeros(len(cells), self.values.shape[1]).index_add_(0, inverse, self.values)
        norms = torch.zeros(self.batch_size, dtype=torch.float64, device=rows.device)
        return self, norms.index_add_(0, cells // self.param.shape[0], squared_norms(rows))

    @override
    def weighted_sum(self, factors: Tensor) -> Tensor:
        scale = factors.to(self.values.device, self.values.dtype)[self.samples]
        return self._table(self.param.shape[0], self.index, self.values * scale[:, None])

    @override
    def dense(self, start: int, stop: int) -> Tensor:
        chosen = (self.samples >= start) & (self.samples < stop)
        cells = (self.samples[chosen] - start) * self.param.shape[0] + self.index[chosen]
        table = self._table((stop - start) * self.param.shape[0], cells, self.values[chosen])
        return table.view(stop - start, *self.param.shape)

    @override
    def zero_(self, samples: Tensor) -> None:
        self.values = self.values.masked_fill(samples.to(self.values.device)[self.samples][:, None], 0)

    def joined(self, other: "SparseRows") -> "SparseRows":
        """Both uses as one with the values of both."""
        pairs = ((self.samples, other.samples), (self.index, other.index), (self.values, other.values))
        return SparseRows(self.param, self.batch_size, *(torch.cat(pair) for pair in pairs))

    def inner_products(self, products: Products) -> Tensor:
        """The inner products with the gradients of a linear layer that has the same weight, for each sample."""
        result = torch.zeros(self.batch_size, dtype=torch.float64, device=self.values.device)
        for i in range(self.batch_size):
            mine = self.samples == i
            weights = products.outputs[i].index_select(1, self.index[mine])  # (positions there, values here)
            angles = products.inputs[i] @ self.values[mine].t().to(products.inputs.dtype)
            result[i] = (weights * angles).sum(dtype=torch.float64)
        return result

    def _table(self, rows: int, index: Tensor, values: Tensor) -> Tensor:
        # no padding row, whose values are 0 already, and no scale by frequency
        return torch.ops.aten.embedding_dense_backward(values, index, rows, -1, False)
