"""Merges several uses of one parameter into one contribution."""

import functools
from collections.abc import Sequence
from typing import Any

from torchzero_clip.per_sample.contributions import Contribution, Dense, Tied
from torchzero_clip.per_sample.products import Products
from torchzero_clip.per_sample.sparse_rows import SparseRows


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
