"""A call of a layer: where its rows are, and what makes its contributions."""

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torchzero_clip.compat import TELLS_HOOKS, checkpoint_around, current_graph_task_id
from torchzero_clip.per_sample.gradients.captured_gradients import Forward
from torchzero_clip.per_sample.gradients.contributions import Contribution
from torchzero_clip.per_sample.gradients.rows import regrouped
from torchzero_clip.per_sample.layer import Layer
from torchzero_clip.per_sample.samples.pattern import Pattern, Place, kinds_of_sizes

Contribute = Callable[..., Iterable[Contribution]]
"""Makes contributions from the place of the samples, the gradient, the inputs that are kept, and the number of samples.

With a `Call.reduce`, these are of the samples. Else there is one for each row, and `Call.contributions` adds up those
of a sample.
"""
Reduce = Callable[[Tensor], Tensor]


class LayerInput(NamedTuple):
    """The input of a layer, with ``leading`` dimensions before those of a single position.

    The samples are in dimension ``dim``, unless a proof finds them elsewhere. If all samples share the input,
    ``tensor`` has one copy of it per sample, and the layer returns one row. ``had_dim`` is True if the input already
    had this dimension, of size 1. If copies stand one after the other in ``dim``, ``rows`` is the
    number of rows of each; else None. With ``takes_positions``, the layer and its contributions take any number of
    dimensions before those of a position.
    """

    tensor: Tensor
    leading: int
    dim: int = 0
    is_shared: bool = False
    had_dim: bool = False
    is_argument: bool = False
    rows: int | None = None
    takes_positions: bool = False


class Call:
    """One call of a layer.

    Args:
        contribute: Makes the contributions.
        input: The input of the layer. Without one, there are rows of items of a ``shape``, such as sequences.
        kind: What it has in common with calls in other forwards.
        shape: The shape of the rows, or of the items.
        reduce: Turns the samples of rows into the samples of items.
        copies: True if the rows are copies that were made for the samples, in their order.
        on_shared: Notes that all samples share the rows, such as positions. Returns True if that is possible.
        beside: The inputs of a layer that gets copies of its parameters, so that a proof sees whether they come from
            shared rows. Then ``input`` are the copies.
    """

    def __init__(
        self,
        layer: Layer,
        forward: Forward,
        contribute: Contribute,
        input: LayerInput | None,
        *,
        kind: Hashable,
        shape: Sequence[int] = (),
        reduce: Reduce | None = None,
        copies: bool = False,
        on_shared: Callable[[], bool] | None = None,
        beside: Iterable[Tensor] | None = None,
    ) -> None:
        self.layer, self.forward, self.kind, self._contribute = layer, forward, kind, contribute
        self.leading = 1 if input is None else input.leading
        """How many dimensions of the gradient the rows have."""
        self.shape = tuple(shape) if input is None else tuple(input.tensor.shape[: input.leading])
        self.declared = input.dim if input is not None and input.is_argument else None
        """The dimension of the samples, if the input is an argument of the model."""
        self.reduce, self.copies, self.on_shared = reduce, copies, on_shared
        self._takes_positions = input is not None and input.takes_positions
        inputs = beside if beside is not None else [] if input is None else [input.tensor]
        self.made_by = [x.grad_fn for x in inputs]
        """The functions that made the inputs of the layer, None for inputs without a graph."""
        self.each: Tensor | None = None
        """The gradient that each sample gives to rows that all of them share, samples first."""
        self.may_be_in_checkpoint = not TELLS_HOOKS and checkpoint_around() is not None
        """True in a checkpoint, if torch does not tell what is in one."""
        self.in_backward = current_graph_task_id() != -1
        """True for a call that first runs in a backward, such as one in a reentrant checkpoint."""
        self.where: Place | Tensor | None = None
        """Where the samples are, once it is known in this backward: their place, or the sample of each row."""
        self.is_silent = False
        """True if it got zeros alone in all proofs, so that another gradient has to be proved."""
        self.through: Tensor | None = None
        """The gradient that came through outputs of the model, in the classic form."""
        self.samples: Tensor | None = None
        """The sample of each row in the proofs of this backward."""

    def key(self, count: int) -> Hashable:
        """What calls of one kind have in common."""
        return self.kind, kinds_of_sizes(self.shape, count)

    def usual_place(self, batch_dim: int, count: int) -> Place | None:
        """The place of samples in the declared dimension; None if the rows do not have it."""
        dim = min(batch_dim, len(self.shape) - 1)
        return Pattern(dim).place(self.shape, count) if count else Place(dim)

    def contributions(
        self, where: Place | Tensor, grad: Tensor, inputs: Sequence[Tensor], count: int
    ) -> list[Contribution]:
        """The contributions of samples in known places."""
        if (each := self.each) is not None:
            self.each, rows = None, self.shape[0]
            copies = [x.expand(count, *x.shape) for x in inputs]
            if rows > 1 and self._takes_positions:
                return [*self._contribute(Place(0), each, *copies)]
            # registered rules may have inputs without rows
            pairs = zip(inputs, copies, strict=True)
            flat = [copied.flatten(0, 1) if x.ndim and len(x) == rows else x for x, copied in pairs]
            parts = self._contribute(Place(0), each.flatten(0, 1), *flat)
            return [*parts] if rows == 1 else [regrouped(part, rows, count) for part in parts]
        if self.reduce is not None:
            return [*self._contribute(where, grad, *inputs, count=count)]
        parts = self._contribute(where, grad, *inputs)
        if isinstance(where, Place) and where.run == 1 and not where.in_turn:  # the usual case, without a call for each
            return [*parts]
        return [of_samples(part, where, count) for part in parts]


def call_of(node: object) -> Call | None:
    """The call of a layer that a function of the graph watches; None for any other function."""
    # a node of the graph is the ``ctx`` of its `torch.autograd.Function`, so it has what the forward has set there
    call = getattr(node, "call", None)
    return call if isinstance(call, Call) else None  # functions of users may have an attribute of that name


def of_samples(part: Contribution, where: Place | Tensor, count: int) -> Contribution:
    """The contribution of samples, from one in which each row was taken for a sample."""
    if isinstance(where, Place):
        if not where.in_turn:
            return part if where.run == 1 else regrouped(part, where.run, count)
        where = torch.arange(part.batch_size, device=part.param.device) % count
    return regrouped(part, where, count)


def rows_first(where: Place | Tensor, *tensors: Tensor) -> list[Tensor]:
    """Tensors with the rows of samples in the first dimension."""
    if isinstance(where, Place):
        return [x.movedim(where.dim, 0) for x in tensors]
    return [x.flatten(0, where.ndim - 1) for x in tensors]
