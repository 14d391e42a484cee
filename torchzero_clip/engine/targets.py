"""The targets of transforms: which tensors a transform gets, and where its result goes."""

from collections.abc import Callable, Mapping
from typing import Protocol

from torch import Tensor

from torchzero_clip.core.nodes import Node, Nodes
from torchzero_clip.engine.executor import Executor
from torchzero_clip.functional import foreach
from torchzero_clip.types import Target


class Applies(Protocol):
    """What a target needs of the walk."""

    @property
    def nodes(self) -> Nodes:
        """The transforms."""
        ...

    @property
    def params(self) -> list[Tensor]:
        """The parameters."""
        ...

    @property
    def grads(self) -> list[Tensor]:
        """Their gradients."""
        ...

    @property
    def executor(self) -> Executor:
        """Reads and changes the updates."""
        ...

    def apply(self, node: Node, rows: list[int], updates: list[Tensor]) -> list[Tensor]:
        """Return the result of a transform for tensors, to which it may write."""
        ...


def change_gradients(walk: Applies, node: Node, rows: list[int]) -> None:
    """Write the transformed gradients over the gradients."""
    grads = [walk.grads[i] for i in rows]
    foreach.copy_(grads, walk.apply(node, rows, foreach.clone(grads)))


def _do_nothing(walk: Applies, node: Node, rows: list[int]) -> None:
    """The transform was applied by `Walk.change_closure_gradients`."""


def _change_params(walk: Applies, node: Node, rows: list[int]) -> None:
    params = [walk.params[i] for i in rows]
    foreach.copy_(params, walk.apply(node, rows, foreach.clone(params)))


def _pass_params_difference(walk: Applies, node: Node, rows: list[int]) -> None:
    params = [walk.params[i] for i in rows]
    walk.executor.memory.put(rows, foreach.subtract(params, walk.apply(node, rows, foreach.clone(params))))


def _pass_update_difference(walk: Applies, node: Node, rows: list[int]) -> None:
    # a later transform with target="grad" would change an update that is the gradient itself
    updates = walk.executor.read(rows, writable="grad" in walk.nodes.targets)
    walk.executor.memory.put(rows, foreach.subtract(updates, walk.apply(node, rows, foreach.clone(updates))))


TARGETS: Mapping[Target, Callable[[Applies, Node, list[int]], None]] = {
    "grad": change_gradients,
    "closure": _do_nothing,
    "params_direct": _change_params,
    "params_difference": _pass_params_difference,
    "update_difference": _pass_update_difference,
}
"""All targets but "update": the updates themselves are changed by the executor."""
