"""The state of one transform in one step: by parameter, or by key as columns and vectors of numbers."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from torchzero_clip.core.undo import Undo
from torchzero_clip.functional import foreach
from torchzero_clip.functional.dtypes import widest
from torchzero_clip.functional.shards import pack
from torchzero_clip.types import State


class States(Sequence[State]):
    """The state of one transform: a plain dict for each parameter, made when it is first read."""

    dicts_read: list[State] | None = None  # the dicts, once they were read
    undo: Undo | None = None  # notes state before it changes, if another optimizer takes the step
    _has_begun = False

    def __init__(
        self, stored: Sequence[State], path: str, entries_of: Callable[[State], State], begin: Callable[[int], State]
    ) -> None:
        self._stored = stored  # the state of each parameter for all transforms, by qualified keys
        self._path = path  # the prefix of the keys of this transform
        self._entries_of = entries_of  # picks the entries of this transform from such a state, without the prefix
        self._begin = begin  # makes the state of a parameter that has none, from its index
        self.first_states: dict[int, State] = {}
        """The state of parameters that had none, as it was before the transform changed it."""

    @classmethod
    def of(cls, dicts: Sequence[State]) -> "States":
        """The states in dicts that the optimizer does not store, for a `Step` that was made by hand."""
        states = cls(dicts, "", dict, lambda i: {})
        states.dicts_read, states._has_begun = list(dicts), True
        return states

    def __len__(self) -> int:
        return len(self._stored)

    @override
    def __getitem__(self, index: Any) -> Any:
        return self.dicts[index]

    @override
    def __iter__(self) -> Iterator[State]:
        return iter(self.dicts)

    @property
    def dicts(self) -> list[State]:
        """One dict for each parameter, with keys as the transform knows them."""
        if self.dicts_read is None:
            self.begin()
            if self.undo is not None:
                for stored in self._stored:
                    self.undo.prefixed(stored, f"{self._path}/")
            made: dict[int, State] = {}  # a parameter that is listed twice has one state
            for stored in self._stored:
                if id(stored) not in made:
                    made[id(stored)] = self._entries_of(stored)
            self.dicts_read = [made[id(stored)] for stored in self._stored]
        return self.dicts_read

    def begin(self) -> None:
        """Make the state of parameters that have none."""
        if not self._has_begun:
            self._has_begun = True
            for i, stored in enumerate(self._stored):
                if not self._entries_of(stored):
                    self.first_states[i] = self._begin(i)
                    if self.undo is not None:
                        self.undo.prefixed(stored, f"{self._path}/")
                    self._store(stored, self.first_states[i])

    def write(self) -> None:
        """Store what was changed in the dicts, and the state of parameters that had none."""
        self.begin()
        for stored, entries in zip(self._stored, self.dicts_read or [], strict=False):
            self._store(stored, entries)

    def _store(self, stored: State, entries: State) -> None:
        # in one call, so that an interrupt leaves all keys or none
        stored.update({f"{self._path}/{key}": value for key, value in entries.items()})

    def column(self, key: str, indices: Sequence[int] | None = None) -> list[Any]:
        """The values of one key: of all parameters, or of some."""
        states, name = (self._stored, f"{self._path}/{key}") if self.dicts_read is None else (self.dicts_read, key)
        if indices is not None:
            states = [states[i] for i in indices]
        try:
            values = [state[name] for state in states]
        except KeyError:
            self.begin()
            if lacking := [state for state in states if name not in state]:
                kept = ", ".join(self._entries_of(lacking[0]) if self.dicts_read is None else lacking[0]) or "none"
                raise RuntimeError(
                    f"{self._path} has no state {key!r} of a parameter, because init_state does not return it; the "
                    f"state is: {kept}"
                ) from None
            values = [state[name] for state in states]
        self._has_begun |= indices is None
        return values

    def draft(self, key: str, indices: Sequence[int] | None = None) -> tuple[list[Tensor], list[Tensor]]:
        """The large state under one key, and the tensors into which the caller writes the next values.

        They are the same tensors, unless the step may have to be undone.
        """
        column = self.column(key, indices)
        if self.undo is None or self.dicts_read is not None:
            return column, column
        states = self._stored if indices is None else [self._stored[i] for i in indices]
        return column, self._drafted(f"{self._path}/{key}", states, column, self.undo)

    def _drafted(self, name: str, states: Sequence[State], column: list[Tensor], undo: Undo) -> list[Tensor]:
        return undo.draft(name, states, column)

    def changing(self, key: str, indices: Sequence[int] | None = None) -> list[Any]:
        """The values of one key, which the caller may change in place: they are noted in ``undo`` before."""
        column = self.column(key, indices)
        if self.undo is None or self.dicts_read is not None:
            return column
        if column and all(isinstance(value, Tensor) and value.ndim for value in column):
            column, drafts = self.draft(key, indices)
            foreach.copy_(drafts, column)
            return drafts
        self.undo.tensors([value for value in column if isinstance(value, Tensor)])
        return column

    def has(self, key: str) -> bool:
        """Whether all parameters have state under a key."""
        name = key if self.dicts_read is not None else f"{self._path}/{key}"
        return all(name in state for state in self.dicts_read or self._stored)

    def numbers(self, key: str, indices: Sequence[int] | None = None) -> Tensor:
        """The numbers of one key, of all parameters or of some: a float64 vector, not to be modified."""
        return pack(self.column(key, indices))

    def keep(self, key: str, values: Tensor, indices: Sequence[int] | None = None) -> None:
        """Replace the numbers of one key."""
        column = self.column(key, indices) if self.undo is None else self.changing(key, indices)
        foreach.copy_(column, list(values.unbind()))

    def changing_vector(self, key: str, indices: Sequence[int] | None = None) -> Tensor | None:
        """The numbers of one key as a vector, which the caller may change in place; None if they are not one."""
        return None

    def add(self, key: str, number: float | Tensor) -> None:
        """Add to the numbers of one key; a tensor is 0-d."""
        foreach.add_number_(self.column(key) if self.undo is None else self.changing(key), number)


def zero_numbers(*keys: str, device: torch.device | None = None) -> dict[str, Tensor]:
    """A 0-d zero for each key, in the widest dtype of the device: float64 holds norms exactly."""
    dtype = torch.float64 if device is None else widest(device)
    return {key: torch.zeros((), dtype=dtype, device=device) for key in keys}
