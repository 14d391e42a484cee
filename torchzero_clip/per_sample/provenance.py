"""Tells which sample each entry of a tensor belongs to.

Labels are stored for the memory of a tensor, so all its views have them: see `memory`. If code that is not seen changes
a tensor, its version is not the one that was noted, and its labels are lost.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.utils.rnn import PackedSequence

from torchzero_clip.compat import current_graph_task_id
from torchzero_clip.per_sample.labels import LOST, Known, Labels, agree, simplest
from torchzero_clip.per_sample.layout import place_of, seen_from, step_at
from torchzero_clip.per_sample.memory import Layout, Owners, owned, seen, spread, written


class _Memory(NamedTuple):
    """The owners of the entries of a memory from ``first`` to ``end``, or None if they are lost."""

    alive: StorageWeakRef  # while it exists, no other memory has this address
    owners: Owners | None
    first: int
    end: int
    version: int
    """The version of its tensors, which changes with every change in place."""
    size: int
    """Bytes of an entry."""
    whole: bool
    """True if these are all entries of the memory."""


class Provenance:
    """The labels of tensors in one forward, with ``count`` samples in dimension ``dim`` of its arguments.

    ``given`` has the sample of each row of arguments and other tensors without a graph, by the number of rows.
    """

    def __init__(self, count: int, dim: int, arguments: Sequence[Tensor], given: Mapping[int, Tensor]) -> None:
        self.count = count
        self.given = given
        self._memories: dict[int, _Memory] = {}
        self._simple: dict[tuple[Owners, Layout], Labels] = {}
        self._asked: dict[tuple[int, tuple[int, ...]], Labels] = {}  # by layers in the forward
        noted: list[tuple[Tensor, Known]] = []
        for x in arguments:
            if x.ndim:
                place = min(dim, x.ndim - 1)
                labels = self._of_given(x.shape)
                if labels is None and x.shape[place] == count and x.stride(place):
                    labels = 1 if count == 1 else step_at(place, x.shape)
                if labels is not None:
                    noted.append((x, labels))
                    self.note(x, labels)
        for x, labels in noted:
            found = self.of(x)
            if _memory_of(x) in self._memories and (
                found is None or found is LOST or not agree(found, labels, x.shape, count)
            ):
                self.note(x, LOST)  # an entry has several samples, as in sliding windows

    def note(self, tensor: Tensor, labels: Labels) -> None:
        """Store the labels of a new tensor, and so those of its memory."""
        key = _memory_of(tensor)
        if isinstance(labels, Tensor):
            labels = simplest(labels, tensor.shape, self.count)
        if key in self._memories:
            self.note_change(tensor, labels)
        elif key is not None and labels is not None:
            layout = Layout.of(tensor)
            owners = None if labels is LOST else owned(labels, layout, self.count)
            if owners is not None or labels is LOST:  # else all samples have one place, as if expanded
                self._store(key, tensor, owners, layout.offset, layout.end)
        self.note_node(tensor, labels)

    def note_node(self, tensor: Tensor, labels: Labels) -> None:
        """Store what a function that is not seen may ask of its input."""
        node: Any = tensor.grad_fn
        if node is not None:
            node.metadata.setdefault(self, {})[tensor.output_nr] = labels

    def note_change(self, tensor: Tensor, labels: Labels) -> None:
        """Store the labels of a tensor that was changed in place, and so those of its part of the memory."""
        key = _memory_of(tensor)
        if key is None or (labels is None and key not in self._memories):
            return
        before = self._memories.get(key)
        base = tensor if tensor._base is None else tensor._base
        layout, whole = Layout.of(tensor), Layout.of(base)
        first, end = min(layout.offset, whole.offset), max(layout.end, whole.end)
        if before is not None:
            first, end = min(first, before.first), max(end, before.end)
        covers = layout.end == whole.end and layout.offset == whole.offset and tensor.numel() == base.numel()
        if labels is LOST:
            owners = None
        elif covers and labels is not None:
            owners = owned(labels, layout, self.count)
        elif before is not None and before.owners is None:
            owners = None
        else:
            owners = self._part(None if before is None else before.owners, labels, layout, whole)
        self._store(key, tensor, owners, first, end)

    def _store(self, key: int, tensor: Tensor, owners: Owners | None, first: int, end: int) -> None:
        storage, size = tensor.untyped_storage(), tensor.element_size()
        whole = first == 0 and end * size == storage.nbytes()
        self._memories[key] = _Memory(StorageWeakRef(storage), owners, first, end, _version(tensor), size, whole)

    def _part(self, owners: Owners | None, labels: Labels, layout: Layout, whole: Layout) -> Owners | None:
        """The owners of a memory in which a part gets labels."""
        if isinstance(labels, int):
            if owners is not None and _same(seen(owners, layout, self.count), labels):
                return owners
            if owners is None and (fits := self._of_all(labels, layout, whole)):
                return fits
        owners = written(owners, labels, layout, max(layout.end, whole.end), self.count)
        if owners is None:
            return None
        found = self._simplest(owners, whole)
        return (owned(found, whole, self.count) if isinstance(found, int) else None) or owners

    def _of_all(self, labels: int, layout: Layout, whole: Layout) -> Owners | None:
        """The owners of a memory of which a part is regular, if all of it then has the samples in one dimension."""
        owners = owned(labels, layout, self.count)
        found = None if owners is None or owners.of is not None else seen(owners, whole, self.count)
        place = place_of(found, whole.shape, self.count) if isinstance(found, int) else None
        return owners if place is not None and place[1] == 1 and whole.shape[place[0]] == self.count else None

    def _simplest(self, owners: Owners, layout: Layout) -> Labels:
        if owners.of is None:
            step = seen_from(owners.step, owners.start, *layout, self.count)
            if step is not None:
                return step
        key = owners, layout  # labels that are no step take more time
        if key not in self._simple:
            labels = spread(owners, layout, self.count)
            self._simple[key] = simplest(labels, layout.shape, self.count, of_batch=False)
        return self._simple[key]

    def note_packed(self, packed: PackedSequence) -> None:
        """Store the labels of the rows of a packed sequence of all samples."""
        first = torch.arange(self.count, device="cpu") if packed.sorted_indices is None else packed.sorted_indices.cpu()
        rows = torch.cat([first[:size] for size in packed.batch_sizes.tolist()]).to(packed.data.device)
        rows = rows.view(-1, *[1] * (packed.data.ndim - 1))
        self.note(packed.data, simplest(rows, packed.data.shape, self.count))

    def note_view(self, tensor: Tensor) -> bool:
        """Return True for a tensor in a memory that is known, and store what a function that is not seen may ask."""
        if _memory_of(tensor) not in self._memories:
            return False
        if tensor.grad_fn is not None:
            self.note_node(tensor, self.of(tensor))
        return True

    def of(self, tensor: Tensor, layer: object = None) -> Labels:
        """The labels of a tensor, which a layer may ask for.

        In a backward, where a checkpoint runs functions that are not seen, a layer gets what it got in the forward.
        """
        memory = self._memory(tensor)
        if memory is not None:
            labels = self._seen(memory, tensor)
        elif current_graph_task_id() != -1 and (id(layer), tensor.shape) in self._asked:
            return self._asked[id(layer), tensor.shape]
        elif tensor.grad_fn is not None:
            labels = self._of_node(tensor.grad_fn, tensor.output_nr)
        else:
            labels = self._of_given(tensor.shape) if self.given else None
        labels = 1 if labels is LOST and self.count == 1 else labels
        if layer is not None and current_graph_task_id() == -1:
            asked = id(layer), tensor.shape
            self._asked[asked] = labels if asked not in self._asked or _same(self._asked[asked], labels) else LOST
        return labels

    def _of_given(self, shape: Sequence[int]) -> Labels:
        rows = self.given.get(shape[0]) if shape else None
        return None if rows is None else simplest(rows.view(-1, *[1] * (len(shape) - 1)), shape, self.count)

    def _memory(self, tensor: Tensor) -> _Memory | None:
        """The memory of a tensor; None if the owners of this part are not stored."""
        memory = self._memories.get(_memory_of(tensor) or 0)
        if memory is None or memory.whole or not tensor.numel():
            return memory
        apart = tensor.storage_offset() >= memory.end or Layout.of(tensor).end <= memory.first
        return None if apart else memory

    def before(self, tensor: Tensor, changed: Tensor, version: int) -> Labels:
        """The labels that a tensor had before a change in place of another one, which then had this version."""
        if _memory_of(tensor) != _memory_of(changed):
            return self.of(tensor)
        memory = self._memory(tensor)
        return None if memory is None else self._seen(memory, tensor, version)

    def refresh(self, tensor: Tensor, version: int) -> None:
        """Note that a tensor was changed in place, and that its labels are as before."""
        memory = self._memory(tensor)
        if memory is not None and memory.version == version:
            self._memories[_memory_of(tensor) or 0] = memory._replace(version=_version(tensor))
        self.note_node(tensor, self.of(tensor))

    def _seen(self, memory: _Memory, tensor: Tensor, version: int | None = None) -> Labels:
        owners, layout, size = memory.owners, Layout.of(tensor), tensor.element_size()
        if owners is None or memory.version != (_version(tensor) if version is None else version):
            return LOST
        if memory.whole and size == memory.size:
            pass
        elif size != memory.size:  # complex numbers as real ones, and back
            if owners.step * memory.size % size or owners.start * memory.size % size:
                return LOST
            owners = Owners(owners.step * memory.size // size, owners.start * memory.size // size, owners.of)
        elif tensor.numel() and (layout.offset < memory.first or layout.end > memory.end):
            return LOST
        return self._simplest(owners, layout)

    def _of_node(self, node: Any, number: int) -> Labels:
        """The labels of an output of a function that was not seen, such as a `torch.autograd.Function`.

        It is taken to run on each sample alone, and to keep their dimension: the check of gradients sees if it mixes.
        """
        rest = [(node, number)]
        while rest:  # without recursion, because graphs may be deep
            node, number = rest[-1]
            known: dict[int, Labels] = node.metadata.setdefault(self, {})
            if number in known:
                rest.pop()
                continue
            inputs = [item for item in node.next_functions if item[0] is not None]
            if missing := [item for item in inputs if item[1] not in item[0].metadata.setdefault(self, {})]:
                rest += missing
                continue
            rest.pop()
            parts = [(item[0].metadata[self][item[1]], item[0]._input_metadata[item[1]].shape) for item in inputs]
            variable = getattr(node, "variable", None)
            shape = node._input_metadata[number].shape
            known[number] = self._kept(parts, shape) if variable is None else self.of(variable)
        return node.metadata[self][number]

    def _kept(self, parts: Sequence[tuple[Labels, Sequence[int]]], shape: Sequence[int]) -> Labels:
        known = [(labels, before) for labels, before in parts if labels is not None]
        if not known:
            return None
        found: set[int] = set()
        for labels, before in known:
            place = place_of(labels, tuple(before), self.count) if isinstance(labels, int) and labels != LOST else None
            dim = -1 if place is None or place[1] > 1 else place[0]
            kept = 0 <= dim < len(shape) and tuple(shape[: dim + 1]) == tuple(before[: dim + 1])
            found.add(step_at(dim, shape) if kept else LOST)
        return found.pop() if len(found) == 1 else LOST


def _memory_of(tensor: Tensor) -> int | None:
    """The address of the memory of a tensor; None if it has none of its own, as sparse tensors and those of vmap."""
    if tensor.layout != torch.strided or tensor.is_nested:
        return None
    try:
        return tensor.untyped_storage()._cdata
    except NotImplementedError:
        return None


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _same(labels: Labels, other: Labels) -> bool:
    if isinstance(labels, Tensor) and isinstance(other, Tensor):
        return labels.shape == other.shape and torch.equal(labels, other)
    return labels is other or (isinstance(labels, int) and isinstance(other, int) and labels == other)
