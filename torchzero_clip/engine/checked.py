"""Checks of what transforms return and store. The messages name the transform."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from torchzero_clip.core.kinds import FinalRule
from torchzero_clip.core.nodes import Node
from torchzero_clip.core.step import Step
from torchzero_clip.core.transform import storable
from torchzero_clip.functional.measure import Measured


def check_result(node: Node, result: Any, given: Sequence[Tensor]) -> None:
    """Raise if a transform returned unusable tensors; the message names the transform."""
    transform = node.transform
    if not isinstance(result, list | tuple):
        raise RuntimeError(f"{transform!r} returned {type(result).__name__} instead of a list of tensors")
    if len(result) != len(given):
        raise RuntimeError(f"{transform!r} returned {len(result)} tensors for {len(given)}")
    for new, old in zip(result, given, strict=True):
        if not isinstance(new, Tensor):
            raise RuntimeError(f"{transform!r} returned {type(new).__name__} instead of a tensor")
        if new.shape != old.shape or new.dtype != old.dtype:
            got, expected = (f"{tuple(t.shape)} of {t.dtype}" for t in (new, old))
            raise RuntimeError(f"{transform!r} returned a tensor of shape {got} for one of shape {expected}")


def check_state(node: Node, step: Step) -> None:
    """Raise if a transform stored state of a parameter that it has not declared, or that checkpoints cannot hold."""
    for state in step.touched_states():
        if not node.has_state and len(state) > 0:
            keys = list(state)
            raise RuntimeError(f"{node.transform!r} keeps state {keys} that its init_state does not return")
        if not isinstance(node.transform, FinalRule):  # the state of a wrapped optimizer is its own
            storable(node.transform, state)


def check_factors(node: Node, factors: Any, measured: Measured) -> None:
    """Raise if a scaling returned anything but one factor for each slice."""
    count = len(measured.vector)
    if getattr(factors, "shape", None) != (count,):
        got = f"shape {tuple(factors.shape)}" if isinstance(factors, Tensor) else type(factors).__name__
        raise RuntimeError(f"{node.transform!r} returned factors of {got} for {count} slices: see Measured.joined")
