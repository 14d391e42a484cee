"""The per-sample gradients from one use of a parameter, stored in the form that is cheapest for its layer."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Literal, TypeAlias

import torch
from torch import Tensor
from typing_extensions import override

from torchzero_clip.functional.dtypes import moved, widest
from torchzero_clip.per_sample.gradients.row_norms import SMALL, in_float64, joint_norms, memory_order, norms_of_rows

Memory: TypeAlias = Literal["auto", "low"]

# bytes of per-sample gradients that are formed at a time, so that their norms read them from the cache
_PIECE = 1 << 20
CANCELLED = 1e-2  # a norm below this share of its parts has lost digits by cancellation in float32
Reserve: TypeAlias = Callable[[int, int], bool]
"""Reserves memory for per-sample gradients: see `CapturedGradients.reserve`."""


class Contribution(ABC):
    """The per-sample gradients of one parameter, from one use of it or from several, for B samples."""

    param: Tensor
    batch_size: int

    @abstractmethod
    def measured(self, reserve: Reserve) -> tuple["Contribution", Tensor]:
        """Return the contribution to store for the sum, and the norms of the samples: (B,), in the `widest` dtype."""

    @abstractmethod
    def weighted_sum(self, factors: Tensor) -> Tensor:
        """Return the sum over samples of factor times gradient, in the shape of the parameter."""

    @abstractmethod
    def dense(self, start: int, stop: int) -> Tensor:
        """Return the gradients of the samples from ``start`` to ``stop``: (stop - start, *shape)."""

    @abstractmethod
    def make_finite(self) -> None:
        """Replace infs and NaNs by 0. The samples that have them get the factor 0, but 0 times NaN is NaN."""

    def formed(self, bounds: Sequence[tuple[int, int]] | None = None, *, keep: bool) -> tuple["Contribution", Tensor]:
        """What `measured` returns, from gradients that are formed for a few samples at a time, and kept or dropped."""
        runs: list[Tensor] = []
        norms: list[Tensor] = []
        for start, stop in pieces(self.batch_size, self.param.numel() * 4) if bounds is None else bounds:
            run = self.dense(start, stop)
            norms.append(norms_of_rows(run))
            if keep:
                runs.append(run)
        device = self.param.device
        joined = torch.cat(norms) if norms else torch.zeros(0, dtype=widest(device), device=device)
        return Dense(self.param, *runs) if keep else self, joined


class Dense(Contribution):
    """Gradients in full, for small parameters and where that costs least.

    They are a tensor of shape (B, *shape), or several with some samples each, which joining would copy.
    """

    def __init__(self, param: Tensor, *runs: Tensor) -> None:
        self.param, self.batch_size = param, sum(map(len, runs))
        self._runs = runs

    @property
    def grads(self) -> Tensor:
        """The gradients as one tensor, (B, *shape)."""
        return self._runs[0] if len(self._runs) == 1 else torch.cat(self._runs)

    @override
    def measured(self, reserve: Reserve) -> tuple[Contribution, Tensor]:
        norms = [norms_of_rows(run) for run in self._runs]
        return self, norms[0] if len(norms) == 1 else torch.cat(norms)

    @override
    def weighted_sum(self, factors: Tensor) -> Tensor:
        first = self._runs[0]
        order = memory_order(first)
        shape = first.permute(order).shape[1:]
        result = first.new_zeros(math.prod(shape))
        parts = factors.to(first.device, first.dtype).split([len(run) for run in self._runs])
        for part, run in zip(parts, self._runs, strict=True):
            # the dimensions are in the order of memory, so reshape makes a view
            result.addmv_(run.permute(order).reshape(len(run), len(result)).t(), part)
        back = [order.index(dim) - 1 for dim in range(1, len(order))]
        return result.view(shape).permute(back).contiguous()

    @override
    def dense(self, start: int, stop: int) -> Tensor:
        return self.grads[start:stop]

    @override
    def make_finite(self) -> None:
        self._runs = tuple(run.nan_to_num(0, 0, 0) for run in self._runs)

    def joined(self, other: "Dense") -> "Dense":
        """Both uses as one."""
        return Dense(self.param, self.grads + other.grads)


class Tied(Contribution):
    """Several uses of one parameter, no two of which can be joined.

    ``inner_products`` returns the sum over pairs of uses of twice their inner product, for each sample. Without it,
    gradients are formed.
    """

    def __init__(self, parts: Sequence[Contribution], inner_products: Callable[[], Tensor] | None = None) -> None:
        self.param, self.batch_size = parts[0].param, parts[0].batch_size
        self._parts = parts
        self._inner_products = inner_products

    @override
    def measured(self, reserve: Reserve) -> tuple[Contribution, Tensor]:
        if self._inner_products is None:
            return self.formed(keep=False)
        products = self._inner_products()
        self._parts, of_parts = zip(*(part.measured(reserve) for part in self._parts), strict=True)
        apart = joint_norms(torch.stack(of_parts))
        norms = (apart.square() + products).clamp(min=0).sqrt()
        unsure = (norms < CANCELLED * apart) | ((norms < SMALL) & (apart > 0)) | ~norms.isfinite()
        for i in unsure.nonzero()[:, 0].tolist():
            norms[i] = moved(norms_of_rows(in_float64(self.dense(i, i + 1)))[0], norms.device)
        return self, norms

    @override
    def weighted_sum(self, factors: Tensor) -> Tensor:
        return total([part.weighted_sum(factors) for part in self._parts])

    @override
    def dense(self, start: int, stop: int) -> Tensor:
        return total([part.dense(start, stop) for part in self._parts])

    @override
    def make_finite(self) -> None:
        for part in self._parts:
            part.make_finite()


def pieces(count: int, bytes_each: int, *, limit: int = _PIECE) -> list[tuple[int, int]]:
    """The bounds of runs of samples, each of at most ``limit`` bytes, or of one sample."""
    step = max(1, min(count, limit // max(bytes_each, 1)))
    return [(start, min(start + step, count)) for start in range(0, count, step)]


def total(tensors: Sequence[Tensor]) -> Tensor:
    """The sum, in one new tensor; the tensor itself if there is only one."""
    if len(tensors) == 1:
        return tensors[0]
    result = tensors[0] + tensors[1]
    for tensor in tensors[2:]:
        result += tensor
    return result
