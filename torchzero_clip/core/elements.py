"""The elements that an elementwise transform acts on, and operations that leave the others unchanged."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchzero_clip.functional import foreach
from torchzero_clip.functional.scratch import Scratch


class Elements:
    """The elements that take part in one call of `Elementwise.change`, and operations that leave the others unchanged.

    Without statistics all elements take part. With statistics the elements of a tensor take part if its gradient is
    finite and, before its statistic has started, not all zero. If the optimizer knows, without synchronizing with the
    GPU, that all elements take part, the methods add no operations.
    """

    def __init__(
        self,
        usable: Tensor | None = None,
        started: Tensor | None = None,
        *,
        finite: bool = False,
        scratch: Scratch | None = None,
        spread: Callable[[Tensor], Tensor] = lambda flags: flags,
    ) -> None:
        self.mask = None if usable is None else spread(usable)
        self._finite, self._scratch, self._spread = finite, scratch, spread
        self.started = started  # None if the optimizer knows that the statistics of all elements have started
        self._new: Tensor | None = None
        self.is_first = False  # True if the formula gets copies, to see whether it changes them
        self.without_statistics: object = None  # the transform, if it does not declare ``keeps_statistics``

    @property
    def usual(self) -> bool:
        """True if all elements take part, are finite and have a statistic that has started, and numbers may be read.

        False if any of this is not known, and under compile, where reading breaks graphs.
        """
        return self.mask is None and self._finite and not torch.compiler.is_compiling()

    def memory(self, name: str, like: Tensor) -> Tensor:
        """Return memory of the shape and the dtype of ``like``, with any values.

        Args:
            name: Calls with another name return other memory.
            like: The elements or their state.
        """
        if self._scratch is not None:
            return self._scratch.memory(f"elements {name}", like.numel(), like).view(like.shape)
        return torch.empty_like(like)

    def only_finite(self, size: Tensor) -> "Elements":
        """Return those of the elements whose magnitude is finite: an earlier transform may make an inf of a gradient.

        Args:
            size: The magnitudes. Their squares may overflow where all elements are finite.
        """
        if self._finite:
            return self
        finite = size < torch.inf  # False for NaN
        usable = finite if self.mask is None else finite.logical_and_(self.mask)
        elements = Elements(usable, finite=True, scratch=self._scratch)
        # set afterwards: the constructor would spread ``usable`` once more
        elements.started, elements._spread, elements._new = self.started, self._spread, self._new
        elements.without_statistics = self.without_statistics
        return elements

    def unless_new(self, values: Sequence[Tensor], first: Sequence[Tensor]) -> list[Tensor]:
        """Return the values, and ``first`` where the statistic had not started before this step."""
        new = self._not_started()
        pairs = zip(values, first, strict=True)
        return [value if new is None else torch.where(new, initial, value) for value, initial in pairs]

    def chosen(self, new: Tensor, old: Tensor) -> Tensor:
        """Return a tensor with ``new`` for elements that take part, and ``old`` for the others."""
        return new.clone() if self.mask is None else torch.where(self.mask, new, old)

    def begin_(self, state: Tensor, first: Tensor) -> None:
        """Set state to ``first`` where the statistic starts in this step, in place. It needs ``keeps_statistics``."""
        if (new := self._not_started()) is not None:
            _choose(new if self.mask is None else new & self.mask, first, state, state)

    def fill_new_(self, tensor: Tensor, number: float) -> None:
        """Fill a tensor with a number where the statistic had not started before this step, in place."""
        if (new := self._not_started()) is not None:
            tensor.masked_fill_(new, number)

    def lerp_(self, state: Tensor, end: Tensor, weight: float) -> None:
        """Compute ``state += weight * (end - state)``, in place."""
        state.lerp_(end if self.mask is None else torch.where(self.mask, end, state), weight)

    def draft(self, name: str, state: Tensor) -> Tensor:
        """Return memory for the next value of ``state``, to be passed to `put`: the state itself if all take part."""
        return state if self.mask is None else self.memory(name, state)

    def put(self, new: Tensor, state: Tensor) -> None:
        """Replace state by its next value. For the result there is `write`."""
        self.write(new, state, state)

    def write(self, new: Tensor, x: Tensor, result: Tensor) -> None:
        """Write the new elements to the result.

        Args:
            new: What replaces the elements.
            x: The elements.
            result: Where the result goes, or ``x`` itself.
        """
        if self.mask is not None:
            _choose(self.mask, new, x, result)
        elif new is not result:
            foreach.copy_([result], [new])

    def clamp(self, x: Tensor, low: Tensor | float, high: Tensor | float, result: Tensor) -> None:
        """Clamp elements to [low, high]. NaN stays NaN.

        Args:
            x: The elements.
            low: Numbers of the shape of ``x``, or one for all.
            high: As ``low``.
            result: Where the result goes, or ``x`` itself.
        """
        limits: Any = [
            bound if isinstance(bound, Tensor) else foreach.usable_limit(bound, x.dtype) for bound in (low, high)
        ]
        if self.mask is not None:
            self.write(torch.clamp(x, *limits), x, result)
        else:
            torch.clamp(x, *limits, out=result)

    def compare(self, comparison: Callable[..., Tensor], x: Tensor, other: Tensor | float, memory: Tensor) -> Tensor:
        """Return ``comparison(x, other)`` for `count`, in the faster form: numbers on CPU, else booleans.

        Args:
            comparison: Such as ``torch.gt``.
            x: Elements.
            other: What they are compared with.
            memory: Where the result may go.
        """
        return comparison(x, other, out=memory) if x.is_cpu else comparison(x, other)

    def count(self, hits: Tensor) -> Tensor:
        """Return how many elements are hit: a number for each vector along the last dimension.

        Args:
            hits: 1 or True for each element that is hit, else 0. It is overwritten.
        """
        # sums over the last dimension: a compiler would compute the sum of all elements in a second loop over them
        hits = hits if self.mask is None else hits.mul_(self.mask)
        return hits.count_nonzero(-1) if self._scratch is None else hits.sum(-1)

    def _not_started(self) -> Tensor | None:
        """True where the statistic had not started before this step; None if it had everywhere."""
        if self.without_statistics is not None:
            raise RuntimeError(
                f"{self.without_statistics!r} calls begin_ or fill_new_, which do nothing without a statistic: write "
                "keeps_statistics = True in the class"
            )
        if self.started is not None and self._new is None:
            self._new = self._spread(self.started.logical_not())
        return self._new


class Flags(NamedTuple):
    """What the elements of a tensor have in common in this step: vectors with one element for each parameter."""

    usable: Tensor | None = None  # True if the update enters the statistic, which then limits it; None if all do
    started: Tensor | None = None  # True if an earlier update has entered the statistic; None if all have
    numbers: tuple[Tensor, ...] = ()
    """What else `Elementwise.change` and `formula` need to know of a tensor, such as a limit."""
    beside: tuple[Tensor, ...] = ()
    """Further numbers for `formula`. Their effect in `change` comes from ``at``."""

    def of_formula(self) -> "Flags":
        """These flags with ``beside`` moved to ``numbers``, because `formula` gets them all."""
        return self._replace(numbers=(*self.numbers, *self.beside), beside=())

    def elements(self, row: int, device: torch.device, scratch: Scratch | None = None) -> Elements:
        """The elements of one tensor."""
        usable, started = (None if flag is None else flag.select(0, row).to(device) for flag in self[:2])
        return Elements(usable, started, scratch=scratch)


def _choose(mask: Tensor, new: Tensor, old: Tensor, out: Tensor) -> None:
    """Write the new elements where the mask is True, and the old ones elsewhere."""
    if torch.compiler.is_compiling() or not new.dtype == old.dtype == out.dtype:
        foreach.copy_([out], [torch.where(mask, new, old)])
    else:
        torch.where(mask, new, old, out=out)
