"""What the argument ``ord`` stands for."""

import math
from typing import Literal, NamedTuple

from torch import Tensor

from torchzero_clip.types import Ord


class Metric(NamedTuple):
    """The metric that ``ord`` names."""

    kind: Literal["norm", "mad", "std", "var", "sum"]
    p: float = 2.0

    @property
    def degree(self) -> int:
        """If a tensor is multiplied by c, its metric is multiplied by c to this power."""
        return 2 if self.kind == "var" else 1

    @property
    def min_size(self) -> int:
        """The fewest elements for which the metric is defined."""
        return 2 if self.kind in ("std", "var") else 1

    @property
    def is_power(self) -> bool:
        """Whether the metric comes from a sum of powers of magnitudes: the p-norm, or the mean magnitude."""
        return self.kind in ("norm", "mad")

    @property
    def counts_zeros(self) -> bool:
        """Whether the metric depends on the number of zeros."""
        return not (self.kind == "sum" or (self.kind == "norm" and self.p >= 0))

    def of_norm(self, norm: Tensor, count: int) -> Tensor:
        """The metric of ``count`` elements from their p-norm."""
        return norm / max(count, 1) if self.kind == "mad" else norm

    def root(self, value: float) -> float:
        """A limit of the metric as a limit of its root, the quantity that scales with the tensor."""
        return math.sqrt(value) if self.kind == "var" else value


_POWERS = {f"l{p}": Metric("norm", float(p)) for p in ("0", "1", "2", "3", "4", "inf")}
_NAMED = {**_POWERS, "mad": Metric("mad", 1.0), "std": Metric("std"), "var": Metric("var"), "sum": Metric("sum")}


def parse_ord(ord: Ord) -> Metric:
    """Parse ``ord``. A 0-d tensor is read once, here."""
    if isinstance(ord, str):
        if ord not in _NAMED:
            hint = "; joint norms are dim='global'" if str(ord) == "global" else ""
            raise ValueError(f"ord must be a number or one of {', '.join(map(repr, _NAMED))}, got {ord!r}{hint}")
        return _NAMED[ord]
    if (isinstance(ord, Tensor) and ord.ndim == 0) or (isinstance(ord, int | float) and not isinstance(ord, bool)):
        p = float(ord)  # at construction, not in a step
        if math.isnan(p):
            raise ValueError("ord must not be NaN")
        return Metric("norm", p)
    raise TypeError(f"ord must be a number, a 0-d tensor or a string, got {ord!r}")
