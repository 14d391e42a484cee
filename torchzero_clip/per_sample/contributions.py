"""The per-sample gradients from one use of a parameter, stored in the form that is cheapest for its layer."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Literal, TypeAlias

import torch
from torch import Tensor
from typing_extensions import override

from torchzero_clip.per_sample.squared_norms import memory_order, squared_norms

Memory: TypeAlias = Literal["auto", "low"]

PIECE = 1 << 20  # bytes of per-sample gradients that are formed at a time, so that their norms read them from the cache


class Contribution(ABC):
    """The per-sample gradients of one parameter, from one use of it or from several.

    Args:
        param: The parameter.
        batch_size: The number B of samples.
    """

    def __init__(self, param: Tensor, batch_size: int) -> None:
        self.param = param
        self.batch_size = batch_size

    @abstractmethod
    def measured(self) -> tuple["Contribution", Tensor]:
        """Return the contribution to store for the sum, and the squared norms of the samples: (B,), float64."""

    @abstractmethod
    def weighted_sum(self, factors: Tensor) -> Tensor:
        """Return the sum over samples of factor times gradient, in the shape of the parameter."""

    @abstractmethod
    def dense(self, start: int, stop: int) -> Tensor:
        """Return the gradients of the samples from ``start`` to ``stop``: (stop - start, *shape)."""

    @abstractmethod
    def zero_(self, samples: Tensor) -> None:
        """Set the gradients of masked samples to 0. A factor of 0 cannot do that, because 0 times NaN is NaN."""


class Dense(Contribution):
    """Gradients in full, for small parameters and for layers without a cheaper form.

    Args:
        param: The parameter.
        grads: Its per-sample gradients, (B, *shape).
        squares: Their squared norms, if known: (B,), float64.
    """

    def __init__(self, param: Tensor, grads: Tensor, squares: Tensor | None = None) -> None:
        super().__init__(param, grads.shape[0])
        self.grads = grads
        self._squares = squares

    @override
    def measured(self) -> tuple[Contribution, Tensor]:
        return self, squared_norms(self.grads) if self._squares is None else self._squares

    @override
    def weighted_sum(self, factors: Tensor) -> Tensor:
        return weighted_rows(factors, [self.grads])

    @override
    def dense(self, start: int, stop: int) -> Tensor:
        return self.grads[start:stop]

    @override
    def zero_(self, samples: Tensor) -> None:
        self.grads = zeroed(self.grads, samples)

    def joined(self, other: "Dense") -> "Dense":
        """Both uses as one."""
        return Dense(self.param, self.grads + other.grads)


class Runs(Contribution):
    """Gradients in full, as a list of runs of samples, because joining the runs would copy them.

    Args:
        param: The parameter.
        runs: The gradients of some samples each, in order.
    """

    def __init__(self, param: Tensor, runs: list[Tensor]) -> None:
        super().__init__(param, sum(len(run) for run in runs))
        self._runs = runs

    @override
    def measured(self) -> tuple[Contribution, Tensor]:
        return self, torch.cat([squared_norms(run) for run in self._runs])

    @override
    def weighted_sum(self, factors: Tensor) -> Tensor:
        return weighted_rows(factors, self._runs)

    @override
    def dense(self, start: int, stop: int) -> Tensor:
        return torch.cat(self._runs)[start:stop]

    @override
    def zero_(self, samples: Tensor) -> None:
        parts = samples.split([len(run) for run in self._runs])
        self._runs = [zeroed(run, part) for run, part in zip(self._runs, parts, strict=True)]


class Tied(Contribution):
    """Several uses of one parameter, no two of which can be joined.

    Args:
        parts: The uses.
        inner_products: Returns the sum over pairs of parts of twice their inner product, for each sample. If None,
            gradients are formed.
    """

    def __init__(self, parts: Sequence[Contribution], inner_products: Callable[[], Tensor] | None = None) -> None:
        super().__init__(parts[0].param, parts[0].batch_size)
        self._parts = parts
        self._inner_products = inner_products

    @override
    def measured(self) -> tuple[Contribution, Tensor]:
        if self._inner_products is None:
            return self, piecewise_squared_norms(self)
        products = self._inner_products()
        kept, squares = zip(*(part.measured() for part in self._parts), strict=True)
        self._parts = kept
        largest = torch.stack(squares).sum(0)
        total = largest + products
        for i in (total < CANCELLED * largest).nonzero()[:, 0].tolist():
            total[i] = squared_norms(self.dense(i, i + 1).double())[0]
        return self, total

    @override
    def weighted_sum(self, factors: Tensor) -> Tensor:
        return total([part.weighted_sum(factors) for part in self._parts])

    @override
    def dense(self, start: int, stop: int) -> Tensor:
        return total([part.dense(start, stop) for part in self._parts])

    @override
    def zero_(self, samples: Tensor) -> None:
        for part in self._parts:
            part.zero_(samples)


CANCELLED = 1e-4  # a squared norm below this share of its parts has lost digits by cancellation in float32


def weighted_rows(factors: Tensor, runs: Sequence[Tensor]) -> Tensor:
    """The sum of factor times row, over the rows of one tensor or several."""
    factors = factors.to(runs[0].device, runs[0].dtype)
    order = memory_order(runs[0])
    shape = runs[0].permute(order).shape[1:]
    parts = factors.split([len(run) for run in runs])
    columns = [run.permute(order).reshape(len(run), math.prod(shape)).t() for run in runs]
    result = torch.mv(columns[0], parts[0])
    for part, matrix in zip(parts[1:], columns[1:], strict=True):
        result.addmv_(matrix, part)
    back = [order.index(dim) - 1 for dim in range(1, len(order))]
    return result.view(shape).permute(back).contiguous()


def pieces(count: int, bytes_each: int, *, limit: int = PIECE) -> list[tuple[int, int]]:
    """The bounds of runs of samples, each of at most ``limit`` bytes, or of one sample."""
    step = max(1, min(count, limit // max(bytes_each, 1)))
    return [(start, min(start + step, count)) for start in range(0, count, step)]


def piecewise_squared_norms(contribution: Contribution) -> Tensor:
    """The squared norms of gradients, which are formed for a few samples at a time and then dropped."""
    param = contribution.param
    bounds = pieces(contribution.batch_size, param.numel() * 4)
    norms = [squared_norms(contribution.dense(start, stop)) for start, stop in bounds]
    return torch.cat(norms) if norms else torch.zeros(0, dtype=torch.float64, device=param.device)


def total(tensors: Sequence[Tensor]) -> Tensor:
    """The sum, in one new tensor; the tensor itself if there is only one."""
    if len(tensors) == 1:
        return tensors[0]
    result = tensors[0] + tensors[1]
    for tensor in tensors[2:]:
        result += tensor
    return result


def zeroed(rows: Tensor, samples: Tensor) -> Tensor:
    """The rows, with zeros in those of masked samples."""
    return rows.masked_fill(samples.to(rows.device).view(-1, *[1] * (rows.ndim - 1)), 0)


class MemoryBudget:
    """Lets per-sample gradients replace the tensors that they are computed from, if that takes no more memory.

    It counts over all layers of one backward: a later layer may use the memory that an earlier one has saved.

    Args:
        memory: With "low", it never does.
    """

    def __init__(self, memory: Memory) -> None:
        self._memory: Memory = memory
        self._saved = 0

    def reserve(self, formed: int, made_of: int) -> bool:
        """Reserve memory for per-sample gradients. Return False if it does not suffice, or if the batch is empty.

        Args:
            formed: The bytes of the per-sample gradients.
            made_of: The bytes of the inputs and output gradients that are stored otherwise.
        """
        saved = self._saved + made_of - formed
        if self._memory == "low" or not formed or saved < 0:
            return False
        self._saved = saved
        return True
