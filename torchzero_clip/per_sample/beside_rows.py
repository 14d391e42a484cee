"""Which tensors have samples, beside a value that all samples share: see `broadcast_row`.

The forward has to guess this by sizes, because only a backward shows the samples. A proof refuses wrong guesses.
"""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from torchzero_clip.per_sample.arguments import counts_up
from torchzero_clip.per_sample.gradients.autograd_graph import nodes_of
from torchzero_clip.per_sample.processes.sharding import storages_of
from torchzero_clip.per_sample.rows_layer import RowsLayer
from torchzero_clip.per_sample.samples.call import call_of
from torchzero_clip.per_sample.samples.pattern import Place


def has_layers(x: Tensor) -> bool:
    """True for a tensor that layers of the model have made, and not only trainable tensors outside of it."""
    return x.requires_grad and any(call_of(node) is not None for node in nodes_of([x]))


def tokens_among(tensors: Iterable[Tensor], layer: RowsLayer, count: int) -> list[Tensor]:
    """The tensors whose rows may be of samples in no order: those that layers have made, or else data."""
    capture = layer.capture
    found = [x for x in tensors if x.ndim and x.layout == torch.strided]
    if capture.forward.outside_model or all(len(x) == count for x in found):
        return []
    if made := [x for x in found if x.requires_grad]:
        # all samples share the rows of a trainable tensor outside of the model
        return made if all(map(has_layers, made)) else []
    own = capture.own_storages()
    data = [x for x in found if x.is_floating_point() and x.ndim > 1 and len(x) > 1 and not storages_of((x,)) & own]
    # no diagonal matrices, such as the identity from which a product of reflections starts
    data = [x for x in data if not _is_diagonal(x)]
    # if proofs cannot find shared rows, data counts as tokens only in a module without submodules, such as PReLU
    may_be = capture.may_find_shared or not [*layer.module.children()]
    return data if may_be and not any(layer.shared.is_table(x) for x in data) else []


def places_in(
    tensors: Mapping[int, Tensor], layer: RowsLayer, count: int, *, changes: bool, squares: bool = True
) -> dict[int, Place]:
    """The place of the ``count`` samples in each tensor, by its key. All samples share the tensors that are left out.

    In a batch of 4 samples, a tensor of shape (4, 7, 8) has them in dimension 0, and one of shape (36, 49, 8), of
    windows of images, in runs of 9, unless the function ``changes`` its first argument in place. Square matrices count
    as tables that all samples share if ``squares`` is False.
    """
    places = dict[int, Place]()
    if not tensors:
        return places
    forward, dim = layer.capture.forward, layer.capture.batch_dim
    own = layer.capture.own_storages()
    for i, x in tensors.items():
        is_shared = not x.requires_grad and storages_of((x,)) & own  # copies of a parameter lie in its memory too
        is_shared = is_shared or (not x.requires_grad and layer.shared.is_table(x))
        is_shared = is_shared or (counts_up(x) and not forward.holds(x))  # positions
        # outside of the model only sizes tell where samples are, and many dimensions have size 1
        if not x.ndim or is_shared or (forward.outside_model and count == 1):
            continue
        fitting = [d for d, size in enumerate(x.shape) if size == count]
        square = x.ndim == 2 and x.shape[0] == x.shape[1] and not x.requires_grad and not squares
        if x.ndim <= dim or x.shape[dim] == 1 or square:
            continue  # such as a table of pairs of positions
        of_rows = x.ndim > 2 and not changes  # such as windows of images
        if x.shape[dim] == count:
            places[i] = Place(dim)
        elif x.shape[0] and x.shape[0] % count == 0 and (of_rows or x.requires_grad or forward.holds(x)):
            places[i] = Place(0, len(x) // count)
        elif fitting:
            places[i] = Place(fitting[0])
    return places


def _is_diagonal(x: Tensor) -> bool:
    return x.shape == (len(x), len(x)) and torch.equal(x, x.diagonal().diag())
