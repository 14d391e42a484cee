"""Transforms that act on each element alone, so that they may run on parts of tensors or on several joined."""

import functools
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from torchzero_clip.core.elements import Elements, Flags
from torchzero_clip.core.states import zero_numbers
from torchzero_clip.core.step import Step
from torchzero_clip.core.transform import TensorwiseTransform, Transform, latest
from torchzero_clip.functional import foreach
from torchzero_clip.functional.dtypes import widest_of
from torchzero_clip.functional.foreach import reals, wide_dtype
from torchzero_clip.functional.measure import counted_elements
from torchzero_clip.functional.ways import may_look
from torchzero_clip.hints import described, explanation
from torchzero_clip.types import NewState, Setting, State

WRITE_ALL = ". Write every element to result, for example by at.write(new, x, result)"

_WAYS = ("formula", "start", "change")
"""The methods that say what happens to elements."""


class Elementwise(TensorwiseTransform):
    """A transform that treats each element on its own: subclasses implement `formula`.

    The formula gets tensors and returns new ones. The optimizer calls it with whole tensors, with parts of tensors, or
    with several joined, so it must not depend on their shape. If the transform has state, a tensor passes unchanged and
    keeps its state if its gradient is not finite, or if its gradients were all 0 so far. Single elements that an
    earlier transform made inf or NaN also pass and keep their state.

    A subclass may also implement `change`, a faster form of the formula. The fast way then runs `change`, and
    ``Modular(..., fast=False)`` runs the formula. The first fast step compares the two on a small tensor.

    The transform has one metric, ``clipped``: the share of elements that changed. The real and the imaginary part of a
    complex number are two elements.

    Args:
        defaults: As in `Transform`.
        target: As in `Transform`.
        name: As in `Transform`.

    Raises:
        ValueError: As in `Transform`.
        TypeError: As in `Transform`, and for a class whose ``keys`` are a string.

    Examples:
        A clip of each element to a multiple of the average of its magnitudes:

        >>> import torch
        >>> from torchzero_clip import Elementwise, Modular
        >>> class ClipToUsual(Elementwise):
        ...     keys = ("average",)
        ...     def __init__(self, factor: float = 3.0, beta: float = 0.99) -> None:
        ...         super().__init__({"factor": factor, "beta": beta})
        ...     def formula(self, x, state, setting):
        ...         average = state[0].lerp(x.abs(), 1 - setting["beta"])
        ...         limit = setting["factor"] * average
        ...         return x.clamp(-limit, limit), (average,)
        >>> weight = torch.nn.Parameter(torch.zeros(2))
        >>> optimizer = Modular([weight], ClipToUsual(1.0, 0.5))
        >>> for gradient in ([4.0, -4.0], [8.0, -1.0]):
        ...     weight.data = torch.zeros(2)
        ...     weight.grad = torch.tensor(gradient)
        ...     optimizer.step()
        ...     print([-x for x in weight.tolist()])
        [2.0, -2.0]
        [5.0, -1.0]
    """

    each_alone = True

    keys: ClassVar[Sequence[str]] = ()
    """The keys of the state that is shaped like the parameter."""

    keeps_finite: ClassVar[bool] = False
    """True if finite elements stay finite, as in a clip. Statistics after it then need not check each element.

    A subclass that overrides a method has to set it again.
    """

    reads_tensors: ClassVar[bool] = False
    """True if `flags` reads the updates, so that operations before this one cannot be postponed."""

    has_formula: ClassVar[bool] = False
    """True if the formula computes what the transform does. False if a subclass overrides only `change`."""

    has_change: ClassVar[bool] = False
    """True if `change` computes what the transform does. False if a subclass overrides only `formula` or `start`."""

    is_elementwise: ClassVar[bool] = True
    """False if a subclass overrides ``apply_tensors`` or ``apply_tensor``, and so may do more than `change`."""

    _applies_tensor: ClassVar[bool] = False  # a subclass overrides `apply_tensor`

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        if isinstance(cls.keys, str):
            raise TypeError(f"keys of {cls.__name__} is a string: write keys = ({cls.keys!r},), with the comma")
        if len({"started", *cls.keys}) <= len(cls.keys):
            raise TypeError(f"keys of {cls.__name__} are {cls.keys}: they must differ, also from 'started'")
        is_written = cls.formula is not Elementwise.formula
        cls.has_formula = is_written and latest(cls, *_WAYS) != "change"
        cls.has_change = cls.change is not Elementwise.change and latest(cls, *_WAYS[::-1]) == "change"
        cls.keeps_finite = cls.keeps_finite and latest(cls, "keeps_finite", *_WAYS) == "keeps_finite"
        cls.is_elementwise = latest(cls, *_WAYS, "apply_tensors", "apply_tensor") in _WAYS
        cls._applies_tensor = latest(cls, *_WAYS, "apply_tensor") == "apply_tensor"
        # the state of a formula is a statistic, unless a class sets ``keeps_statistics`` itself
        says = next(base for base in cls.__mro__ if "keeps_statistics" in vars(base))
        if says is Transform and is_written and cls.keys:
            cls.keeps_statistics = True

    def formula(self, x: Tensor, state: Sequence[Tensor], setting: Setting) -> tuple[Tensor, Sequence[Tensor]]:
        """Return the new elements, and a tuple with the new state under each of ``keys``.

        It must change none of its arguments in place.

        Args:
            x: Real elements of float32 or float64.
            state: The state under each of ``keys``, of the shape and the dtype of ``x``. Before the first step it is
                zeros.
            setting: The settings.
        """
        raise NotImplementedError

    def start(self, x: Tensor, setting: Setting) -> Sequence[Tensor] | None:
        """Return the state after the first usable update of a tensor, which then passes unchanged.

        By default it returns None. Then the formula computes the first update like all others.

        Args:
            x: The elements of the update.
            setting: The settings.
        """
        return None

    def change(self, x: Tensor, result: Tensor, state: Sequence[Tensor], setting: Setting, at: Elements) -> Tensor:
        """Write the changed elements to ``result``, change their state in place, and return how many changed.

        This is the faster form of `formula` and `start`, for the fast way. By default it runs the formula. It must not
        raise, because a part of the parameter may have changed already.

        Args:
            x: Real elements of float32 or float64. Do not change them, except through ``result``.
            result: Memory for the changed elements, which may be ``x`` itself. Read what you need of ``x`` before you
                write to it.
            state: The state under each of ``keys``, shaped like ``x``, and then the numbers of `flags`, one for all
                elements or one for each.
            setting: The settings.
            at: The elements that take part. Its methods leave the others unchanged.
        """
        old_state = state[: len(self.keys)]
        copies = [tensor.clone() for tensor in (x, *state)] if at.is_first else []
        arguments = copies or [x, *state]
        returned = self.formula(arguments[0], arguments[1:], setting)
        self._check_unchanged("formula", copies)
        new, *moved = self._tensors("formula", returned, [x, *old_state])
        if old_state:
            at = at.only_finite(x.abs())
            first = self.start(arguments[0], setting) if at.started is not None else None
            self._check_unchanged("start", copies)
            if first is not None:
                first = self._tensors("start", first, old_state)
                new, *moved = at.unless_new([new, *moved], [x, *first])
        changed = at.compare(torch.ne, new, x, at.memory("changed", x))
        count = at.count(changed if old_state else changed.mul_(x == x))  # NaN that stays NaN does not count
        # new tensors, because a formula may return `x`, or state under another key
        moved = [at.chosen(value, old) for value, old in zip(moved, old_state, strict=True)]
        at.write(new, x, result)
        foreach.copy_(old_state, moved)
        return count

    def _check_unchanged(self, name: str, arguments: Sequence[Tensor]) -> None:
        # the arguments are new tensors, so a version above 0 is a change in place
        if any(tensor._version for tensor in arguments if not tensor.is_inference()):
            raise RuntimeError(
                f"{self!r}.{name} changes its arguments in place. Compute new tensors, for example by lerp instead of "
                "lerp_"
            )

    def _tensors(self, name: str, returned: Any, like: Sequence[Tensor]) -> list[Tensor]:
        """The tensors that a method returned. Raise if their number, a shape or a dtype is wrong."""
        tensors = list(_leaves(returned))
        kinds = [[(getattr(t, "shape", None), getattr(t, "dtype", None)) for t in group] for group in (tensors, like)]
        is_pair = name == "formula" and isinstance(returned, tuple | list) and len(returned) == 2
        state: Any = returned[1] if is_pair else returned
        if kinds[0] != kinds[1] or (self.keys and isinstance(state, Tensor)):
            state = f"({''.join(f'new_{key}, ' for key in self.keys).strip()})"
            parts = (
                "the new elements and a tuple of the new state" if name == "formula" else "a tuple of the first state"
            )
            got = " and ".join(map(described, tensors)) or "nothing"
            raise RuntimeError(
                f"{self!r}.{name} returned {got}. Return {parts}, of the shape and the dtype of x: "
                f"write `return {f'new, {state}' if name == 'formula' else state}`"
            )
        return tensors

    def counted(
        self, x: Tensor, result: Tensor, state: Sequence[Tensor], setting: Setting, at: Elements, *, by_formula: bool
    ) -> Tensor:
        """Call `change`, or the formula if ``by_formula`` is True and the class has one.

        If the result is not a number, raise before a kernel takes the elements.
        """
        is_change = self.has_change and not (by_formula and self.has_formula)
        change = self.change if is_change else partial(Elementwise.change, self)
        at.without_statistics = None if self.keeps_statistics else self
        try:
            count: Any = change(x, result, state, setting, at)
        except Exception as error:
            names = {"settings": setting, "keys of state": self.keys}
            text = explanation(error, f"{self!r}.{'change' if is_change else 'formula'}", names)
            if text is None:
                raise
            raise RuntimeError(text) from error
        if not isinstance(count, Tensor) or (count.numel() != 1 and count.shape != x.shape[:-1]):
            raise RuntimeError(
                f"{self!r}.change returned {described(count)} instead of the number of elements that changed, a 0-d "
                "tensor: return at.count(...)"
            )
        return count

    @override
    def check_parameter(self, name: str, param: Tensor) -> None:
        if self.is_elementwise and not (self.has_formula or self.has_change):
            raise TypeError(
                f"{self!r} changes no elements: its class has neither formula(self, x, state, setting) nor change"
            )

    @override
    def init_state(self, param: Tensor, setting: Setting) -> NewState:
        """Return zeros of float32 or wider for each of ``keys``, and with statistics whether they have started."""
        return self.possible_state(param, setting)

    @override
    def possible_state(self, param: Tensor, setting: Setting) -> NewState:
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

    @override
    def keeps_refused(self, settings: Sequence[Setting]) -> bool:
        """True with statistics: a gradient that is not finite does not change them."""
        return self.keeps_statistics and self.is_elementwise

    def may_wait(self, step: Step) -> bool:
        """True if the dtype can hold all settings, so that a postponed call cannot raise. Tensors never raise."""
        largest = torch.finfo(step.params[0].dtype).max
        values = [v for setting, _ in step.by_setting() for v in setting.values() if not isinstance(v, Tensor | None)]
        return all(abs(x) <= largest for value in values for x in (value if isinstance(value, tuple) else (value,)))

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
        step.keep("started", (usable | started).to(widest_of(usable)), rows)
        return Flags(usable, started)

    def rows_of(self, step: Step) -> list[int] | None:
        """The indices of the parameters that it acts on; None for all."""
        if all(self.acts_with(setting) for setting, _ in step.by_setting()):
            return None
        return [i for i, setting in enumerate(step.settings) if self.acts_with(setting)]

    @override
    def apply_tensors(self, updates: list[Tensor], step: Step) -> Sequence[Tensor]:
        if self._applies_tensor:
            return super().apply_tensors(updates, step)
        self._change_each_(updates, step)
        return updates

    def _change_each_(self, updates: list[Tensor], step: Step) -> None:
        rows = self.rows_of(step)
        indices = range(len(updates)) if rows is None else rows
        if not indices:
            return
        by_formula = self.has_formula and (step.tools.runs_formulas or not self.has_change)
        flags = self.flags(updates, step, rows)
        flags = flags.of_formula() if by_formula else flags
        columns = [step.column(key, rows) for key in self.keys]
        counts: dict[int, Tensor] = {}
        try:
            for k, i in enumerate(indices):
                tensors = [reals(tensor) for tensor in (updates[i], *(column[k] for column in columns))]
                x, *state = wide = _of_one_dtype(tensors)
                numbers = [vector.select(0, k).to(x.device, x.dtype) for vector in flags.numbers]
                at = flags.elements(k, x.device)
                at.is_first = step.is_first
                # not the memory of `x`: elements that `change` forgets stay NaN
                wide[0] = torch.full_like(x, torch.nan)
                count = self.counted(x, wide[0], [*state, *numbers], step.settings[i], at, by_formula=by_formula)
                if at.is_first and not by_formula and may_look(x) and bool((wide[0].isnan() & x.isfinite()).any()):
                    raise RuntimeError(f"{self!r}.change gives NaN for finite elements{WRITE_ALL}")
                changed = [(to, of) for to, of in zip(tensors, wide, strict=True) if to is not of]
                foreach.copy_([to for to, _ in changed], [of for _, of in changed])
                counts[i] = count
        except BaseException:
            if flags.started is not None:  # the other statistics have not started in this step
                now = step.numbers("started", rows)
                now[len(counts) :] = flags.started[len(counts) :]
                step.keep("started", now, rows)
            raise
        zeros = ((i, u) for i, u in enumerate(updates) if i not in counts)
        counts |= {i: torch.zeros((), dtype=torch.int64, device=u.device) for i, u in zeros}
        step.show_share("clipped", *counted_elements(updates, [counts[i] for i in range(len(updates))]))

    @override
    def apply_tensor(
        self, tensor: Tensor, param: Tensor, grad: Tensor, loss: Tensor | float | None, state: State, setting: Setting
    ) -> Tensor:
        """Change every element of one update in place. Its gradient is assumed to be finite."""
        norms = torch.ones(1, dtype=widest_of(tensor), device=tensor.device)
        self._change_each_([tensor], Step([param], [grad], loss, [state], [setting], gradient_norms=norms))
        return tensor


def _leaves(returned: object) -> Iterator[Any]:
    """What a method returned, without the tuples and lists around it."""
    if isinstance(returned, tuple | list):
        for part in returned:  # pyright: ignore[reportUnknownVariableType]
            yield from _leaves(part)
    else:
        yield returned


def _of_one_dtype(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The same elements in the widest of the dtypes, float32 or wider; in the same memory if possible."""
    dtype = functools.reduce(torch.promote_types, [tensor.dtype for tensor in tensors], torch.float32)
    if torch.compiler.is_compiling():  # it breaks graphs at `out=` with other strides
        return [tensor.to(dtype, copy=True, memory_format=torch.contiguous_format) for tensor in tensors]
    return [tensor.to(dtype) for tensor in tensors]
