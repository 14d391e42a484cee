"""Functions that leave every sample at its place: the labels of their outputs follow from those of their inputs.

Names have no underscores: "maskedfill" stands for `masked_fill` and `masked_fill_`.
"""

import functools
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from torchzero_clip.per_sample.samples.labels import LOST, Known, agree, simplest, wider


def names(text: str) -> frozenset[str]:
    """The words of a text as the names of functions."""
    return frozenset(text.replace("_", "").split())


POINTWISE = "pointwise"
"""Stands for all operations that torch tags as pointwise."""
ELEMENTS = {POINTWISE} | names("""
    abs add addcmul alias and bernoulli bfloat16 bool bucketize celu clamp clamp_max clamp_min clip clone contiguous
    copy cos cpu cuda data detach div double dropout elu empty_like eq exp fill float floor floor_divide floordiv
    full_like ge gelu gt half hardsigmoid hardswish hardtanh index_fill int invert le leaky_relu lerp log log_sigmoid
    logical_and logical_not logical_or logsigmoid long lt masked_fill maximum minimum mish mod mul nan_to_num
    native_dropout ne neg ones_like or pow prelu radd rand_like randn_like reciprocal relu relu6 remainder rmul round
    rpow rsqrt rsub rtruediv selu sigmoid sign silu sin softplus sqrt square sub tanh threshold to to_copy tril triu
    truediv type type_as where zeros_like
""")
"""Functions of single elements: those without the tag, those in place, and frequent ones, which are found sooner."""
ALONG = names("""
    argsort cummax cummin cumprod cumsum fft_fft fft_ifft fft_irfft fft_rfft glu linalg_cross log_softmax
    logcumsumexp msort softmax sort topk
""")
"""Functions along one dimension, which the output keeps."""
REDUCES = names("""
    all amax amin aminmax any argmax argmin count_nonzero kthvalue linalg_vector_norm logsumexp max mean median min mode
    nanmean nanmedian nanquantile nansum norm prod quantile std std_mean sum var var_mean
""")
"""Functions along dimensions, which the output does not have."""
COUNTED = names("""
    fft_fft fft_ifft fft_irfft fft_rfft kthvalue linalg_vector_norm nanquantile norm quantile repeatinterleave roll
    takealongdim topk
""")
"""Functions with another argument before the dimension."""
JOINED = names("cat concat concatenate stack")
"""Functions whose first argument has the tensors."""
PRODUCTS = {
    **dict.fromkeys(("addmm", "addmv", "baddbmm"), 1),
    **dict.fromkeys(("bmm", "cdist", "euclideandist", "ger", "linear", "matmul", "mm", "mv", "outer"), 0),
}
"""Products of matrices, and the place of the left factor among the arguments."""
DISTANCES = names("cdist euclidean_dist ger outer")
"""Products that do not sum over samples of the left factor."""
ROWS = names("embedding one_hot")
"""Functions that give each entry a last dimension."""
LAST = names("fused_rms_norm layer_norm native_layer_norm rms_norm")
"""Functions of the last dimensions, as many as their second argument has."""
BATCHED = tuple(
    names("""
        adaptive affinegrid avgpool bilinear channelshuffle col2im conv fold fractional gridsample groupnorm im2col
        instancenorm interpolate localresponse lppool maxpool nativegroupnorm pixel unfold upsample
    """)
)
"""Beginnings of the names of functions that keep the first dimension, and work on each of its entries alone."""
CHANNELS = names("batch_norm native_batch_norm cudnn_batch_norm")
"""Functions that work on each channel (second dimension) alone, and in eval mode on each element alone."""
RECURRENT = names("gru lstm rnn_relu rnn_tanh")
"""Functions of sequences: LSTM, GRU and RNN without trainable weights."""
NEW = names("new new_empty new_full new_ones new_tensor new_zeros")
"""Functions that take only the dtype and the device from their argument."""
ATTENTION = "scaleddotproduct"
ASIDE = "beside"
"""Stands for a function that works along other dimensions, aligned as in broadcasting."""
KEPT = "kept"
"""Stands for an unknown function. Samples keep their dimension if the sizes up to it are the same."""


Way: TypeAlias = Callable[[int], int | None]
"""Where a function takes a dimension; None if it sums over it."""


class Part(NamedTuple):
    """An input of a function: its labels, its shape, and its place among the inputs."""

    labels: Known
    shape: Sequence[int]
    place: int = 0


@functools.cache
def is_listed(name: str) -> bool:
    """True if `unmoved` knows a function."""
    lists = ELEMENTS, ALONG, REDUCES, PRODUCTS, ROWS, LAST, CHANNELS, RECURRENT, NEW
    return any(name in x for x in lists) or name.startswith((*BATCHED, ATTENTION))


def dims_of(name: str, ndim: int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> set[int]:
    """The dimensions along which a function works. Empty if these are all or none of them, or if they are not known."""
    if name in LAST:
        shape = args[1] if len(args) > 1 else kwargs.get("normalized_shape", ())
        return {*range(ndim - (len(shape) if isinstance(shape, list | tuple) else 1), ndim)}
    if name in CHANNELS:
        training = args[5] if len(args) > 5 else kwargs.get("training", False)
        return {*range(ndim)} - {1} if training else set()
    if name.startswith(ATTENTION):
        return {ndim - 2, ndim - 1}
    if name in ("pad", "constantpadnd"):
        pads = args[1] if len(args) > 1 else kwargs["pad"]
        return {ndim - 1 - i // 2 for i, n in enumerate(pads) if n}
    given = args[2 if name in COUNTED else 1 :]
    dims = next((kwargs[key] for key in ("dim", "dims", "axis") if key in kwargs), given[0] if given else None)
    if (name in ALONG or name in JOINED) and not isinstance(dims, int):
        dims = -1 if name in ALONG and name != "msort" else 0
    dims = [dims] if isinstance(dims, int) and not isinstance(dims, bool) else dims
    ndim += name == "stack"  # along a new dimension
    return {dim % max(ndim, 1) for dim in dims if isinstance(dim, int)} if isinstance(dims, list | tuple) else set()


def unmoved(name: str, parts: Iterable[Part], shape: Sequence[int], count: int, dims: Collection[int]) -> Known:
    """The labels of an output of this shape, from the parts that depend on samples.

    ``dims`` has the dimensions along which the function works. It is empty for all, for none, or if not known.
    """
    parts = tuple(parts)
    regular = all(isinstance(part.labels, int) for part in parts)  # tensors may be long, so they are not cached
    found = _unmoved if regular else _unmoved.__wrapped__
    return found(name, parts, tuple(shape), count, frozenset(dims))


def beside(part: Part, shape: Sequence[int], count: int, dims: Collection[int] = ()) -> Known:
    """The labels of a part after a function along other dimensions, aligned as in broadcasting."""
    return unmoved(ASIDE, [part], shape, count, dims)


def after_sequence(parts: Iterable[Part], batch_dim: int, shape: Sequence[int], count: int, place: int) -> Known:
    """The labels of an output of LSTM, GRU or RNN, in its dimension ``place``.

    The samples are in ``batch_dim`` of the first part, the sequence, and in dimension 1 of the others, the states.
    """

    def way(part: Part) -> Way:
        own = 1 if part.place else batch_dim
        return lambda dim: place if dim == own else None

    found = [_carried(part, shape, count, way(part)) for part in parts]
    if any(x is LOST for x in found) or not all(agree(found[0], x, shape, count) for x in found[1:]):
        return LOST
    return found[0]


@functools.lru_cache(4096)  # because forwards repeat their calls
def _unmoved(name: str, parts: tuple[Part, ...], shape: tuple[int, ...], count: int, dims: Collection[int]) -> Known:
    if name in ELEMENTS:  # values of unknown samples may be statistics of the batch, which the check of gradients finds
        parts = tuple(part for part in parts if part.labels is not LOST)
    found = [_carried(part, shape, count, _way(name, part, shape, dims)) for part in parts]
    if not found or any(x is LOST for x in found):
        return LOST
    if name in PRODUCTS and all(len(part.shape) == 2 for part in parts):
        return found[0]  # similarities of samples, such as those of images and texts, have those of the left
    result = found[0]
    for other in found[1:]:
        if not agree(result, other, shape, count):
            return LOST
        if isinstance(result, Tensor):  # an entry of no sample in one part may have a sample in another part
            result = torch.maximum(result.to(other.device), other) if isinstance(other, Tensor) else other
    return result


def _carried(part: Part, shape: Sequence[int], count: int, to: Way) -> Known:
    """The labels after a function that takes each dimension of a part to another place."""
    if part.labels is LOST:
        return LOST
    labels, before = wider(part.labels, part.shape, count), part.shape
    if not labels.numel() and math.prod(shape):  # what is reduced from nothing belongs to no sample
        return torch.full([1] * len(shape), LOST, device=labels.device)
    sizes = [1] * len(shape)
    for dim, size in enumerate(labels.shape):
        place = dim if size == 1 else to(dim)
        if size != 1 and (place is None or not 0 <= place < len(shape) or shape[place] != before[dim]):
            return LOST
        if size != 1 and place is not None:
            sizes[place] = size
    labels = labels.reshape(sizes)
    found = simplest(labels, shape, count) if isinstance(part.labels, int) else labels
    return LOST if found is None else found


def _aligned(part: Part, shape: Sequence[int], dims: Collection[int]) -> Way:
    wider = len(shape) - len(part.shape)
    return lambda dim: None if dim in dims else dim + wider


def _way(name: str, part: Part, shape: Sequence[int], dims: Collection[int]) -> Way:
    """Where a function takes the dimensions of a part."""
    ndim, wider = len(part.shape), len(shape) - len(part.shape)
    if name in ELEMENTS or name == ASIDE:
        return _aligned(part, shape, dims)
    if name == "stack":
        return lambda dim: dim + (dim >= min(dims))
    if name in REDUCES and wider:  # else it keeps the dimensions, with size 1
        kept = [dim for dim in range(ndim) if dims and dim not in dims]
        return lambda dim: kept.index(dim) if dim in kept else None
    is_normalized = name in CHANNELS and not part.place
    if is_normalized or name in REDUCES or name in ALONG or name in LAST or name.startswith(ATTENTION):
        return _aligned(part, shape, dims or (range(ndim) if name in REDUCES else ()))
    if name in PRODUCTS and (place := part.place - PRODUCTS[name]) >= 0:  # else it is added
        if place == 1 and (name == "linear" or name in DISTANCES):  # its rows become columns
            row = max(ndim - 2, 0)
            return lambda dim: dim if dim < row else len(shape) - 1 if dim == row else None
        summed = None if name in DISTANCES else ndim - 1 - (place == 1 and ndim > 1)
        more = max(wider, 0) if name == "matmul" else 0
        return lambda dim: None if dim == summed else dim + more
    if name in PRODUCTS:
        return _aligned(part, shape, ())
    if name in ROWS:
        return lambda dim: dim if part.shape == shape[:-1] else None
    if name == KEPT:
        return lambda dim: dim if shape[: dim + 1] == part.shape[: dim + 1] else None
    if name.startswith(BATCHED) and (not part.place or name.startswith("grid")):
        return lambda dim: None if dim else dim
    return lambda dim: None
