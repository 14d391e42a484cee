"""Values that all samples share, such as embeddings of positions, class tokens and layer scales.

They are made of parameters, but not of samples, so their gradient would be a sum over samples. So a layer without
samples runs for each sample, on copies, and returns one row, whose shape the model expects. Functions of rows alone run
on the rows. A function that joins a row with a tensor of the batch, as ``h + positions``, gets a copy for each sample.
Autograd takes the gradients of the copies back through the functions that made the row.
"""

import functools
import inspect
import warnings
from collections.abc import Callable, Generator, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge, saved_tensors_hooks
from typing_extensions import override

from torchzero_clip.compat import (
    DisableTorchFunctionSubclass,
    checkpoint_around,
    in_subclass,
    is_restored_by_checkpoint,
    never_a_frame,
    never_traced,
    pytree,
)
from torchzero_clip.per_sample.arguments import Rebuild, flattened, tensors_in
from torchzero_clip.per_sample.beside_rows import places_in, tokens_among
from torchzero_clip.per_sample.each_sample import CANNOT, EachSample
from torchzero_clip.per_sample.function_names import EXPANSIONS, HOOKS, OF_DTYPE, is_arithmetic, is_in_place
from torchzero_clip.per_sample.gradients.autograd_graph import nodes_of
from torchzero_clip.per_sample.gradients.contributions import Dense
from torchzero_clip.per_sample.gradients.row_norms import wide
from torchzero_clip.per_sample.modes import attribute_read, sets_data
from torchzero_clip.per_sample.processes.sharding import storages_of
from torchzero_clip.per_sample.rows_layer import RowsLayer
from torchzero_clip.per_sample.samples.call import LayerInput, rows_first
from torchzero_clip.per_sample.samples.pattern import Place

_EMBEDDING = inspect.signature(F.embedding)

OnShared: TypeAlias = Callable[[], bool]
"""Notes that all samples share the rows of a call. Returns False if that cannot be."""
CopiesInAnyOrder: TypeAlias = Callable[[int, OnShared | None], Tensor]
"""Makes as many copies as its first argument says, for rows whose samples only the backward finds."""


class Source(NamedTuple):
    """What rows are made of: a parameter, the output of a layer for all samples, or a tensor outside of the model."""

    layer: RowsLayer  # named by errors
    each: Callable[[], Tensor]  # makes a copy for each sample, samples first
    in_any_order: CopiesInAnyOrder | None = None  # None for the output of a layer, whose samples are known


class BroadcastRow(Tensor):
    """A value that all samples share. It may also be the indices that a function such as `topk` returns beside a row.

    A function with a tensor of the batch runs sample by sample, with a copy of the row for each, so that the gradient
    has a row for each sample. A function of rows alone runs once, and returns rows. Where neither is possible, the
    gradient would be summed over samples, so the backward raises.
    """

    _layer: RowsLayer
    _count: int  # of samples
    _param: nn.Parameter | None = None  # the parameter that it is, if it is one
    _each: tuple[int, Tensor] | None = None  # its version, and the copies for the samples, once they were made

    def copies(self, count: int | None = None, on_shared: OnShared | None = None) -> Tensor:
        """A copy for each sample, samples first; or ``count`` copies, if all sources make some in any order."""
        with DisableTorchFunctionSubclass(), torch.enable_grad():
            if count is not None:
                return self._copied(count, on_shared)
            if self._each is None or self._each[0] != self._version:  # it was changed in place
                self._each = self._version, self._copied(None, None)
            return self._each[1]

    def _copied(self, count: int | None, on_shared: OnShared | None) -> Tensor:
        value = self.detach().as_subclass(Tensor).expand(self._count if count is None else count, *self.shape)
        if not self.requires_grad:
            return value
        edge, starts = get_gradient_edge(self), self._starts()
        sources = starts.values()
        copies = [s.in_any_order(count, on_shared) if s.in_any_order and count else s.each() for s in sources]
        if any(len(x) != len(value) for x in copies):
            raise ValueError(f"{self._layer} uses a value of an earlier forward, which had another number of samples")
        if [*starts] == [edge.node]:  # no function was called with the source
            return copies[0]
        made: Any = _Copies.apply([value], edge, [GradientEdge(node, 0) for node in starts], *copies)
        return made

    def _starts(self) -> dict[Node, Source]:
        """The sources of the row, each with the function at which the graph of the row starts."""
        # a node of the graph is the ``ctx`` of its `torch.autograd.Function`, so it has what the forward has set there
        found = {node: getattr(node, "source", None) for node in nodes_of([self])}
        return {node: source for node, source in found.items() if isinstance(source, Source)}

    def sources(self) -> list[Source]:
        """What the row is made of."""
        return [*self._starts().values()]

    def as_input(self, dim: int) -> tuple[Tensor, bool]:
        """The copies as the input of a layer with this batch dimension, and whether the value has that dimension."""
        with DisableTorchFunctionSubclass():
            if self.ndim > dim and self.shape[dim] == 1:
                return self.aligned(self.copies(), self.ndim, dim), True
            return self.copies().movedim(0, dim), False

    def aligned(self, copies: Tensor, ndim: int, dim: int) -> Tensor:
        """Copies of the value as a tensor with ``ndim`` dimensions, of which ``dim`` has the copies."""
        with DisableTorchFunctionSubclass():
            shape = (1,) * (ndim - self.ndim) + tuple(self.shape)
            return copies.reshape(len(copies), *shape[:dim], *shape[dim + 1 :]).movedim(0, dim)

    def fits(self, ndim: int, dim: int) -> bool:
        """True if the value can be added to a tensor with ``ndim`` dimensions, of which ``dim`` is the batch."""
        with DisableTorchFunctionSubclass():
            return ndim > dim and self.ndim <= ndim and (self.ndim < ndim - dim or self.shape[dim - ndim] == 1)

    def rows_in(self, output: Any) -> Any:
        """The output of a function of this row and others, with rows in place of its tensors if it has gradients."""

        def row(x: Tensor) -> Tensor:
            if isinstance(x, BroadcastRow) or x.layout != torch.strided:
                return x
            result = x.as_subclass(BroadcastRow)
            result._layer, result._count = self._layer, self._count
            return result

        return pytree.tree_map_only(Tensor, row, output) if any(x.requires_grad for x in tensors_in(output)) else output

    @classmethod
    @override
    @never_a_frame
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        with DisableTorchFunctionSubclass():
            if sets_data(func):
                args[0]._layer.misuse = "an assignment to .data", args[0]._layer.capture.running is args[0]._layer
                args[0]._layer.refuse_row()
            if name == "__set__":  # of an attribute, such as requires_grad
                return func(*args)
            if attribute_read(func) is not None:  # such as `shape`, or `T`, which is a row
                return args[0].rows_in(func(*args))
            leaves, rebuilt = flattened(args, kwargs)
            rows = [x for x in leaves if isinstance(x, BroadcastRow) and x.requires_grad]
            if rows and torch.is_grad_enabled():
                if name not in HOOKS:
                    output = _RowFunction(func, args, kwargs, leaves, rebuilt).output()
                    if output is not NotImplemented:
                        return output
                for layer in {source.layer for row in rows for source in row.sources()}:
                    layer.misuse = repr(name), layer.capture.running is layer
                if is_in_place(name) and rows[0] is leaves[0]:  # it would be no row afterwards
                    rows[0]._layer.refuse_row()
            if rows and name in HOOKS:
                rows[0]._layer.refuse_row()
            return func(*args, **kwargs)


def row_of(layer: RowsLayer, each: Tensor) -> Tensor:
    """Return the first entry of ``each`` as a row, or as it is if there is one sample.

    ``each`` has the output for every sample, samples first.
    """
    if len(each) == 1:
        return each[0]
    value = (each[0] if len(each) else each.new_zeros(each.shape[1:])).detach().clone()
    return _first_row([value], Source(layer, lambda: each), len(each))


def row_of_param(source: Source, param: nn.Parameter, value: Tensor, count: int) -> Tensor:
    """Return the value of a parameter as a row for ``count`` samples, or as it is for one."""
    if count == 1:
        return source.each().unbind()[0]  # unlike that of ``[0]``, a view of unbind cannot be changed in place
    row = _first_row(value, source, count)
    row._param = param
    return row


def _first_row(value: Tensor | list[Tensor], source: Source, count: int) -> BroadcastRow:
    """The row of a source, for functions that make other rows of it. In a list, the value may be changed in place."""
    never_traced(BroadcastRow)
    source.layer.misuse = None  # what was done with earlier rows is no reason to refuse this one
    row: Any = _Start.apply(source.layer.capture.anchor, value, source)
    row._layer, row._count = source.layer, count
    return row


class _Start(torch.autograd.Function):
    """Where the graph of rows starts. A gradient that arrives here is summed over samples, and raises an error."""

    keeps_rows = True  # it moves no rows: see `graph_nodes`

    @staticmethod
    @override
    def forward(ctx: Any, anchor: Tensor, value: Tensor | list[Tensor], source: Source) -> Tensor:
        ctx.source = source  # ``anchor`` requires grad, so that the row has a graph
        # autograd takes a value in a list as created here; one outside is a view, which cannot be changed in place
        return in_subclass(BroadcastRow, value[0]) if isinstance(value, list) else value.as_subclass(BroadcastRow)

    @staticmethod
    @override
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, None]:
        source: Source = ctx.source
        source.layer.refuse_row()
        return None, None, None


class _Copies(torch.autograd.Function):
    """Copies of a row. Their gradients go through the functions that made the row, to copies of its sources."""

    keeps_rows = True  # it moves no rows: see `graph_nodes`

    @staticmethod
    @override
    def forward(ctx: Any, values: list[Tensor], edge: Any, edges: Sequence[Any], *copies: Tensor) -> Tensor:
        ctx.edge, ctx.edges = edge, edges
        return values[0]  # from a list, so that it may be changed in place

    @staticmethod
    @override
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        # the graph of the row is kept: there may be other copies of it, and further backwards
        through = functools.partial(torch.autograd.grad, ctx.edge, ctx.edges, retain_graph=True, allow_unused=True)
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "There is a performance drop")  # of vmap, which takes a loop
                found = through(grads[0], is_grads_batched=True)
        except RuntimeError:  # vmap cannot run a function, or the error comes again
            with _named(ctx.edges[0].node.source.layer):
                columns = [*zip(*map(through, grads[0]), strict=True)]
            found = [None if column[0] is None else torch.stack(column) for column in columns]
        return None, None, None, *(found or [None for _ in ctx.edges])  # without copies, the loop has found nothing


class _RowFunction:
    """A function with rows among its arguments. Each method that returns an output is a way to run it with copies.

    ``leaves`` are those of the arguments, and ``rebuilt`` makes arguments of others. `_at` has the indices of rows.
    """

    def __init__(self, func: Any, args: Any, kwargs: Any, leaves: list[Any], rebuilt: Rebuild) -> None:
        if func is F.embedding:
            args, kwargs = without_padding(args, kwargs)
            leaves, rebuilt = flattened(args, kwargs)
        self._func, self._name, self._args = func, getattr(func, "__name__", ""), args
        self._leaves, self._rebuilt = leaves, rebuilt
        self._changes = is_in_place(self._name)
        self._at = [i for i, x in enumerate(leaves) if isinstance(x, BroadcastRow) and x.requires_grad]
        self._first: BroadcastRow = leaves[self._at[0]]
        self._layer, self._count = self._first._layer, self._first._count
        others = {i: x for i, x in enumerate(leaves) if isinstance(x, Tensor) and not isinstance(x, BroadcastRow)}
        self._others = {} if self._name in OF_DTYPE else others

    def _call(self, leaves: Sequence[Any]) -> Any:
        args, kwargs = self._rebuilt(leaves)
        return self._func(*args, **kwargs)

    def output(self) -> Any:
        """The output in the first way that can run the function; NotImplemented if there is none.

        Where samples are is guessed by sizes here. A proof finds a wrong guess, which then raises an error.
        """
        for way in self._ways():
            if (output := way()) is not NotImplemented:
                return output
        return NotImplemented

    def _ways(self) -> Iterator[Callable[[], Any]]:
        yield self._by_position
        tokens = [] if self._changes else tokens_among(self._others.values(), self._layer, self._count)
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
        if not is_arithmetic(self._name) or len(self._at) != 1 or len(self._others) != 1:
            return NotImplemented
        row, (x,), layer = self._first, self._others.values(), self._layer
        if (param := row._param) is None or x.is_nested or x.is_sparse:
            return NotImplemented
        # the backward could not find samples in what all of them share
        if not x.requires_grad and layer.shared.is_table(x):
            return NotImplemented
        if not (x.requires_grad or layer.capture.may_find_shared) and x.ndim > 1 and layer.shared.may_be_shared(x):
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

        def contribute(where: Place | Tensor, grad: Tensor) -> list[Dense]:
            grad = grad.sum(dims, keepdim=True) if dims else grad
            (grads,) = rows_first(where, *wide(grad))
            grads = grads.flatten(1, grads.ndim - len(shape) - 1).sum(1) if grads.ndim - len(shape) > 1 else grads
            return [Dense(param, grads.reshape(len(grads), *param.shape))]

        value, leaves = row.as_subclass(Tensor).detach().expand(*x.shape), list(self._leaves)
        leaves[self._at[0]] = layer.watch(
            value, [], contribute, LayerInput(value, leading), on_shared=self._on_shared(x)
        )
        return self._call(leaves)

    def _by_token(self, tokens: Sequence[Tensor]) -> Any:
        """A function of rows in no order, such as tokens of an expert, with a copy for each of them.

        The backward finds the sample of each.
        """
        rows, counts = [self._leaves[i] for i in self._at], {len(x) for x in tokens}
        if len(counts) > 1 or (count := counts.pop()) == self._count:
            return NotImplemented
        if not count:  # such as an expert without tokens
            plain = [x.as_subclass(Tensor).detach() if isinstance(x, BroadcastRow) else x for x in self._leaves]
            return self._call(plain)
        if any(source.in_any_order is None for row in rows for source in row.sources()):
            return NotImplemented
        on_shared = None if any(x.requires_grad for x in tokens) else self._on_shared(tokens[0])
        places = {i: Place(0) for i, x in self._others.items() if x.ndim and len(x) == count}
        return self._with_copies(places, [row.copies(count, on_shared) for row in rows])

    def _by_sample(self, squares: bool) -> Any:
        """A function of tensors of the batch, with a copy for each sample."""
        places = places_in(self._others, self._layer, self._count, changes=self._changes, squares=squares)
        if not places or (self._changes and 0 not in places):
            return NotImplemented
        return self._with_copies(places, [self._leaves[i].copies() for i in self._at])

    def _with_copies(self, places: Mapping[int, Place], copies: Sequence[Tensor]) -> Any:
        """The output for copies of the rows, and tensors of the batch with samples in some places.

        NotImplemented if the function cannot run for each sample.
        """
        of_batch = [self._leaves[i] for i in places]
        function = functools.partial(self._called, [*self._at, *places])
        try:
            if len(copies[0]) > 1:
                output = self._arithmetic(function, places, copies, of_batch)
                if output is NotImplemented:
                    rows = [self._leaves[i].as_subclass(Tensor) for i in self._at]
                    each = EachSample(function, rows, copies, of_batch, [*places.values()])
                    output = each.output(self._layer.learnt.sample_dims, (self._name, *map(_kind, self._leaves)))
            else:
                output = function(*(x[0] for x in copies), *of_batch)
        except CANNOT:
            return NotImplemented
        return self._leaves[0].copy_(output) if self._changes and output is not NotImplemented else output

    def _called(self, at: Sequence[int], *tensors: Tensor) -> Any:
        """The output with other leaves at some indices. A function that changes its first argument changes a clone."""
        leaves = list(self._leaves)
        for i, x in zip(at, tensors, strict=True):
            leaves[i] = x.clone() if self._changes and i == 0 else x
        output = self._call(leaves)
        return leaves[0] if self._changes else output

    def _arithmetic(
        self,
        function: Callable[..., Any],
        places: Mapping[int, Place],
        copies: Sequence[Tensor],
        of_batch: Sequence[Tensor],
    ) -> Any:
        """The output for copies that are expanded to the batch, which is much faster than vmap."""
        kinds = {(place, x.ndim) for place, x in zip(places.values(), of_batch, strict=True)}
        if not is_arithmetic(self._name) or self._changes or len(kinds) != 1:
            return NotImplemented
        ((place, ndim),) = kinds
        rows = [self._leaves[i] for i in self._at]
        if place.run != 1 or not all(row.fits(ndim, place.dim) for row in rows):
            return NotImplemented
        aligned = [row.aligned(x, ndim, place.dim) for row, x in zip(rows, copies, strict=True)]
        return function(*aligned, *of_batch)

    def _alone(self) -> Any:
        """The output of a function of rows without a tensor of samples, which runs once: a row too."""
        first, layer = self._first, self._layer
        places = places_in(self._others, layer, self._count, changes=self._changes)
        of_batch = [self._others[i] for i in places]
        if any(x.requires_grad for x in of_batch) or layer.capture.forward.holds(*of_batch):
            return NotImplemented
        if self._changes and places:
            return NotImplemented
        if self._changes and not isinstance(target := self._args[0], BroadcastRow):
            return self._written(target)
        if self._changes and storages_of((first,)) & layer.capture.own_storages():
            raise RuntimeError(f"{layer} changes a parameter in place in its forward: do so in torch.no_grad()")
        output = self._of_rows()
        if any(x.layout != torch.strided for x in tensors_in(output)):
            return NotImplemented
        output = first.rows_in(output)
        kind = self._name.strip("_")
        if not isinstance(output, BroadcastRow) or output is first:
            return output
        if kind in EXPANSIONS and first.fits(output.ndim, dim := layer.capture.batch_dim):
            # the size of the batch means one entry for each sample, as in `token.expand(len(x), -1)`. If the same
            # expansion ever had another size, as in `token.expand(length, -1)`, its sizes are equal by chance
            expansion, size = (kind, tuple(first.shape), output.ndim), output.shape[dim]
            others = layer.learnt.other_sizes
            if size not in (1, self._count):
                others.add(expansion)
            if size == self._count and expansion not in others:
                copies = first.aligned(first.copies(), output.ndim, dim)
                if kind == "repeat":
                    return copies.repeat(*(b // max(a, 1) for a, b in zip(copies.shape, output.shape, strict=True)))
                return copies.expand_as(output)
        return output

    def _of_rows(self) -> Any:
        """The output for the rows themselves. Other tensors with gradients become rows too."""
        leaves = list(self._leaves)
        for i, x in self._others.items():
            if x.requires_grad and not (self._changes and i == 0):
                copies = functools.partial(_expanded, x)
                source = Source(self._layer, functools.partial(copies, self._count), copies)
                leaves[i] = _first_row(x.detach(), source, self._count)
        # a checkpoint would run again for each nested backward that asks for what rows have saved
        in_checkpoint = checkpoint_around() is not None or is_restored_by_checkpoint()
        with saved_tensors_hooks(_keep, _kept) if in_checkpoint else nullcontext():
            return self._call(leaves)

    def _written(self, target: Tensor) -> Any:
        """Write rows into a tensor that is of no sample. The module of the parameters then uses a row in its place."""
        written = self._layer.written
        if written is None or target.requires_grad:
            return NotImplemented
        output = self._of_rows()
        written[id(target)] = target, self._first.rows_in(target)
        return output

    def _on_shared(self, data: Tensor) -> Callable[[], bool] | None:
        """What notes that all samples share a tensor that no layer has made."""
        note = functools.partial(self._layer.shared.note_table, data, self._layer.capture.forward)
        return None if data.requires_grad else note


def _expanded(x: Tensor, count: int, on_shared: OnShared | None = None) -> Tensor:
    """Copies of a tensor that autograd itself adds up."""
    return x.expand(count, *x.shape)


@contextmanager
def _named(layer: RowsLayer) -> Generator[None]:
    """A block in which an error about a change in place names the layer whose values have changed."""
    try:
        yield
    except RuntimeError as error:
        if "inplace" not in str(error):  # torch has no class for it
            raise
        raise RuntimeError(
            f"{layer}: a parameter, or a value made of parameters, was changed in place after it was used, and its "
            "gradient needs the value from before (modified by an inplace operation)"
        ) from error


def _keep(saved: Tensor) -> tuple[Tensor, int]:
    """The tensor without its graph, which would keep itself alive, and the version, which `_kept` compares."""
    return saved.detach(), saved._version


def _kept(saved: tuple[Tensor, int]) -> Tensor:
    tensor, version = saved
    if tensor._version != version:
        raise RuntimeError(f"a tensor of shape {tuple(tensor.shape)} was modified by an inplace operation")
    return tensor


def _kind(leaf: object) -> Hashable:
    """What leaves of one kind have in common."""
    return leaf if isinstance(leaf, int | str | None) else leaf.ndim if isinstance(leaf, Tensor) else 0


def without_padding(args: Any, kwargs: Any) -> tuple[Any, Any]:
    """The arguments of an embedding whose padding row gets no gradient. Embeddings under vmap ignore that row."""
    call = _EMBEDDING.bind(*args, **kwargs)
    given, index = call.arguments["weight"], call.arguments.pop("padding_idx", None)

    def detached(x: Tensor) -> Tensor:  # (..., rows, width)
        row = torch.arange(x.shape[-2], device=x.device) == index % x.shape[-2]
        return torch.where(row[:, None], x.detach(), x)

    if index is not None:
        table = detached(given)
        call.arguments["weight"] = given.rows_in(table) if isinstance(given, BroadcastRow) else table
    return call.args, call.kwargs
