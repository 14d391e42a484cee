"""Gathers the parameters that take part in a step."""

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, TypeAlias

import torch
from torch import Tensor

from torchzero_clip.compat import SameLayout, same_layout
from torchzero_clip.core.scope import named_params
from torchzero_clip.core.states import Vectors
from torchzero_clip.functional import foreach
from torchzero_clip.types import State

Group: TypeAlias = dict[str, Any]

_FACTS = attrgetter("dtype", "is_cpu", "shape")


def taking_part(groups: Sequence[Group]) -> tuple[list[Tensor], list[Any], list[int]]:
    """The parameters that have a gradient and are not frozen, their gradients, and the index of the group of each."""
    params: list[Tensor] = []
    grads: list[Any] = []
    group_of: list[int] = []
    for g, group in enumerate(groups):
        own: list[Tensor] = group["params"]
        found = [param.grad for param in own]
        if type(None) in set(map(type, found)) or False in [param.requires_grad for param in own]:
            if True in [param.is_meta for param in own]:
                _refuse_meta(group)
            own = [param for param in own if param.grad is not None and param.requires_grad]
            found = [param.grad for param in own]
        params += own
        grads += found
        group_of += [g] * len(own)
    return params, grads, group_of


def refuse_unusable(groups: Sequence[Group]) -> None:
    """Raise a RuntimeError if a gradient is sparse, or a parameter is on the meta device."""
    for group in groups:
        if True in [param.is_meta for param in group["params"]]:
            _refuse_meta(group)
        own = [param for param in group["params"] if param.grad is not None and param.requires_grad]
        if not {torch.strided}.issuperset([param.grad.layout for param in own]):
            _refuse_sparse(own, group)


@dataclass
class Alike:
    """The state of parameters that are plain and alike."""

    columns: dict[str, list[Tensor]]
    """The state of all parameters under each key."""
    like: Set[str]
    """The keys of state that is like the parameters. State under other keys is 0-d."""

    def has(self, keys: Iterable[str]) -> bool:
        """True if the state under all these keys is like the parameters."""
        return all(key in self.like and key in self.columns for key in keys)


class Layouts:
    """The layouts of parameters, gradients and state that passed the check of `alike`, so that it is not repeated."""

    def __init__(self) -> None:
        self.keys: Set[str] = set()
        """The keys of state."""
        self.like: dict[str, SameLayout] = {}
        """A check for the parameters and whatever is like them."""

    def hold(self, columns: Mapping[str, list[Tensor]]) -> bool:
        """True if lists of tensors have these layouts. 0-d state is not compared: see `Vectors`."""
        return self.keys == columns.keys() and all(fits(columns[key]) for key, fits in self.like.items())


def alike(
    params: list[Tensor], grads: list[Tensor], states: Sequence[State], layouts: Layouts, vectors: Vectors
) -> Alike | None:
    """The state by key, if parameters, gradients and state are plain and alike; else None.

    Tensors are alike if they are plain and contiguous, of one dtype, on one device, and in each row of one shape. No
    tensor may be listed twice. State may also be 0-d.

    Args:
        params: The parameters, at least one.
        grads: Their gradients.
        states: Their states.
        layouts: The layouts of the last successful check, updated in place.
        vectors: Numbers that are views of its vectors need no check.
    """
    if len(set(map(len, states))) > 1:
        return None
    try:
        columns = {key: [state[key] for state in states] for key in states[0]}
    except KeyError:  # parameters have different state
        return None
    tensors = {"params": params, "grads": grads, **columns}
    if not layouts.hold(tensors):
        if params[0].is_meta or foreach.kind(params) is None or not foreach.all_contiguous(params) or _repeated(params):
            return None
        facts = list(map(_FACTS, params))
        like = {key for key, column in columns.items() if _are_like(facts, column)}
        if not _are_like(facts, grads):
            return None
        layouts.keys = set(tensors)
        layouts.like = {key: same_layout(tensors[key]) for key in ("params", "grads", *like)}
    for key, column in columns.items():
        if key not in layouts.like and not (vectors.are_views(key, column) or _are_numbers(column)):
            return None
    return Alike(columns, layouts.like.keys())


def _are_like(facts: list[Any], tensors: Sequence[Tensor]) -> bool:
    is_plain = foreach.PLAIN.issuperset(map(type, tensors)) and list(map(_FACTS, tensors)) == facts
    one_device = is_plain and (tensors[0].is_cpu or len({tensor.device for tensor in tensors}) == 1)
    if not one_device or _repeated(tensors) or any(map(Tensor.is_neg, tensors)):  # see `own_gradients`
        return False
    return foreach.all_contiguous(tensors)


def _repeated(tensors: Sequence[Tensor]) -> bool:
    return len(set(map(id, tensors))) < len(tensors)


def _are_numbers(column: Sequence[Any]) -> bool:
    return all(isinstance(number, Tensor) and number.ndim == 0 for number in column)


def _refuse_meta(group: Group) -> None:
    for param in group["params"]:
        if param.is_meta and param.requires_grad:
            raise RuntimeError(
                f"{_name(param, group)} is on the meta device and has no values: calls that allocate them, such as "
                "to_empty, may replace the parameters of a module. Build Modular after such a call"
            )


def _refuse_sparse(own: Sequence[Tensor], group: Group) -> None:
    sparse = next(param for param in own if param.grad is not None and param.grad.layout != torch.strided)
    raise RuntimeError(f"{_name(sparse, group)} has a sparse gradient, which Modular does not take")


def _name(param: Tensor, group: Group) -> str:
    number, named = next((i, n) for i, n in enumerate(named_params(group)) if n.param is param)
    return named.name or f"parameter {number} of its group, of shape {tuple(param.shape)},"
