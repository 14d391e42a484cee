"""What a transform that remembers norms reads and writes in a step: numbers of single tensors, or of all as one."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from torchzero_clip.core.entering import Flags
from torchzero_clip.core.settings import runs, same_in_all_groups
from torchzero_clip.core.transform import Transform
from torchzero_clip.functional import foreach
from torchzero_clip.functional.measure import Measured, Slicing, measure, scale_, summary
from torchzero_clip.functional.metric import parse_ord
from torchzero_clip.functional.shards import pack
from torchzero_clip.types import Ord, Setting, State, Target


def numbers(*keys: str, device: torch.device | None = None) -> dict[str, Tensor]:
    """Zeros, one 0-d tensor for each key, in which norms can be kept exactly whatever the dtype of the gradients."""
    return {key: torch.zeros((), dtype=torch.float64, device=device) for key in keys}


class Units:
    """The units of a statistic, each with a norm and a state of its own: single tensors, or all of them as one vector.

    Numbers come as vectors with one element per unit. A unit is `usable` if its gradient is finite and the statistic
    has started, which it does with the first gradient that is not all zero; others pass unchanged and leave no trace.

    Args:
        measured: What `measure` found in the tensors.
        flags: What the gradients were.
        states: The state of each tensor, with a number ``"started"``.
        settings: The settings of each tensor.
        joint: The state of all tensors as one vector, if they are one.
        takes_part: Whether a tensor with this setting is a unit; others are left alone.
    """

    def __init__(
        self,
        measured: Measured,
        flags: Flags,
        states: Sequence[State],
        settings: Sequence[Setting],
        joint: State | None,
        takes_part: Callable[[Setting], bool],
    ) -> None:
        self.measured = measured
        self.degree = measured.metric.degree
        self._joint = joint is not None
        self.indices = [i for i in measured.indices if joint is not None or takes_part(settings[i])]
        """The tensors that take part."""
        self.settings_of_tensors = [settings[i] for i in self.indices]
        if joint is None:
            self.states = [states[i] for i in self.indices]
            self.settings = self.settings_of_tensors
            kept = dict(zip(measured.indices, measured.roots, strict=True))
            self.roots = pack([kept[i] for i in self.indices])
            if len(self.indices) < len(settings):
                flags = flags.some(self.indices)
        else:
            self.states = [joint]
            self.settings = list(settings[:1])
            self.roots = self.roots_of(measured)
            flags = Flags(*(flag.view(1) for flag in flags.together()))
        self.started = self.get("started") > 0
        self.usable = flags.usable(self.started) & self.roots.isfinite()
        """Also, the norm is finite: no transform before this one has made an inf of a finite gradient."""

        self.starting = self.usable & self.started.logical_not()
        """This is the first gradient that is not all zero."""

    def roots_of(self, measured: Measured) -> Tensor:
        """The root of the metric of each unit, from what `measure` found in other tensors, those that take part."""
        return pack(measured.roots[:1]).narrow(0, 0, 1) if self._joint else pack(measured.roots)

    def size(self, roots: Tensor) -> Tensor:
        """The metric from its root, finite where that is."""
        return (roots**self.degree).clamp(max=torch.finfo(torch.float64).max) if self.degree > 1 else roots

    def get(self, key: str) -> Tensor:
        """A number of the state of each unit."""
        return pack([state[key] for state in self.states])

    def keep(self, **values: Tensor) -> None:
        """Write numbers to the states of usable units, which have started with that."""
        for key, value in {**values, "started": torch.ones_like(self.roots)}.items():
            kept = [state[key] for state in self.states]
            foreach.copy_(kept, list(torch.where(self.usable, value, pack(kept)).unbind()))

    def by_settings(self, rule: Callable[..., Tensor], *vectors: Tensor) -> Tensor:
        """What the rule makes of the settings and the elements of each unit; units that share settings together."""
        found = runs(self.settings)
        columns = [vector.split([own.stop - own.start for _, own in found]) for vector in vectors]
        rows = zip(*columns, strict=True)
        return torch.cat([rule(setting, *row) for (setting, _), row in zip(found, rows, strict=True)])

    def of_tensors(self, vector: Tensor) -> list[Tensor]:
        """The number of each tensor that takes part, from those of its unit."""
        return [vector.select(0, 0)] * len(self.indices) if self._joint else list(vector.unbind())

    def factors(self, vector: Tensor) -> Tensor:
        """Factors for `scale_`, from those of the usable units; 1 for everything else."""
        vector = torch.where(self.usable, vector, 1.0)
        if self._joint:
            return vector.expand(len(self.measured.parts))
        if len(self.indices) == len(self.measured.parts):
            return vector
        own, one = dict(zip(self.indices, vector.unbind(), strict=True)), torch.ones_like(vector.select(0, 0))
        return torch.stack([own.get(i, one) for i in self.measured.indices])


class NormStatistics(Transform):
    """Remembers norms, of single tensors or of all as one vector, and scales by them: subclasses implement `factors`.

    Args:
        defaults: As in `Transform`.
        ord: The metric.
        joint: All tensors have one norm.
        target: As in `Transform`.
    """

    keeps_statistics = True
    scaling = True

    def __init__(self, defaults: Setting, *, ord: Ord, joint: bool, target: Target) -> None:
        super().__init__(defaults, target=target)
        self.ord = ord
        self.joint = joint
        self.slicing = Slicing(parse_ord(ord), "global" if joint else None)

    def common_settings(self) -> Sequence[str]:
        """What must be the same in all groups if all tensors have one norm."""
        return list(self.defaults)

    def takes_part(self, setting: Setting) -> bool:
        """Whether a tensor with this setting has a statistic."""
        return True

    @abstractmethod
    def factors(self, units: Units, tensors: list[Tensor], states: Sequence[State]) -> Tensor:
        """Return the factor of each unit, and write to its state."""

    @override
    def check_groups(self, groups: Sequence[Setting]) -> None:
        """Raise if a setting is out of range, or groups differ in what has to be one value for all."""
        super().check_groups(groups)
        if self.joint:
            same_in_all_groups(self, groups, self.common_settings())

    @override
    def init_state(self, param: Tensor, setting: Setting) -> dict[str, Any]:
        """The norm of the step before; none where there is no limit, or one norm for all tensors."""
        return self.possible_state(param, setting) if self.takes_part(setting) else {}

    @override
    def possible_state(self, param: Tensor, setting: Setting) -> dict[str, Any]:
        return {} if self.joint else numbers("prev", "started", device=param.device)

    @override
    def init_global_state(self) -> dict[str, Any]:
        """The norm of the step before, if it is one for all tensors."""
        return numbers("prev", "started") if self.joint else {}

    @override
    def apply_tensors(
        self,
        tensors: list[Tensor],
        params: list[Tensor],
        grads: list[Tensor],
        loss: Tensor | float | None,
        states: Sequence[State],
        settings: Sequence[Setting],
    ) -> Sequence[Tensor]:
        """Scale, in place."""
        measured = measure(tensors, self.slicing)
        factors = torch.ones_like(pack(measured.roots))
        if any(self.takes_part(settings[i]) for i in measured.indices):
            joint = self.global_state if self.joint else None
            units = Units(measured, self.entering.flags(measured), states, settings, joint, self.takes_part)
            factors = units.factors(self.factors(units, tensors, states))
        self.metrics.update(summary(measured, scale_(measured, factors)))
        return tensors
