"""Batches that take each sample with the same probability, on its own, as accounts of private training suppose."""

import copy
import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sized
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, default_collate
from typing_extensions import override

from torchzero_clip.checks import at_least_one, count, instance, positive, unit_interval
from torchzero_clip.functional.processes import device_of, gathered_texts


def poisson_loader(
    dataset: Dataset[Any],
    *,
    sample_rate: float,
    steps: int | None = None,
    generator: torch.Generator | None = None,
    collate_fn: Callable[[list[Any]], Any] = default_collate,
    **options: Any,
) -> DataLoader[Any]:
    """Return a loader of batches that take each sample with the same probability, on its own (Poisson sampling).

    A batch without samples has the structure, shapes and dtypes of the others. Several processes share one draw, and
    each gets its part. Loaders that split batches between processes, such as those of Accelerate, raise around it.

    Draws are independent, so a loader has no state: a resumed training goes on with fresh draws.

    Args:
        dataset: Has a length, and takes indices. The whole one, on all processes.
        sample_rate: The probability, above 0 and at most 1.
        steps: The number of batches in an iteration, by default ``round(1 / sample_rate)``.
        generator: Seeds the draws, for tests. Whoever knows its state knows who was drawn. By default, draws come from
            the random numbers of the operating system.
        collate_fn: As in `DataLoader`. The empty batch follows from the batches of one sample and of two.
        options: Further arguments of `DataLoader`, such as ``num_workers``.

    Raises:
        TypeError: If an argument has the wrong type, or decides about batches. In an iteration, if ``collate_fn`` makes
            an object of which no empty one is known.
        ValueError: If the value of an argument is invalid, or, in an iteration, differs between processes.
        RuntimeError: In an iteration of several processes, if another loader wraps this one.

    Examples:
        >>> import torch
        >>> from torch.utils.data import TensorDataset
        >>> dataset = TensorDataset(torch.randn(3, 4), torch.zeros(3))
        >>> loader = poisson_loader(dataset, sample_rate=1e-6, steps=1)
        >>> [(tuple(x.shape), tuple(y.shape)) for x, y in loader]
        [((0, 4), (0,))]
    """
    check_sample_rate(sample_rate)
    steps = round(1 / sample_rate) if steps is None else steps
    count("steps", steps)
    at_least_one("steps", steps)
    if generator is not None:
        instance("generator", generator, torch.Generator)
    if others := sorted({"batch_size", "batch_sampler", "drop_last", "sampler", "shuffle"} & options.keys()):
        raise TypeError(f"poisson_loader has no argument {others[0]!r}, because sample_rate decides about batches")
    if isinstance(dataset, IterableDataset) or not isinstance(dataset, Sized):
        raise TypeError(f"dataset must have a length and take indices, got {type(dataset).__name__}")
    at_least_one("len(dataset)", len(dataset))
    draws = _Draws(len(dataset), sample_rate, steps, generator)
    return _Loader(dataset, batch_sampler=draws, collate_fn=partial(_collated, dataset, collate_fn), **options)


def check_sample_rate(value: float) -> None:
    """Raise unless it is above 0 and at most 1."""
    positive("sample_rate", value)
    unit_interval("sample_rate", value)


class _Draws(Sampler[list[int]]):
    """The indices of the samples of this process."""

    def __init__(self, size: int, sample_rate: float, steps: int, generator: torch.Generator | None) -> None:
        self.size, self.sample_rate, self.steps, self.generator = size, sample_rate, steps, generator
        self.is_own = False  # True while its own loader asks, and not another one that wraps it

    def __len__(self) -> int:
        return self.steps

    @override
    def __iter__(self) -> Iterator[list[int]]:
        group = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
        if group is not None and group.size() > 1 and not self.is_own:
            raise RuntimeError(
                "another loader wraps poisson_loader, and would split its draw between the processes again: iterate "
                "over poisson_loader itself. Give accelerator.prepare only the model and the optimizer"
            )
        return self._drawn(group)

    def _drawn(self, group: dist.ProcessGroup | None) -> Iterator[list[int]]:
        key, part = os.urandom(32), slice(None)
        if (seeds := self.generator) is not None:
            key = bytes(torch.randint(256, (32,), generator=seeds, device=seeds.device).tolist())
        if group is not None:  # one key for all, from which each process computes all draws
            settings = f"{self.size}, {self.sample_rate}, {self.steps}"
            said = [text.split(":") for text in gathered_texts(f"{key.hex()}:{settings}", group, device_of([], group))]
            if len({text for _, text in said}) > 1:
                text = "; ".join(text for _, text in said)
                raise ValueError(f"processes have other values of len(dataset), sample_rate, steps: {text}")
            key, part = bytes.fromhex(said[0][0]), slice(group.rank(), None, group.size())
        for step in range(self.steps):
            stream = bytearray(hashlib.shake_256(key + step.to_bytes(8, "little")).digest(8 * self.size))
            uniform = (torch.frombuffer(stream, dtype=torch.int64) & (2**53 - 1)).double().mul_(2.0**-53)
            yield (uniform < self.sample_rate).nonzero()[part, 0].tolist()


class _Loader(DataLoader[Any]):
    @override
    def __iter__(self) -> Any:
        draws: Any = self.batch_sampler
        draws.is_own = True
        try:
            return super().__iter__()
        finally:
            draws.is_own = False


def _collated(dataset: Any, collate_fn: Callable[[list[Any]], Any], samples: list[Any]) -> Any:
    return collate_fn(samples) if samples else _empty(collate_fn([dataset[0]]), collate_fn([dataset[0], dataset[0]]))


def _empty(one: Any, two: Any) -> Any:
    """An empty batch: the dimensions that differ between a batch of one and of two become 0."""
    if isinstance(one, Tensor):
        return one.new_zeros([max(2 * a - b, 0) for a, b in zip(one.shape, two.shape, strict=True)])
    if isinstance(one, Mapping):
        result: Any = copy.copy(one)  # pyright: ignore[reportUnknownVariableType]
        result.update({key: _empty(one[key], two[key]) for key in one})
        return result
    if isinstance(one, list | tuple):
        kind, same = type(one), len(one) == len(two)  # pyright: ignore[reportUnknownVariableType]
        parts = [_empty(a, b) for a, b in zip(one, two, strict=True)] if same else []
        return kind(*parts) if hasattr(one, "_fields") else kind(parts)
    if isinstance(one, bool | int | float | str | None) and one == two:
        return one
    raise TypeError(
        f"collate_fn makes a {type(one).__name__}, of which no empty one is known: return tensors, or dicts, lists and "
        "tuples of them"
    )
