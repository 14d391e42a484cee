"""Transforms that act on each element alone, so that they may run on parts of tensors or on several joined."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from torchzero_clip.core.step import Step
from torchzero_clip.core.transform import TensorwiseTransform, overridden_last
from torchzero_clip.functional.foreach import reals
from torchzero_clip.functional.measure import share
from torchzero_clip.functional.scratch import Scratch
from torchzero_clip.types import Setting, State


class Flags(NamedTuple):
    """What the elements of a tensor have in common in this step: vectors with one element for each parameter."""

    usable: Tensor
    """True if the update enters the statistic, which then limits it."""
    started: Tensor
    """True if an earlier update has entered the statistic."""
    numbers: tuple[Tensor, ...] = ()
    """What else `Elementwise.change_` needs to know of a tensor, such as a limit."""


class Elementwise(TensorwiseTransform):
    """Acts on each element alone, with state of the same shape: subclasses implement `change_`.

    The optimizer calls it with whole tensors, with parts of them, or with several joined. It reports one metric,
    ``clipped``: the share of elements that changed.
    """

    keys: ClassVar[Sequence[str]] = ()
    """The keys of the state that is shaped like the parameter."""

    reads_tensors: ClassVar[bool] = False
    """True if `flags` reads the updates, so that operations before this one cannot be postponed."""

    @abstractmethod
    def change_(self, x: Tensor, state: Sequence[Tensor], setting: Setting, usable: Tensor, started: Tensor) -> Tensor:
        """Change elements and their state in place, and return how many elements changed.

        Args:
            x: Real elements.
            state: State of the same shape, and after it the numbers of `Flags`: each one for all elements, or one for
                each.
            setting: The settings.
            usable: As in `Flags`: one boolean for all elements, or one for each.
            started: As ``usable``.
        """

    def change_usual_(
        self, x: Tensor, result: Tensor, state: Sequence[Tensor], setting: Setting, scratch: Scratch
    ) -> Tensor | None:
        """Do the same in fewer operations, or return None. Elements are finite, statistics usable and started.

        It is called only where reading a number does not wait for a device.

        Args:
            x: Real elements in a vector, not to be modified unless ``result`` is the same.
            result: Where the changed elements go.
            state: As in `change_`.
            setting: As in `change_`.
            scratch: Memory for intermediate results.
        """
        return None

    def has_usual_way(self) -> bool:
        """False if a subclass overrides `change_` without `change_usual_`, so that their results may differ."""
        return overridden_last(type(self), "change_usual_", "change_") == "change_usual_"

    def may_wait(self, step: Step) -> bool:
        """True if the dtype can hold all settings, so that a postponed call cannot raise."""
        largest = torch.finfo(step.params[0].dtype).max
        values = [value for setting, _ in step.by_setting() for value in setting.values() if value is not None]
        return all(abs(value) <= largest for value in values)

    def is_elementwise(self) -> bool:
        """False if a subclass overrides ``apply_tensors`` or ``apply_tensor``, and so may do more than `change_`."""
        return overridden_last(type(self), "change_", "apply_tensors", "apply_tensor") == "change_"

    def acts_with(self, setting: Setting) -> bool:
        """False for settings with which updates pass unchanged."""
        return True

    def flags(self, updates: Sequence[Tensor], step: Step, rows: Sequence[int] | None) -> Flags:
        """Return which statistics are usable and have started, and mark the usable ones as started.

        Args:
            updates: The updates of all parameters, to be read only with ``reads_tensors``, and not to be modified.
            step: The step.
            rows: The indices of the parameters that it acts on; None for all.
        """
        count = len(step.params) if rows is None else len(rows)
        all_true = torch.ones((), dtype=torch.bool, device=step.params[0].device).expand(count)
        if not self.keeps_statistics:
            return Flags(all_true, all_true)
        started = step.live_numbers("started", rows) > 0
        usable = step.usable(started, indices=rows)
        step.keep("started", (usable | started).double(), rows)
        return Flags(usable, started)

    def rows_of(self, step: Step) -> list[int] | None:
        """The indices of the parameters that it acts on; None for all."""
        if all(self.acts_with(setting) for setting, _ in step.by_setting()):
            return None
        return [i for i, setting in enumerate(step.settings) if self.acts_with(setting)]

    @override
    def apply_tensors(self, updates: list[Tensor], step: Step) -> Sequence[Tensor]:
        """Change every tensor, in place."""
        if overridden_last(type(self), "change_", "apply_tensor") == "apply_tensor":
            return super().apply_tensors(updates, step)
        self._change_each_(updates, step)
        return updates

    def _change_each_(self, updates: list[Tensor], step: Step) -> None:
        """Change every tensor, one after the other."""
        rows = self.rows_of(step)
        counts = [torch.zeros((), dtype=torch.int64, device=update.device) for update in updates]
        indices = range(len(updates)) if rows is None else rows
        if indices:
            usable, started, numbers = self.flags(updates, step, rows)
            columns = [step.column(key, rows) for key in self.keys]
            for k, i in enumerate(indices):
                x = reals(updates[i])
                flags = [vector.select(0, k).to(x.device) for vector in (usable, started, *numbers)]
                state = [*(reals(column[k]) for column in columns), *flags[2:]]
                counts[i] = self.change_(x, state, step.settings[i], *flags[:2])
            step.metrics["clipped"] = share(updates, counts)

    @override
    def apply_tensor(
        self, tensor: Tensor, param: Tensor, grad: Tensor, loss: Tensor | float | None, state: State, setting: Setting
    ) -> Tensor:
        """Change every element of one update in place. Its gradient is assumed to be finite."""
        norms = torch.ones(1, dtype=torch.float64, device=tensor.device)
        self._change_each_([tensor], Step([param], [grad], loss, [state], [setting], gradient_norms=norms))
        return tensor
