"""What is captured of a forward of the model and of its backwards."""

import functools
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchzero_clip.checks import instance
from torchzero_clip.compat import warn_user, without_autocast
from torchzero_clip.per_sample.arguments import counts_up
from torchzero_clip.per_sample.gradients.contributions import Contribution, Dense, Memory, Tied
from torchzero_clip.per_sample.gradients.products import Products
from torchzero_clip.per_sample.gradients.rows import RowProducts, SparseRows
from torchzero_clip.per_sample.layer import Layer
from torchzero_clip.per_sample.processes.sharding import storages_of

PACKED = "Several documents packed in one row? Put one document in each row."


class DeclaredRows(NamedTuple):
    """What the user gave to `rows`: vectors with the sample of each row, by length, and the number of samples."""

    by_length: Mapping[int, Tensor]
    batch_size: int

    @classmethod
    def checked(cls, samples: Sequence[Tensor], batch_size: int) -> "DeclaredRows":
        """What was given for each number of rows: see `PerSampleGradientClipper.rows`."""
        instance("batch_size", batch_size, int)
        by_length: dict[int, Tensor] = {}
        for rows in samples:
            instance("samples", rows, Tensor)
            if rows.is_floating_point() or rows.dtype == torch.bool:
                raise TypeError(f"samples must hold integers, got {rows.dtype}")
            if rows.ndim != 1 or not bool(((rows >= 0) & (rows < batch_size)).all()):
                raise ValueError(f"samples must be vectors of numbers from 0 to {batch_size - 1}, got {rows}")
            if not torch.equal(rows, by_length.setdefault(len(rows), rows)):
                raise ValueError(f"samples has two vectors of {len(rows)} rows: pad one of the tensors")
            if len(rows) == batch_size and not torch.equal(rows, torch.arange(batch_size, device=rows.device)):
                raise ValueError(
                    f"samples has as many rows as there are samples, {batch_size}, in another order, so that rows and "
                    "samples cannot be told apart: sort the rows by sample, or add a row"
                )
        return cls(by_length, batch_size)


class Forward:
    """A forward of the model with ``inputs`` among its arguments; None for layers that are called outside of one.

    Args:
        in_objects: Tensors in objects among the arguments, used only if no argument is a tensor.
        captured: False if the layers run as they do without a clipper.
        declared_rows: The sample of each row, as the user gave it.
        had_several_sizes: True if an earlier call with such arguments had inputs of several sizes.
    """

    def __init__(
        self,
        inputs: Sequence[Tensor] | None = None,
        dim: int = 0,
        *,
        in_objects: Sequence[Tensor] = (),
        captured: bool = True,
        declared_rows: DeclaredRows | None = None,
        had_several_sizes: bool = False,
    ) -> None:
        self.captured = captured
        self.outside_model = inputs is None
        """True for layers that are called outside of the forward of the model."""
        found = [x for x in inputs or () if x.ndim]
        self.shows_batch_size = self.outside_model or bool(found)
        """False if no argument is a tensor from which the number of samples can be read."""
        found = found or [x for x in in_objects if x.ndim]
        each = [x.shape[min(dim, x.ndim - 1)] for x in found]
        sizes = {*each}
        if len(sizes) > 1:  # positions have as many entries as a sequence, not as the batch
            sizes = {n for x, n in zip(found, each, strict=True) if not counts_up(x)}
        others = sizes - {1}
        if len(others) == 1 and each[0] in others:
            sizes = others  # the rest is one row for all samples
        self.has_several_sizes = len(sizes) > 1
        self.batch_size = sizes.pop() if len(sizes) == 1 and (not had_several_sizes or sizes == {0}) else None
        """The size of all inputs in the batch dimension; None if they differ, or have one size by chance."""
        if declared_rows is not None:
            self.batch_size = declared_rows.batch_size
        self.declared_rows = declared_rows
        self._arguments = [weakref.ref(x) for x in found]

    def holds(self, *tensors: Tensor) -> bool:
        """True if an argument or a view of one is among these tensors: it is of samples."""
        return bool(storages_of(tensors) & self._storages)

    # The caller holds the arguments until the forward ends. After that, a new tensor may get the memory of one. It then
    # counts as a tensor of samples, and the proof raises if all samples share it.
    @functools.cached_property
    def _storages(self) -> set[int]:
        return storages_of(self._alive)

    @functools.cached_property
    def storages_of_values(self) -> set[int]:
        """The memory of the arguments that are not indices."""
        return storages_of([x for x in self._alive if x.dtype != torch.int64])

    @property
    def _alive(self) -> list[Tensor]:
        return [x for x in (argument() for argument in self._arguments) if x is not None]

    @functools.cached_property
    def has_batch_of_numbers(self) -> bool:
        """True if all arguments are 0, 1, 2, ..., or there is only one, because one of them must be the batch."""
        return len(self._alive) == 1 or all(map(counts_up, self._alive))

    def is_batch(self, tensor: Tensor) -> bool:
        """True for an argument of the model, or a view of one, that must be the batch, also if it is 0, 1, 2, ..."""
        return self.has_batch_of_numbers and any(tensor is x or tensor._base is x for x in self._alive)

    def is_argument(self, tensor: Tensor) -> bool:
        """True if this tensor is an argument of the model, whose samples are in the declared dimension."""
        return any(argument() is tensor for argument in self._arguments)


class CapturedGradients:
    """The contributions of layers to all parameters, in the backwards since the last clipping."""

    def __init__(self, memory: Memory) -> None:
        self.forwards: set[Forward] = set()
        """The forwards that the gradients belong to."""
        self.joins: list[tuple[Forward, Forward]] = []
        """Forwards of which one got an output of the other, as far as the classic form has seen them."""
        self.by_param: dict[int, list[Contribution]] = {}
        """The contributions by the id of the parameter."""
        self._norms: dict[int, Tensor] = {}  # of those that are measured
        self._memory: Memory = memory
        self._saved = 0  # bytes
        self.counts: list[tuple[Layer, int]] = []
        """The number of samples in each call of a layer."""

    @property
    def batch_size(self) -> int:
        """The number of samples in the first contribution."""
        return self.counts[0][1]

    def add(self, layer: Layer, part: Contribution, *, alone: bool) -> None:
        """Take a contribution. It is measured at once if no other one to the same parameter is expected."""
        self.counts.append((layer, part.batch_size))
        key, found = id(part.param), self.by_param.setdefault(id(part.param), [])
        self._norms.pop(key, None)
        last = found[-1] if found else None
        if isinstance(part, Dense) and isinstance(last, Dense) and part.batch_size == last.batch_size:
            found[-1] = last.joined(part)  # one gradient of each sample for many calls
        elif found or not alone:
            found.append(part)
        else:
            measured, self._norms[key] = part.measured(self.reserve)
            found.append(measured)

    def reserve(self, formed: int, made_of: int) -> bool:
        """Let per-sample gradients replace the tensors that they are computed from, if that takes no more memory.

        Both are in bytes. It counts over all layers: a later layer may use the memory that an earlier one has saved. An
        empty batch stores none.
        """
        saved = self._saved + made_of - formed
        if self._memory == "low" or not formed or saved < 0:
            return False
        self._saved = saved
        return True

    def gathered(self) -> dict[int, tuple[Contribution, Tensor]]:
        """The contribution to each parameter, by its id, and the norms."""
        for key, found in self.by_param.items():
            if key not in self._norms:
                with without_autocast(found[0].param):  # it would round the norms
                    part, self._norms[key] = in_one(found).measured(self.reserve)
                found[:] = [part]
        return {key: (found[0], self._norms[key]) for key, found in self.by_param.items()}

    def check_counts(self, count: int | None, *, batch_first: bool) -> None:
        """Raise a ValueError if a layer saw another number of samples than ``count``, or than others if it is None."""
        count = self.batch_size if count is None else count
        for layer, seen in self.counts:
            if seen != count:
                layers, counts = ({item[i] for item in self.counts} for i in range(2))
                every = len(layers) > 1 and len(counts) == 1
                place = f"dimension {0 if batch_first else 1} of the input of every layer (batch_first={batch_first})"
                way_out = f"Per-sample gradients need the samples in {place}, and one loss for each{layer.way_out}"
                if seen and not count % seen and len(self.forwards) == 1:
                    n = count // seen
                    mean = f"view({seen}, {n}).mean(1)" if batch_first else f"view({n}, {seen}).mean(0)"
                    way_out = (
                        "One loss for each token? If some are padded, divide each sum by the number of real ones. "
                        f"{PACKED} Else average over the tokens of each sample: losses.{mean}"
                    )
                elif seen > count:
                    vectors = "sample_of_node, sample_of_edge" if len(counts) > 1 else "sample_of_row"
                    rows = f"`with clipper.rows({vectors}, batch_size={count}):`"
                    what = "rows of several samples, such as the nodes of graphs"
                    way_out = f"If these are {what}, run the forward in {rows}. {way_out}"
                elif 0 < seen < count:
                    way_out = f"{PACKED} {way_out}"
                raise ValueError(
                    f"{'every layer' if every else layer} saw {seen} samples, the batch has {count}. {way_out}"
                )

    def check_joined(self) -> None:
        """Raise a ValueError if gradients are of several calls of the model, of which none uses another's output."""
        rest = {forward for forward in self.forwards if not forward.outside_model}
        count = len(rest)
        connected = [rest.pop()] if rest else []
        while connected:
            one = connected.pop()
            near = {x for pair in self.joins if one in pair for x in pair} & rest
            connected += near
            rest -= near
        if rest:
            raise ValueError(
                f"gradients of {count} calls of the model have arrived, and not all of them are "
                "connected by outputs that another call uses, so their samples cannot be compared. If each call got a "
                "part of the batch, run a backward for each part. If all got the same samples, use backward(losses)"
            )

    def check_one_batch(self) -> None:
        """Raise a ValueError if the gradients may belong to parts of a batch. Warn if rows may not be samples."""
        of_model = [forward for forward in self.forwards if not forward.shows_batch_size]
        if of_model or len(self.forwards) > 1:
            found = (
                "the arguments of the forward hold no tensor that tells how many samples there are"
                if of_model
                else f"gradients of {len(self.forwards)} forwards have arrived, which may be parts of one batch"
            )
            raise ValueError(f"{found}: call clip_and_accumulate(batch_size=...), or use backward(losses)")
        if any(forward.batch_size is None and forward.has_several_sizes for forward in self.forwards):
            warn_user(
                "the arguments of the forward have several sizes in the dimension of the samples, so each of "
                f"{self.batch_size} rows was taken for a sample, which is wrong for nodes of graphs. Let "
                "clip_and_accumulate(batch_size=...) check it, or backward(losses) find the samples"
            )


def in_one(parts: Sequence[Contribution]) -> Contribution:
    """Merge the uses of one parameter: those of one kind are joined, and different kinds are combined in `Tied`."""
    kinds: list[Any] = [Products, SparseRows, RowProducts, Dense]
    # by their exact type, because convolutions are products too, and have no positions to join
    found = {kind: [part for part in parts if type(part) is kind] for kind in kinds}
    joined: list[Any] = [functools.reduce(kind.joined, same) for kind, same in found.items() if same]
    joined += [part for part in parts if type(part) not in kinds]
    match joined:
        case [part]:
            return part
        case [Products() as products, SparseRows() as rows]:  # an embedding and the head that shares its weight
            return Tied(joined, inner_products=lambda: 2 * rows.inner_products(products))
        case _:
            return Tied(joined)
