"""Values that all samples share, such as embeddings of positions, class tokens and layer scales.

They are made of parameters, but not of samples, so their gradient would be a sum over samples. So a layer without
samples runs for each sample, on copies, and returns one row with the copies behind it. The model goes on with the row,
whose shape it expects. A function that joins it with a tensor of the batch, as ``h + positions``, gets the copies.
"""

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from torchzero_clip.compat import DisableTorchFunctionSubclass, never_a_frame, never_traced, pytree
from torchzero_clip.per_sample.arguments import Rebuild, counts_up, flattened, tensors_in
from torchzero_clip.per_sample.each_sample import are_equal, by_vmap
from torchzero_clip.per_sample.function_names import ATTRIBUTES, EXPANSIONS, HOOKS, OF_DTYPE, is_arithmetic, is_in_place
from torchzero_clip.per_sample.gradients.autograd_graph import nodes_of
from torchzero_clip.per_sample.gradients.contributions import Dense
from torchzero_clip.per_sample.gradients.row_norms import wide
from torchzero_clip.per_sample.modes import attribute_read
from torchzero_clip.per_sample.processes.sharding import storages_of
from torchzero_clip.per_sample.rows_layer import RowsLayer
from torchzero_clip.per_sample.samples.call import LayerInput, call_of, rows_first
from torchzero_clip.per_sample.samples.pattern import Place

_EMBEDDING = inspect.signature(F.embedding)
CANNOT = IndexError, RuntimeError, TypeError, ValueError
"""Errors of a function of torch that cannot run for single samples, because they lack the dimension that it names.

They hide no wrong call of the user: if all ways fail, the function runs with its own arguments, and raises.
"""


Make: TypeAlias = Callable[[int, Callable[[], bool] | None], Tensor]
"""Makes as many copies of a value as its first argument says, for rows in any order.

The second argument becomes `Call.on_shared`.
"""


class BroadcastRow(Tensor):
    """A value that all samples share, with a copy for each sample behind it.

    A function with a tensor of the batch runs sample by sample, with the copies, so that the gradient has a row for
    each sample. Functions of such values alone run on the copies too. Where neither is possible, the gradient would be
    summed over samples, so the backward raises.
    """

    _each: Tensor  # (B, *shape): the copies
    _layer: RowsLayer  # that it comes from
    _param: Any = None  # the parameter that it is, if it is one
    _make: Make | None = None  # makes copies for rows of several samples; None if there can be none
    _version_then: int  # another version means a change in place that the copies have missed

    def as_input(self, dim: int) -> tuple[Tensor, bool]:
        """The copies as the input of a layer with this batch dimension, and whether the value has that dimension."""
        with DisableTorchFunctionSubclass():
            if self.ndim > dim and self.shape[dim] == 1:
                return self.aligned(self._each, self.ndim, dim), True
            return self._each.movedim(0, dim), False

    def aligned(self, copies: Tensor, ndim: int, dim: int) -> Tensor:
        """Copies of the value as a tensor with ``ndim`` dimensions, of which ``dim`` has the copies."""
        with DisableTorchFunctionSubclass():
            shape = (1,) * (ndim - self.ndim) + tuple(self.shape)
            return copies.reshape(len(copies), *shape[:dim], *shape[dim + 1 :]).movedim(0, dim)

    def fits(self, ndim: int, dim: int) -> bool:
        """True if the value can be added to a tensor with ``ndim`` dimensions, of which ``dim`` is the batch."""
        with DisableTorchFunctionSubclass():
            return ndim > dim and self.ndim <= ndim and (self.ndim < ndim - dim or self.shape[dim - ndim] == 1)

    @classmethod
    @override
    @never_a_frame
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        with DisableTorchFunctionSubclass():
            if (attribute := attribute_read(func)) is not None and attribute not in ATTRIBUTES:
                return func(*args)
            leaves, rebuilt = flattened(args, kwargs)
            rows = [x for x in leaves if isinstance(x, BroadcastRow)]
            if torch.is_grad_enabled():
                if name not in HOOKS and all(map(is_row, rows)):
                    output = _Use(func, args, kwargs, leaves, rebuilt).output()
                    if output is not NotImplemented:
                        return output
                for layer in (row._layer for row in rows):
                    layer.misuse = repr(name), layer.capture.running is layer
            if name in HOOKS:
                rows[0]._layer.refuse_row()
            return func(*args, **kwargs)


def is_row(value: Any) -> bool:
    """True if the value is shared by all samples, and was not changed in place, which the copies would not see."""
    if not isinstance(value, BroadcastRow):
        return False
    with DisableTorchFunctionSubclass():
        return value._version == value._version_then


def row_of(layer: RowsLayer, each: Tensor) -> Tensor:
    """Return the first entry of ``each`` as a row, or as it is if there is one sample.

    ``each`` has the output for every sample, samples first.
    """
    row = each[0] if len(each) else each.new_zeros(each.shape[1:])
    return _as_row(_refusing(layer, row.detach().clone()).clone(), each, layer)


def row_of_param(layer: RowsLayer, param: nn.Parameter, value: Tensor, each: Tensor, make: Make) -> Tensor:
    """Return the value of a parameter as a row. ``make`` makes other numbers of copies."""
    row = _as_row(_refusing(layer, value.detach()), each, layer, make)
    if isinstance(row, BroadcastRow):
        row._param = param
    return row


def _refusing(layer: RowsLayer, leaf: Any) -> Tensor:
    """The tensor, whose gradient would be summed over samples: a backward that reaches it raises."""

    def refuse(grad: Tensor) -> None:
        layer.refuse_row()

    layer.misuse, leaf.refuses_gradients = None, True
    leaf.requires_grad_().register_hook(refuse)
    return leaf


def refuses_gradients(leaf: Tensor) -> bool:
    """True for a leaf behind a row: a backward that reaches it raises an error that names the layer."""
    return hasattr(leaf, "refuses_gradients")


def _as_row(row: Any, each: Tensor, layer: RowsLayer, make: Make | None = None) -> Tensor:
    if len(each) == 1:
        return each[0]  # a single sample needs no row
    never_traced(BroadcastRow)
    with DisableTorchFunctionSubclass():
        result = row.as_subclass(BroadcastRow)
        result._each, result._layer, result._version_then = each, layer, row._version
        result._make = make
        return result


class _Use:
    """A function with rows among its arguments. Each method that returns an output is a way to run it with copies.

    ``leaves`` are those of the arguments, and ``rebuilt`` makes arguments of other leaves.
    """

    def __init__(self, func: Any, args: Any, kwargs: Any, leaves: list[Any], rebuilt: Rebuild) -> None:
        if func is F.embedding:
            args, kwargs = without_padding(args, kwargs)
            leaves, rebuilt = flattened(args, kwargs)
        self.func, self.name, self._args, self._kwargs = func, getattr(func, "__name__", ""), args, kwargs
        self.leaves, self.rebuilt = leaves, rebuilt
        self.changes = is_in_place(self.name)
        self.rows = [i for i, x in enumerate(leaves) if isinstance(x, BroadcastRow)]
        self._first: BroadcastRow = leaves[self.rows[0]]
        self.layer, self._count = self._first._layer, len(self._first._each)
        tensors = {i: x for i, x in enumerate(leaves) if isinstance(x, Tensor)}
        self._others = {i: x for i, x in tensors.items() if i not in self.rows and self.name not in OF_DTYPE}

    def output(self) -> Any:
        """The output in the first way that can run the function; NotImplemented if there is none."""
        for way in self._ways():
            if (output := way()) is not NotImplemented:
                return output
        return NotImplemented

    def _ways(self) -> Iterator[Callable[[], Any]]:
        yield self._by_position
        tokens = [] if self.changes else self._tokens()
        by_token = [functools.partial(self._by_token, tokens)] if tokens else []
        # a matrix more often has tokens in no order than samples; another tensor with a dimension of B has samples
        is_flat = all(x.ndim == 2 or self._count not in x.shape for x in tokens)
        yield from by_token if is_flat else ()
        for squares in (False, True):  # a square table may be of positions or of samples
            yield functools.partial(self._by_sample, squares)
        yield from () if is_flat else by_token
        yield self._alone

    def _by_position(self) -> Any:
        """Arithmetic of a parameter and a tensor, with a copy of the parameter for each of its positions.

        The backward finds the sample of each position.
        """
        if not is_arithmetic(self.name) or len(self.rows) != 1 or len(self._others) != 1:
            return NotImplemented
        row, (x,), layer = self._first, self._others.values(), self.layer
        if (param := row._param) is None or x.is_nested or x.is_sparse:
            return NotImplemented
        if not x.requires_grad and layer.shared.is_table(x):
            return NotImplemented
        if not (x.requires_grad or layer.capture.proofs_may_share) and x.ndim > 1 and layer.shared.may_be(x):
            return NotImplemented
        shape = tuple(row.shape)
        while shape and shape[0] == 1:
            shape = shape[1:]
        leading = x.ndim - len(shape)
        if leading < 1 or row.ndim > x.ndim:
            return NotImplemented
        sizes = [*zip(shape, x.shape[leading:], strict=True)]
        if any(a not in (1, b) for a, b in sizes):
            return NotImplemented
        dims = [leading + i for i, (a, b) in enumerate(sizes) if a == 1 != b]

        def contribute(where: Any, grad: Tensor) -> list[Any]:
            grad = grad.sum(dims, keepdim=True) if dims else grad
            (grads,) = rows_first(where, *wide(grad))
            grads = grads.flatten(1, grads.ndim - len(shape) - 1).sum(1) if grads.ndim - len(shape) > 1 else grads
            return [Dense(param, grads.reshape(len(grads), *param.shape))]

        value, leaves = row.as_subclass(Tensor).detach().expand(*x.shape), list(self.leaves)
        leaves[self.rows[0]] = layer.watch(
            value, [], contribute, LayerInput(value, leading), on_shared=self._on_shared(x)
        )
        args, kwargs = self.rebuilt(leaves)
        return self.func(*args, **kwargs)

    def _by_token(self, tokens: Sequence[Tensor]) -> Any:
        """A function of rows in no order, such as tokens of an expert, with a copy for each of them.

        The backward finds the sample of each.
        """
        rows, counts = [self.leaves[i] for i in self.rows], {len(x) for x in tokens}
        if len(counts) > 1 or (count := counts.pop()) == self._count:
            return NotImplemented
        if not count:  # such as an expert without tokens
            plain = [x.as_subclass(Tensor).detach() if isinstance(x, BroadcastRow) else x for x in self.leaves]
            args, kwargs = self.rebuilt(plain)
            return self.func(*args, **kwargs)
        on_shared = None if any(x.requires_grad for x in tokens) else self._on_shared(tokens[0])
        copies = [make(count, on_shared) for x in rows if (make := x._make) is not None]
        if len(copies) < len(rows):
            return NotImplemented
        tensors = {i: x for i, x in enumerate(self.leaves) if isinstance(x, Tensor) and i not in self.rows}
        places = {i: Place(0) for i, x in tensors.items() if x.ndim and len(x) == count}
        return _WithCopies(self, places, copies).of_batch_or_not()

    def _by_sample(self, squares: bool) -> Any:
        """A function of tensors of the batch, with a copy for each sample."""
        places = self._places(squares)
        if not places or (self.changes and 0 not in places):
            return NotImplemented
        return _WithCopies(self, places).of_batch_or_not()

    def _alone(self) -> Any:
        """A function of rows without a tensor of samples beside them: the output is a row too."""
        first, layer, places = self._first, self.layer, self._places(True)
        of_batch = [self._others[i] for i in places]
        if any(x.requires_grad for x in of_batch) or layer.capture.forward.holds(*of_batch):
            return NotImplemented
        if self.changes and places:
            return NotImplemented
        if self.changes:
            target = self._args[0]
            return _WithCopies(self).changed(target) if isinstance(target, BroadcastRow) else self._written(target)
        output = self.plain()
        if not any(x.requires_grad for x in tensors_in(output)) or output is first:
            return output
        kind = self.name.strip("_")
        if kind in EXPANSIONS and first.fits(output.ndim, dim := layer.capture.batch_dim):
            # the size of the batch means one entry for each sample, as in `token.expand(len(x), -1)`. If the same
            # expansion ever had another size, as in `token.expand(length, -1)`, its sizes are equal by chance
            expansion, size = (kind, tuple(first.shape), output.ndim), output.shape[dim]
            others = layer.learnt.expanded
            if size not in (1, self._count):
                others.add(expansion)
            if size == self._count and expansion not in others:
                copies = first.aligned(first._each, output.ndim, dim)
                if kind == "repeat":
                    return copies.repeat(*(b // max(a, 1) for a, b in zip(copies.shape, output.shape, strict=True)))
                return copies.expand_as(output)
        return _WithCopies(self).of_each(output)

    def _written(self, target: Tensor) -> Any:
        """Write rows into a tensor that is of no sample. The module of the parameters then uses a row in its place."""
        written: dict[int, Any] | None = self.layer.written
        if written is None:
            return NotImplemented
        each = _alike(_WithCopies(self, {0: Place(0)}), target.expand(self._count, *target.shape))
        output = self.plain()
        written[id(target)] = target, _as_row(target.as_subclass(Tensor), each, self.layer)
        return output

    def plain(self) -> Any:
        """The output for the rows themselves."""
        return self.func(*self._args, **self._kwargs)

    def _on_shared(self, data: Tensor) -> Callable[[], bool] | None:
        """What notes that all samples share a tensor that no layer has made."""
        note = functools.partial(self.layer.shared.note_table, data, self.layer.capture.forward)
        return None if data.requires_grad else note

    def _tokens(self) -> list[Tensor]:
        """The tensors whose rows may be of samples in no order: those that layers have made, or else data."""
        capture = self.layer.capture
        found = [x for x in self._others.values() if x.ndim]
        if capture.forward.outside_model or all(len(x) == self._count for x in found):
            return []
        if made := [x for x in found if x.requires_grad]:
            # of trainable tensors outside of the model, all samples share the rows
            return made if all(map(has_layers, made)) else []
        own = capture.own_storages()
        data = [x for x in found if x.is_floating_point() and x.ndim > 1 and len(x) > 1 and not storages_of((x,)) & own]
        # no diagonal matrices, such as the identity from which a product of reflections starts
        data = [x for x in data if not _is_diagonal(x)]
        # where proofs may not find what is shared, only modules without submodules, such as PReLU, get data
        may_be = capture.proofs_may_share or not [*self.layer.module.children()]
        return data if may_be and not any(self.layer.shared.is_table(x) for x in data) else []

    def _places(self, squares: bool) -> dict[int, Place]:
        """The places of samples in tensors, by their sizes. All samples share others; with ``squares``, no squares.

        In a batch of 4 samples, a tensor of shape (4, 7, 8) has them in dimension 0, and one of shape (36, 49, 8), of
        windows of images, in runs of 9.
        """
        layer, places = self.layer, dict[int, Place]()
        if not self._others:
            return places
        count, forward, dim = self._count, layer.capture.forward, layer.capture.batch_dim
        own = layer.capture.own_storages()
        for i, x in self._others.items():
            is_own = not x.requires_grad and storages_of((x,)) & own  # copies of a parameter lie in its memory too
            is_own = is_own or (not x.requires_grad and layer.shared.is_table(x))
            is_own = is_own or (counts_up(x) and not forward.holds(x))  # positions
            if not x.ndim or is_own or (forward.outside_model and count == 1):
                continue
            sizes = [d for d, size in enumerate(x.shape) if size == count]
            square = x.ndim == 2 and x.shape[0] == x.shape[1] and not x.requires_grad and not squares
            if x.ndim <= dim or x.shape[dim] == 1 or square:
                continue  # such as a table of pairs of positions
            of_rows = x.ndim > 2 and not self.changes  # such as windows of images
            if x.shape[dim] == count:
                places[i] = Place(dim)
            elif x.shape[0] and x.shape[0] % count == 0 and (of_rows or x.requires_grad or forward.holds(x)):
                places[i] = Place(0, len(x) // count)
            elif sizes:
                places[i] = Place(sizes[0])
        return places


def _is_diagonal(x: Tensor) -> bool:
    return x.shape == (len(x), len(x)) and torch.equal(x, x.diagonal().diag())


def has_layers(x: Tensor) -> bool:
    """True for a tensor that layers of the model have made, and not only trainable tensors outside of it."""
    return x.requires_grad and any(call_of(node) is not None for node in nodes_of([x]))


class _WithCopies:
    """Runs a function with copies of its rows, and tensors of the batch in some places among its arguments."""

    def __init__(
        self, use: _Use, places: Mapping[int, Place] | None = None, copies: list[Tensor] | None = None
    ) -> None:
        self._use, self._places = use, places or {}
        self.copies = [use.leaves[i]._each for i in use.rows] if copies is None else copies

    def __call__(self, *tensors: Tensor) -> Any:
        """The output for other tensors in the places of rows and of tensors of the batch."""
        use, leaves = self._use, list(self._use.leaves)
        for i, x in zip((*use.rows, *self._places), tensors, strict=True):
            leaves[i] = x.clone() if use.changes and i == 0 else x
        args, kwargs = use.rebuilt(leaves)
        output = use.func(*args, **kwargs)
        return leaves[0] if use.changes else output

    def of_batch_or_not(self) -> Any:
        """The output of the batch; NotImplemented if the function cannot run for each sample."""
        use = self._use
        try:
            if len(self.copies[0]) > 1:
                return self._of_batch()
            output = self(*(x[0] for x in self.copies), *(use.leaves[i] for i in self._places))
            return use.leaves[0].copy_(output) if use.changes else output
        except CANNOT:
            return NotImplemented

    def of_each(self, output: Any) -> Any:
        """The output, with a copy for each sample; NotImplemented if the function cannot run under vmap."""
        try:
            each = _alike(self)
        except (RuntimeError, ValueError):
            return NotImplemented
        given, structure = pytree.tree_flatten(output)
        rows = zip(given, pytree.tree_leaves(each), self._makers(len(given)), strict=True)
        return pytree.tree_unflatten([_as_row(row, x, self._use.layer, make) for row, x, make in rows], structure)

    def changed(self, target: Any) -> Any:
        """Change a row in place, with its copies. Return the output."""
        (make,) = self._makers(1)
        each, output = _alike(self), self._use.plain()
        target._each, target._layer, target._version_then, target._make = each, self._use.layer, target._version, make
        return output

    def _makers(self, outputs: int) -> list[Make | None]:
        """What makes more copies of each output, from more copies of the rows as they are now."""
        use = self._use
        makes = [make for i in use.rows if (make := use.leaves[i]._make) is not None]
        if len(makes) < len(use.rows):
            return [None] * outputs
        tensors = [x for i, x in enumerate(use.leaves) if isinstance(x, Tensor) and i not in use.rows]
        versions = [x._version for x in tensors]

        def made(output: int, count: int, on_shared: Callable[[], bool] | None) -> Tensor:
            if versions != [x._version for x in tensors]:
                use.layer.refuse_row()
            call = _WithCopies(use, copies=[make(count, on_shared) for make in makes])
            return pytree.tree_leaves(_alike(call))[output]

        return [functools.partial(made, i) for i in range(outputs)]

    def _of_batch(self) -> Any:
        """The output of the batch, from those of its samples; NotImplemented if its samples are in no dimension.

        For ``x @ row``, with x of shape (4, 7, 8) and a row of shape (8, 5), vmap runs over x and the copies (4, 8, 5).
        The output of the batch shows that its samples are in dimension 0 of (4, 7, 5).
        """
        use, of_batch = self._use, [self._use.leaves[i] for i in self._places]
        if len(runs := {place.run for place in self._places.values()}) > 1:
            return NotImplemented
        (run,), places, count = runs, [place.dim for place in self._places.values()], len(self.copies[0])
        kind = {(place, x.ndim) for place, x in zip(places, of_batch, strict=True)}
        if is_arithmetic(use.name) and run == len(kind) == 1 and not use.changes:
            ((dim, ndim),) = kind
            rows = [use.leaves[i] for i in use.rows]
            if all(row.fits(ndim, dim) for row in rows):
                aligned = [row.aligned(x, ndim, dim) for row, x in zip(rows, self.copies, strict=True)]
                return self(*aligned, *of_batch)  # much faster than vmap
        kinds = [x if isinstance(x, int | str | None) else x.ndim if isinstance(x, Tensor) else 0 for x in use.leaves]
        pairs = zip(of_batch, places, strict=True)
        inputs = [x.movedim(d, 0).unflatten(0, (count, run)).movedim(1, d + 1) for x, d in pairs]
        # if a row has B entries, they may be positions, which all samples share, or one for each sample: both are tried
        parts = self._own_parts(places[0]) if run == 1 else None
        for copies in filter(None, (self.copies, parts)):
            key = use.name, *kinds, *places, run > 1, parts is not None, copies is parts
            try:
                each, structure = pytree.tree_flatten(self._by_sample(copies, inputs))
            except CANNOT:
                continue
            learnt = use.layer.learnt.dims
            if key not in learnt:  # the first call decides: the comparison takes another run of the function
                learnt[key] = self._dims(each, of_batch, run)
            if (dims := learnt[key]) is None:
                continue
            if any(x.shape[d + 1] != run for x, d in zip(each, dims, strict=True)):
                return NotImplemented
            joined = [_joined(x, d) for x, d in zip(each, dims, strict=True)]
            output = pytree.tree_unflatten(joined, structure)
            return use.leaves[0].copy_(output) if use.changes else output
        return NotImplemented

    def _own_parts(self, dim: int) -> list[Tensor] | None:
        """The copies. Of a row with one entry for each sample, a copy keeps its own. None if there is no such row."""
        count = len(self.copies[0])
        sized = [x.ndim > dim + 1 and x.shape[dim + 1] == count for x in self.copies]
        pairs = zip(self.copies, sized, strict=True)
        parts = [x.diagonal(0, 0, dim + 1).movedim(-1, 0).unsqueeze(dim + 1) if own else x for x, own in pairs]
        return parts if any(sized) else None

    def _by_sample(self, copies: Sequence[Tensor], of_batch: Sequence[Tensor]) -> Any:
        try:
            attends = self._use.func is F.scaled_dot_product_attention
            return by_vmap(self, *copies, *of_batch, attends=attends)
        except (RuntimeError, ValueError):
            each = [self(*one) for one in zip(*copies, *of_batch, strict=True)]
            return pytree.tree_map(lambda *parts: torch.stack(parts), *each)

    def _dims(self, found: Sequence[Any], of_batch: Sequence[Tensor], run: int) -> list[int] | None:
        """The dimension of the samples in each output, found from the outputs for the batch; None if these differ."""
        use, dims = self._use, list[int]()
        with torch.no_grad():
            together = self(*(use.leaves[i].as_subclass(Tensor) for i in use.rows), *of_batch)
        for one, whole in zip(found, pytree.tree_leaves(together), strict=True):
            sizes = [*zip(one.shape[1:], whole.shape, strict=False)]
            apart = [i for i, (a, b) in enumerate(sizes) if a != b]
            if one.ndim != whole.ndim + 1 or [sizes[i] for i in apart] != [(run, len(one) * run)]:
                return None
            dims.append(apart[0])
            if not are_equal(whole, _joined(one, apart[0])):
                return None
        return dims


def _alike(call: _WithCopies, *tensors: Tensor) -> Any:
    """The output of a function of copies, which may draw no random numbers, because one row stands for all of them."""
    return by_vmap(call, *call.copies, *tensors, attends=False, randomness="error")


def _joined(each: Tensor, dim: int) -> Tensor:
    """The output of the batch, from that of each sample, samples first, with rows of the sample along a dimension."""
    return each.movedim(dim + 1, 1).flatten(0, 1).movedim(0, dim)


def without_padding(args: Any, kwargs: Any) -> tuple[Any, Any]:
    """The arguments of an embedding whose padding row gets no gradient. Embeddings under vmap ignore that row."""
    call = _EMBEDDING.bind(*args, **kwargs)
    table, index = call.arguments["weight"], call.arguments.pop("padding_idx", None)

    def detached(x: Tensor) -> Tensor:  # (..., rows, width)
        row = torch.arange(x.shape[-2], device=x.device) == index % x.shape[-2]
        return torch.where(row[:, None], x.detach(), x)

    if index is not None and isinstance(table, BroadcastRow):
        plain = table.as_subclass(Tensor).clone()
        call.arguments["weight"] = _as_row(plain, detached(table._each), table._layer)
    elif index is not None:
        call.arguments["weight"] = detached(table)
    return call.args, call.kwargs
