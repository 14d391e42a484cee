"""The targets of transforms: which tensors a transform gets, and where its result goes."""

from collections.abc import Callable

from torch import Tensor

from torchzero_clip.engine.executor import Executor
from torchzero_clip.functional import foreach
from torchzero_clip.types import Target

Apply = Callable[[list[Tensor]], list[Tensor]]  # returns the result of a transform for tensors, to which it may write


def change_gradients(grads: list[Tensor], apply: Apply) -> None:
    """Write the transformed gradients over the gradients."""
    foreach.copy_(grads, apply(foreach.clone(grads)))


def change(
    target: Target, executor: Executor, rows: list[int], params: list[Tensor], grads: list[Tensor], apply: Apply
) -> None:
    """Apply a transform of any target but "update": the executor changes the updates itself."""
    put = executor.memory.put
    match target:
        case "grad":
            change_gradients(grads, apply)
        case "params_direct":
            foreach.copy_(params, apply(foreach.clone(params)))
        case "params_difference":
            put(rows, foreach.subtract(params, apply(foreach.clone(params))))
        case "update_difference":
            updates = executor.read(rows)
            removed = foreach.clone(updates)  # before a child with target="grad" changes the gradient
            foreach.subtract_(removed, apply(foreach.clone(updates)))
            put(rows, removed)
        case "closure" | "update":
            pass  # "closure": `Walk.change_closure_gradients` has applied it; "update": `Walk` does not call this
