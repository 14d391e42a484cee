"""Stores the contributions of layers in the backwards since the last clipping."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from torchzero_clip.per_sample.captured_layer import CapturedLayer
from torchzero_clip.per_sample.contributions import Contribution, Dense
from torchzero_clip.per_sample.merge import merged


@dataclass
class CapturedGradient:
    """The contribution of one call of a layer to one parameter. Squared norms are taken at once if it is alone."""

    layer: CapturedLayer
    contribution: Contribution
    squares: Tensor | None


class CapturedGradients:
    """The contributions, by parameter."""

    def __init__(self) -> None:
        self._of: dict[int, list[CapturedGradient]] = {}

    def __bool__(self) -> bool:
        return bool(self._of)

    @property
    def batch_size(self) -> int:
        """The number of samples in the first contribution."""
        return next(iter(self._of.values()))[0].contribution.batch_size

    def keep(
        self,
        layer: CapturedLayer,
        part: Contribution,
        *,
        is_shared: bool,
        formed: Callable[[Any, Tensor], None] | None,
    ) -> None:
        """Take one contribution.

        Args:
            layer: The layer.
            part: The contribution.
            is_shared: Whether other layers have the same parameter, so that more contributions may come.
            formed: Called with the per-sample gradients in full; None if they are not needed.
        """
        earlier = self._of.setdefault(id(part.param), [])
        if formed is not None:
            part = Dense(part.param, part.dense(0, part.batch_size))
            formed(part.param, part.grads)
        last = earlier[-1].contribution if earlier else None
        if isinstance(part, Dense) and isinstance(last, Dense) and part.batch_size == last.batch_size:
            earlier[-1] = CapturedGradient(layer, last.joined(part), None)  # one gradient of each sample for many calls
        elif earlier or layer.calls > 1 or is_shared:
            earlier.append(CapturedGradient(layer, part, None))
        else:
            earlier.append(CapturedGradient(layer, *part.measured()))

    def gathered(self) -> dict[int, tuple[Contribution, Tensor]]:
        """The contribution to each parameter, by its id, and the squared norms."""
        result: dict[int, tuple[Contribution, Tensor]] = {}
        for key, arrivals in self._of.items():
            if len(arrivals) > 1 or arrivals[0].squares is None:
                kept, squares = merged([arrival.contribution for arrival in arrivals]).measured()
            else:
                kept, squares = arrivals[0].contribution, arrivals[0].squares
            self._of[key] = [CapturedGradient(arrivals[0].layer, kept, squares)]
            result[key] = kept, squares
        return result

    def check_counts(self, count: int | None, *, batch_first: bool) -> None:
        """Compare the numbers of samples in all contributions with ``count``, or with each other if it is None.

        Raises:
            ValueError: If they differ.
        """
        arrivals = [arrival for group in self._of.values() for arrival in group]
        agree = len({arrival.contribution.batch_size for arrival in arrivals}) == 1
        several = len({arrival.layer for arrival in arrivals}) > 1
        for arrival in arrivals:
            found = arrival.contribution.batch_size
            count = found if count is None else count
            if found != count:
                raise ValueError(
                    f"{'every layer' if agree and several else arrival.layer} saw {found} samples, the batch has "
                    f"{count}. Per-sample gradients need the samples in dimension {0 if batch_first else 1} of the "
                    f"input of every layer (batch_first={batch_first}), and one loss for each; positions that all "
                    "samples share need a batch dimension too"
                )
        for arrival in arrivals:
            if arrival.layer.awaits is not None:
                arrival.layer.agreed[arrival.layer.awaits] = True
