"""Scalings that store norms: one for each tensor, or one of all tensors together."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from torchzero_clip.checks import same_in_all_groups
from torchzero_clip.core.kinds import Scaling
from torchzero_clip.core.states import zero_numbers
from torchzero_clip.core.step import Step, usable_gradients
from torchzero_clip.functional import foreach
from torchzero_clip.functional.choice import places, where
from torchzero_clip.functional.clip import within
from torchzero_clip.functional.dtypes import moved, widened
from torchzero_clip.functional.measure import Measured, Slicing, by_setting
from torchzero_clip.functional.shards import elements_at
from torchzero_clip.functional.slices import joint_of_norms
from torchzero_clip.functional.ways import extent, may_look
from torchzero_clip.types import NewState, Ord, Setting, Target


class Tracked:
    """The norms of a step, and numbers stored in earlier steps: one for each tensor, or one for all if ``joint``."""

    # A statistic starts with the first gradient that is finite and not all zero. From then on, a norm is `usable` if it
    # and its gradient are finite. Other updates pass unchanged and do not change the statistic. Tensors have one if
    # `takes_part` returns True for their settings. With `joint`, the stored numbers are state of the whole chain.

    def __init__(self, measured: Measured, step: Step, joint: bool, takes_part: Callable[[Setting], bool]) -> None:
        self.degree = measured.metric.degree
        self.joint = joint
        self.step = step
        self._count = len(measured.indices)
        everybody = joint or all(takes_part(setting) for setting, _ in step.by_setting())
        numbered = enumerate(measured.indices)
        self._taken = None if everybody else [k for k, i in numbered if takes_part(step.settings[i])]
        """Which of the measured tensors have a statistic, by position; None for all."""
        self.indices = measured.indices if self._taken is None else [measured.indices[k] for k in self._taken]
        """The index of each tensor with a statistic."""
        self._rows = None if len(self.indices) == len(step.params) else self.indices
        whole = self._rows is None
        self.shared = step.by_setting() if whole else by_setting([step.settings[i] for i in self.indices])
        """Each setting, with the range of ``indices`` that share it."""
        self.norms = self.of(measured)
        self._measured = measured
        self._marks = self["started"]  # 0 before the start
        self._all_marked = False
        self.is_usual = self._are_usual()  # all are known to have started, and norms to be usable and not 0
        self.are_gradients = step.gradient_norms is self.norms
        """True if ``norms`` is the object ``step.gradient_norms``. False is always right, but slower."""
        if self.is_usual:
            self.usable = self.started  # True where gradient and norm are usable
        else:
            usable = usable_gradients(step, self._marks, None if joint else self._rows, joint=joint)
            # an earlier transform may make an inf of a finite gradient
            self.usable = usable if self.are_gradients else usable & (self.norms < torch.inf)

    @property
    def started(self) -> Tensor:
        """True where a statistic has started before this step. Read it before `keep`, which starts more of them."""
        return self._marks > 0

    def _are_usual(self) -> bool:
        of_gradients = self.step.gradient_norms
        if of_gradients is None or not may_look(self.norms):
            return False
        smallest, largest = extent(self.norms)
        if not (smallest > 0 and largest < torch.inf):  # also NaN
            return False
        marks = extent(self._marks)
        self._all_marked = marks == (1.0, 1.0)
        if not marks[0] > 0:
            return False
        return of_gradients is self.norms or extent(of_gradients)[1] < torch.inf

    def restrict(self, chosen: Tensor) -> None:
        """From now on, count a norm as usable only if it is also chosen."""
        self.usable, self.is_usual = self.usable & chosen, False

    def limits(self, values: Tensor) -> Tensor:
        """The limits of usable norms whose statistic has started before this step, and inf for the others."""
        return values if self.is_usual else where(self._marks.logical_and(self.usable), values, torch.inf)

    def limited(self, sizes: Tensor, limits: Tensor) -> tuple[Tensor, Tensor]:
        """Norms or metrics, cut to their limits, and the ratio to those before: 1 for one within its limit."""
        limited = torch.minimum(sizes, limits)
        # the quotient may be 0 / 0 or inf / inf, for squares even of usual norms
        return limited, limited / sizes if self.is_usual and self.degree == 1 else within(sizes, limits)

    def where_usable(self, factors: Tensor) -> Tensor:
        """The factors of usable norms, and 1 for the others."""
        return factors if self.is_usual else where(self.usable, factors, 1.0)

    def of(self, measured: Measured) -> Tensor:
        """The norms of the tensors with a statistic, from what `measure` returned."""
        if self.joint:
            # state is on the device of the first parameter, and the first gradient may be on another one
            return moved(measured.first, self.step.global_state["started"].device)
        is_subset = self._taken is not None and len(measured.indices) > len(self._taken)
        return elements_at(measured.vector, self._taken or []) if is_subset else measured.vector

    def averaged(
        self, key: str, updates: list[Tensor], slicing: Slicing, *, from_update: bool
    ) -> tuple[list[Tensor], Measured]:
        """Move the averages under a key towards usable updates. Return them, and what was measured of them.

        With ``from_update``, they start at their first update.
        """
        tools, usable, started = self.step.tools, self.per_tensor(self.usable), self.per_tensor(self._marks)
        averages, changed = self.step.stored.draft(key, self._rows)
        norms = tools.average_(averages, updates, self.shared, usable, started, into=changed, from_update=from_update)
        return changed, tools.measure(changed, slicing, norms)

    def __getitem__(self, key: str) -> Tensor:
        """The stored numbers under one key, not to be used after `keep`."""
        if self.joint:
            return widened(self.step.global_state[key]).view(1)
        return self.step.live_numbers(key, self._rows)

    def keep(self, **values: Tensor) -> None:
        """Where the norm is usable, store numbers and mark the statistic as started."""
        if not may_look(self.usable) and self._keep_in_place(values):
            return
        if "started" not in values and not (self.is_usual and self._all_marked):
            values["started"] = torch.ones_like(self.norms)
        if not (self.is_usual or (may_look(self.usable) and bool(self.usable.all()))):
            values = {key: torch.where(self.usable, value, self[key]) for key, value in values.items()}
        if self.joint:
            stored = [self.step.global_state[key] for key in values]
            foreach.copy_(stored, [value.squeeze(0) for value in values.values()])
            return
        for key, value in values.items():
            self.step.keep(key, value, self._rows)

    def _keep_in_place(self, values: dict[str, Tensor]) -> bool:
        """Do the same in one launch for each key. False if numbers are not elements of vectors in the widest dtype."""
        keys = {**values, "started": self._marks}
        stored = {key: vector for key in keys if (vector := self._stored(key)) is not None}
        if len(stored) < len(keys) or any(vector.dtype != self.norms.dtype for vector in stored.values()):
            return False
        for key, vector in stored.items():
            if key in values:
                torch.where(self.usable, values[key], vector, out=vector)
            else:
                vector.masked_fill_(self.usable, 1.0)
        return True

    def _stored(self, key: str) -> Tensor | None:
        """The stored numbers under one key as a vector, to be changed in place; None if they cannot be one."""
        return self.step.global_state[key].view(1) if self.joint else self.step.stored.changing_vector(key, self._rows)

    def remember(self) -> Tensor:
        """Write usable norms over the oldest ones in the ring, and return it, with NaN where it is still empty."""
        # the statistic stores the count of its norms under "started"
        ring, count = self.step.global_state["ring"], self.step.global_state["started"]
        put_(ring, count, self.norms, self.usable)
        return filled(ring, count)

    def show(self, **metrics: Tensor) -> None:
        """Add metrics of the transform, one number each."""
        self.step.metrics.update({name: value.reshape(()) for name, value in metrics.items()})

    def joint_norm(self) -> tuple[Tensor, Tensor]:
        """The L2 norm of all tensors together, and whether all gradients and all norms are finite: 0-d tensors."""
        norm = self._measured.total
        finite = norm < torch.inf  # False for NaN
        if not self.are_gradients:
            finite = finite & self.step.finite.all().to(norm.device)
        if self.step.tools.process_group is None:
            return norm, finite
        norms, are_finite = self.step.tools.gathered(norm, finite)
        return joint_of_norms(norms, 2.0), are_finite.all()

    def root(self, ratios: Tensor) -> Tensor:
        """Ratios of norms, from ratios of metrics."""
        return ratios ** (1 / self.degree) if self.degree > 1 else ratios

    def metric(self, norms: Tensor) -> Tensor:
        """The metric of norms: for 'var' their squares, clamped to the range of the dtype; else the norms."""
        return (norms**self.degree).clamp(max=torch.finfo(norms.dtype).max) if self.degree > 1 else norms

    def by_setting(self, rule: Callable[[Setting, Tensor], Tensor] | Callable[..., Tensor], *vectors: Tensor) -> Tensor:
        """Apply ``rule`` to each setting and the elements of the vectors that share it, and concatenate."""
        if self.joint or len(self.shared) == 1:
            return rule(self.shared[0][0], *vectors)
        columns = [vector.split([span.stop - span.start for _, span in self.shared]) for vector in vectors]
        return torch.cat([rule(setting, *parts) for (setting, _), *parts in zip(self.shared, *columns, strict=True)])

    def per_tensor(self, vector: Tensor) -> Tensor:
        """The element of a vector that belongs to each tensor with a statistic."""
        return vector.expand(len(self.indices)) if self.joint else vector

    def factors(self, vector: Tensor) -> Tensor:
        """One factor for each measured tensor, from one for each statistic."""
        if self.joint:
            return vector.expand(self._count)
        if self._taken is None:
            return vector
        by_place, one = dict(zip(self._taken, vector.unbind(), strict=True)), torch.ones_like(vector.select(0, 0))
        return torch.stack([by_place.get(k, one) for k in range(self._count)])


def put_(ring: Tensor, count: Tensor, value: Tensor, where: Tensor) -> None:
    """Write ``value`` over the oldest one in ``ring`` if ``where`` is true, and count it. The others have one element.

    Float32 counts only to 2**24, so in float32 the count goes back by the size of the ring: the next place stays.
    """
    torch.where((places(ring) == count % len(ring)) & where, value.to(ring), ring, out=ring)
    count.add_(where.view_as(count))
    if count.dtype != torch.float64:
        foreach.copy_([count], [torch.where(count >= 2 * len(ring), count - len(ring), count)])


def filled(ring: Tensor, count: Tensor) -> Tensor:
    """A ring buffer with NaN in places that were not written yet, which `Tensor.nanquantile` leaves out."""
    return where(places(ring) < count, ring, torch.nan)


def averaged(setting: Setting, average: Tensor, new: Tensor, key: str = "beta") -> Tensor:
    return average.lerp(new, 1 - setting[key])


class NormStatistics(Scaling):
    """Stores norms, of each tensor or, if ``joint``, of all together. Subclasses implement `factors_of`."""

    keeps_statistics = True

    common: ClassVar[Sequence[str] | None] = None
    """The settings that must be the same in all groups if all tensors have one norm; None for all settings."""

    def __init__(
        self, defaults: Setting, *, ord: Ord, joint: bool, target: Target = "update", name: str | None = None
    ) -> None:
        super().__init__(defaults, ord=ord, dim="global" if joint else None, target=target, name=name)
        self.joint = joint

    @abstractmethod
    def factors_of(self, tracked: Tracked, updates: list[Tensor]) -> Tensor:
        """Return the factor of each norm, 1 where it is not usable, and store what the next step needs."""

    def takes_part(self, setting: Setting) -> bool:
        """True if tensors with this setting have a statistic."""
        return True

    @override
    def check_groups(self, settings: Sequence[Setting]) -> None:
        super().check_groups(settings)
        if self.joint:
            same_in_all_groups(self, settings, self.defaults if self.common is None else self.common)

    @override
    def keeps_refused(self, settings: Sequence[Setting]) -> bool:
        """True, because statistics do not follow norms that are not finite."""
        return True

    @override
    def init_state(self, param: Tensor, setting: Setting) -> NewState:
        """The norm of the step before. Empty for a tensor without a statistic, and if all tensors share a norm."""
        return self.possible_state(param, setting) if self.takes_part(setting) else {}

    @override
    def possible_state(self, param: Tensor, setting: Setting) -> NewState:
        return {} if self.joint else zero_numbers("prev", "started", device=param.device)

    @override
    def has_state(self) -> bool:
        """False if all tensors share a norm, and a subclass adds nothing."""
        return not self.joint or type(self).possible_state is not NormStatistics.possible_state

    @override
    def init_global_state(self) -> NewState:
        """The norm of the step before, if all tensors have one."""
        return zero_numbers("prev", "started") if self.joint else {}

    @override
    def factors(self, measured: Measured, updates: list[Tensor], step: Step) -> Tensor:
        if not any(self.takes_part(setting) for setting, _ in step.by_setting()):
            return torch.ones_like(measured.vector)
        tracked = Tracked(measured, step, self.joint, self.takes_part)
        return (
            tracked.factors(self.factors_of(tracked, updates)) if tracked.indices else torch.ones_like(measured.vector)
        )
