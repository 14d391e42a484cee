"""Values that all samples share, such as embeddings of positions, class tokens and layer scales."""

import math
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils import _pytree as pytree
from typing_extensions import override

from torchzero_clip.compat import DisableTorchFunctionSubclass
from torchzero_clip.per_sample.arguments import Rebuild, flattened, tensors_in
from torchzero_clip.per_sample.labels import depth_of

ARITHMETIC = {f"{side}{name}" for name in ("add", "sub", "mul", "div", "truediv") for side in ("", "r", "i")}
EXPANSIONS = {"expand", "expand_as", "broadcast_to", "repeat"}
TRANSPOSED = {"T", "mT", "H", "mH"}
EXPANDED = "expanded"  # a key of `CapturedLayer.known`: what was expanded to another size than that of the batch
HOOKS = {"register_hook", "retain_grad", "register_post_accumulate_grad_hook"}


class NotARowError(BaseException):  # so that the code of a module does not catch it
    """An operation with a value that all samples share has a result that is not of that kind.

    It is raised only while a layer runs that catches it.
    """


class BroadcastRow(Tensor):
    """A value that all samples share, with a copy for each sample behind it.

    Arithmetic with a tensor of the batch takes the copies, so that the gradient has a row for each sample. Operations
    on such values alone are done on the copies too. Any other use would sum the gradient over samples, and raises.
    """

    _each: Tensor  # (B, *shape): the copies
    _layer: Any  # the `CapturedLayer` that it comes from
    _is_param: bool  # raise at once for another use, rather than in the backward
    _version_then: int

    def samples(self, dim: int) -> tuple[Tensor, int, bool]:
        """The copies as the input of a layer, their batch dimension, and whether the value has that dimension."""
        with DisableTorchFunctionSubclass():
            if self.ndim > dim and self.shape[dim] == 1:
                return self.aligned(self.ndim, dim), dim, True
            return self._each.movedim(0, dim), dim, False

    def aligned(self, ndim: int, dim: int) -> Tensor:
        """The copies as a tensor of the batch with some dimensions."""
        with DisableTorchFunctionSubclass():
            shape = (1,) * (ndim - self.ndim) + tuple(self.shape)
            return self._each.reshape(len(self._each), *shape[:dim], *shape[dim + 1 :]).movedim(0, dim)

    def of_rows(self, samples: Tensor, ndim: int) -> Tensor | None:
        """The copies for rows of several samples in a tensor with some dimensions; None if the value has their places.

        ``samples`` has the sample of each entry of that tensor, as in `labels`.
        """
        depth = max(depth_of(samples), 1)
        with DisableTorchFunctionSubclass():
            if self.ndim > ndim - depth or bool((samples < 0).any()):
                return None
            shape = (1,) * (ndim - depth - self.ndim) + tuple(self.shape)
            rows = samples.reshape(samples.shape[:depth]).to(self._each.device)
            return self._each.reshape(len(self._each), *shape)[rows]

    def fits(self, ndim: int, dim: int) -> bool:
        """True if the value can be added to a tensor of the batch with some dimensions."""
        with DisableTorchFunctionSubclass():
            return ndim > dim and self.ndim <= ndim and (self.ndim < ndim - dim or self.shape[dim - ndim] == 1)

    @classmethod
    @override
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if func is F.layer_norm and not isinstance(args[0], BroadcastRow):
            return _normalized(*args, **kwargs)
        if func is F.linear and (output := _linear(*args, **kwargs)) is not None:
            return output
        with DisableTorchFunctionSubclass():
            if name == "__get__" and func.__self__.__name__ not in TRANSPOSED:
                return func(*args)
            leaves, rebuilt = flattened(args, kwargs)
            tensors = [x for x in leaves if isinstance(x, Tensor)]
            rows = [x for x in tensors if isinstance(x, BroadcastRow)]
            param = any(row._is_param for row in rows)
            if name in HOOKS:
                if param:
                    _refuse_param(rows, name)
                rows[0]._layer.refuse_row()
            if torch.is_grad_enabled() and all(map(is_row, rows)):
                output = _with_copies(func, args, kwargs, leaves, rebuilt)
                if output is not NotImplemented:
                    return output
            if param and (name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))):
                _refuse_param(rows, name)
            output = func(*args, **kwargs)
        if param and any(x.requires_grad for x in tensors_in(output)):
            _refuse_param(rows, getattr(func, "__name__", func))
        return output


def _refuse_param(rows: list[BroadcastRow], operation: str) -> NoReturn:
    """Raise for an operation that is not for rows, with a parameter or with what was made of one."""
    layer = next(row._layer for row in rows if row._is_param)
    if layer.engine.tries:
        raise NotARowError(operation)
    raise RuntimeError(
        f"{layer} returned a value that it made of its parameters alone, and {operation!r} used it in a way that does "
        "not tell samples apart: let the module return a copy for each sample, with x.expand(batch_size, ...)"
        f"{layer.way_out}"
    )


def _normalized(
    input: Tensor, shape: Any, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    """A layer norm whose weight and bias may be rows: arithmetic takes their copies."""
    result = F.layer_norm(input, shape, None, None, eps)
    result = result if weight is None else result * weight
    return result if bias is None else result + bias


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:
    """A linear layer of the batch with the copies of a weight and a bias, as in routers; None for other uses."""
    params: list[Any] = [weight] if bias is None else [weight, bias]
    if isinstance(input, BroadcastRow) or input.ndim < 2 or not all(map(is_row, params)):
        return None
    layer = params[0]._layer
    found = layer.samples(input, input.ndim - 1)
    with DisableTorchFunctionSubclass():
        if found.lost:
            raise layer.unknown_rows()
        if found.kept is not None or weight.ndim != 2:
            return None
        copies = [param._each for param in params]
        if found.rows is None:
            rows = input.movedim(found.dim, 0)
            output = _products(rows.reshape(len(rows), math.prod(rows.shape[1:-1]), rows.shape[-1]), *copies)
            output = output.view(*rows.shape[:-1], output.shape[-1]).movedim(0, found.dim)
        else:
            sample = found.rows.flatten().to(input.device)
            sample = sample.repeat_interleave(input.shape[:-1].numel() // len(sample))
            order, lengths = sample.argsort(stable=True), sample.bincount(minlength=len(copies[0])).tolist()
            rows = input.reshape(len(sample), input.shape[-1])[order]
            if len(set(lengths)) == 1:
                output = _products(rows.view(len(lengths), lengths[0], rows.shape[-1]), *copies).flatten(0, 1)
            else:
                own = [[copy[i, None] for copy in copies] for i in range(len(lengths))]
                output = torch.cat(
                    [_products(x[None], *each)[0] for x, each in zip(rows.split(lengths), own, strict=True)]
                )
            output = output[order.argsort()].view(*input.shape[:-1], output.shape[-1])
        layer.mark(
            output,
            found.dim
            if found.rows is None
            else found.rows.view(*found.rows.shape, *[1] * (output.ndim - found.rows.ndim)),
        )
        return output


def _products(rows: Tensor, weights: Tensor, biases: Tensor | None = None) -> Tensor:
    """The outputs of the linear layer of each sample for its rows, (B, L, width)."""
    output = torch.bmm(rows, weights.mT)
    return output if biases is None else output + biases[:, None]


def is_row(value: Any) -> bool:
    """True if the value is shared by all samples, and was not changed in place, which the copies would not see."""
    if not isinstance(value, BroadcastRow):
        return False
    with DisableTorchFunctionSubclass():
        return value._version == value._version_then


def row_of(layer: Any, each: Tensor) -> BroadcastRow:
    """Return the output of a layer that ran for each sample as one row, the output for its real input.

    The samples of ``each`` are in a first dimension that the row does not have.
    """
    row = each[0] if len(each) else each.new_zeros(each.shape[1:])
    return _as_row(_refusing(layer, row.detach().clone()).clone(), each, layer, is_param=False)


def row_of_param(layer: Any, param: Tensor, each: Tensor) -> BroadcastRow:
    """Return a parameter as a row. An operation that is not for rows raises."""
    return _as_row(_refusing(layer, param.detach()), each, layer, is_param=True)


def _refusing(layer: Any, leaf: Tensor) -> Tensor:
    """The tensor, whose gradient would be summed over samples: a backward that reaches it raises."""

    def refuse(grad: Tensor) -> None:
        layer.refuse_row()

    leaf.requires_grad_().register_hook(refuse)
    return leaf


def _as_row(row: Any, each: Tensor, layer: Any, *, is_param: bool) -> BroadcastRow:
    with DisableTorchFunctionSubclass():
        result = row.as_subclass(BroadcastRow)
        result._each, result._layer, result._is_param, result._version_then = each, layer, is_param, row._version
        return result


def _with_copies(func: Any, args: Any, kwargs: Any, leaves: list[Any], rebuilt: Rebuild) -> Any:
    """The result with the copies in place of the rows; NotImplemented if the operation is not for rows."""
    rows = [x for x in leaves if isinstance(x, BroadcastRow)]
    others = [x for x in leaves if isinstance(x, Tensor) and not isinstance(x, BroadcastRow)]
    name, first = getattr(func, "__name__", ""), rows[0]
    layer, count = first._layer, len(first._each)
    kind, dim = name.strip("_"), layer.engine.batch_dim

    def call(*copies: Tensor) -> Any:
        rest = iter(copies)
        args, kwargs = rebuilt([next(rest) if isinstance(x, BroadcastRow) else x for x in leaves])
        return func(*args, **kwargs)

    in_place = (name.endswith("_") and not name.startswith("__")) or (kind in ARITHMETIC and kind[0] == "i")
    if in_place and (kind not in ARITHMETIC or isinstance(args[0], BroadcastRow)):
        return NotImplemented
    others = [x for x in others if x.ndim <= dim or x.requires_grad or not layer.is_constant(x)]
    if kind in ARITHMETIC and (batch := [x for x in others if x.ndim]):
        copies = _beside(batch, rows)
        return NotImplemented if copies is None else call(*copies)
    if any(x.requires_grad or _is_of_batch(x, dim, count) for x in others) or "out" in kwargs:
        return NotImplemented
    if kwargs.get("padding_idx") is not None:  # embeddings under vmap give the padding row a gradient
        return NotImplemented
    output = func(*args, **kwargs)
    if not any(x.requires_grad for x in tensors_in(output)) or any(output is row for row in rows):
        return output
    if kind in EXPANSIONS and first.fits(output.ndim, dim):
        expansion = kind, tuple(first.shape), output.ndim
        if _is_to_batch(layer, expansion, output.shape[dim], count):
            return _expanded(kind, first.aligned(output.ndim, dim), output)
    try:
        each = torch.vmap(call)(*[row._each for row in rows])
    except (RuntimeError, ValueError):  # it cannot run under vmap
        return NotImplemented

    def row(x: Tensor, y: Tensor) -> BroadcastRow:
        return _as_row(x, y, layer, is_param=first._is_param)

    return pytree.tree_map(row, output, each)


def _beside(batch: list[Tensor], rows: list[BroadcastRow]) -> list[Tensor] | None:
    """The copies that arithmetic with tensors of the batch takes in place of rows; None if it is not for rows."""
    layer, count, ndim = rows[0]._layer, len(rows[0]._each), max(x.ndim for x in batch)
    dim, samples = layer.engine.batch_dim, layer.labels(batch[0])
    if isinstance(samples, Tensor) and count > 1:  # rows of several samples
        copies = [x for row in rows if (x := row.of_rows(samples, ndim)) is not None]
        return copies if len(copies) == len(rows) and len(batch) == 1 else None
    of_batch = all(x.ndim == ndim > dim and x.shape[dim] == count for x in batch)
    if not of_batch or not all(row.fits(ndim, dim) for row in rows):
        return None
    if any(not x.requires_grad and layer.is_constant(x, of_batch=False) for x in batch):
        return None  # equal values, for samples or for positions
    for x in batch:
        layer.check_rows(x, dim)
    layer.note("arithmetic", ndim)
    return [row.aligned(ndim, dim) for row in rows]


def _expanded(kind: str, copies: Tensor, output: Tensor) -> Tensor:
    """Copies for each sample as the output of an expansion of one row."""
    if kind != "repeat":
        return copies.expand_as(output)
    return copies.repeat(*(b // max(a, 1) for a, b in zip(copies.shape, output.shape, strict=True)))


def _is_to_batch(layer: Any, expansion: Any, size: int, count: int) -> bool:
    """True if a row was expanded to the batch, and not, in this call or an earlier one, to another size."""
    others = layer.known.setdefault(EXPANDED, set())
    if size not in (1, count):
        others.add(expansion)
    layer.note(*expansion, expansion in others)
    return size == count and expansion not in others


def _is_of_batch(tensor: Tensor, dim: int, count: int) -> bool:
    return tensor.ndim > dim and (tensor.is_floating_point() or tensor.shape[dim] == count)
