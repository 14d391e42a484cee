"""Runs a function for each sample, and compares its outputs with those of the batch."""

import warnings
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from torchzero_clip.compat import pytree
from torchzero_clip.functional.dtypes import widened
from torchzero_clip.per_sample.samples.pattern import Place


def by_vmap(function: Callable[..., Any], *tensors: Any) -> Any:
    """The output of a function, which may have attention, for all samples. Each draws its own random numbers."""
    # vmap runs the other backends of attention in a loop
    with warnings.catch_warnings(), sdpa_kernel(SDPBackend.MATH):
        warnings.filterwarnings("ignore", "There is a performance drop")
        return torch.vmap(function, randomness="different")(*tensors)


CANNOT = IndexError, RuntimeError, TypeError, ValueError
"""Errors of a function of torch that cannot run for single samples, because they lack the dimension that it names.

They hide no wrong call of the user: if all ways fail, the function runs with its own arguments, and raises.
"""


class EachSample(NamedTuple):
    """A function of rows and tensors of the batch, which runs for each sample with copies of the rows."""

    function: Callable[..., Any]  # gets rows, then tensors of the batch
    rows: Sequence[Tensor]  # what all samples share
    copies: Sequence[Tensor]  # a copy of each row for each sample, samples first
    of_batch: Sequence[Tensor]  # tensors of the batch
    places: Sequence[Place]  # where these have the samples

    def output(self, known_dims: dict[Hashable, list[int] | None], kind: Hashable) -> Any:
        """The output of the batch, from those of its samples; NotImplemented if its samples are in no dimension.

        For ``x @ row``, with x of shape (4, 7, 8) and a row of shape (8, 5), vmap runs over x and the copies (4, 8, 5).
        The output of the batch shows that its samples are in dimension 0 of (4, 7, 5). This is found in the first call
        of a ``kind``, and stored in ``known_dims``.
        """
        if len(runs := {place.run for place in self.places}) > 1:
            return NotImplemented
        (run,), count = runs, len(self.copies[0])
        pairs = [(x, place.dim) for x, place in zip(self.of_batch, self.places, strict=True)]
        inputs = [x.movedim(d, 0).unflatten(0, (count, run)).movedim(1, d + 1) for x, d in pairs]
        # if a row has B entries, they may be positions, which all samples share, or one for each sample: both are tried
        entries = self._own_entries(self.places[0].dim) if run == 1 else None
        for copies in filter(None, (self.copies, entries)):
            key = kind, *self.places, entries is not None, copies is entries
            try:
                each, structure = pytree.tree_flatten(self._outputs(copies, inputs))
            except CANNOT:
                continue
            if key not in known_dims:  # the first call decides: the comparison takes another run of the function
                known_dims[key] = self._dims(each, run)
            if (dims := known_dims[key]) is None:
                continue
            if any(x.shape[d + 1] != run for x, d in zip(each, dims, strict=True)):
                return NotImplemented
            return pytree.tree_unflatten([_joined(x, d) for x, d in zip(each, dims, strict=True)], structure)
        return NotImplemented

    def _own_entries(self, dim: int) -> list[Tensor] | None:
        """The copies. If a row has an entry for each sample, copy i has entry i alone. None without such a row."""
        count = len(self.copies[0])
        sized = [x.ndim > dim + 1 and x.shape[dim + 1] == count for x in self.copies]
        pairs = zip(self.copies, sized, strict=True)
        parts = [own_entries(x, dim).unsqueeze(dim + 1) if own else x for x, own in pairs]
        return parts if any(sized) else None

    def _outputs(self, copies: Sequence[Tensor], inputs: Sequence[Tensor]) -> Any:
        """The output of each sample, samples first."""
        try:
            return by_vmap(self.function, *copies, *inputs)
        except (RuntimeError, ValueError):
            each = [self.function(*one) for one in zip(*copies, *inputs, strict=True)]
            return pytree.tree_map(lambda *parts: torch.stack(parts), *each)

    def _dims(self, each: Sequence[Tensor], run: int) -> list[int] | None:
        """The dimension of the samples in each output, found from the outputs for the batch; None if these differ."""
        dims = list[int]()
        with torch.no_grad():
            together = self.function(*self.rows, *self.of_batch)
        for one, whole in zip(each, pytree.tree_leaves(together), strict=True):
            sizes = [*zip(one.shape[1:], whole.shape, strict=False)]
            apart = [i for i, (a, b) in enumerate(sizes) if a != b]
            if one.ndim != whole.ndim + 1 or [sizes[i] for i in apart] != [(run, len(one) * run)]:
                return None
            dims.append(apart[0])
            if not are_equal(whole, _joined(one, apart[0])):
                return None
        return dims


def own_entries(copies: Tensor, dim: int) -> Tensor:
    """Of copies of a row, samples first: those entries of each copy that have the sample's own index in a dimension."""
    return copies.diagonal(0, 0, dim + 1).movedim(-1, 0)


def _joined(each: Tensor, dim: int) -> Tensor:
    """The output of the batch, from that of each sample, samples first, with rows of the sample along a dimension."""
    return each.movedim(dim + 1, 1).flatten(0, 1).movedim(0, dim)


def are_equal(together: Tensor, alone: Tensor) -> bool:
    """True if outputs of the batch and of its samples are equal up to rounding."""
    tolerance = torch.finfo(together.dtype).eps ** 0.5 if together.is_floating_point() else 0
    return not differ(widened(together), widened(alone.detach()), tolerance)


def differ(together: Tensor, alone: Tensor, tolerance: float) -> bool:
    """True if two tensors of one shape differ by more than a tolerance, relative to the largest magnitude.

    Equal values at the ends of the range, such as -1e9 in masks, do not count as magnitudes.
    """
    apart = ~together.isclose(alone, rtol=0, atol=1e-12, equal_nan=True)
    if not apart.any():
        return False
    apart |= (together > together.min()) & (together < together.max())
    scale = together[apart].nan_to_num(0, 0, 0).abs().max()
    return not bool(((together - alone)[apart].abs() <= tolerance * scale).all())
