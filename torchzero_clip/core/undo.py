"""Puts state back as it was before the transforms, if the optimizer after them raises in its step."""

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torchzero_clip.functional import foreach
from torchzero_clip.functional.lists import same_objects
from torchzero_clip.types import State


class Spares:
    """Spare memory for large state: a step writes the next values there. The memory of the old values is then spare."""

    # copying the state in each step would cost one more pass over memory

    def __init__(self) -> None:
        self._kept: dict[str, tuple[list[Tensor], list[Tensor]]] = {}

    def exchanged(self, name: str, column: list[Tensor]) -> list[Tensor]:
        """Memory for the next values of a column. The column itself is the spare memory of the next step."""
        live, spare = self._kept.get(name, ([], []))
        if not same_objects(live, column):
            spare = list(map(torch.empty_like, column))
        self._kept[name] = spare, column
        return spare

    def put_back(self, name: str) -> None:
        """Undo the last exchange."""
        live, spare = self._kept[name]
        self._kept[name] = spare, live


class Undo:
    """Notes how state was before a step changes it."""

    def __init__(self, spares: Spares) -> None:
        self._spares = spares
        self._ways_back: list[Callable[[], object]] = []

    def restore(self) -> None:
        """Put back what was noted, the last first."""
        while self._ways_back:
            self._ways_back.pop()()

    def then(self, way_back: Callable[[], object]) -> None:
        """Note how to undo the change that follows."""
        self._ways_back.append(way_back)

    def tensors(self, tensors: Sequence[Tensor]) -> None:
        """Note short tensors before they change in place."""
        kept, tensors = foreach.clone(tensors), list(tensors)
        self.then(lambda: foreach.copy_(tensors, kept))

    def vector(self, vector: Tensor, elements: Sequence[Tensor]) -> None:
        """Note numbers that are the elements of a vector."""
        kept, elements = vector.clone(), list(elements)
        self.then(lambda: foreach.copy_(elements, list(kept.unbind())))

    def members(self, dicts: Sequence[MutableMapping[Any, Any]]) -> None:
        """Note which values dicts have, not the content of their tensors."""
        self._ways_back.append(partial(_replace, dicts, list(map(dict, dicts))))

    def prefixed(self, stored: State, prefix: str) -> None:
        """Note the state of one transform and one parameter."""
        kept = {key: value for key, value in stored.items() if key.startswith(prefix)}
        self.tensors([value for value in kept.values() if isinstance(value, Tensor)])

        def way_back() -> None:
            for key in [key for key in stored if key.startswith(prefix) and key not in kept]:
                del stored[key]
            stored.update(kept)

        self.then(way_back)

    def draft(self, name: str, states: Sequence[State], column: list[Tensor]) -> list[Tensor]:
        """Put other memory into the place of large state, for its next values."""
        drafts = self._spares.exchanged(name, column)

        def way_back() -> None:
            self._spares.put_back(name)
            _put(states, name, column)

        self.then(way_back)
        _put(states, name, drafts)
        return drafts


def _put(states: Sequence[State], name: str, column: Sequence[Tensor]) -> None:
    for state, value in zip(states, column, strict=True):
        state[name] = value


def _replace(dicts: Sequence[MutableMapping[Any, Any]], kept: Sequence[Mapping[Any, Any]]) -> None:
    for values, before in zip(dicts, kept, strict=True):
        values.clear()
        values.update(before)
