"""Inputs of a layer that all samples share, such as positions, tables of distances, and single rows."""

import torch
from torch import Tensor

from torchzero_clip.per_sample.arguments import counts_up
from torchzero_clip.per_sample.capture import Capture
from torchzero_clip.per_sample.gradients.captured_gradients import Forward
from torchzero_clip.per_sample.processes.sharding import storages_of
from torchzero_clip.per_sample.samples.call import LayerInput


class SharedInputs:
    """Which inputs of one layer all samples share.

    A proof is the first to find them: rows that get gradients from several samples. It calls `note` or `note_table`.
    They return False for what may belong to samples; the proof then raises. In later forwards, `is_row`, `is_known` and
    `is_table` recognize such an input before the layer runs. They learn from what they see: a row of positions is one
    in later calls too, and a table that once had other values is data from then on. What a proof finds counts from the
    next forward on, because a checkpoint has to run its layers in the backward as it did in the forward.
    """

    def __init__(self, capture: Capture) -> None:
        self._capture = capture
        self._values: dict[tuple[int, int], Tensor | None] = {}
        """The values of shared inputs, or None for inputs that turned out to be data.

        The key has the number of dimensions, and how many are before those of a position: 0 for a table.
        """
        self._ndims_of_rows: set[int] = set()  # of inputs with one row that all samples share
        self._forward = 0  # the number of the forward whose proofs have found what follows
        self._new_values: dict[tuple[int, int], Tensor | None] = {}
        self._new_ndims: set[int] = set()
        self._had_indices_of_samples = False  # in an argument of the model

    def is_row(self, input: Tensor) -> bool:
        """True for an input with one row, if all samples share this row."""
        capture = self._capture
        self._take_over()
        if not _may_be_row(input, capture.forward):
            return False
        if input.ndim in self._ndims_of_rows or not capture.may_find_shared:
            return True
        # it may also be a row of data, such as the only one for an expert, which the proof finds out
        is_row = self._is_buffer(input) or counts_up(input.flatten())
        if is_row:
            self._ndims_of_rows.add(input.ndim)
        return is_row

    def are_positions(self, index: Tensor) -> bool:
        """True for the index of an embedding if all samples share it, such as positions and their distances."""
        forward, dim = self._capture.forward, self._capture.batch_dim
        if not index.ndim or index.shape[min(dim, index.ndim - 1)] == 1 or forward.outside_model:
            return False
        if forward.batch_size in (None, 0, 1):
            return False
        if not forward.holds(index):
            return counts_up(index) or _are_distances(index)
        # an argument of the model that was 0, 1, 2, ... in all calls
        self._had_indices_of_samples |= index.ndim == 1 and not counts_up(index)
        return counts_up(index) and not (self._had_indices_of_samples or forward.has_batch_of_numbers)

    def is_known(self, input: Tensor, leading: int) -> bool:
        """True for an input with the values of an earlier one that all samples share, or for a longer or shorter one.

        ``leading`` dimensions are before those of a position. A table that the layer uses itself, which has none, is
        known by its values alone.
        """
        self._take_over()
        earlier = self._values.get((input.ndim, leading))
        if earlier is None or input.requires_grad:
            return False
        common = tuple(slice(min(sizes)) for sizes in zip(earlier.shape, input.shape, strict=True))
        is_same = earlier.dtype == input.dtype and input.numel() > 1 and torch.equal(earlier[common], input[common])
        if is_same and not self._capture.forward.holds(input):
            return True  # also if it has as many rows as there are samples
        if leading and not self.may_be_shared(input):
            return False
        if earlier.shape == input.shape:  # other values of the same shape, so it is data, in later calls too
            self._values[input.ndim, leading] = None
            return False
        return leading > 0

    def is_table(self, input: Tensor) -> bool:
        """True for a table that the layer uses itself, with the values of an earlier one that all samples share."""
        return self.is_known(input, 0)

    def may_be_shared(self, input: Tensor, forward: Forward | None = None) -> bool:
        """True for an input that is not known to depend on samples."""
        forward = self._capture.forward if forward is None else forward
        if not self._is_free(input, forward) or forward.declared_rows is not None or not forward.batch_size:
            return False
        # data of the batch may be neither an argument nor have a graph, but have its size
        size = input.shape[min(self._capture.batch_dim, input.ndim - 1)]
        is_like_data = not size % forward.batch_size and (input.is_floating_point() or input.ndim > 1)
        return not is_like_data or self._is_buffer(input)

    def note(self, samples: LayerInput, forward: Forward) -> bool:
        """Note that all samples share the input of a call. False if it may be one of samples."""
        x = samples.tensor
        if x.shape[samples.dim] == 1 and forward.batch_size is not None:
            if is_row := _may_be_row(x, forward):
                self._take_over()
                self._new_ndims.add(x.ndim)
            return is_row
        return self.may_be_shared(x, forward) and self._note(x, samples.leading)

    def note_table(self, input: Tensor, forward: Forward) -> bool:
        """Note that all samples share a tensor that the layer uses itself. False if it may be one of samples."""
        return self._is_free(input, forward) and self._note(input, 0)

    def _note(self, input: Tensor, leading: int) -> bool:
        self._take_over()
        if self._values.get((input.ndim, leading), input) is None:
            return False
        self._new_values[input.ndim, leading] = input.clone()
        return True

    def _take_over(self) -> None:
        """Let what the proofs of an earlier forward have found count."""
        if self._forward < self._capture.forwards:
            self._forward = self._capture.forwards
            self._values |= self._new_values
            self._ndims_of_rows |= self._new_ndims
            self._new_values, self._new_ndims = {}, set()

    def _is_free(self, input: Tensor, forward: Forward) -> bool:
        """True for a tensor of no layer and no argument."""
        return not (input.requires_grad or forward.outside_model or not self._capture.may_share or forward.holds(input))

    def _is_buffer(self, input: Tensor) -> bool:
        return bool(storages_of((input,)) & storages_of(self._capture.model.buffers()))


def _may_be_row(input: Tensor, forward: Forward) -> bool:
    """True for an input with one row that is not known to depend on samples."""
    if input.requires_grad or forward.outside_model or input.is_sparse:
        return False
    return not storages_of((input,)) & forward.storages_of_values


def _are_distances(index: Tensor) -> bool:
    """True for a square table of indices that depend on the distance of two positions."""
    if index.ndim != 2 or index.shape[0] != index.shape[1] or len(index) < 3:
        return False
    return torch.equal(index[1:, 1:], index[:-1, :-1]) and bool((index != index[0, 0]).any())
