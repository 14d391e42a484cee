"""Stores the contributions of layers in the backwards since the last clipping."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from torchzero_clip.per_sample.contributions import Contribution, Dense, Tied
from torchzero_clip.per_sample.param_attributes import ParamAttributes
from torchzero_clip.per_sample.products import Products
from torchzero_clip.per_sample.sparse_rows import SparseRows


@dataclass
class CapturedGradient:
    """The contribution of one call of a layer to one parameter. Squared norms are taken at once if it is alone."""

    layer: Any
    contribution: Contribution
    squares: Tensor | None


class CapturedGradients:
    """The contributions to all parameters."""

    def __init__(self) -> None:
        self.of: dict[int, list[CapturedGradient]] = {}
        """The contributions by the id of the parameter."""

    @property
    def batch_size(self) -> int:
        """The number of samples in the first contribution."""
        return next(iter(self.of.values()))[0].contribution.batch_size

    def keep(self, layer: Any, part: Contribution, *, alone: bool, shown: ParamAttributes | None) -> None:
        """Take one contribution.

        Args:
            layer: The layer.
            part: The contribution.
            alone: Whether no other contribution to the parameter is expected.
            shown: Gets the per-sample gradients if it needs them.
        """
        earlier = self.of.setdefault(id(part.param), [])
        if shown is not None and shown.needs_gradients:
            part = Dense(part.param, part.dense(0, part.batch_size))
            shown.gradients_formed(part.param, part.grads)
        last = earlier[-1].contribution if earlier else None
        if isinstance(part, Dense) and isinstance(last, Dense) and part.batch_size == last.batch_size:
            earlier[-1] = CapturedGradient(layer, last.joined(part), None)  # one gradient of each sample for many calls
        elif earlier or not alone:
            earlier.append(CapturedGradient(layer, part, None))
        else:
            earlier.append(CapturedGradient(layer, *part.measured()))

    def gathered(self) -> dict[int, tuple[Contribution, Tensor]]:
        """The contribution to each parameter, by its id, and the squared norms."""
        result: dict[int, tuple[Contribution, Tensor]] = {}
        for key, found in self.of.items():
            if len(found) > 1 or found[0].squares is None:
                kept, squares = merged([gradient.contribution for gradient in found]).measured()
            else:
                kept, squares = found[0].contribution, found[0].squares
            self.of[key] = [CapturedGradient(found[0].layer, kept, squares)]
            result[key] = kept, squares
        return result

    def check_counts(self, count: int | None, *, batch_first: bool) -> None:
        """Compare the numbers of samples in all contributions with ``count``, or with each other if it is None.

        Raises:
            ValueError: If they differ.
        """
        found = [gradient for group in self.of.values() for gradient in group]
        agree = len({gradient.contribution.batch_size for gradient in found}) == 1
        several = len({gradient.layer for gradient in found}) > 1
        for gradient in found:
            seen, layer = gradient.contribution.batch_size, gradient.layer
            count = seen if count is None else count
            if seen != count:
                raise ValueError(
                    f"{'every layer' if agree and several else layer} saw {seen} samples, the batch has {count}. "
                    f"Per-sample gradients need the samples in dimension {0 if batch_first else 1} of the input of "
                    f"every layer (batch_first={batch_first}), and one loss for each{layer.way_out}"
                )


def merged(parts: Sequence[Contribution]) -> Contribution:
    """Merge the uses of one parameter: those of one kind are joined, and different kinds are combined in `Tied`."""
    joined = [*_reduced(Products, parts), *_reduced(SparseRows, parts), *_reduced(Dense, parts)]
    joined += [part for part in parts if not isinstance(part, Products | SparseRows | Dense)]
    if len(joined) == 1:
        return joined[0]
    match joined:
        case [Products() as products, SparseRows() as rows]:  # an embedding and the head that shares its weight
            return Tied(joined, inner_products=lambda: 2 * rows.inner_products(products))
        case _:
            return Tied(joined)


def _reduced(kind: type[Any], parts: Sequence[Contribution]) -> list[Any]:
    chosen: list[Any] = [part for part in parts if isinstance(part, kind)]
    return [functools.reduce(kind.joined, chosen)] if chosen else []
