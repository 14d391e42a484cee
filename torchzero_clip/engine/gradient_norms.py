"""What the gradients were before the first transform."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from torchzero_clip.core.chain import Chain
from torchzero_clip.core.kinds import Gate, Scaling
from torchzero_clip.core.nodes import Node, Nodes
from torchzero_clip.core.transform import Transform
from torchzero_clip.engine.checked import slice_dims
from torchzero_clip.engine.executor import Measurer
from torchzero_clip.functional.choice import where
from torchzero_clip.functional.measure import L2, DimsOf, Measured, measure
from torchzero_clip.functional.shards import elements_at, memories
from torchzero_clip.functional.slices import joint_of_norms


class NormNeeds:
    """What the transforms of a chain ask about the gradients before the first transform. Made once for each chain."""

    def __init__(self, nodes: Nodes) -> None:
        keepers = [node for node in nodes if node.transform.keeps_statistics]
        self.has_statistics = bool(keepers)  # True if a transform asks which gradients are finite and not zero
        # only statistics of this package have ``joint``, and only they count with scopes
        self.asks_jointly = all(getattr(n.transform, "joint", False) and not n.scope.limited for n in keepers)
        """True if one answer for all gradients together is enough."""
        first = next((node for node in nodes if not node.outer and not isinstance(node.transform, Gate)), None)
        self.joint_clip = first.path if first is not None and _clips_all_gradients(first.transform) else None
        """The path of the first transform, if it needs just the joint norm that gates may have measured."""
        self.first_scaling = first.path if first is not None and _scales_all_gradients(first.transform) else None
        """The path of the first transform, if it measures the gradients of all parameters."""
        self.norm_metric = "" if first is None or not _tells_zeros(first.transform) else f"{first.path}/norm"
        """The metric that is 0 only if all gradients are 0; empty if there is none."""
        scalings = [(node.path, node.transform) for node in nodes if isinstance(node.transform, Scaling)]
        overriding = [(path, s) for path, s in scalings if type(s).slice_dims is not Scaling.slice_dims]
        self.dims_of: dict[str, DimsOf] = {path: partial(slice_dims, scaling) for path, scaling in overriding}
        """The methods that return the dimensions of a slice, by path. Only overriding ones, because calls take time."""
        not_enough = [path for path, s in scalings if not (self.asks_jointly and s.slicing.is_joint_l2)]
        self.needs_each = set(not_enough if self.has_statistics else ())
        """The paths of scalings that have to measure each tensor, because statistics need more than the joint norm."""


@dataclass
class GradientNorms:
    """The norms of the gradients before the first transform: each is measured once, and only if it is asked for.

    Statistics find the usable gradients by them. Gates and ``nonfinite`` decide by them whether the step is taken. A
    listener stores them.
    """

    norm_needs: NormNeeds
    grads: list[Tensor]
    measurer: Measurer
    listens: bool = False  # a `Listener` needs ``before``
    norms: Tensor | None = None  # a norm of each gradient, or their joint norm, once it was measured
    norm_of_decision: Tensor | None = None
    """The joint L2 norm of the gradients of all processes, once gates have measured it: 0-d."""
    before: Tensor | None = None  # the L2 norm of each gradient, once it was measured for a listener
    taken: Tensor | None = None
    """A 0-d boolean, if the device decides whether the step is taken. Statistics see norms of NaN if it is not."""

    def measure(self, *, jointly: bool = False) -> Tensor:
        """The L2 norm of each gradient, equal on all ranks, in float64. ``jointly``: the joint norm if it is enough."""
        if self.norms is None:
            # joint statistics only ask whether it is finite and not 0, which the joint norm of the gradients answers
            jointly = jointly and self.norm_needs.asks_jointly
            joint = self.measurer.joint_norm(self.grads, beside=self.listens) if jointly else None
            if joint is None:
                self.norms = norms = self.measurer.norms_of_each(self.grads)
            else:
                total, norms = joint
                self.norms = total.view(1)
            self._note(norms)
        return self.norms

    def of_rows(self, rows: Sequence[int]) -> Tensor:
        """The norm of the gradient of each row, or the joint norm if statistics need only that."""
        norms = self.measure()
        norms = norms if self.taken is None else where(self.taken, norms, torch.nan)
        return norms if norms.numel() < len(self.grads) else elements_at(norms, rows)

    def of_each(self) -> Tensor:
        """The norm of the gradient of each row, also if statistics need only the joint norm."""
        norms = self.measure()
        return norms if len(norms) == len(self.grads) else self.measurer.norms_of_each(self.grads)

    def for_decision(self, scopes: Sequence[list[int]]) -> list[Tensor]:
        """The joint norm of all gradients; 1 if some gradient is not finite, else 0; the joint norm of each scope."""
        total, finite = self.total_and_finite()
        of_scopes = [self.joint_of(rows, total) for rows in scopes]
        return [total, finite.logical_not().to(total.dtype), *of_scopes]

    def joint_of(self, rows: Sequence[int], total: Tensor) -> Tensor:
        """The joint norm of some rows: ``total`` if these are all."""
        return total if len(rows) == len(self.grads) else joint_of_norms(self.of_rows(rows), 2.0)

    def total_and_finite(self) -> tuple[Tensor, Tensor]:
        """The joint norm of all gradients, and whether all are finite: 0-d."""
        norms = self.measure()
        # the squares of other dtypes cannot overflow in float64, so the sum is finite if all norms are
        dtypes = set[torch.dtype]() if norms.is_cpu else {grad.dtype for grad in self.grads}
        if dtypes and norms.dtype == torch.float64 and torch.float64 not in dtypes:
            total = torch.linalg.vector_norm(norms)
            return total, total < torch.inf
        total = joint_of_norms(norms, 2.0) if len(norms) != 1 else norms.squeeze(0)
        return total, norms.isfinite().all()

    def total(self) -> Tensor | None:
        """The joint norm of the gradients, to the bit as in `measure_scaling`; None if that measures each alone."""
        if self.norms is not None:
            return self.norms.squeeze(0) if self.norms.numel() < len(self.grads) else None
        total, norms = self.measurer.joint_norm(self.grads, beside=self.listens) or (None, None)
        if norms is not None:
            self._note(norms)
        return total

    def before_change(self, transform: Transform) -> None:
        """Called before a transform changes updates, because later statistics need the norms of the gradients."""
        if self.norm_needs.has_statistics and not _measures_gradients(transform):
            self.measure()

    def before_first(self, transform: Transform) -> None:
        """Called before each transform if there is a listener, whose norms are those before the first transform."""
        if not (isinstance(transform, Gate) or _measures_gradients(transform)):
            self._note()

    def before_closure(self) -> None:
        """Called before the gradients that a closure has left are changed."""
        if self.norm_needs.has_statistics:
            self.measure()
        self._note()

    def forget(self) -> None:
        """Called after the gradients were changed: later statistics judge those that enter the rest of the chain."""
        self.norms = self.norm_of_decision = None

    def measure_scaling(self, node: Node, updates: list[Tensor]) -> Measured:
        """The norms of the updates of a scaling on this process, which may be those of the gradients too."""
        needs, known, total, count = self.norm_needs, self.norms, self.norm_of_decision, len(updates)
        if known is not None and node.path == needs.joint_clip and len(known) < count:
            total = known.squeeze(0)  # gates have measured the gradients jointly
            return Measured(L2, list(range(count)), total.expand(count), total, memories(updates), joint=True)
        resources = self.measurer.resources(updates)
        is_alone = self.measurer.process_group is None
        if known is not None and total is not None and node.path == needs.first_scaling and is_alone:
            # gates have measured each gradient
            is_of_each = not known.is_cpu and len(known) == count == len(self.grads)
            resources = resources._replace(norms=(total, known) if is_of_each else None)
        each, beside = node.path in needs.needs_each, self.listens and self.before is None
        resources = resources._replace(name=node.path, beside=beside, each=each)
        slicing = node.transform.slicing  # pyright: ignore
        measured = measure(updates, slicing, needs.dims_of.get(node.path), resources)
        # the first updates that are measured are the gradients: see `before_change` and `before_first`
        if known is None and needs.has_statistics:
            is_joint = not each and len(measured.vector) > 0
            self.norms = measured.first if is_joint else measured.tensor_norms
            self.measure()  # if the scaling has not measured each tensor
        if beside:
            self._note(measured.tensor_norms if measured.metric == L2 else None)
        return measured

    def _note(self, norms: Tensor | None = None) -> None:
        """Store the L2 norms of the gradients for a listener; None to measure them."""
        if self.listens and self.before is None:
            self.before = self.measurer.norms_of_each(self.grads) if norms is None else norms


def _clips_all_gradients(transform: Transform) -> bool:
    measures_all = isinstance(transform, Scaling) and transform.slicing.is_joint_l2
    return measures_all and not (transform.scope.limited or transform.keeps_statistics or transform.target != "update")


def _scales_all_gradients(transform: Transform) -> bool:
    return isinstance(transform, Scaling) and transform.target == "update" and _measures_gradients(transform)


def _tells_zeros(transform: Transform) -> bool:
    """True if the metric ``norm`` of the first transform is 0 only if all gradients are 0."""
    if not (isinstance(transform, Scaling) and _measures_gradients(transform)):
        return False
    slicing, has_own_slices = transform.slicing, type(transform).slice_dims is not Scaling.slice_dims
    is_whole = slicing.dim is None and not (slicing.inverse_dims or slicing.min_size > 1 or has_own_slices)
    # other metrics, such as the sum, may be 0 for other gradients too
    return (is_whole or slicing.dim == "global") and slicing.metric.is_power and slicing.metric.p > 0


def _measures_gradients(transform: Transform) -> bool:
    """True if a transform, as the first of the chain, measures the gradients of all parameters."""
    # with a scope it measures only some gradients, and with another target it measures parameters
    if transform.scope.limited or transform.target not in ("update", "update_difference", "grad"):
        return False
    if isinstance(transform, Chain):
        first = next(iter(transform.transforms.values()), None)
        return first is not None and _measures_gradients(first)
    return isinstance(transform, Scaling)
