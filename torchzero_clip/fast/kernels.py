"""The end of a chain in one pass over memory: a kernel that also applies the factors of the last scaling."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torchzero_clip.core.kinds import Fused, Kernel
from torchzero_clip.core.nodes import Node
from torchzero_clip.engine.executor import Multiply
from torchzero_clip.fast.workspace import StepLayout
from torchzero_clip.functional import foreach, short_tensors
from torchzero_clip.functional.clip import inverse
from torchzero_clip.functional.scratch import Scratch
from torchzero_clip.types import Columns, Runs, Setting

LONG = 65536
"""Longer tensors are passed to a kernel one by one, with their factors; shorter ones are multiplied together before."""


class EndedByKernel(NamedTuple):
    """The end of a step in which a kernel did the work of a rule and of the rest of the chain, for all parameters."""

    node: Node  # the rule
    rest: list[Node]
    fused: Fused
    kernel: Kernel
    layout: StepLayout
    columns: dict[str, list[Tensor]]  # parameters, gradients and state by key


class EndedByDelivery(NamedTuple):
    """The end of a step in which the updates of all parameters were written into their gradients."""

    layout: StepLayout
    columns: dict[str, list[Tensor]]  # as in `EndedByKernel`
    multiply: Multiply


def run_kernel(
    kernel: Kernel, columns: Columns, runs: Runs, factors: Tensor | float | None, scratch: Scratch, owner: int = 0
) -> None:
    """Multiply updates by their factors, in place, and take the step; ``owner`` is as in `multiply_short_`.

    ``columns`` are parameters, updates, and a list for each key of state. ``factors`` are a vector with one for each
    update; or one for all, as a 0-d tensor or, except in float64, as a number; or None for 1.
    """
    params, updates, *state = columns
    alone: dict[int, Tensor] = {}
    scale = None
    if factors is not None and not isinstance(factors, Tensor):
        scale = inverse(factors)
    elif factors is not None:
        if params[0].dtype == torch.float64 and factors.ndim and not factors.is_cpu:
            short_tensors.multiply_any_length_(updates, factors, scratch, owner=owner)  # the kernels divide in float32
        elif params[0].dtype == torch.float64:
            foreach.multiply_each_(updates, factors.expand(len(updates)))
        elif factors.ndim and not factors.is_cpu:
            long = short_tensors.multiply_short_(updates, factors, scratch, LONG, owner=owner)
            inverses = inverse(factors) if long else factors
            alone = {i: inverses.select(0, i) for i in long}
        elif not factors.ndim:
            scale = inverse(factors)
        else:
            alone = _multiply_short_(updates, factors, scratch)
    if len(runs) == 1 and not alone:
        kernel(params, updates, state, runs[0][0], scale)
        return
    for setting, span in runs:
        places = range(span.start, span.stop)
        together = [i for i in places if i not in alone] if alone else span
        _call(kernel, together, columns, setting, scale)
        for i in places if alone else ():
            if i in alone:
                _call(kernel, [i], columns, setting, alone[i])


def _call(kernel: Kernel, rows: slice | list[int], columns: Columns, setting: Setting, scale: Tensor | None) -> None:
    lists = [column[rows] if isinstance(rows, slice) else [column[i] for i in rows] for column in columns]
    if lists[0]:
        kernel(lists[0], lists[1], lists[2:], setting, scale)


def _multiply_short_(updates: Sequence[Tensor], factors: Tensor, scratch: Scratch) -> dict[int, Tensor]:
    """Multiply short updates by their factors, on CPU; return the inverse factors of the others by index."""
    sizes = list(map(Tensor.numel, updates))
    if sum(sizes) <= LONG:  # to choose would take longer
        foreach.multiply_each_(updates, factors, scratch)
        return {}
    changed = (factors != 1).tolist()
    short = [i for i, size in enumerate(sizes) if changed[i] and size <= LONG]
    long = [i for i, size in enumerate(sizes) if changed[i] and size > LONG]
    if short:
        foreach.multiply_each_(updates, factors, scratch, short)
    return {i: inverse(factors[i]) for i in long}
