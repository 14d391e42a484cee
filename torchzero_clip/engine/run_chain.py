"""Runs the chain in a step that no gate has refused: from the gradients to the new parameters."""

from torchzero_clip.core.chain import Chain
from torchzero_clip.engine.listener import Listener
from torchzero_clip.engine.others import Others
from torchzero_clip.engine.parts import Parts
from torchzero_clip.engine.walk import RefusedByDevice, Walk
from torchzero_clip.functional.ways import may_look
from torchzero_clip.types import StateByParam

LACKS = (
    "If the device lacks this operation, let the CPU carry it out (PYTORCH_ENABLE_MPS_FALLBACK=1 for a GPU of Apple), "
    "or try fast=False, which takes other operations"
)


def run_chain(
    walk: Walk, chain: Chain, *, states: StateByParam, listener: Listener | None, parts: Parts | None
) -> bool:
    """Send the gradients down the chain, and change parameters and states. Return False if no process has gradients."""
    table, company = walk.table, walk.company
    if listener is not None:
        listener.begin(walk)
    try:
        if "closure" in walk.nodes.targets:
            walk.change_closure_gradients(chain)
        walk.run(chain, "", table.rows, walk.end)
        has_gradients = True
        if isinstance(company, Others):
            metrics = company.metrics(walk.nodes, walk.metrics, len(table.params) > 0)
            walk.metrics, has_gradients = metrics or {}, metrics is not None
        gradient_norms = walk.gradient_norms
        norms = gradient_norms.norms if company is None else None  # those of others may not be 0
        norms = walk.metrics.get(gradient_norms.norm_needs.norm_metric) if norms is None else norms
        if norms is not None and may_look(norms):
            walk.are_zero = not norms.any()
    except RefusedByDevice:
        walk.executor.abandon()
        return False
    except BaseException as error:
        if isinstance(error, NotImplementedError):
            error.add_note(LACKS)
        walk.refused_by.append("error")
        walk.executor.abandon()
        raise
    finally:
        states.update({param: state for param, state in table.new_states.items() if state})
    # Also entries without a key: while optimizer.state is empty, or lacks a parameter, torch.distributed.checkpoint
    # takes a step on zero gradients in a training that it saves, or raises when it loads
    states.update(table.new_states)
    if parts is not None and company is not None:
        parts.add(company.numbers, walk.metrics, table.params)
    return has_gradients
