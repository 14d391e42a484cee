"""What a scaling does in a step: measure, find the factors, store. Ordinary and planned steps call it."""

from collections.abc import MutableMapping, Sequence
from typing import Any

from torch import Tensor

from torchzero_clip.core.kinds import Scaling
from torchzero_clip.core.nodes import Node
from torchzero_clip.core.step import Step
from torchzero_clip.engine.checked import factors_of
from torchzero_clip.engine.company import Company
from torchzero_clip.engine.judged import Judged
from torchzero_clip.functional.measure import Measured


def find_factors(
    node: Node,
    transform: Scaling,
    rows: Sequence[int],
    updates: list[Tensor],
    step: Step,
    judged: Judged,
    company: Company | None,
    chain_state: MutableMapping[str, Any],
) -> tuple[Measured, Tensor]:
    """The norms of updates, and the factors that a scaling computes from them. State is stored, after errors too."""
    try:
        measured = judged.measured(node, updates)
        if transform.keeps_statistics:
            step.gradient_norms = judged.of(rows)
        if company is not None:
            measured = company.joined(node, measured, updates, step, judged)
        return measured, factors_of(node, measured, updates, step)
    finally:
        store_state(node, step, chain_state, company)


def store_state(node: Node, step: Step, chain_state: MutableMapping[str, Any], company: Company | None) -> None:
    """Store the state of a transform."""
    if node.has_state:
        step.store_states()
    if company is not None:
        company.store(node, step, chain_state)
    if new := {key: value for key, value in step.global_state.items() if value is not step.given.get(key)}:
        _replace(chain_state, node.qualified(new))


def _replace(kept: MutableMapping[str, Any], new: dict[str, Any]) -> None:
    """Write values into the tensors that are kept, which the param groups of checkpoints in memory share."""
    # copies first, because a transform may have exchanged two tensors
    copies = {key: value.clone() for key, value in new.items() if isinstance(value, Tensor)}
    for key, value in copies.items():
        old = kept.get(key)
        if isinstance(old, Tensor) and (old.shape, old.dtype) == (value.shape, value.dtype):
            new[key] = old.copy_(value)
    kept.update(new)
