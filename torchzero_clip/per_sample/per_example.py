"""Clipping of per-example gradients: every leaf of a tree has one row per example."""

import math
from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor

from torchzero_clip.checks import boolean, non_negative
from torchzero_clip.compat import pytree, without_autocast
from torchzero_clip.functional.clip import within
from torchzero_clip.functional.foreach import wide_dtype
from torchzero_clip.functional.shards import Part
from torchzero_clip.functional.slices import norms_of_slices
from torchzero_clip.functional.ways import beyond_float32
from torchzero_clip.per_sample.gradients.row_norms import stacked

Tree = TypeVar("Tree")
"""A tensor, or a list, tuple or dict of trees."""


@torch.no_grad()
def per_example_global_norm_clip(grads: Tree, l2_norm_clip: float) -> tuple[Tree, Tensor]:
    """Clip the gradient of every example, all leaves together, to an L2 norm of at most ``l2_norm_clip``, and sum.

        mᵢ = min(1, l2_norm_clip / ‖gᵢ‖)        sum = Σᵢ mᵢ · gᵢ

    The norm of an example covers all leaves. What one example adds to the sum has a norm of at most ``l2_norm_clip``.

    Args:
        grads: A list, dict, tuple or any other tree of tensors of shape (B, ...), with the same number B of examples,
            such as the result of `torch.func.vmap` of `torch.func.grad`.
        l2_norm_clip: The limit C, >= 0, in units of the gradient.

    Returns:
        The sums, as the same tree with leaves of shape (...) and of the same dtypes, and the number of examples that
            were clipped: a 0-d tensor of integers.

    Raises:
        ValueError: If the leaves do not have the same number of examples, or for a negative or NaN limit.
        TypeError: If a leaf is not a floating point tensor, or the limit is not a number.

    | example | result |
    | --- | --- |
    | norm 0 | adds zeros; not counted, also with C = 0 |
    | norm exactly C | unchanged, not counted |
    | C = 0 | adds zeros |
    | C = inf | unchanged |
    | an inf | adds NaN there and 0 elsewhere, and is counted; unchanged with C = inf |
    | a NaN | unchanged, not counted |
    | B = 0 | sums of zeros, count 0 |
    | a tree without leaves | returned as it is, count 0 |

    Examples:
        >>> import torch
        >>> from torchzero_clip import per_example_global_norm_clip
        >>> per_example_global_norm_clip([torch.tensor([[0.0, 0.0], [3.0, 4.0], [0.3, 0.4]])], 1.0)
        ([tensor([0.9000, 1.2000])], tensor(1))

    Source: Abadi et al., [Deep learning with differential privacy](https://arxiv.org/abs/1607.00133), 2016.
    """
    non_negative("l2_norm_clip", l2_norm_clip)
    leaves, structure = _examples(grads)
    if not leaves:
        return grads, torch.zeros((), dtype=torch.int64, device="cpu")
    of_leaves = _norms(leaves)
    norms = norms_of_slices([Part(stacked(of_leaves), dims=(0,), size=len(leaves))], 2.0)[0].view(-1)
    factors = within(norms, torch.full_like(norms, l2_norm_clip))
    sums = [_weighted_sum(factors, leaf) for leaf in leaves]
    return pytree.tree_unflatten(sums, structure), (factors < 1).sum()


@torch.no_grad()
def per_example_layer_norm_clip(grads: Tree, global_l2_norm_clip: float, uniform: bool = True) -> tuple[Tree, Tree]:
    """Clip the gradient of every example, each leaf by itself, so that all leaves together meet a limit, and sum.

        Cₖ = C / √K        (uniform, K leaves)
        Cₖ = C · √(Dₖ / D) (otherwise: leaf k has Dₖ of the D elements of an example)

    Each leaf k is clipped to Cₖ as `per_example_global_norm_clip` would clip it alone. The squares of all Cₖ add up to
    C², so what one example adds to the sums has a norm of at most C.

    Args:
        grads: A list, dict, tuple or any other tree of tensors of shape (B, ...), with the same number B of examples.
        global_l2_norm_clip: The limit C of all leaves together, >= 0, in units of the gradient.
        uniform: Give every leaf the same limit, instead of one that depends on its number of elements.

    Returns:
        The sums, as the same tree with leaves of shape (...), and the numbers of examples that were clipped, as the
            same tree with 0-d tensors of integers.

    Raises:
        ValueError: If the leaves do not have the same number of examples, or for a negative or NaN limit.
        TypeError: If a leaf is not a floating point tensor, or an argument has the wrong type.

    For each leaf, single examples are treated as in `per_example_global_norm_clip`.

    Examples:
        >>> import torch
        >>> from torchzero_clip import per_example_layer_norm_clip
        >>> grads = {"weight": torch.tensor([[3.0, 4.0], [0.0, 0.1]]), "bias": torch.tensor([0.5, -2.0])}
        >>> sums, counts = per_example_layer_norm_clip(grads, 2**0.5)  # each leaf at 1
        >>> sums["weight"], sums["bias"]
        (tensor([0.6000, 0.9000]), tensor(-0.5000))
        >>> counts["weight"].item(), counts["bias"].item()
        (1, 1)

    Source: McMahan, Ramage, Talwar, Zhang, [Learning differentially private recurrent language
    models](https://arxiv.org/abs/1710.06963), 2018.
    """
    non_negative("global_l2_norm_clip", global_l2_norm_clip)
    boolean("uniform", uniform)
    leaves, structure = _examples(grads)
    sizes = [math.prod(leaf.shape[1:]) for leaf in leaves]
    shares = [1 / len(leaves) if uniform else size / max(sum(sizes), 1) for size in sizes]
    limits = [global_l2_norm_clip * math.sqrt(share) for share in shares]
    factors = [within(n, torch.full_like(n, limit)) for n, limit in zip(_norms(leaves), limits, strict=True)]
    sums = [_weighted_sum(f, leaf) for f, leaf in zip(factors, leaves, strict=True)]
    counts = [(f < 1).sum() for f in factors]
    return pytree.tree_unflatten(sums, structure), pytree.tree_unflatten(counts, structure)


def _examples(grads: object) -> tuple[list[Tensor], pytree.TreeSpec]:
    leaves, structure = pytree.tree_flatten(grads)
    for leaf in leaves:
        if not isinstance(leaf, Tensor) or not (leaf.is_floating_point() or leaf.is_complex()):
            kind = leaf.dtype if isinstance(leaf, Tensor) else type(leaf).__name__
            raise TypeError(f"grads must be a tree of floating point tensors, got a leaf of {kind}")
    shapes = [tuple(leaf.shape) for leaf in leaves]
    if not all(shape and shape[0] == shapes[0][0] for shape in shapes):
        raise ValueError(f"grads must have the same number of examples in the first dimension, got shapes {shapes}")
    return leaves, structure


def _norms(leaves: Sequence[Tensor]) -> list[Tensor]:
    """The norms of all examples in each leaf, float64."""
    rows = [leaf.unsqueeze(-1) for leaf in leaves]
    parts = [Part(row, dims=tuple(range(1, row.ndim)), size=math.prod(row.shape[1:])) for row in rows]
    return [norms.view(-1) for norms in norms_of_slices(parts, 2.0)]


def _weighted_sum(factors: Tensor, leaf: Tensor) -> Tensor:
    exact = factors.is_cpu and beyond_float32(factors)
    wide = torch.promote_types(leaf.dtype, torch.float64) if exact else wide_dtype(leaf.dtype)
    with without_autocast(leaf):
        return torch.tensordot(factors.to(leaf.device, wide), leaf.to(wide), 1).to(leaf.dtype)
