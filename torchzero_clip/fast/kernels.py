"""The end of a chain in one pass over memory: a kernel that also applies the factors of the last scaling."""

from collections.abc import Sequence

import torch
from torch import Tensor

from torchzero_clip.core.kinds import Kernel
from torchzero_clip.functional import foreach
from torchzero_clip.functional.measure import by_setting
from torchzero_clip.types import Setting

LONG = 65536
"""Longer tensors are passed to a kernel one by one, with their factors; shorter ones are multiplied together before."""


def run_kernel(
    kernel: Kernel,
    params: list[Tensor],
    updates: list[Tensor],
    state: list[list[Tensor]],
    settings: Sequence[Setting],
    factors: Tensor | None,
) -> None:
    """Multiply updates by their factors, and take the step.

    Args:
        kernel: The rest of the chain.
        params: The parameters.
        updates: Their updates, which are modified if there are factors.
        state: Their state, one list for each key.
        settings: Their settings.
        factors: One number for each update, or a 0-d tensor for all; None for 1.
    """
    alone: dict[int, Tensor] = {}
    scale = None
    if factors is not None:
        if params[0].dtype == torch.float64 or (factors.ndim and not factors.is_cpu):
            foreach.multiply_each_(updates, factors.expand(len(updates)))  # the kernels divide in float32
        elif not factors.ndim:
            scale = inverse(factors)
        else:
            alone = _multiply_short_(updates, factors)
    for setting, own in by_setting(settings):
        rows = range(own.start, own.stop)
        together = [i for i in rows if i not in alone] if alone else own
        _call(kernel, together, params, updates, state, setting, scale)
        for i in rows if alone else ():
            if i in alone:
                _call(kernel, [i], params, updates, state, setting, alone[i])


def _call(
    kernel: Kernel,
    rows: slice | list[int],
    params: list[Tensor],
    updates: list[Tensor],
    state: list[list[Tensor]],
    setting: Setting,
    scale: Tensor | None,
) -> None:
    lists = [
        column[rows] if isinstance(rows, slice) else [column[i] for i in rows] for column in (params, updates, *state)
    ]
    if lists[0]:
        kernel(lists[0], lists[1], lists[2:], setting, scale)


def call_kernel(
    kernel: Kernel,
    params: list[Tensor],
    state: list[list[Tensor]],
    settings: Sequence[Setting],
    rows: list[int],
    cut: slice | None,
    updates: list[Tensor],
) -> None:
    """Take the step of some parameters that share a setting; ``cut`` says which elements, None for all."""
    lists = [[column[i] for i in rows] for column in (params, *state)]
    if cut is not None:
        lists = [[t.view(-1)[cut] if t.ndim else t for t in column] for column in lists]
    kernel(lists[0], updates, lists[1:], settings[rows[0]], None)


def _multiply_short_(updates: Sequence[Tensor], factors: Tensor) -> dict[int, Tensor]:
    """Multiply short updates by their factors, on CPU; return the inverse factors of the others by index."""
    changed, sizes = (factors != 1).tolist(), list(map(Tensor.numel, updates))
    short = [i for i, size in enumerate(sizes) if changed[i] and size <= LONG]
    long = [i for i, size in enumerate(sizes) if changed[i] and size > LONG]
    if len(short) == len(updates):
        foreach.multiply_each_(updates, factors)
    elif short:
        foreach.multiply_each_([updates[i] for i in short], factors[torch.tensor(short, device=factors.device)])
    return {i: inverse(factors[i]) for i in long}


def inverse(factors: Tensor) -> Tensor:
    """The inverse factors, which the kernels divide by. For a factor of 0 it is inf, so that the quotient is 0."""
    largest = torch.finfo(torch.float32).max
    if factors.is_cpu and not factors.ndim:
        factor = factors.item()
        exact = min(max(1 / factor, -largest), largest) if factor else torch.inf
        return torch.tensor(exact, dtype=torch.float32, device=factors.device)
    exact = factors.reciprocal()
    return torch.where(factors == 0, exact, exact.clamp(min=-largest, max=largest)).float()
