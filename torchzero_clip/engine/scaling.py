"""What a scaling does in a step: measure, find the factors, store. Ordinary and planned steps call it."""

from collections.abc import Sequence

from torch import Tensor

from torchzero_clip.core.nodes import Node
from torchzero_clip.core.step import Step
from torchzero_clip.engine.checked import factors_of
from torchzero_clip.engine.company import Company
from torchzero_clip.engine.gradient_norms import GradientNorms
from torchzero_clip.functional import foreach
from torchzero_clip.functional.choice import where
from torchzero_clip.functional.measure import Measured
from torchzero_clip.types import State


def find_factors(
    node: Node,
    rows: Sequence[int],
    updates: list[Tensor],
    step: Step,
    gradient_norms: GradientNorms,
    company: Company | None,
    chain_state: State,
) -> tuple[Measured, Tensor]:
    """The norms of updates, and the factors that a scaling computes from them. State is stored, after errors too."""
    try:
        measured = gradient_norms.measure_scaling(node, updates)
        if node.transform.keeps_statistics:
            step.gradient_norms = gradient_norms.of_rows(rows)
        if company is not None:
            measured = company.joined(node, measured, updates, step, gradient_norms)
        return measured, factors_of(node, measured, updates, step)
    finally:
        store_state(node, step, chain_state, company)


def unless_refused(factors: Tensor, taken: Tensor) -> Tensor:
    """The factors, or 1 in a step that the device refuses: a gradient times 1 keeps its bits."""
    if not foreach.is_one_number(factors):
        return where(taken, factors, 1.0)
    return where(taken, factors.narrow(0, 0, 1), 1.0).expand(len(factors))  # still one number for kernels


def store_state(node: Node, step: Step, chain_state: State, company: Company | None) -> None:
    """Store the state of a transform."""
    if node.has_state:
        step.stored.write()
    if company is not None:
        company.store(node, step, chain_state)
    before = step.global_state_before
    changed = [(key, value) for key, value in step.global_state.items() if value is not before.get(key)]
    kept: list[Tensor] = []
    new: list[Tensor] = []
    for key, value in changed:
        old = before.get(key)
        if isinstance(old, Tensor) and isinstance(value, Tensor) and old.shape == value.shape:
            kept.append(old)
            new.append(value.clone())  # it may be a view of other state, as after a swap
        else:
            chain_state[f"{node.path}/{key}"] = value
    if kept:
        foreach.copy_(kept, new)  # into the tensors that checkpoints in memory share
