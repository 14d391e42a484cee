"""Memory that steps reuse."""

import operator
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from torchzero_clip.compat import SameLayout, same_layout

T = TypeVar("T")


class _Plan(NamedTuple):
    key: Hashable
    fits: SameLayout
    layout: object
    result: Any


@dataclass(eq=False)
class Scratch:
    """Memory for intermediate results, undefined after a call, and plans of how to use it."""

    # every optimizer has its own, because two threads that shared one would overwrite each other's numbers

    _memory: dict[Hashable, Tensor] = field(default_factory=dict)
    _plans: dict[str, _Plan] = field(default_factory=dict)
    _tensors: Sequence[Tensor] = ()
    _layout: object = None  # that of ``_tensors``

    def knowing(self, tensors: Sequence[Tensor], layout: object) -> "Scratch":
        """The same memory and plans, for tensors of a known layout: `plan` compares the object that stands for it."""
        return Scratch(self._memory, self._plans, tensors, layout)

    def held(self) -> object:
        """All memory of now."""
        return dict(self._memory), dict(self._plans)

    def memory(self, name: str, count: int, like: Tensor) -> Tensor:
        """A vector of ``count`` elements, of the dtype and on the device of ``like``, with any values."""
        key = name, like.dtype, like.device
        kept = self._memory.get(key)
        if kept is None or kept.numel() < count:
            kept = self._memory[key] = torch.empty(count, dtype=like.dtype, device=like.device)
        return kept.narrow(0, 0, count)

    def elements(self, vector: Tensor) -> Sequence[Tensor]:
        """The elements of a vector as 0-d tensors, which the next call may overwrite."""
        if not vector.is_cpu:
            return vector.unbind()

        def make() -> tuple[Tensor, Sequence[Tensor]]:
            memory = torch.empty_like(vector)
            return memory, memory.unbind()

        # for 400 elements `unbind` takes 0.37 ms, which is three quarters of the time to multiply short tensors by them
        memory, elements = self.plan("elements", [vector], make)
        memory.copy_(vector)
        return elements

    def plan(self, name: str, tensors: Sequence[Tensor], make: Callable[[], T], key: Hashable = None) -> T:
        """What ``make`` returns; called only if the tensors or the key differ from the last call with this name."""
        # no tensor is listed twice, and the result depends on their layout and on the key alone
        kept = self._plans.get(name)
        are_same = len(tensors) == len(self._tensors) and all(map(operator.is_, tensors, self._tensors))
        layout = self._layout if are_same else None
        if kept is not None and kept.key == key and layout is not None and kept.layout is layout:
            return kept.result
        if kept is not None and kept.key == key and kept.fits(tensors):
            kept = kept._replace(layout=layout)
        else:
            kept = _Plan(key, same_layout(tensors), layout, make())
        self._plans[name] = kept
        return kept.result
