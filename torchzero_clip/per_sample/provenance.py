"""Tells which sample each entry of a tensor belongs to, from the graph that autograd has recorded.

The graph is followed back to the nearest tensors whose labels are known, such as outputs of layers. Tensors without a
graph are arguments, views of them, or noted by `Following`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.utils.weak import WeakIdKeyDictionary

from torchzero_clip.compat import current_graph_task_id
from torchzero_clip.per_sample.labels import LOST, Labels, simplest, wider
from torchzero_clip.per_sample.operations import Part
from torchzero_clip.per_sample.row_moves import Step, after

_UNKNOWN: Any = object()


class Provenance:
    """The labels of tensors in one forward, with ``count`` samples in dimension ``dim`` of its arguments.

    ``given`` has the sample of each row of arguments and other tensors without a graph, by the number of rows.
    """

    def __init__(self, count: int, dim: int, arguments: Sequence[Tensor], given: Mapping[int, Tensor]) -> None:
        self.count = count
        self._dim = dim
        self.given = given
        self._known: Any = WeakIdKeyDictionary()  # the labels of tensors without a graph
        for x in arguments:
            if x.ndim:
                place = min(dim, x.ndim - 1)
                labels = self._of_given(x.shape)
                if labels is None and x.shape[place] == count:
                    labels = place
                self.note(x, labels)

    def note(self, tensor: Tensor, labels: Labels) -> None:
        """Store the labels of a tensor."""
        if tensor.grad_fn is None:
            self._known[tensor] = labels
        else:
            self._memory(tensor.grad_fn)[tensor.output_nr] = labels

    def knows_base(self, value: object) -> bool:
        """True for a view of a tensor with known labels."""
        return isinstance(value, Tensor) and value._base is not None and value._base in self._known

    def note_packed(self, packed: PackedSequence) -> None:
        """Store the labels of the rows of a packed sequence of all samples."""
        first = torch.arange(self.count, device="cpu") if packed.sorted_indices is None else packed.sorted_indices.cpu()
        rows = torch.cat([first[:size] for size in packed.batch_sizes.tolist()]).to(packed.data.device)
        self.note(packed.data, simplest(rows.view(-1, *[1] * (packed.data.ndim - 1)), self.count))

    def of(self, tensor: Tensor) -> Labels:
        """The labels of a tensor."""
        if tensor.grad_fn is not None:
            return self._of_node(tensor.grad_fn, tensor.output_nr)
        if tensor in self._known:
            return self._known[tensor]
        base = tensor._base
        if base is not None and base in self._known:
            return self._of_view(tensor, base, self._known[base])
        dim = self._dim
        if (
            tensor.requires_grad
            and current_graph_task_id() != -1
            and tensor.ndim > dim
            and tensor.shape[dim] == self.count
        ):
            return dim  # an input of a checkpoint with use_reentrant=True
        return self._of_given(tensor.shape)

    def _of_given(self, shape: Sequence[int]) -> Labels:
        rows = self.given.get(shape[0]) if shape else None
        return None if rows is None else simplest(rows.view(-1, *[1] * (len(shape) - 1)), self.count)

    def _of_view(self, view: Tensor, base: Tensor, labels: Labels) -> Labels:
        """The labels of a view of a tensor without a graph, from the places of its elements in memory."""
        offset = view.storage_offset() - base.storage_offset()
        if labels is None or labels is LOST:
            return labels
        if view.element_size() != base.element_size():  # complex numbers as real ones, and back
            kept = isinstance(labels, int) and view.ndim > labels and view.shape[labels] == self.count
            return labels if kept else LOST
        if isinstance(labels, int) and labels == 0 and view.ndim and view.numel() and view.shape[0] == self.count:
            row = offset + sum((size - 1) * step for size, step in zip(view.shape[1:], view.stride()[1:], strict=True))
            if view.stride(0) == base.stride(0) > row:
                return 0
        places = torch.empty_strided(base.shape, base.stride(), dtype=torch.int64, device=base.device)
        places.copy_(wider(labels, base.ndim, self.count))
        return simplest(places.as_strided(view.shape, view.stride(), offset), self.count)

    def _memory(self, node: Any) -> dict[int, Labels]:
        return node.metadata.setdefault(self, {})

    def _of_node(self, node: Any, number: int) -> Labels:
        rest = [(node, number)]
        while rest:  # without recursion, because graphs may be deep
            node, number = rest[-1]
            memory = self._memory(node)
            if number in memory:
                rest.pop()
                continue
            before = len(rest)
            parts: list[Part] = []
            for place, item in enumerate(node.next_functions):
                if item[0] is None:
                    continue
                labels = self._memory(item[0]).get(item[1], _UNKNOWN)
                if labels is _UNKNOWN:
                    rest.append(item)
                else:
                    parts.append(Part(labels, item[0]._input_metadata[item[1]].shape, place))
            if len(rest) > before:
                continue
            rest.pop()
            if hasattr(node, "variable"):
                memory[number] = self.of(node.variable)
                continue
            labels = after(Step(node, number, node._input_metadata[number].shape, self.count), parts)
            memory[number] = simplest(labels, self.count) if isinstance(labels, Tensor) else labels
        return self._memory(node)[number]
