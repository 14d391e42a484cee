"""What a scaling does in a step: measure, find the factors, store. Ordinary and planned steps call it."""

from collections.abc import MutableMapping, Sequence
from typing import Any

from torch import Tensor

from torchzero_clip.core.kinds import Scaling
from torchzero_clip.core.nodes import Node
from torchzero_clip.core.step import Step
from torchzero_clip.engine.checked import check_factors, check_state
from torchzero_clip.engine.company import Company
from torchzero_clip.engine.judged import Judged
from torchzero_clip.functional.measure import Measured


def find_factors(
    node: Node,
    rows: Sequence[int],
    updates: list[Tensor],
    step: Step,
    judged: Judged,
    company: Company,
    chain_state: MutableMapping[str, Any],
) -> tuple[Measured, Tensor]:
    """The norms of updates, and the factors that a scaling computes from them. Its state is stored, after errors too.

    Args:
        node: The scaling.
        rows: The rows of the updates among the gradients.
        updates: The updates.
        step: What the scaling sees of the step.
        judged: The gradients before the first transform.
        company: Who else takes part in the step.
        chain_state: The state of the whole chain.
    """
    transform = node.transform
    assert isinstance(transform, Scaling)
    try:
        measured = judged.measured(node, updates)
        if transform.keeps_statistics:
            step.gradient_norms = judged.of(rows)
        measured = company.joined(node, measured, updates, step, judged)
        factors = transform.factors(measured, updates, step)
        check_factors(node, factors, measured)
        check_state(node, step)
        return measured, factors
    finally:
        company.store(node, step, chain_state)
