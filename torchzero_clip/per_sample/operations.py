"""What functions do to samples if they move none: the labels of their outputs, from those of their inputs.

Names have no underscores: "maskedfill" stands for `masked_fill` and `masked_fill_`.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from torchzero_clip.per_sample.labels import LOST, Known, Labels, agree
from torchzero_clip.per_sample.layout import moved


def _names(text: str) -> frozenset[str]:
    return frozenset(text.replace("_", "").split())


ELEMENTS = _names("""
    abs acos add addcdiv addcmul alias and atan2 bernoulli bfloat16 bool ceil celu clamp clamp_max clamp_min clip clone
    contiguous copy copysign cos cpu cuda data detach div double dropout elu empty_like eq erf exp expm1 fill float
    floor floor_divide floordiv full_like ge gelu gt half hardsigmoid hardswish hardtanh index_fill int invert isfinite isinf isnan
    le leaky_relu lerp log log1p log_sigmoid logical_and logical_not logical_or logsigmoid long lt masked_fill maximum
    minimum mish mod mul multiply nan_to_num native_dropout ne neg negative ones_like or pow prelu radd rand_like
    randn_like reciprocal relu relu6 remainder rmul round rpow rsqrt rsub rtruediv selu sigmoid sign silu sin softplus
    sqrt square sub subtract tanh threshold to to_copy tril triu true_divide truediv type type_as where xlogy zeros_like
""")
"""Functions of single elements."""
ALONG = _names("""
    argsort cummax cummin cumprod cumsum gather glu log_softmax logcumsumexp msort softmax sort topk
""")
"""Functions along one dimension, which the output keeps."""
REDUCES = _names("""
    all amax amin aminmax any argmax argmin count_nonzero kthvalue linalg_vector_norm logsumexp max mean median min mode
    nanmean nanmedian nanquantile nansum norm prod quantile std std_mean sum var var_mean
""")
"""Functions along dimensions, which the output does not have."""
COUNTED = _names("kthvalue linalg_vector_norm nanquantile norm quantile topk")
"""Functions with a number before the dimension."""
PRODUCTS = {
    **dict.fromkeys(("addmm", "addmv", "baddbmm"), 1),
    **dict.fromkeys(("bmm", "cdist", "euclideandist", "ger", "linear", "matmul", "mm", "mv", "outer", "rmatmul"), 0),
}
"""Products of matrices, and the place of the left factor among the arguments."""
DISTANCES = _names("cdist euclidean_dist ger outer")
"""Products that do not sum over samples of the left factor."""
ROWS = _names("embedding one_hot")
"""Functions of every entry by itself, which give it further dimensions."""
LAST = _names("fused_rms_norm layer_norm native_layer_norm rms_norm")
"""Functions of the last dimensions, as many as their second argument has."""
BATCHED = (
    *(
        "adaptive",
        "affinegrid",
        "avgpool",
        "bilinear",
        "conv",
        "fold",
        "fractional",
        "gridsample",
        "groupnorm",
        "im2col",
    ),
    *("instancenorm", "interpolate", "localresponse", "lppool", "maxpool", "nativegroupnorm", "pixel", "upsample"),
    *("channelshuffle", "col2im", "gridsampler", "unfold"),
)
"""Beginnings of the names of functions that keep the first dimension, and work on each of its entries alone."""
CHANNELS = _names("batch_norm native_batch_norm cudnn_batch_norm")
"""Functions of the second dimension, on each of its entries alone."""
NEW = _names("new new_empty new_full new_ones new_tensor new_zeros")
"""Functions that use only the kind of their argument."""
MIX = _names("""
    argwhere bincount block_diag cartesian_prod combinations diagonal_scatter kron nonzero segment_reduce select_scatter
    slice_scatter trace unique unique_consecutive unique2 vander
""")
"""Functions after which the samples are not known."""
ATTENTION = "scaleddotproduct"


class Part(NamedTuple):
    """An input of a function: its labels, its shape, and its place among the inputs."""

    labels: Known
    shape: Sequence[int]
    place: int = 0


def is_listed(name: str) -> bool:
    """True if `unmoved` knows a function."""
    lists = ELEMENTS, ALONG, REDUCES, PRODUCTS, ROWS, LAST, CHANNELS, NEW, MIX
    return any(name in x for x in lists) or name.startswith((*BATCHED, ATTENTION))


def dims_of(name: str, ndim: int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> set[int]:
    """The dimensions along which a function works; none if it works along all, or if they are not known."""
    if name in LAST:
        shape = args[1] if len(args) > 1 else kwargs.get("normalized_shape", ())
        return {*range(ndim - (len(shape) if isinstance(shape, list | tuple) else 1), ndim)}
    if name.startswith(ATTENTION):
        return {ndim - 2, ndim - 1}
    given = args[2 if name in COUNTED else 1 :]
    dims = kwargs.get("dim", kwargs.get("axis", given[0] if given else None))
    if name in ALONG and not isinstance(dims, int):
        dims = 0 if name == "msort" else -1
    dims = [dims] if isinstance(dims, int) and not isinstance(dims, bool) else dims
    return {dim % max(ndim, 1) for dim in dims} if isinstance(dims, list | tuple) else set()


def unmoved(name: str, parts: Sequence[Part], shape: Sequence[int], count: int, dims: Collection[int]) -> Known:
    """The labels of an output of this shape, from the parts that depend on samples.

    ``dims`` has the dimensions along which the function works. It is empty if these are all of them, or not known.
    """
    if count == 1:  # all values that depend on samples depend on this one
        return 1
    if name in ELEMENTS:  # values of unknown samples may be statistics of the batch, which the check of gradients finds
        return _common([beside(part, shape, count, ()) for part in parts if part.labels is not LOST], shape, count)
    if any(part.labels is LOST for part in parts):
        return LOST
    if name in REDUCES:
        return _common([_reduced(part, shape, count, dims) for part in parts], shape, count)
    if name in ALONG or name in LAST or name.startswith(ATTENTION):
        return _common([beside(part, shape, count, dims) for part in parts], shape, count)
    if name in PRODUCTS:  # similarities of samples have those of the left
        kept = [_multiplied(name, part, shape, count) for part in parts]
        return LOST if LOST in (x for x in kept if isinstance(x, int)) else _common(kept[:1], shape, count)
    if name in ROWS:
        return _common([_entered(part, shape, count) for part in parts], shape, count)
    if name in CHANNELS or name.startswith(BATCHED):
        only = 1 if name in CHANNELS else 0
        other = [dim for dim in range(max(map(len, (x.shape for x in parts)))) if dim != only]
        second = any(part.place for part in parts) and not name.startswith("grid")
        return LOST if second else _common([beside(part, shape, count, other) for part in parts], shape, count)
    return LOST


def _common(labels: Sequence[Known], shape: Sequence[int], count: int) -> Known:
    """The labels of the parts, if no two of them differ."""
    if not labels or any(x is LOST for x in labels):
        return LOST
    return labels[0] if all(agree(labels[0], x, shape, count) for x in labels[1:]) else LOST


def beside(part: Part, shape: Sequence[int], count: int, dims: Collection[int]) -> Known:
    """The labels of a part after a function along other dimensions, aligned as in broadcasting."""
    labels, before = part.labels, part.shape
    wider = len(shape) - len(before)
    if isinstance(labels, int):
        if not dims and tuple(before) == tuple(shape):
            return labels
        found = moved(labels, before, shape, count, lambda dim: None if dim in dims else dim + wider)
        return LOST if found is None else found
    if wider < 0 or any(labels.shape[dim] != 1 for dim in dims):
        return LOST
    fits = all(size in (1, now) for size, now in zip(labels.shape, shape[wider:], strict=True))
    return labels[(None,) * wider] if fits else LOST


def _reduced(part: Part, shape: Sequence[int], count: int, dims: Collection[int]) -> Known:
    labels, before = part.labels, part.shape
    if len(shape) == len(before):  # the dimensions are kept, with size 1
        dims = dims or range(len(before))
        return beside(part, shape, count, dims)
    gone = [dim for dim in range(len(before)) if dim in dims or not dims]
    kept = [dim for dim in range(len(before)) if dim not in gone]
    if isinstance(labels, int):
        found = moved(labels, before, shape, count, lambda dim: kept.index(dim) if dim in kept else None)
        return LOST if found is None else found
    if any(labels.shape[dim] > 1 for dim in gone):
        return LOST
    if not labels.numel():  # what is reduced from nothing belongs to no sample
        labels = labels.new_full([max(n, 1) for n in labels.shape], LOST)
    return labels.reshape([labels.shape[dim] for dim in kept])


def _multiplied(name: str, part: Part, shape: Sequence[int], count: int) -> Known:
    """The labels of a factor of a product of matrices."""
    labels, before, wider = part.labels, part.shape, len(shape) - len(part.shape)
    place = part.place - PRODUCTS[name]
    if place < 0:  # what is added
        return beside(part, shape, count, ())
    summed = len(before) - 1 - (place == 1 and len(before) > 1)  # the dimension that it sums over
    if place == 1 and (name == "linear" or name in DISTANCES):
        return LOST
    if isinstance(labels, int):
        more = wider if name in ("matmul", "rmatmul") and wider > 0 else 0
        stays = name in DISTANCES
        found = moved(labels, before, shape, count, lambda dim: dim + more if dim != summed or stays else None)
        return LOST if found is None else found
    if labels.shape[summed] != 1 or place == 1:
        return LOST
    depth = max((dim + 1 for dim, size in enumerate(labels.shape) if size != 1), default=0)
    fits = wider <= 0 and tuple(shape[:depth]) == tuple(before[:depth])
    return labels.reshape(*labels.shape[:depth], *[1] * (len(shape) - depth)) if fits else LOST


def _entered(part: Part, shape: Sequence[int], count: int) -> Known:
    """The labels of entries that get further dimensions behind theirs."""
    labels, before = part.labels, part.shape
    if isinstance(labels, int):
        found = moved(labels, before, shape, count, lambda dim: dim)
        return LOST if found is None else found
    fits = tuple(shape[: len(before)]) == tuple(before)
    return labels.reshape(*labels.shape, *[1] * (len(shape) - len(before))) if fits else LOST
