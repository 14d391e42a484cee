"""Arguments and results of the in-place functions: parameters in many forms, gradients of many layouts."""

import math
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from torchzero_clip.compat import warn_user
from torchzero_clip.functional.bad import bad_gradients, labels
from torchzero_clip.functional.dtypes import is_narrow
from torchzero_clip.functional.foreach import PLAIN, TINY32, all_contiguous, are_plain, is_dense, wide_dtype
from torchzero_clip.functional.measure import Slicing
from torchzero_clip.functional.processes import check_group, device_of
from torchzero_clip.functional.shards import aligned, is_distributed, mesh_groups, wholes, without_gradient
from torchzero_clip.functional.slices import norms_of_slices
from torchzero_clip.functional.ways import may_look
from torchzero_clip.types import Tensors

NamedTensors: TypeAlias = list[tuple[str | None, Tensor]]


def listed(name: str, tensors: Tensors) -> list[Any]:
    """A tensor, or the items of an iterable, in a list. `named_tensors` checks the items."""
    is_iterable = isinstance(tensors, Iterable)  # pyright: ignore[reportUnnecessaryIsInstance]
    items = [tensors] if isinstance(tensors, Tensor) else list(tensors) if is_iterable else []
    # a list of parameters is callable too, because it is a module
    if not is_iterable or (callable(tensors) and not all(isinstance(item, Tensor) for item in items)):
        way_out = ": pass model.parameters()" if name == "params" and callable(tensors) else ""
        raise TypeError(f"{name} must be a tensor or an iterable of tensors, got {type(tensors).__name__}{way_out}")
    return items


def tensors_of(name: str, tensors: Tensors) -> list[Tensor]:
    """The tensors of `named_tensors`, without the names."""
    items = listed(name, tensors)
    return items if PLAIN.issuperset(map(type, items)) else [tensor for _, tensor in named_tensors(name, items)]


def named_tensors(name: str, tensors: Tensors) -> NamedTensors:
    """A tensor, an iterable of tensors, or of pairs of a name and a tensor, as a list of such pairs."""
    pairs: NamedTensors = []
    for i, item in enumerate(listed(name, tensors)):
        is_named = isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], str)
        label, tensor = item if is_named else (None, item)
        if not isinstance(tensor, Tensor):
            kind = type(tensor).__name__
            raise TypeError(f"{name} must be a tensor or an iterable of tensors, got {kind} at index {i}")
        pairs.append((label, tensor))
    return pairs


def gradients(
    params: Tensors,
    parameters: Sequence[Tensor],
    process_group: ProcessGroup | None = None,
    *,
    zeros_count: bool = False,
) -> list[Tensor]:
    """The gradients that `with_gradients` returns, without the parameters. Warn if there is none.

    ``params`` is what the user passed, and ``parameters`` a list of it.
    """
    pairs = with_gradients(parameters, process_group, zeros_count=zeros_count)
    if not pairs and process_group is None:
        warn_of_no_gradients(params, parameters)
    return [grad for _, grad in pairs]


def with_gradients(
    params: Sequence[Tensor], process_group: ProcessGroup | None = None, *, zeros_count: bool = False
) -> list[tuple[Tensor, Tensor]]:
    """Those parameters that have a gradient, once each, with the gradient as `own_gradients` returns it."""
    # A distributed parameter without a gradient has zeros here, because another process may have a gradient, and all
    # send equally many numbers. If zeros change the result, those without a gradient on any process are left out.
    once = {id(param): param for param in params}
    check_group(process_group, list(once.values()))
    having = [param for param in once.values() if param.grad is not None]
    grads = own_gradients(having)
    if PLAIN.issuperset(map(type, params)):
        return list(zip(having, grads, strict=True))
    grad_of = dict(zip(map(id, having), grads, strict=True))
    missing = without_gradient(list(once.values()), zeros_count=zeros_count)
    grad_of |= {id(param): torch.zeros_like(param) for param in missing}
    return [(param, grad_of[key]) for key, param in once.items() if key in grad_of]


def warn_of_no_gradients(params: Tensors, parameters: Sequence[Tensor]) -> None:
    """Warn that no parameter has a gradient. The call then changes nothing."""
    # in a pipeline or with experts, one of several processes may have none
    if torch.compiler.is_compiling() or (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return
    if isinstance(params, Iterator) and not parameters:
        warn_user("params is an iterator that has ended, so nothing was changed: pass a new one, model.parameters()")
    elif any(param.requires_grad for param in parameters):
        warn_user(
            "none of the parameters has a gradient, so nothing was changed. Call this function after backward(), and "
            "before step() and zero_grad()"
        )
    elif not all(isinstance(param, nn.Parameter) for param in parameters):
        warn_user("none of the tensors has a .grad, so nothing was changed: pass the parameters, not their gradients")


def own_gradients(params: Sequence[Tensor]) -> list[Tensor]:
    """The gradients of parameters that all have one, as functions can change them in place.

    A gradient is replaced, in ``.grad`` too, if it has other placements than its parameter, a pending conjugation or
    negation, expanded memory, or is that of another parameter too.
    """
    before = [cast(Tensor, param.grad) for param in params]
    strided = {torch.strided}.issuperset([grad.layout for grad in before])
    if strided and are_plain(before, 0) and all_contiguous(before) and len(set(map(id, before))) == len(before):
        return before
    owners: dict[Tensor, Tensor] = {}
    grads: list[Tensor] = []
    for param, stored in zip(params, before, strict=True):
        grad = aligned(stored, param)
        if grad.layout == torch.strided and 0 in grad.stride():
            grad = laid_out_like(grad, param)
        if owners.setdefault(grad, param) is not param:
            grad = grad.clone()
        if grad is not stored:
            param.grad = grad = laid_out_like(grad, param)
        grads.append(grad)
    return grads


def new_gradient(value: Tensor, param: Tensor) -> Tensor:
    """A value as torch's backward stores it in an empty ``.grad``: in the parameter's layout, own memory, detached.

    It may be the value itself, so the caller must not use the value afterwards.
    """
    value = laid_out_like(value.detach(), param)
    if value.layout != torch.strided or is_distributed(value):
        return value
    return value if value.untyped_storage().nbytes() == value.nbytes else value.clone()


def laid_out_like(value: Tensor, param: Tensor) -> Tensor:
    """A value with the strides of the parameter, or contiguous if the parameter has gaps or overlaps."""
    # torch's fused optimizers assume that gradients have the strides of their parameter; on the CPU without a check
    if value.layout != torch.strided or is_distributed(value) or value.stride() == param.stride():
        return value
    strides = param.stride() if is_dense(param) else torch.empty(param.shape, device="meta").stride()
    pairs = zip(value.shape, value.stride(), strides, strict=True)
    if all(stride == wanted for size, stride, wanted in pairs if size != 1):
        return value
    return value.new_empty_strided(value.shape, strides).copy_(value)


@contextmanager
def opened(
    tensors: list[Tensor], values_suffice: Callable[[Tensor], bool], *, write: bool = True
) -> Generator[list[Tensor]]:
    """Yield dense tensors in place of sparse ones, and write their values back to the sparse ones.

    ``values_suffice`` returns True if the stored values of a sparse tensor are enough.
    """
    pairs = [(x, None) if x.layout == torch.strided else _opened(x, values_suffice) for x in tensors]
    yield [dense for dense, _ in pairs]
    for _, close in pairs:
        if close is not None and write:
            close()


def _opened(tensor: Tensor, values_suffice: Callable[[Tensor], bool]) -> tuple[Tensor, Callable[[], object]]:
    """A sparse tensor as a dense one, and a function that writes the new values to the sparse one."""
    if tensor.layout != torch.sparse_coo:
        raise TypeError(f"gradients must be dense, or sparse in the COO layout, got one of layout {tensor.layout}")
    summed = tensor.coalesce()
    values = summed.values()
    if values_suffice(values):
        return values, lambda: summed is tensor or tensor.copy_(summed)
    dense = tensor.to_dense()  # with the zeros that are not stored
    return dense, lambda: tensor.copy_(dense.to_sparse(tensor.sparse_dim()))


def values_tell_all(slicing: Slicing) -> Callable[[Tensor], bool]:
    """A function: True if a sparse tensor has the metric of its stored values, so that zeros do not count."""
    joint, blind_to_zeros = slicing.dim == "global", not slicing.metric.counts_zeros
    return lambda values: (
        (joint or slicing.is_whole) and blind_to_zeros and (joint or values.numel() >= slicing.min_size)
    )


def as_reported(total: Tensor, grads: list[Tensor], process_group: ProcessGroup | None = None) -> Tensor:
    """A joint metric as the functions return it: float32, or float64 for such gradients or if float32 is too small."""
    # with a process group float64: all processes get the same number, and not all know all dtypes
    if process_group is not None:
        return total
    dtype = torch.float32
    for dtype_of_grad in {grad.dtype for grad in grads}:
        dtype = torch.promote_types(dtype, wide_dtype(dtype_of_grad).to_real())
    dtype = torch.float32 if is_narrow(total) else dtype  # although a gradient on a CPU may be float64
    largest = torch.finfo(dtype).max
    if may_look(total) and not TINY32 <= total <= largest and total.isfinite() and total != 0:
        return total
    return torch.where(total.isfinite(), total.clamp(max=largest), total).to(dtype)


def names_of_bad(
    kind: str, named: NamedTensors, owners: list[Tensor], values: list[Tensor], process_group: ProcessGroup | None
) -> str:
    """Those ``owners`` whose ``values`` have inf or NaN on some process, as text. All processes have to call this."""
    names = labels(kind, named)
    parts = [part._replace(groups=()) for part in wholes(values)]  # the names of all ranks are joined afterwards
    norms = [norm.item() for norm in norms_of_slices(parts, math.inf)]
    norm_of = {names[owner]: norm for owner, norm in zip(owners, norms, strict=True)}
    tensors = [tensor for _, tensor in named]
    return bad_gradients(norm_of, mesh_groups(tensors), process_group, device_of(tensors, process_group)).listed
