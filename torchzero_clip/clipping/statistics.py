"""Scalings that remember norms: those of single tensors, or one of all tensors together."""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from torchzero_clip.core.kinds import Scaling
from torchzero_clip.core.step import Step
from torchzero_clip.functional import foreach
from torchzero_clip.functional.measure import Measured, by_setting
from torchzero_clip.functional.shards import pack
from torchzero_clip.types import Ord, Setting, State, Target


def numbers(*keys: str, device: torch.device | None = None) -> dict[str, Tensor]:
    """Zeros, one 0-d tensor for each key, in which norms can be kept exactly whatever the dtype of the gradients."""
    return {key: torch.zeros((), dtype=torch.float64, device=device) for key in keys}


def same_in_all_groups(owner: object, groups: Sequence[Setting], keys: Iterable[str]) -> None:
    """Raise if groups differ in a setting of a transform that has one statistic for all tensors."""
    for key in keys:
        found = [settings[key] for settings in groups]
        if others := [value for value in found if value != found[0]]:
            raise ValueError(
                f"{key} must be the same in every param group for {owner!r}, which has one statistic for all "
                f"tensors; got {found[0]} and {others[0]}"
            )


class Tracked:
    """The norms of a step and the numbers remembered of those before: vectors of one element per tensor, or of one.

    A statistic starts with the first gradient that is finite and not all zero. From then on, a norm is `usable` if
    it and its gradient are finite. Other updates pass unchanged, and do not change the statistic.

    Args:
        measured: The norms of the tensors.
        step: The step.
        joint: All tensors have one norm, and its numbers are state of the whole chain.
        takes_part: Returns True for settings with which a tensor has a statistic.
    """

    def __init__(self, measured: Measured, step: Step, joint: bool, takes_part: Callable[[Setting], bool]) -> None:
        self.degree = measured.metric.degree
        self.joint = joint
        self._count = len(measured.indices)
        self._taken = [k for k, i in enumerate(measured.indices) if joint or takes_part(step.settings[i])]
        self.indices = [measured.indices[k] for k in self._taken]
        """The index of each tensor with a statistic."""
        self.settings_of_tensors = [step.settings[i] for i in self.indices]
        self._settings = step.settings[:1] if joint else self.settings_of_tensors
        self._states: list[State] = [step.global_state] if joint else [step.states[i] for i in self.indices]
        self.norms = self.of(measured)
        self.started = self["started"] > 0
        usable = step.usable(self.started, indices=None if joint else self.indices, joint=joint)
        self.usable = usable & self.norms.isfinite()
        """The norm is finite too: no transform before this one has made an inf of a finite gradient."""
        self.starting = self.usable & self.started.logical_not()
        """This is the first gradient that is not all zero."""

    def of(self, measured: Measured) -> Tensor:
        """The norms that `measure` found in the tensors of this step, or in others of the same shapes."""
        if self.joint:
            return pack(measured.norms[:1]).narrow(0, 0, 1)
        return pack(
            [measured.norms[k] for k in self._taken] if len(measured.norms) > len(self._taken) else measured.norms
        )

    def __getitem__(self, key: str) -> Tensor:
        """One of the remembered numbers."""
        return pack([state[key] for state in self._states])

    def keep(self, **values: Tensor) -> None:
        """Remember numbers of usable norms. A statistic has started with that."""
        for key, value in {**values, "started": torch.ones_like(self.norms)}.items():
            kept = [state[key] for state in self._states]
            foreach.copy_(kept, list(torch.where(self.usable, value, pack(kept)).unbind()))

    def metric(self, norms: Tensor) -> Tensor:
        """The metric of norms: for 'var' their squares, clamped to the range of float64; else the norms themselves."""
        return (norms**self.degree).clamp(max=torch.finfo(torch.float64).max) if self.degree > 1 else norms

    def by_setting(self, rule: Callable[..., Tensor], *vectors: Tensor) -> Tensor:
        """What ``rule`` makes of each setting and the elements of the vectors that share it."""
        shared = by_setting(self._settings)
        columns = [vector.split([own.stop - own.start for _, own in shared]) for vector in vectors]
        rows = zip(*columns, strict=True)
        return torch.cat([rule(setting, *row) for (setting, _), row in zip(shared, rows, strict=True)])

    def per_tensor(self, vector: Tensor) -> list[Tensor]:
        """The element of a vector that belongs to each tensor with a statistic."""
        return [vector.select(0, 0)] * len(self.indices) if self.joint else list(vector.unbind())

    def factors(self, vector: Tensor) -> Tensor:
        """One factor per measured tensor, from those of the statistics; 1 where the norm is not usable."""
        vector = torch.where(self.usable, vector, 1.0)
        if self.joint:
            return vector.expand(self._count)
        if len(self._taken) == self._count:
            return vector
        own, one = dict(zip(self._taken, vector.unbind(), strict=True)), torch.ones_like(vector.select(0, 0))
        return torch.stack([own.get(k, one) for k in range(self._count)])


class NormStatistics(Scaling):
    """Remembers norms, of single tensors or of all as one vector, and scales by them: subclasses implement `limit`.

    Args:
        defaults: As in `Transform`.
        ord: The metric.
        joint: All tensors have one norm.
        target: As in `Transform`.
        name: As in `Transform`.
    """

    keeps_statistics = True

    def __init__(
        self, defaults: Setting, *, ord: Ord, joint: bool, target: Target = "update", name: str | None = None
    ) -> None:
        super().__init__(defaults, ord=ord, dim="global" if joint else None, target=target, name=name)
        self.joint = joint

    @abstractmethod
    def limit(self, tracked: Tracked, updates: list[Tensor], states: list[State]) -> Tensor:
        """Return the factor of each norm, and remember what the next step needs."""

    def common_settings(self) -> Sequence[str]:
        """The settings that must be the same in all groups if all tensors have one norm."""
        return list(self.defaults)

    def takes_part(self, setting: Setting) -> bool:
        """True if tensors with this setting have a statistic."""
        return True

    @override
    def check_groups(self, settings: Sequence[Setting]) -> None:
        """Raise if a setting is out of range, or groups differ in what has to be one value for all."""
        super().check_groups(settings)
        if self.joint:
            same_in_all_groups(self, settings, self.common_settings())

    @override
    def init_state(self, param: Tensor, setting: Setting) -> dict[str, Any]:
        """The norm of the step before; none without a limit, or with one norm for all tensors."""
        return self.possible_state(param, setting) if self.takes_part(setting) else {}

    @override
    def possible_state(self, param: Tensor, setting: Setting) -> dict[str, Any]:
        return {} if self.joint else numbers("prev", "started", device=param.device)

    @override
    def init_global_state(self) -> dict[str, Any]:
        """The norm of the step before, if all tensors have one."""
        return numbers("prev", "started") if self.joint else {}

    @override
    def factors(self, measured: Measured, updates: list[Tensor], step: Step) -> Tensor:
        """The factor of each tensor."""
        if not any(self.takes_part(step.settings[i]) for i in measured.indices):
            return torch.ones_like(pack(measured.norms))
        tracked = Tracked(measured, step, self.joint, self.takes_part)
        return tracked.factors(self.limit(tracked, updates, step.states))
