"""The state of one transform in one step: by parameter, or by key as columns and vectors of numbers."""

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, overload

import torch
from torch import Tensor
from typing_extensions import override

from torchzero_clip.compat import FakeTensor
from torchzero_clip.functional import foreach
from torchzero_clip.functional.shards import pack
from torchzero_clip.types import State


class States(Sequence[State]):
    """The state of one transform: a plain dict for each parameter, made when it is first read.

    Args:
        stored: The state of each parameter for all transforms, by qualified keys.
        path: The prefix of the keys of this transform.
        own: Returns the entries of this transform, without the prefix.
        begin: Makes the state of a parameter that has none, from its index.
        vectors: Stores numbers as elements of vectors; None to read and write them one by one.
        known: Columns of state by qualified key, if they were collected before. Outdated ones are removed.
    """

    def __init__(
        self,
        stored: Sequence[State],
        path: str,
        own: Callable[[State], State],
        begin: Callable[[int], State],
        vectors: "Vectors | None" = None,
        known: dict[str, list[Tensor]] | None = None,
    ) -> None:
        self._stored = stored
        self._path = path
        self._own = own
        self._begin = begin
        self._vectors = vectors
        self._known: dict[str, list[Tensor]] = {} if known is None else known
        self._dicts: list[State] | None = None
        self._has_begun = False
        self._found: dict[str, Tensor | None] = {}

    @classmethod
    def of(cls, dicts: Sequence[State]) -> "States":
        """The states in dicts that the optimizer does not store, for a `Step` that was made by hand."""
        states = cls(dicts, "", dict, lambda i: {})
        states._dicts, states._has_begun = list(dicts), True
        return states

    def __len__(self) -> int:
        return len(self._stored)

    @overload
    def __getitem__(self, index: int) -> State: ...
    @overload
    def __getitem__(self, index: slice) -> list[State]: ...
    @override
    def __getitem__(self, index: int | slice) -> Any:
        return self.dicts[index]

    @override
    def __iter__(self) -> Iterator[State]:
        return iter(self.dicts)

    @property
    def dicts(self) -> list[State]:
        """One dict for each parameter, with keys as the transform knows them."""
        if self._dicts is None:
            self.begin()
            made: dict[int, State] = {}  # a parameter that is listed twice has one state
            for stored in self._stored:
                if id(stored) not in made:
                    made[id(stored)] = self._own(stored)
            self._dicts = [made[id(stored)] for stored in self._stored]
        return self._dicts

    @property
    def touched(self) -> list[State]:
        """The dicts, if they were read; else empty."""
        return self._dicts or []

    def begin(self) -> None:
        """Make the state of parameters that have none."""
        if not self._has_begun:
            self._has_begun = True
            for i, stored in enumerate(self._stored):
                if not self._own(stored):
                    self._store(stored, self._begin(i))

    def write(self) -> None:
        """Store what was changed in the dicts, and the state of parameters that had none."""
        self.begin()
        for stored, own in zip(self._stored, self._dicts or [], strict=False):
            self._store(stored, own)

    def _store(self, stored: State, own: State) -> None:
        for key, value in own.items():
            name = f"{self._path}/{key}"
            if name in self._known and stored.get(name) is not value:
                del self._known[name]
            stored[name] = value

    def column(self, key: str, indices: Sequence[int] | None = None) -> list[Any]:
        """The values of one key: of all parameters, or of some."""
        rows, name = (self._stored, f"{self._path}/{key}") if self._dicts is None else (self._dicts, key)
        if indices is not None:
            rows = [rows[i] for i in indices]
        elif self._dicts is None and name in self._known:
            self._has_begun = True
            return self._known[name]
        try:
            found = [row[name] for row in rows]
        except KeyError:
            self.begin()
            found = [row[name] for row in rows]
        self._has_begun |= indices is None
        return found

    def has(self, key: str) -> bool:
        """Whether all parameters have state under a key."""
        name = key if self._dicts is not None else f"{self._path}/{key}"
        return all(name in row for row in self._dicts or self._stored)

    def numbers(self, key: str, indices: Sequence[int] | None = None) -> Tensor:
        """The numbers of one key, of all parameters or of some: a float64 vector, not to be modified."""
        vector = self._vector(key, indices)
        return pack(self.column(key, indices)) if vector is None else vector.double()

    def keep(self, key: str, values: Tensor, indices: Sequence[int] | None = None) -> None:
        """Replace the numbers of one key."""
        vector = self._vector(key, indices)
        if vector is None:
            foreach.copy_(self.column(key, indices), list(values.unbind()))
        else:
            foreach.copy_([vector], [values])

    def add(self, key: str, number: float) -> None:
        """Add to the numbers of one key."""
        vector = self._vector(key, None)
        foreach.add_number_(self.column(key) if vector is None else [vector], number)

    def _vector(self, key: str, indices: Sequence[int] | None) -> Tensor | None:
        if self._vectors is None or self._dicts is not None:
            return None
        name = f"{self._path}/{key}"
        if indices is not None:
            rows = [self._stored[i] for i in indices]
            self._known.pop(name, None)
            self._found.pop(key, None)  # its views leave the rows
            return self._vectors.vector(name, self.column(key, indices), rows)
        if key not in self._found:
            self._found[key] = self._vectors.vector(name, self.column(key), self._stored)
        return self._found[key]


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

    def are_views(self, name: str, column: list[Any]) -> bool:
        """Whether the numbers under a name are the views that `vector` made last."""
        kept = self._kept.get(name)
        return kept is not None and len(column) == len(kept.views) and all(map(operator.is_, column, kept.views))

    def vector(self, name: str, column: list[Tensor], rows: Sequence[State]) -> Tensor | None:
        """The numbers that ``rows`` have under a name as a vector, to be modified; None if they cannot be one.

        Args:
            name: The qualified key.
            column: The numbers as they are now, to be replaced by views of the vector.
            rows: The states, in which they are replaced too.
        """
        kept = self._kept.get(name)
        if kept and self.are_views(name, column) and pointers(column) == kept.pointers:
            return kept.vector
        if len({(type(n), n.ndim, n.dtype, n.device) for n in column}) != 1 or column[0].ndim:
            return None
        if len(set(map(id, column))) < len(column):  # a parameter that is listed twice
            return None
        vector = torch.stack(column)
        views = list(vector.unbind())
        for row, view in zip(rows, views, strict=True):
            row[name] = view
        column[:] = views
        self._kept[name] = _Kept(vector, views, pointers(views))
        return vector


def own_numbers(state: Mapping[str, Any]) -> dict[str, Any]:
    """The state of a parameter, with copies of numbers that are elements of a vector, so that they are saved alone."""
    return {key: v.clone() if isinstance(v, Tensor) and not v.ndim else v for key, v in state.items()}


def pointers(tensors: Sequence[Tensor]) -> list[int]:
    """The address of each tensor's memory; empty for fake tensors, which have none."""
    return [] if isinstance(tensors[0], FakeTensor) else list(map(Tensor.data_ptr, tensors))
