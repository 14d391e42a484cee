"""Compares per-sample gradients with those of one backward for each sample."""

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from torchzero_clip.checks import instance, non_negative
from torchzero_clip.per_sample.attachment import trainable
from torchzero_clip.per_sample.clipper import LossReduction, PerSampleGradientClipper
from torchzero_clip.per_sample.memory_budget import Memory
from torchzero_clip.per_sample.norm_clippers import STABILITY, ConstantFlatClipper
from torchzero_clip.per_sample.weighting import ClippingResult

MODES: tuple[Memory, ...] = ("auto", "low")
LossFunction = Callable[[nn.Module, Any], Tensor]


def check_per_sample(
    model: nn.Module,
    batch: Any,
    loss_fn: LossFunction,
    *,
    batch_first: bool = True,
    loss_reduction: LossReduction = "mean",
    tolerance: float = 1e-6,
) -> dict[str, Tensor]:
    """Raise unless `PerSampleGradientClipper` agrees with one backward for each sample, on this model and batch.

    It compares the norms of every parameter and the clipped sums, in float64, on a copy of the model, in every memory
    mode. It takes B backwards, so check once, with a few samples. It finds wrong rules, layers that mix samples, a
    batch dimension that is not where it was declared, and a loss that is not the declared mean or sum over samples.

    Args:
        model: The model. If it draws random numbers, as dropout does, call ``eval()`` first.
        batch: A tensor, or a tuple, list, dict or other tree of tensors, with the samples in the dimension that
            ``batch_first`` declares. Tensors of another size there are shared by all samples.
        loss_fn: Called as ``loss_fn(model, batch)``. It returns one loss for each sample, of shape (B,), as
            `PerSampleGradientClipper.backward` takes it; or a single loss, reduced according to ``loss_reduction``.
        batch_first: As in `PerSampleGradientClipper`.
        loss_reduction: As in `PerSampleGradientClipper`: whether a single loss is the mean or the sum over samples.
        tolerance: The largest difference, relative to the largest magnitude in the same tensor.

    Returns:
        The norms of the per-sample gradients, by parameter: of shape (B,), float64.

    Raises:
        ValueError: If gradients differ: the message names the first layer that does, in the order of the model, or the
            reduction that was declared. Also if the model draws random numbers, or cannot be clipped per sample.
        RuntimeError: If a parameter is used where samples cannot be told apart.
        TypeError: If an argument has the wrong type.

    Examples:
        >>> import torch
        >>> from torch import nn
        >>> from torchzero_clip import check_per_sample
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
        >>> batch = torch.randn(5, 4), torch.randint(0, 3, (5,))
        >>> def loss_fn(model, batch):
        ...     inputs, targets = batch
        ...     return nn.functional.cross_entropy(model(inputs), targets, reduction="none")
        >>> norms = check_per_sample(model, batch, loss_fn)
        >>> norms["0.weight"].shape
        torch.Size([5])
    """
    instance("model", model, nn.Module)
    non_negative("tolerance", tolerance)
    if not trainable(model):
        raise ValueError("model has no parameters that train: there is nothing to compare")
    twin, batch = copy.deepcopy(model).double(), _wide(batch)
    try:
        expected = _one_by_one(twin, batch, loss_fn, dim=0 if batch_first else 1)
    except (RuntimeError, IndexError) as error:
        raise RuntimeError(
            "loss_fn raised for one sample alone, in float64. Tensors that it holds itself have to be in the batch, or "
            f"to be cast to the dtype of the output, and its loss must not need other samples: {error}"
        ) from error
    norms = {name: grads.flatten(1).norm(dim=1) for name, grads in expected.items()}
    total = torch.stack(list(norms.values())).norm(dim=0)
    limit = total.median().item() if len(total) else 1.0
    factors = (limit / (total + STABILITY)).clamp(max=1)
    for memory in MODES:
        twin.zero_grad()
        with PerSampleGradientClipper(
            twin, ConstantFlatClipper(limit), batch_first, loss_reduction, memory=memory
        ) as clipper:
            result = _clipped(clipper, loss_fn(twin, batch))
        _compare_norms(twin, result.param_norms, norms, loss_reduction, tolerance)
        for name, grads in expected.items():
            sums = torch.tensordot(factors, grads, 1) / (len(total) if loss_reduction == "mean" else 1)
            found = twin.get_parameter(name).grad
            _compare(twin, name, "clipped sum", torch.zeros_like(sums) if found is None else found, sums, tolerance)
    return norms


def _one_by_one(model: nn.Module, batch: Any, loss_fn: LossFunction, *, dim: int) -> dict[str, Tensor]:
    """The per-sample gradients, by one backward for each sample."""
    params = trainable(model)
    rows: list[list[Tensor]] = []
    for one in _samples(batch, dim):
        row = _grads(loss_fn(model, one), params)
        if not rows and any(
            not torch.equal(a, b) for a, b in zip(row, _grads(loss_fn(model, one), params), strict=True)
        ):
            raise ValueError("model gives different gradients for the same sample: call model.eval() before the check")
        rows.append(row)
    return {name: torch.stack(column) for name, column in zip(params, zip(*rows, strict=True), strict=True)}


def _grads(loss: Tensor, params: Mapping[str, nn.Parameter]) -> list[Tensor]:
    grads = torch.autograd.grad(loss.sum(), list(params.values()), allow_unused=True)
    pairs: Any = zip(params.values(), grads, strict=True)
    return [torch.zeros_like(p) if g is None else g for p, g in pairs]


def _samples(batch: Any, dim: int) -> Iterator[Any]:
    leaves = [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.ndim]
    if not leaves:
        raise ValueError("batch must hold at least one tensor with a batch dimension")
    count = leaves[0].shape[min(dim, leaves[0].ndim - 1)]
    if not count:
        raise ValueError("batch must hold at least one sample")

    def one(leaf: Tensor, i: int) -> Tensor:
        where = min(dim, leaf.ndim - 1)
        return leaf.narrow(where, i, 1) if leaf.ndim and leaf.shape[where] == count else leaf

    for i in range(count):
        yield pytree.tree_map_only(Tensor, lambda leaf, i=i: one(leaf, i), batch)


def _clipped(clipper: PerSampleGradientClipper, loss: Tensor) -> ClippingResult:
    if loss.ndim == 1:
        return clipper.backward(loss)
    if loss.ndim:
        raise ValueError(f"loss_fn must return one loss for each sample, (B,), or one for all, got {tuple(loss.shape)}")
    loss.backward()
    result = clipper.clip_and_accumulate()
    clipper.pre_step()
    return result


def _compare_norms(
    model: nn.Module,
    found: Mapping[str, Tensor],
    expected: Mapping[str, Tensor],
    declared: LossReduction,
    tolerance: float,
) -> None:
    mine = torch.stack([found[name] for name in expected])
    theirs = torch.stack(list(expected.values()))
    if mine.shape != theirs.shape:
        raise ValueError(f"the clipper saw {mine.shape[1]} samples, the batch has {theirs.shape[1]}")
    count = mine.shape[1]
    factor, other = (count, "sum") if declared == "mean" else (1 / count, "mean")
    if count > 1 and theirs.any() and torch.allclose(mine, theirs * factor, rtol=tolerance, atol=0):
        raise ValueError(
            f"the loss is the {other} over samples, but loss_reduction={declared!r} was declared: norms are "
            f"{factor:g} times those of single samples. Use loss_reduction={other!r}"
        )
    for name, norms in expected.items():
        _compare(model, name, "norm of single samples", found[name], norms, tolerance)


def _compare(model: nn.Module, name: str, what: str, found: Tensor, expected: Tensor, tolerance: float) -> None:
    error = (found - expected).abs().max().item() if found.numel() else 0.0
    scale = expected.abs().max().item() if found.numel() else 0.0
    if error <= tolerance * scale:
        return
    layer, _, key = name.rpartition(".")
    kind = type(model.get_submodule(layer)).__name__
    raise ValueError(
        f"layer {layer!r} ({kind}) is the first that differs from one backward per sample: the {what} of its {key!r} "
        f"is off by {error:.3g}, where the largest is {scale:.3g}. Its rule is wrong, a layer at or after it mixes "
        "samples, or the loss of a sample depends on others"
    )


def _wide(batch: Any) -> Any:
    return pytree.tree_map_only(Tensor, lambda x: x.double() if x.is_floating_point() else x, batch)
