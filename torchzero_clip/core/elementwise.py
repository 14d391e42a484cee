"""Transforms that act on each element alone, so that they may run on parts of tensors or on several joined."""

import functools
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from torchzero_clip.core.elements import Elements
from torchzero_clip.core.states import zero_numbers
from torchzero_clip.core.step import Step
from torchzero_clip.core.transform import TensorwiseTransform, overridden_last
from torchzero_clip.functional import foreach
from torchzero_clip.functional.foreach import reals, wide_dtype
from torchzero_clip.functional.measure import counted
from torchzero_clip.functional.scratch import Scratch
from torchzero_clip.hints import explanation
from torchzero_clip.types import Setting, State


class Flags(NamedTuple):
    """What the elements of a tensor have in common in this step: vectors with one element for each parameter."""

    usable: Tensor | None = None
    """True if the update enters the statistic, which then limits it; None if all do."""
    started: Tensor | None = None
    """True if an earlier update has entered the statistic; None if that is so for all."""
    numbers: tuple[Tensor, ...] = ()
    """What else `Elementwise.change` needs to know of a tensor, such as a limit."""

    def elements(self, row: int, device: torch.device, scratch: Scratch | None = None) -> Elements:
        """The elements of one tensor."""
        usable, started = (None if flag is None else flag.select(0, row).to(device) for flag in self[:2])
        return Elements(usable, started, scratch=scratch)


class Elementwise(TensorwiseTransform):
    """A transform that treats each element on its own: subclasses implement `change`.

    ``change`` may get a whole tensor, a part of one, or several joined, so it must not depend on their shape. The
    transform has one metric, ``clipped``: the share of elements that changed. The real and the imaginary part of a
    complex number are two elements.

    With ``keeps_statistics`` a statistic starts with the first gradient that is finite and not all zero. Until then,
    and where a gradient is not finite, updates pass unchanged and do not enter the statistic, as long as ``change``
    uses the methods of its argument ``at``.

    Args:
        defaults: As in `Transform`.
        target: As in `Transform`.
        name: As in `Transform`.

    Raises:
        ValueError: As in `Transform`.
        TypeError: As in `Transform`, and for a class whose ``keys`` are a string.

    Examples:
        A clip of each element to a multiple of the average of its magnitudes, which starts at the first update:

        >>> import torch
        >>> from torchzero_clip import Elementwise, Modular
        >>> from torchzero_clip.checks import positive, unit_interval
        >>> class ClipToUsual(Elementwise):
        ...     checks = {"factor": positive, "beta": unit_interval}
        ...     keeps_statistics = True
        ...     keys = ("average",)
        ...     def __init__(self, factor: float, beta: float = 0.9) -> None:
        ...         super().__init__({"factor": factor, "beta": beta})
        ...     def change(self, x, result, state, setting, at):
        ...         (average,) = state
        ...         size = torch.abs(x, out=at.memory("size", x))
        ...         finite = at.only_finite(size)
        ...         finite.begin_(average, size)
        ...         finite.lerp_(average, size, 1 - setting["beta"])
        ...         limit = torch.mul(average, setting["factor"], out=at.memory("limit", x))
        ...         count = at.count(torch.gt(size, limit, out=size))
        ...         at.clamp(x, torch.neg(limit, out=size), limit, result)
        ...         return count
        >>> weight = torch.nn.Parameter(torch.zeros(2))
        >>> optimizer = Modular([weight], ClipToUsual(2.0, 0.75))
        >>> for gradient in ([1.0, -1.0], [9.0, -1.5]):
        ...     weight.data = torch.zeros(2)
        ...     weight.grad = torch.tensor(gradient)
        ...     optimizer.step()
        ...     print([-x for x in weight.tolist()])
        [1.0, -1.0]
        [6.0, -1.5]
    """

    each_alone = True

    keys: ClassVar[Sequence[str]] = ()
    """The keys of the state that is shaped like the parameter."""

    keeps_finite: ClassVar[bool] = False
    """True if finite elements stay finite, as in a clip. Statistics after it then need not check each element."""

    reads_tensors: ClassVar[bool] = False
    """True if `flags` reads the updates, so that operations before this one cannot be postponed."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if isinstance(cls.keys, str):
            raise TypeError(f"keys of {cls.__name__} is a string: write keys = ({cls.keys!r},), with the comma")

    @abstractmethod
    def change(self, x: Tensor, result: Tensor, state: Sequence[Tensor], setting: Setting, at: Elements) -> Tensor:
        """Write the changed elements to ``result``, change their state in place, and return how many changed.

        It must not raise: a part of the parameter may have moved already.

        Args:
            x: Real elements of float32 or float64. They are not to be modified, except through ``result``.
            result: Where the changed elements go: other memory, or ``x`` itself. All that is needed of ``x`` has to be
                read before.
            state: The state under each of ``keys``, shaped like ``x``. After it the numbers of `flags`: one for all
                elements, or one for each.
            setting: The settings.
            at: The elements that take part. Its methods leave the others unchanged.
        """

    def counted(self, x: Tensor, result: Tensor, state: Sequence[Tensor], setting: Setting, at: Elements) -> Tensor:
        """Call `change`. Raise if it does not return a number, before a kernel takes the elements."""
        at.without_statistics = None if self.keeps_statistics else self
        try:
            count: Any = self.change(x, result, state, setting, at)
        except Exception as error:
            known = {"settings": setting, "keys of state": self.keys}
            text = explanation(error, f"{self!r}.change", known)
            if text is None:
                raise
            raise RuntimeError(text) from error
        if not isinstance(count, Tensor) or count.numel() != 1:
            got = f"a tensor of shape {tuple(count.shape)}" if isinstance(count, Tensor) else type(count).__name__
            raise RuntimeError(
                f"{self!r}.change returned {got} instead of the number of elements that changed, a 0-d tensor: return "
                "at.count(...)"
            )
        return count

    @override
    def init_state(self, param: Tensor, setting: Setting) -> dict[str, Any]:
        """Return zeros of float32 or wider for each of ``keys``, and with statistics whether they have started."""
        return self.possible_state(param, setting)

    @override
    def possible_state(self, param: Tensor, setting: Setting) -> dict[str, Any]:
        """Return every entry that the state of one parameter may ever have, as in `Transform.possible_state`."""
        state = {key: torch.zeros_like(param, dtype=wide_dtype(param.dtype)) for key in self.keys}
        if self.keeps_statistics:
            state |= zero_numbers("started", device=param.device)
        return state

    @override
    def has_state(self) -> bool:
        """Return True if there are ``keys`` or statistics, or if a subclass says what the state is."""
        kind = type(self)
        says = (kind.init_state, kind.possible_state) != (Elementwise.init_state, Elementwise.possible_state)
        return says or self.keeps_statistics or len(self.keys) > 0

    def stays_finite(self) -> bool:
        """True with ``keeps_finite``, but not for a subclass that overrides `change` and does not declare it again."""
        return self.keeps_finite and overridden_last(type(self), "keeps_finite", "change") == "keeps_finite"

    def may_wait(self, step: Step) -> bool:
        """True if the dtype can hold all settings, so that a postponed call cannot raise."""
        largest = torch.finfo(step.params[0].dtype).max
        values = [value for setting, _ in step.by_setting() for value in setting.values() if value is not None]
        return all(abs(x) <= largest for value in values for x in (value if isinstance(value, tuple) else (value,)))

    def is_elementwise(self) -> bool:
        """False if a subclass overrides ``apply_tensors`` or ``apply_tensor``, and so may do more than `change`."""
        return overridden_last(type(self), "change", "apply_tensors", "apply_tensor") == "change"

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
        if not self.keeps_statistics:
            return Flags()
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
        if overridden_last(type(self), "change", "apply_tensor") == "apply_tensor":
            return super().apply_tensors(updates, step)
        self._change_each_(updates, step)
        return updates

    def _change_each_(self, updates: list[Tensor], step: Step) -> None:
        """Change every tensor, one after the other."""
        rows = self.rows_of(step)
        indices = range(len(updates)) if rows is None else rows
        if not indices:
            return
        flags = self.flags(updates, step, rows)
        columns = [step.column(key, rows) for key in self.keys]
        counts: dict[int, Tensor] = {}
        for k, i in enumerate(indices):
            given = [reals(tensor) for tensor in (updates[i], *(column[k] for column in columns))]
            x, *state = own = _of_one_dtype(given)
            numbers = [vector.select(0, k).to(x.device, x.dtype) for vector in flags.numbers]
            at = flags.elements(k, x.device)
            counts[i] = self.counted(x, x, [*state, *numbers], step.settings[i], at)
            changed = [(to, of) for to, of in zip(given, own, strict=True) if to is not of]
            foreach.copy_([to for to, _ in changed], [of for _, of in changed])
        zeros = ((i, u) for i, u in enumerate(updates) if i not in counts)
        counts |= {i: torch.zeros((), dtype=torch.int64, device=u.device) for i, u in zeros}
        step.show_share("clipped", *counted(updates, [counts[i] for i in range(len(updates))]))

    @override
    def apply_tensor(
        self, tensor: Tensor, param: Tensor, grad: Tensor, loss: Tensor | float | None, state: State, setting: Setting
    ) -> Tensor:
        """Change every element of one update in place. Its gradient is assumed to be finite."""
        norms = torch.ones(1, dtype=torch.float64, device=tensor.device)
        self._change_each_([tensor], Step([param], [grad], loss, [state], [setting], gradient_norms=norms))
        return tensor


def _of_one_dtype(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The same elements in the widest of the dtypes, float32 or wider; in the same memory if possible."""
    dtype = functools.reduce(torch.promote_types, [tensor.dtype for tensor in tensors], torch.float32)
    if torch.compiler.is_compiling():  # it breaks graphs at `out=` with other strides
        return [tensor.to(dtype, copy=True, memory_format=torch.contiguous_format) for tensor in tensors]
    return [tensor.to(dtype) for tensor in tensors]
