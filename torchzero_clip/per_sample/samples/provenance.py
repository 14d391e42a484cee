"""Stores which sample each entry of a tensor belongs to.

Labels are stored for the memory of a tensor, so all its views have them: see `memory`. If code that is not seen changes
a tensor, torch counts up its version, and its labels are lost. If such code returns a new tensor, as a
`torch.autograd.Function` does, its labels follow from those of its inputs in the graph.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from typing_extensions import override

from torchzero_clip.compat import address_of_storage, current_graph_task_id
from torchzero_clip.per_sample.samples.labels import (
    LOST,
    Known,
    Labels,
    Place,
    agree,
    place_of,
    same,
    simplest,
    step_at,
)
from torchzero_clip.per_sample.samples.memory import Layout, Owners, Runs, end_of, owned, seen, written
from torchzero_clip.per_sample.samples.operations import KEPT, Part, unmoved

# reserves the address of a memory until it is released; `StorageWeakRef` of torch takes twice as long
weak_reference: Any = torch.UntypedStorage._weak_ref  # pyright: ignore


class _Memory:
    """The owners of the entries of a memory from ``first`` to ``end``.

    ``found`` is LOST, or the owners, or a function that finds them when they are needed, because this takes time.
    """

    __slots__ = "end", "first", "found", "labels", "size", "step", "version", "whole"

    def __init__(self, tensor: Tensor, found: "Owners | Callable[[], Owners | None]", first: int, end: int) -> None:
        self.found, self.first, self.end = found, first, end
        self.size = size = tensor.element_size()
        self.version = version_of(tensor)  # it changes with every change in place
        nbytes = tensor.untyped_storage().nbytes()
        self.whole = first == 0 and end * size == nbytes  # these are all entries of the memory
        self.step = found if isinstance(found, int) and self.whole else 0  # of contiguous tensors of all entries
        self.labels: dict[tuple[int, Layout], Labels] = {}  # of irregular tensors in it, once asked

    @property
    def owners(self) -> Owners | None:
        if callable(self.found):
            found = self.found()
            self.found = LOST if found is None else found
        return None if self.found == LOST else self.found


class Provenance:
    """The labels of tensors in one forward, with ``count`` samples in dimension ``dim`` of its arguments.

    ``given`` has what the user has given to `rows()`: the sample of each row, by the number of rows. This is used for
    arguments and other tensors without a graph.
    """

    def __init__(self, count: int, dim: int, arguments: Sequence[Tensor], given: Mapping[int, Tensor]) -> None:
        self.count = count
        self.given = given
        self._memories: dict[int, _Memory] = {}
        self._held: list[Any] = []  # weak references that reserve the addresses of these memories
        self._asked: dict[tuple[int, tuple[int, ...]], Labels] = {}  # what layers got in the forward, by shape
        noted: list[tuple[Tensor, Known]] = []
        for x in arguments:
            place = min(dim, x.ndim - 1)
            labels = self._of_given(x.shape) if given else None
            if labels is None and x.shape[place] == count and x.stride(place):
                labels = step_at(Place(place), x.shape)
            if labels is not None:
                noted.append((x, labels))
                self.note(x, labels)
        # an entry can have several samples only if arguments share a memory, or one overlaps with itself
        apart = len(noted) == len(self._memories) and all(memory.step for memory in self._memories.values())
        for x, labels in () if apart else noted:
            found = self.of(x)
            if memory_of(x) in self._memories and (
                found is None or found is LOST or not agree(found, labels, x.shape, count)
            ):
                self.note(x, LOST)  # as in sliding windows

    def __del__(self, release: Callable[[int], None] = torch.UntypedStorage._free_weak_ref) -> None:  # pyright: ignore
        for held in self._held:
            release(held)

    @override
    def __reduce__(self) -> tuple[Any, ...]:
        return Provenance, (self.count, 0, (), self.given)  # a copy must not release these references too

    def note(self, tensor: Tensor, labels: Labels) -> None:
        """Store the labels of a new tensor, and so those of its memory."""
        key = memory_of(tensor)
        if key in self._memories:
            self.note_change(tensor, labels)
        elif key and labels is not None:
            self._held.append(weak_reference(tensor.untyped_storage()))
            first: Any = tensor.storage_offset()
            if type(labels) is int and tensor.is_contiguous():
                self._memories[key] = _Memory(tensor, labels, first, first + tensor.numel())
            else:
                self._store(key, tensor, labels, first)
        if tensor.requires_grad:
            self.note_node(tensor, labels)

    def _store(self, key: int, tensor: Tensor, labels: Known, first: int) -> None:
        """Store the labels of a tensor that is not contiguous, or irregular."""
        layout = Layout.of(tensor, first)
        if isinstance(labels, Tensor) and 0 not in layout.strides:
            found = functools.partial(owned, labels, layout, self.count)
        else:
            found = LOST if labels is LOST else owned(labels, layout, self.count)
        if found is not None:  # else all samples have one place, as if expanded
            self._memories[key] = memory = _Memory(tensor, found, first, first + end_of(layout))
            if isinstance(labels, Tensor):
                memory.labels[memory.size, layout] = labels

    def note_node(self, tensor: Tensor, labels: Labels) -> None:
        """Store the labels of a tensor in the graph, for a function that is not seen and takes it: see `_of_node`."""
        node: Any = tensor.grad_fn
        if node is not None:
            node.metadata[self, tensor.output_nr] = labels

    def note_change(self, tensor: Tensor, labels: Labels) -> None:
        """Store the labels of a tensor that was changed in place, and so those of its part of the memory."""
        key = memory_of(tensor)
        if not key or (labels is None and key not in self._memories):
            return
        before = self._memories.get(key)
        if before is None:
            self._held.append(weak_reference(tensor.untyped_storage()))
        base = tensor if tensor._base is None or tensor._base.is_nested else tensor._base
        first: Any = min(tensor.storage_offset(), base.storage_offset())
        first = first if before is None else min(first, before.first)
        layout, whole = Layout.of(tensor, first), Layout.of(base, first)
        end = max(end_of(layout), end_of(whole), 0 if before is None else before.end - first)
        covers = layout.offset == 0 and end_of(layout) == end and tensor.numel() == base.numel()
        before = None if covers else before  # else some of it stays
        stays = None
        if before is not None and (owners := before.owners) is not None:
            stays = owners, before.first - first, before.end - first
        if labels is LOST or (before is not None and (stays is None or before.size != tensor.element_size())):
            owners = None  # a memory is lost as a whole
        elif covers and labels is not None:
            owners = owned(labels, layout, self.count)
        else:
            owners = written(stays, labels, layout, end, self.count)
            # once the last part is written, as in a loop over samples, the memory may be regular
            found = None if owners is None else seen(owners, whole, self.count)
            owners = (owned(found, whole, self.count) if isinstance(found, int) else None) or owners
        self._memories[key] = _Memory(tensor, LOST if owners is None else owners, first, first + end)

    def note_packed(self, packed: PackedSequence, samples: Tensor) -> None:
        """Store the labels of packed sequences of these samples: rows of the first position, then of the second, ..."""
        first = samples if packed.sorted_indices is None else samples[packed.sorted_indices.to(samples.device)]
        rows = torch.cat([first[:size] for size in packed.batch_sizes.tolist()]).to(packed.data.device)
        rows = rows.view(-1, *[1] * (packed.data.ndim - 1))
        self.note(packed.data, simplest(rows, packed.data.shape, self.count))

    def is_new(self, value: Any) -> bool:
        """True for a tensor in a memory without labels. The labels of others are stored in the graph too."""
        if not isinstance(value, Tensor) or value.is_nested:
            return False
        if memory_of(value) not in self._memories:
            return True
        if value.requires_grad:
            self.note_node(value, self.of(value))
        return False

    def asked(self, tensor: Tensor, layer: object) -> Labels:
        """The labels of a tensor, as a layer asks for them."""
        # in a backward, where a checkpoint runs functions that are not seen, a layer gets what it got in the forward
        key, labels = (id(layer), tensor.shape), self.of(tensor)
        if current_graph_task_id() != -1:
            unseen = labels is LOST or self._memory(tensor) is None
            return self._asked.get(key, labels) if unseen else labels
        self._asked[key] = labels if key not in self._asked or same(self._asked[key], labels) else LOST
        return labels

    def of(self, tensor: Tensor) -> Labels:
        """The labels of a tensor."""
        memory = self._memories.get(memory_of(tensor))
        if memory is not None and memory.step and tensor.numel() == memory.end and tensor.is_contiguous():
            return memory.step if memory.version == version_of(tensor) else LOST
        if memory is not None and (memory.whole or self._memory(tensor)):
            return self._seen(memory, tensor, version_of(tensor))
        if tensor.is_nested:  # it has no shape
            return LOST
        if tensor.grad_fn is not None:
            return self._of_node(tensor.grad_fn, tensor.output_nr)
        return self._of_given(tensor.shape) if self.given else None

    def _of_given(self, shape: Sequence[int]) -> Labels:
        rows = self.given.get(shape[0]) if shape else None
        return None if rows is None else simplest(rows.view(-1, *[1] * (len(shape) - 1)), shape, self.count)

    def _memory(self, tensor: Tensor) -> _Memory | None:
        """The memory of a tensor; None if the owners of this part are not stored."""
        memory = self._memories.get(memory_of(tensor))
        if memory is None or memory.whole or not tensor.numel():
            return memory
        apart = tensor.storage_offset() >= memory.end or end_of(Layout.of(tensor, memory.first)) <= 0
        return None if apart else memory

    def before(self, tensor: Tensor, changed: Tensor, version: int) -> Labels:
        """The labels that a tensor had before a change in place of another one, which then had this version."""
        if memory_of(tensor) != memory_of(changed):
            return self.of(tensor)
        memory = self._memory(tensor)
        return None if memory is None else self._seen(memory, tensor, version)

    def refresh(self, tensor: Tensor, version: int) -> None:
        """Note that a tensor was changed in place, and has the same labels as before."""
        memory = self._memory(tensor)
        if memory is not None and memory.version == version:
            memory.version = version_of(tensor)
        self.note_node(tensor, self.of(tensor))

    def _seen(self, memory: _Memory, tensor: Tensor, version: int) -> Labels:
        if memory.found is LOST or memory.version != version:
            return LOST
        size = tensor.element_size()
        first, rest = divmod(memory.first * memory.size, size)  # complex numbers as real ones, and back
        layout = Layout.of(tensor, first)
        if memory.labels and (size, layout) in memory.labels:
            return memory.labels[size, layout]
        owners = memory.owners
        if owners is None:
            return LOST
        if size != memory.size:
            step, of = (owners, None) if isinstance(owners, int) else owners
            if rest or step * memory.size % size:
                return LOST
            owners = step * memory.size // size if of is None else Runs(step * memory.size // size, of)
        elif not memory.whole and tensor.numel() and (layout.offset < 0 or end_of(layout) > memory.end - first):
            return LOST
        labels = seen(owners, layout, self.count)
        if isinstance(labels, Tensor):
            memory.labels[size, layout] = labels
        return labels

    def _of_node(self, node: Any, number: int) -> Labels:
        """The labels of an output of a function that was not seen, such as a `torch.autograd.Function`.

        It is taken to run on each sample alone, and to keep their dimension: the check of gradients sees if it mixes.
        """
        rest = [(node, number)]
        while rest:  # without recursion, because graphs may be deep
            node, number = rest[-1]
            if (self, number) in node.metadata:
                rest.pop()
                continue
            inputs = [item for item in node.next_functions if item[0] is not None]
            if missing := [item for item in inputs if (self, item[1]) not in item[0].metadata]:
                rest += missing
                continue
            rest.pop()
            parts = [(item[0].metadata[self, item[1]], item[0]._input_metadata[item[1]].shape) for item in inputs]
            variable = getattr(node, "variable", None)
            shape = node._input_metadata[number].shape
            node.metadata[self, number] = self._kept(parts, shape) if variable is None else self.of(variable)
        return node.metadata[self, number]

    def _kept(self, parts: Sequence[tuple[Labels, Sequence[int]]], shape: Sequence[int]) -> Labels:
        """The labels of an output, if all inputs have the samples in the same dimension, and the output has it too."""
        known = [Part(labels, tuple(before)) for labels, before in parts if labels is not None]
        places = [place_of(x.labels, x.shape, self.count) for x in known if isinstance(x.labels, int)]
        if len(places) < len(known) or not all(place is not None and place.run == 1 for place in places):
            return LOST
        return unmoved(KEPT, known, shape, self.count, ()) if known else None


def memory_of(tensor: Tensor) -> int:
    """The address of the memory of a tensor; 0 if it has none of its own, as sparse tensors and those of vmap."""
    try:
        return 0 if tensor.is_nested else address_of_storage(tensor)
    except NotImplementedError:
        return 0


def version_of(tensor: Tensor) -> int:
    """The number of changes of a tensor in place; 0 if torch does not count them, as in inference."""
    return 0 if tensor.is_inference() else tensor._version
