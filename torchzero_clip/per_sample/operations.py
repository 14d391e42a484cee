"""The samples of the outputs of operations that move no samples: nodes of the graph, and functions without a graph.

Names have no underscores: "maskedfill" stands for `masked_fill` and for the node `MaskedFillBackward0`.
"""

from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torchzero_clip.per_sample.labels import LOST, Known, Labels, agree, aligned


def _names(text: str) -> frozenset[str]:
    return frozenset(text.replace("_", "").split())


ELEMENTS = _names("""
    abs acos add addcdiv addcmul alias and atan2 bfloat16 bool ceil clamp clamp_max clamp_min clip clone contiguous copy
    copysign cos cpu cuda data detach div double dropout elu empty_like eq erf exp expm1 fill float floor floordiv
    full_like ge gelu gt half hardsigmoid hardswish hardtanh int invert isnan le leaky_relu lerp log log1p log_sigmoid
    logical_and logical_not logical_or long lt masked_fill maximum minimum mish mod mul nan_to_num native_dropout ne neg
    ones_like or pow radd rand_like randn_like reciprocal relu remainder rmul round rsqrt rsub rtruediv sigmoid sign
    silu sin softplus sqrt square sub tanh threshold to to_copy true_divide truediv type type_as where xlogy zeros_like
""")
"""Operations on single elements."""
ALONG = _names("""
    argsort cummax cummin cumprod cumsum gather glu kthvalue logcumsumexp log_softmax mode msort softmax sort topk
""")
"""Operations along one dimension, which the output keeps."""
REDUCES = _names("""
    all amax amin aminmax any argmax argmin count_nonzero linalg_vector_norm logsumexp max mean median min nanmean
    nanmedian nanquantile nansum norm prod quantile std std_mean sum var var_mean
""")
"""Operations along dimensions, which the output does not have."""
COUNTED = _names("kthvalue linalg_vector_norm nanquantile norm quantile topk")
"""Functions with a number before the dimension."""
PRODUCTS = {
    **dict.fromkeys(("addmm", "addmv", "baddbmm"), 1),
    **dict.fromkeys(("bmm", "cdist", "euclideandist", "ger", "linear", "matmul", "mm", "mv", "outer"), 0),
}
"""Products of matrices, and the place of the left factor among the arguments."""
DISTANCES = _names("cdist euclidean_dist ger outer")
"""Products that do not sum over samples of the left factor."""
ROWS = _names("embedding one_hot unfold")
"""Operations on every row by itself, which may change the number of dimensions."""
BATCHED = _names("""
    avg_pool2d convolution fused_rms_norm group_norm layer_norm native_group_norm native_layer_norm normalize rms_norm
    scaled_dot_product_attention_math scaled_dot_product_cudnn_attention scaled_dot_product_efficient_attention
    scaled_dot_product_flash_attention scaled_dot_product_flash_attention_for_cpu
""")
"""Operations that keep the first dimension of their input."""
UNKNOWN = _names("""
    argwhere as_strided bincount block_diag cartesian_prod combinations diagonal diagonal_scatter einsum inner kron
    masked_select nonzero rot90 segment_reduce select_scatter slice_scatter take tensordot trace unique
    unique_consecutive vander
""")
"""Operations after which the samples are not known, if they are not moved in the same way."""


class Part(NamedTuple):
    """An input of an operation: its labels, its shape, and its place among the inputs."""

    labels: Labels
    shape: Sequence[int]
    place: int = 0


def unmoved(name: str, parts: Sequence[Part], shape: Sequence[int], count: int, dims: Collection[int]) -> Labels:
    """The labels of an output of this shape, from the parts that depend on samples.

    ``dims`` has the dimensions along which the operation works. It is empty if these are all of them, or not known.
    """
    known = [(part, part.labels) for part in parts if part.labels is not None]
    if name in ELEMENTS:
        first = known[0][1]
        usual = all(isinstance(x, int) and x == first and len(p.shape) == len(shape) for p, x in known)
        if usual and isinstance(first, int) and first is not LOST:
            return first if shape[first] == count else LOST
        # a value whose samples are unknown may be a statistic of the batch, which the check of gradients finds
        return _common([aligned(x, len(p.shape), len(shape)) for p, x in known if x is not LOST], shape, count)
    if any(labels is LOST for _, labels in known):
        return LOST
    if count == 1:  # all values that depend on samples depend on this one
        return torch.zeros((1,) * len(shape), dtype=torch.int64, device="cpu")
    if name in ALONG or name in REDUCES:
        return _along(*known[0], shape, dims)
    if name in UNKNOWN:
        return LOST
    kept = [_kept(name, *item, shape) for item in known]
    if name in PRODUCTS and all(x is not LOST for x in kept):  # similarities of samples have those of the left
        kept = kept[:1]
    return _common(kept, shape, count)


def _common(labels: Sequence[Known], shape: Sequence[int], count: int) -> Known:
    """The labels of the first part with the samples of the output, if no other part has other samples."""
    fits = [x for x in labels if isinstance(x, Tensor) or (0 <= x < len(shape) and shape[x] == count)]
    agrees = fits and all(x is not LOST and agree(fits[0], x, len(shape), count) for x in labels)
    return fits[0] if agrees else LOST


def _along(part: Part, labels: Known, shape: Sequence[int], dims: Collection[int]) -> Known:
    varies = {labels} if isinstance(labels, int) else {i for i, n in enumerate(labels.shape) if n > 1}
    if varies & {*dims} or (not dims and varies):
        return LOST
    if len(shape) == len(part.shape):
        return labels if isinstance(labels, int) else labels[tuple(map(slice, shape))]  # `gather` may shorten it
    if isinstance(labels, int):
        return labels - sum(dim < labels for dim in dims)
    if not labels.numel():  # what is reduced from nothing belongs to no sample
        labels = labels.new_full([max(n, 1) for n in labels.shape], -1)
    return labels.reshape([n for i, n in enumerate(labels.shape) if i not in dims])


def _kept(name: str, part: Part, labels: Known, shape: Sequence[int]) -> Known:
    """The labels of a part whose first dimensions stay, or all of them."""
    before, wider = part.shape, len(shape) - len(part.shape)
    place = part.place - PRODUCTS.get(name, 0)
    if name in PRODUCTS and place >= 0:
        dim = len(before) - 1 - (place == 1 and len(before) > 1)  # the one that it sums over
        sums = labels == dim if isinstance(labels, int) else labels.shape[dim] != 1
        if (sums and name not in DISTANCES) or (place == 1 and (sums or name == "linear")):
            return LOST
    if isinstance(labels, int):
        if name == "matmul" and wider > 0:
            return labels + wider
        return labels if not wider or labels == 0 or name in PRODUCTS or name in ROWS else LOST
    depth = max((dim + 1 for dim, size in enumerate(labels.shape) if size != 1), default=0)
    fits = (name in PRODUCTS and wider <= 0) or name in ROWS or (name in BATCHED and depth <= 1)
    if not fits or tuple(shape[:depth]) != tuple(before[:depth]):
        return LOST
    return labels.reshape(*labels.shape[:depth], *[1] * (len(shape) - depth))
