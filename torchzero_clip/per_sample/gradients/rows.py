"""Per-sample gradients by rows: of layers whose rows belong to several samples, of their stacks, and of embeddings."""

from collections.abc import Iterator

import torch
from torch import Tensor
from typing_extensions import override

from torchzero_clip.functional.dtypes import widest_of
from torchzero_clip.per_sample.gradients.contributions import Contribution, Dense, Reserve, pieces
from torchzero_clip.per_sample.gradients.products import GRAM_BYTES, Products, exact, gram_norms, scaled
from torchzero_clip.per_sample.gradients.row_norms import norms_of_rows, norms_of_samples

_MULTIPLE = 8  # products of matrices are 1.3 to 2 times as fast if their sides are multiples of it
PADDING = 1.3  # the most by which padding may multiply the rows, besides filling the lanes


class RowProducts(Contribution):
    """The gradient of the weight (p, d) from sample i is Σ_r b_r a_rᵀ over its rows r.

    The inputs a have shape (N, d), the gradients of the outputs b have shape (N, p). In a stack of E weights, of shape
    (E, p, d), or (E, d, p) if ``turned``, each row belongs to one of them. The rows are sorted by weight and then by
    sample: ``cells`` has the weight times B plus the sample of each.
    """

    def __init__(
        self, param: Tensor, batch_size: int, inputs: Tensor, outputs: Tensor, cells: Tensor, *, turned: bool = False
    ) -> None:
        self.param, self.batch_size = param, batch_size
        self.inputs, self.output_grads = inputs, outputs
        self.cells = cells
        self._turned = turned

    @classmethod
    def sorted(cls, param: Tensor, batch_size: int, inputs: Tensor, outputs: Tensor, cells: Tensor) -> "RowProducts":
        """The products of rows in any order."""
        order = torch.argsort(cells, stable=True)
        return cls(param, batch_size, inputs[order], outputs[order], cells[order])

    @override
    def measured(self, reserve: Reserve) -> tuple[Contribution, Tensor]:
        cells, sizes = self.cells.unique_consecutive(return_counts=True)
        if not len(cells):
            return self, self.inputs.new_zeros(self.batch_size, dtype=widest_of(self.inputs))
        order = sizes.argsort(descending=True)
        starts, sizes = (sizes.cumsum(0) - sizes)[order], sizes[order]
        found = [self._norms(starts[i:j], sizes[i:j], longest) for i, j, longest in self._groups(sizes.tolist())]

        def rows(i: int) -> tuple[Tensor, Tensor]:
            run = slice(int(starts[i]), int(starts[i] + sizes[i]))
            return self.inputs[None, run], self.output_grads[None, run]

        norms = exact(found, gram_norms, rows)
        return self, norms_of_samples(norms, cells[order] % self.batch_size, self.batch_size)

    def _groups(self, lengths: list[int]) -> Iterator[tuple[int, int, int]]:
        """The bounds of groups of runs, the longest ones first, and the length that they are padded to."""
        sides, start = self.inputs.shape[1] + self.output_grads.shape[1], 0
        while start < len(lengths):
            rows = lengths[start]
            # so few rows are not worth the padding
            longest = rows if rows < 3 else -(-rows // _MULTIPLE) * _MULTIPLE
            most = start + max(1, GRAM_BYTES // (longest * max(2 * longest, sides) * self.inputs.element_size()))
            stop = start + 1
            for length in lengths[stop:most]:
                rows += length
                if longest * (stop + 1 - start) > PADDING * rows and length <= longest - _MULTIPLE:
                    break
                stop += 1
            yield start, stop, longest
            start = stop

    def _norms(self, starts: Tensor, sizes: Tensor, longest: int) -> tuple[Tensor, Tensor, Tensor]:
        """The norms of products, inputs and output gradients of runs of rows, which are padded with zeros."""
        if longest == 1:
            norms = [norms_of_rows(x.index_select(0, starts)) for x in (self.inputs, self.output_grads)]
            return norms[0] * norms[1], norms[0], norms[1]
        places = torch.arange(longest, device=sizes.device)
        # padding reads the last row of the run again, and gets zeros below
        index = (starts[:, None] + torch.minimum(places, sizes[:, None] - 1)).flatten()
        inputs, outputs = (
            x.index_select(0, index).view(len(starts), longest, -1) for x in (self.inputs, self.output_grads)
        )
        padding = (places >= sizes[:, None])[..., None]
        width, height = inputs.shape[2], outputs.shape[2]
        (inputs if width < height else outputs).masked_fill_(padding, 0)  # enough, because a product with 0 is 0
        if longest * (width + height) < width * height:
            return gram_norms(inputs, outputs)
        (outputs if width < height else inputs).masked_fill_(padding, 0)
        of_products = Products(self.param.new_empty(height, width), inputs, outputs).formed(keep=False)[1]
        return of_products, norms_of_rows(inputs), norms_of_rows(outputs)

    @override
    def weighted_sum(self, factors: Tensor) -> Tensor:
        factors = factors.to(self.inputs.device, self.inputs.dtype)[self.cells % self.batch_size]
        inputs, outputs = scaled(self.inputs, self.output_grads, factors[:, None])
        return self._stacked(inputs, outputs, self.cells // self.batch_size)

    @override
    def dense(self, start: int, stop: int) -> Tensor:
        samples = self.cells % self.batch_size
        chosen = [(samples == i).nonzero()[:, 0] for i in range(start, stop)]
        weights = self.cells // self.batch_size
        each = [self._stacked(self.inputs[rows], self.output_grads[rows], weights[rows]) for rows in chosen]
        return torch.stack(each) if each else self.inputs.new_empty(0, *self.param.shape)

    @override
    def make_finite(self) -> None:
        self.inputs, self.output_grads = self.inputs.nan_to_num(0, 0, 0), self.output_grads.nan_to_num(0, 0, 0)

    def joined(self, other: "RowProducts") -> "RowProducts":
        """Both uses as one with the rows of both."""
        rows = ((self.inputs, other.inputs), (self.output_grads, other.output_grads), (self.cells, other.cells))
        joined = RowProducts.sorted(self.param, self.batch_size, *(torch.cat(pair) for pair in rows))
        joined._turned = self._turned
        return joined

    def _stacked(self, inputs: Tensor, outputs: Tensor, weights: Tensor) -> Tensor:
        """The sums of products of rows that are sorted by weight."""
        left, right = (inputs, outputs) if self._turned else (outputs, inputs)
        stack = self.param if self.param.ndim == 3 else self.param[None]
        counts = torch.bincount(weights, minlength=len(stack)).tolist()
        result = inputs.new_empty(stack.shape)
        for matrix, a, b in zip(result, left.split(counts), right.split(counts), strict=True):
            torch.mm(a.t(), b, out=matrix)
        return result.view(self.param.shape)


class SparseRows(Contribution):
    """Row v of the gradient of sample i is the sum of the values of sample i that have the index v.

    Each of the N values (N, width) has a sample and an index, (N,), in a table of shape (rows, width).
    """

    def __init__(self, param: Tensor, batch_size: int, samples: Tensor, index: Tensor, values: Tensor) -> None:
        self.param, self.batch_size = param, batch_size
        self.samples = samples
        self.index = index
        self.values = values

    @override
    def measured(self, reserve: Reserve) -> tuple[Contribution, Tensor]:
        # rows are added up first, because a Gram matrix would lose digits where they cancel
        cells, inverse = (self.samples * self.param.shape[0] + self.index).unique(return_inverse=True)
        rows = self.values.new_zeros(len(cells), self.values.shape[1]).index_add_(0, inverse, self.values)
        return self, norms_of_samples(norms_of_rows(rows), cells // self.param.shape[0], self.batch_size)

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
    def make_finite(self) -> None:
        self.values = self.values.nan_to_num(0, 0, 0)

    def joined(self, other: "SparseRows") -> "SparseRows":
        """Both uses as one with the values of both."""
        pairs = ((self.samples, other.samples), (self.index, other.index), (self.values, other.values))
        return SparseRows(self.param, self.batch_size, *(torch.cat(pair) for pair in pairs))

    def inner_products(self, products: Products) -> Tensor:
        """The inner products with the gradients of a linear layer that has the same weight, for each sample."""
        result = self.values.new_zeros(self.batch_size, dtype=widest_of(self.values))
        for i in range(self.batch_size):
            mine = self.samples == i
            weights = products.output_grads[i].index_select(1, self.index[mine])  # (positions there, values here)
            angles = products.inputs[i] @ self.values[mine].t().to(products.inputs.dtype)
            result[i] = (weights * angles).sum(dtype=result.dtype)
        return result

    def _table(self, rows: int, index: Tensor, values: Tensor) -> Tensor:
        # no padding row, whose values are 0 already, and no scale by frequency
        return torch.ops.aten.embedding_dense_backward(values, index, rows, -1, False)


def regrouped(part: Contribution, rows: Tensor | int, count: int) -> Contribution:
    """The contribution of samples, from one in which each row was taken for a sample.

    ``rows`` has the sample of each row. If the rows of each sample follow each other, in order, it is their number.
    """
    if isinstance(rows, int):
        if type(part) is Products:  # a convolution is one too, whose positions are not in a dimension of their own
            return Products(part.param, *(x.reshape(count, -1, x.shape[-1]) for x in (part.inputs, part.output_grads)))
        rows = torch.arange(count, device=part.param.device).repeat_interleave(rows)
    rows = rows.flatten().to(part.param.device)
    if not len(rows):
        return Dense(
            part.param, torch.zeros(count, *part.param.shape, dtype=part.param.dtype, device=part.param.device)
        )
    if isinstance(part, SparseRows):
        return SparseRows(part.param, count, rows[part.samples], part.index, part.values)
    if type(part) is Products:
        inputs, outputs = part.inputs, part.output_grads
        in_turn = torch.arange(count, device=rows.device).repeat_interleave(len(rows) // max(count, 1))
        order = None if torch.equal(rows, in_turn) else rows.argsort(stable=True)
        if order is None or torch.equal(rows[order], in_turn):  # the samples have equally many
            both = (inputs, outputs) if order is None else (x.index_select(0, order) for x in (inputs, outputs))
            return Products(part.param, *(x.reshape(count, -1, x.shape[-1]) for x in both))
        of_position = rows.repeat_interleave(inputs.shape[1])
        return RowProducts.sorted(part.param, count, inputs.flatten(0, 1), outputs.flatten(0, 1), of_position)
    result: Tensor | None = None
    for start, stop in pieces(part.batch_size, part.param.numel() * 4):
        grads = part.dense(start, stop)
        result = grads.new_zeros(count, *grads.shape[1:]) if result is None else result
        result.index_add_(0, rows[start:stop], grads)
    return Dense(part.param, part.dense(0, 0).new_zeros(count, *part.param.shape) if result is None else result)
