"""Numbers of many parameters as elements of vectors."""

import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack, to_dlpack  # pyright: ignore[reportPrivateImportUsage]
from typing_extensions import override

from torchzero_clip.compat import FakeTensor
from torchzero_clip.core.states import States
from torchzero_clip.core.undo import Undo
from torchzero_clip.functional import foreach
from torchzero_clip.functional.dtypes import widened
from torchzero_clip.types import State


class _Kept(NamedTuple):
    vector: Tensor
    views: list[Tensor]
    pointers: list[int]


class Vectors:
    """Numbers of many parameters as elements of vectors, so that one operation changes all of one key.

    The state of each parameter holds a view of its element. A checkpoint or a user may replace a number. `vector`
    notices, because the number is then another tensor or in other memory, and builds a new vector.
    """

    def __init__(self) -> None:
        self._kept: dict[str, _Kept] = {}

    def held(self) -> object:
        """All vectors of now, which have to stay alive as long as a captured step that reads them."""
        return dict(self._kept)

    def are_views(self, name: str, column: list[Any]) -> bool:
        """True if the numbers under a name are the views that `vector` made last."""
        kept = self._kept.get(name)
        return kept is not None and len(column) == len(kept.views) and all(map(operator.is_, column, kept.views))

    def last(self, name: str, column: list[Tensor]) -> Tensor | None:
        """The vector that `vector` made last under a name, if the numbers are still its elements; else None."""
        kept = self._kept.get(name)
        if kept is None or len(column) != len(kept.views) or not all(map(operator.is_, column, kept.views)):
            return None
        return kept.vector if pointers(column) == kept.pointers else None

    def vector(self, name: str, column: list[Tensor], states: Sequence[State]) -> Tensor | None:
        """The numbers that ``states`` have under a name as a vector, to be modified; None if they cannot be one.

        Views of the vector replace them in the states, and in ``column``, which has them as they are now.
        """
        last = self.last(name, column)
        if last is not None:
            return last
        if len({(type(n), n.ndim, n.dtype, n.device) for n in column}) != 1 or column[0].ndim:
            return None
        vector = torch.stack(column)
        views = list(vector.unbind())
        if type(vector) is Tensor and (vector.is_cpu or vector.is_cuda):
            # the same memory with a storage for each: a pickle of a view would contain the whole vector
            views = [from_dlpack(to_dlpack(view)) for view in views]
        for state, view in zip(states, views, strict=True):
            state[name] = view
        column[:] = views
        self._kept[name] = _Kept(vector, views, pointers(views))
        return vector


def pointers(tensors: Sequence[Tensor]) -> list[int]:
    """The address of each tensor's memory; empty for fake tensors, which have none."""
    return [] if isinstance(tensors[0], FakeTensor) else list(map(Tensor.data_ptr, tensors))


class VectorStates(States):
    """States whose numbers are elements of vectors. ``columns`` are those of all parameters that exist already."""

    def __init__(
        self,
        stored: Sequence[State],
        path: str,
        entries_of: Callable[[State], State],
        begin: Callable[[int], State],
        vectors: Vectors,
        columns: dict[str, list[Tensor]] | None,
    ) -> None:
        super().__init__(stored, path, entries_of, begin)
        self._vectors = vectors
        self._columns: dict[str, list[Tensor]] = {} if columns is None else columns
        self._by_key: dict[str, Tensor | None] = {}

    @override
    def _store(self, stored: State, entries: State) -> None:
        for key, value in entries.items():
            name = f"{self._path}/{key}"
            if name in self._columns and stored.get(name) is not value:
                del self._columns[name]
        super()._store(stored, entries)

    @override
    def _drafted(self, name: str, states: Sequence[State], column: list[Tensor], undo: Undo) -> list[Tensor]:
        drafts = super()._drafted(name, states, column, undo)
        if name in self._columns:
            self._columns[name] = drafts
        return drafts

    @override
    def column(self, key: str, indices: Sequence[int] | None = None) -> list[Any]:
        name = f"{self._path}/{key}"
        if self.dicts_read is not None or indices is not None or name not in self._columns:
            return super().column(key, indices)
        self._has_begun = True
        return self._columns[name]

    @override
    def numbers(self, key: str, indices: Sequence[int] | None = None) -> Tensor:
        vector = self._vector(key, indices)
        return super().numbers(key, indices) if vector is None else widened(vector)

    @override
    def keep(self, key: str, values: Tensor, indices: Sequence[int] | None = None) -> None:
        vector = self._vector(key, indices)
        if vector is None:
            super().keep(key, values, indices)
        else:
            self._note(key, vector, indices)
            foreach.copy_([vector], [values])

    @override
    def changing_vector(self, key: str, indices: Sequence[int] | None = None) -> Tensor | None:
        vector = self._vector(key, indices)
        if vector is not None:
            self._note(key, vector, indices)
        return vector

    @override
    def add(self, key: str, number: float | Tensor) -> None:
        vector = self._vector(key, None)
        if vector is None:
            super().add(key, number)
        else:
            self._note(key, vector, None)
            vector.add_(number)

    def _note(self, key: str, vector: Tensor, indices: Sequence[int] | None) -> None:
        if self.undo is not None:
            self.undo.vector(vector, self.column(key, indices))

    def _vector(self, key: str, indices: Sequence[int] | None) -> Tensor | None:
        """The vector of one key. None if its numbers cannot form one, or authors may replace them in dicts."""
        if self.dicts_read is not None:
            return None
        name = f"{self._path}/{key}"
        if indices is not None:
            states = [self._stored[i] for i in indices]
            self._columns.pop(name, None)
            self._by_key.pop(key, None)  # its views leave the states
            return self._vectors.vector(name, self.column(key, indices), states)
        if key not in self._by_key:
            self._by_key[key] = self._vectors.vector(name, self.column(key), self._stored)
        return self._by_key[key]
