"""The parameters that take part in a step, gathered anew each time."""

import operator
from collections.abc import Sequence
from operator import attrgetter
from typing import Any, NamedTuple, TypeAlias
from weakref import ref

import torch
from torch import Tensor

from torchzero_clip.core.scope import named_params
from torchzero_clip.core.states import pointers
from torchzero_clip.functional import foreach
from torchzero_clip.types import State

Group: TypeAlias = dict[str, Any]

_SHAPE, _FACTS = attrgetter("shape"), attrgetter("dtype", "is_cpu", "shape")


def taking_part(groups: Sequence[Group]) -> tuple[list[Tensor], list[Any], list[int]]:
    """The parameters that have a gradient and are not frozen, their gradients, and the index of the group of each.

    Raises:
        RuntimeError: If a gradient is sparse, or a parameter is on the meta device.
    """
    params: list[Tensor] = []
    grads: list[Any] = []
    group_of: list[int] = []
    for g, group in enumerate(groups):
        if True in [param.is_meta for param in group["params"]]:
            _refuse_meta(group)
        own = [param for param in group["params"] if param.grad is not None and param.requires_grad]
        found = [param.grad for param in own]
        if not {torch.strided}.issuperset([grad.layout for grad in found]):
            _refuse_sparse(own, group)
        params += own
        grads += found
        group_of += [g] * len(own)
    return params, grads, group_of


class Checked(NamedTuple):
    """Tensors that were found plain, contiguous and alike.

    While each is the same object in the same memory, the checks need not be repeated.
    """

    facts: list[Any]
    tensors: list[ref[Tensor]]
    """References that keep no tensor alive: a user may move state to other memory."""
    places: list[int]
    """See `_places`."""

    def holds(self, facts: list[Any], tensors: list[Tensor]) -> bool:
        """Whether these are the same tensors, and should still look the same."""
        same = len(tensors) == len(self.tensors) and all(map(operator.is_, tensors, [kept() for kept in self.tensors]))
        if not same or not (facts is self.facts or facts == self.facts):
            return False
        return _places(tensors) == self.places


def alike(
    params: list[Tensor], grads: list[Tensor], states: Sequence[State], known: dict[str, Checked]
) -> set[str] | None:
    """The keys of state that is like the parameters, if parameters and gradients are plain and alike; else None.

    Alike are plain contiguous tensors of one dtype, on one device, and in each row of one shape. If the result is not
    None, the state under all other keys is 0-d.

    Args:
        params: The parameters, at least one.
        grads: Their gradients.
        states: Their states.
        known: What was found the last time, by key. It is changed.
    """
    kept = known.get("params")
    facts = kept.facts if kept and kept.holds(kept.facts, params) else list(map(_FACTS, params))
    if not kept or facts is not kept.facts:
        if foreach.kind(params) is None or not foreach.all_contiguous(params):
            return None
        known["params"] = Checked(facts, list(map(ref, params)), _places(params))
    if not _are_like(facts, grads) or len(set(map(len, states))) > 1:
        return None
    found: set[str] = set()
    try:
        for key in states[0]:
            column = [state[key] for state in states]
            if column[0].ndim:
                found.add(key)
                if not (key in known and known[key].holds(facts, column)):
                    if not _are_like(facts, column):
                        return None
                    known[key] = Checked(facts, list(map(ref, column)), _places(column))
            elif any(map(_SHAPE, column)):  # shapes of single numbers are false
                return None
    except (AttributeError, KeyError):  # parameters have different state, or some that is no tensor
        return None
    return found


def _places(tensors: list[Tensor]) -> list[int]:
    """Where the memory of each begins, how many elements it has, and whether it is contiguous."""
    return [*pointers(tensors), *map(Tensor.numel, tensors), *map(Tensor.is_contiguous, tensors)]


def _are_like(facts: list[Any], tensors: Sequence[Tensor]) -> bool:
    is_plain = foreach.PLAIN.issuperset(map(type, tensors)) and list(map(_FACTS, tensors)) == facts
    one_device = is_plain and (tensors[0].is_cpu or len({tensor.device for tensor in tensors}) == 1)
    return one_device and foreach.all_contiguous(tensors)


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
