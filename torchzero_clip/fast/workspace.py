"""Memory that the fast steps of an optimizer reuse, and the layout of their tensors, which saves checks."""

from collections.abc import Iterable, Mapping, Sequence, Set
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from torchzero_clip.compat import SameLayout, same_layout
from torchzero_clip.engine.table import Table
from torchzero_clip.fast.vectors import Vectors
from torchzero_clip.functional import foreach
from torchzero_clip.functional.lists import has_repeats
from torchzero_clip.functional.scratch import Scratch

_FACTS = attrgetter("dtype", "is_cpu", "shape")


class StepLayout:
    """How the parameters, gradients and state of a step are laid out. Later steps are compared with it.

    Parameters, gradients and state of their shape are plain, contiguous, of one dtype and on one device, and none of
    them is listed twice. On devices other than the CPU, state of parameters in half precision may be float32. All other
    state is 0-d. ``like`` are the keys of tensors with the shapes and the dtype of the parameters, and ``wider`` those
    of float32 state.
    """

    def __init__(self, tensors: Mapping[str, list[Tensor]], like: Iterable[str], wider: Iterable[str]) -> None:
        self._keys: Set[str] = set(tensors)
        self._like = set(like)
        self._fits: dict[str, SameLayout] = {key: same_layout(tensors[key]) for key in (*like, *wider)}
        first = tensors["params"][0]
        self.is_on_cpu = first.is_cpu
        self.divides_in_kernel = first.dtype != torch.float64
        """False for float64, whose updates are multiplied before the kernel, which divides in float32."""
        self.runs_in_pieces = first.dtype in foreach.WIDE or not first.is_cpu
        """True for float32 and float64, and on devices other than the CPU. On CPU, half precision is slow in pieces."""

    @classmethod
    def of(cls, tensors: Mapping[str, list[Tensor]], vectors: Vectors) -> "StepLayout | None":
        """The layout of tensors; None if they have none."""
        params = tensors["params"]
        is_plain = not params[0].is_meta and foreach.kind(params) is not None and foreach.all_contiguous(params)
        if not is_plain or has_repeats(params):
            return None
        facts = list(map(_FACTS, params))
        like = {key for key, column in tensors.items() if key == "params" or _are_like(facts, column)}
        # statistics of half precision are float32
        is_half = not (params[0].is_cpu or params[0].dtype in foreach.WIDE)
        others = [(key, column) for key, column in tensors.items() if is_half and key not in like]
        wide = [(torch.float32, *rest) for _, *rest in facts]
        wider = {key for key, column in others if _are_like(wide, column)}
        layout = cls(tensors, like, wider)
        return layout if "grads" in like and layout.fits(tensors, vectors) else None

    def fits(self, tensors: Mapping[str, list[Tensor]], vectors: Vectors) -> bool:
        """True if other tensors have this layout. Numbers that are views of ``vectors`` need no check."""
        if self._keys != tensors.keys() or not all(fits(tensors[key]) for key, fits in self._fits.items()):
            return False
        others = [(key, column) for key, column in tensors.items() if key not in self._fits]
        unknown: list[list[Any]] = [column for key, column in others if not vectors.are_views(key, column)]
        return all(isinstance(number, Tensor) and number.ndim == 0 for column in unknown for number in column)

    def has(self, keys: Iterable[str]) -> bool:
        """True if the state under all these keys has the shapes and the dtype of the parameters."""
        return all(key in self._like for key in keys)

    def is_shaped(self, key: str) -> bool:
        """True if what is under this key has the shapes of the parameters, in their dtype or in float32."""
        return key in self._fits


def _are_like(facts: list[Any], tensors: Sequence[Any]) -> bool:
    is_plain = foreach.PLAIN.issuperset(map(type, tensors)) and list(map(_FACTS, tensors)) == facts
    one_device = is_plain and (tensors[0].is_cpu or len({tensor.device for tensor in tensors}) == 1)
    if not one_device or has_repeats(tensors) or any(map(Tensor.is_neg, tensors)):  # see `own_gradients`
        return False
    return foreach.all_contiguous(tensors)


class Workspace:
    """Memory for intermediate results, numbers of state as vectors, and the layout of the last step.

    It is not saved or copied with an optimizer: a new one works the same.
    """

    def __init__(self) -> None:
        self.scratch = Scratch()
        self.vectors = Vectors()
        self.layout: StepLayout | None = None
        self.tried: set[tuple[int, torch.dtype]] = set()
        """The ids of elementwise transforms that were tried out, see `fast.trial`."""

    def held(self) -> object:
        """All memory of now."""
        return self.scratch.held(), self.vectors.held()

    def columns(self, table: Table) -> dict[str, list[Tensor]] | None:
        """Parameters, gradients and state by key, if they have a layout, which becomes that of this step; else None."""
        states = table.states
        if not states or len(set(map(len, states))) > 1:  # parameters have different state
            return None
        try:
            keys = [key for key in states[0] if "/" in key]  # bare keys belong to other packages
            columns = {key: [state[key] for state in states] for key in keys}
        except KeyError:
            return None
        tensors: dict[str, list[Tensor]] = {"params": table.params, "grads": table.grads, **columns}
        if self.layout and self.layout.fits(tensors, self.vectors):
            return tensors
        layout = StepLayout.of(tensors, self.vectors)
        self.layout = layout or self.layout
        return tensors if layout else None
