"""A step that is taken in parts: what was updated, and the metrics of all parts together."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchzero_clip.core.chain import Chain
from torchzero_clip.core.kinds import Scaling
from torchzero_clip.core.nodes import Nodes
from torchzero_clip.core.scope import NamedParam
from torchzero_clip.engine.numbers import Numbers, joint_metrics
from torchzero_clip.functional import foreach
from torchzero_clip.functional.processes import device_of
from torchzero_clip.functional.shards import locals_of


class Apart(NamedTuple):
    """Transforms, by path, that measure updates or state one tensor at a time, because an ordinary step does so."""

    updates: Set[str]
    state: Set[str]


class Parts:
    """The parts of one step, which `Modular.step` ends.

    Args:
        attach: Called when parameters were added to the optimizer.
    """

    def __init__(self, attach: Callable[[], None]) -> None:
        self.attach = attach
        self.updated: dict[int, Tensor] = {}
        """The parameters that were updated, in order, by id."""
        self.has_layout = True
        """True if all trainable parameters together have the layout that the fast way needs."""
        self.apart = Apart(set(), set())
        self._numbers: list[Numbers] = []
        self._metrics: dict[str, Tensor] = {}

    def plan(self, nodes: Nodes, params: Sequence[NamedParam], *, has_layout: bool) -> None:
        """Make the decisions that an ordinary step makes from all trainable parameters, to get the same bits.

        The fast way measures a list of tensors in one pass if all of them allow it. The tensors of one part may all
        allow it even if some other parameter does not.
        """
        self.has_layout = has_layout
        found: tuple[set[str], set[str]] = (set(), set())
        for node in nodes:
            transform = node.transform
            if isinstance(transform, Scaling) and all(isinstance(outer, Chain) for outer in node.outer):
                own = [named.param for named in params if node.scope.has(named)]
                for paths, dtype_of in zip(found, (_dtype, _dtype_of_state), strict=True):
                    if own and not _are_together(transform, own, dtype_of):
                        paths.add(node.path)
        self.apart = Apart(*found)

    def add(self, numbers: Numbers, metrics: dict[str, Tensor], params: Iterable[Tensor]) -> None:
        """Note that parameters were updated.

        Args:
            numbers: What was measured.
            metrics: The metrics that transforms have set themselves; those of the last part stay.
            params: The parameters.
        """
        self._numbers.append(numbers)
        self._metrics.update(metrics)
        self.updated.update({id(param): param for param in params})

    def refuse_second(self, params: Iterable[Tensor]) -> None:
        """Raise if a parameter was updated already."""
        if any(id(param) in self.updated for param in params):
            raise second_gradient()

    def end(self, nodes: Nodes, groups: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """Return the metrics of all parts as those of one step, and forget the parts.

        Args:
            nodes: The transforms.
            groups: The param groups.
        """
        device = device_of([param for group in groups for param in group["params"]])
        parts, metrics = self._numbers, self._metrics
        self._numbers, self._metrics, self.updated = [], {}, {}
        found = joint_metrics(nodes, torch.stack([numbers.vector(nodes, device) for numbers in parts]))
        paths = set[str]().union(*(numbers.paths for numbers in parts))
        found = metrics | {key: value for key, value in found.items() if key.rpartition("/")[0] in paths}
        return {key: found[key] for node in nodes for key in found if key.rpartition("/")[0] == node.path}


def _dtype(param: Tensor) -> torch.dtype:
    return param.dtype


def _dtype_of_state(param: Tensor) -> torch.dtype:
    return foreach.wide_dtype(param.dtype)


def _are_together(transform: Scaling, own: Sequence[Tensor], dtype_of: Callable[[Tensor], torch.dtype]) -> bool:
    """True if `measure` can measure all these parameters in one pass."""
    slicing, cuts = transform.slicing, type(transform).slice_dims is not Scaling.slice_dims
    alike = len({(dtype_of(param), param.device) for param in own}) == 1
    kinds = [[param for param in own if param.dtype == dtype] for dtype in {param.dtype for param in own}]
    if not alike or not all(foreach.are_plain(locals_of(kind), 0) for kind in kinds):
        return False
    if slicing.dim is None and not slicing.inverse_dims and not cuts:
        return min(map(Tensor.numel, own)) >= max(slicing.min_size, 1)
    dims = [transform.slice_dims(param) for param in own]
    shaped = zip([tuple(param.shape) or (1,) for param in own], dims, strict=True)
    return all(d and math.prod(shape[k] for k in d) >= slicing.min_size for shape, d in shaped)


def second_gradient() -> RuntimeError:
    """The error for a parameter that was updated already, and got another gradient in the same step."""
    return RuntimeError(
        "a parameter got a second gradient before optimizer.step(), and the backward has applied the first. Call "
        "optimizer.zero_grad() and then optimizer.step() to drop the second one and end the step. From then on call "
        "optimizer.step() after each backward, or take ordinary steps to accumulate gradients. Checkpoints of "
        "activations need use_reentrant=False"
    )
