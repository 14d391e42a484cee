"""Compares per-sample gradients with those of one backward for each sample."""

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from torchzero_clip.checks import instance, non_negative
from torchzero_clip.compat import any_distributed, pytree
from torchzero_clip.functional.dtypes import is_narrow
from torchzero_clip.per_sample.clipper import LossReduction, PerSampleGradientClipper
from torchzero_clip.per_sample.gradients.autograd_graph import outside_gradients
from torchzero_clip.per_sample.layer import trainable
from torchzero_clip.per_sample.modes import Mode
from torchzero_clip.per_sample.norm_clippers import STABILITY, ConstantFlatClipper

LossFunction = Callable[[nn.Module, Any], Tensor]
Norms = Mapping[str, Tensor]


def check_per_sample(
    model: nn.Module,
    batch: object,
    loss_fn: LossFunction,
    *,
    batch_first: bool = True,
    loss_reduction: LossReduction = "mean",
    tolerance: float = 1e-6,
    whole: Sequence[type[nn.Module] | str] = (),
) -> dict[str, Tensor]:
    """Raise unless `PerSampleGradientClipper` agrees with one backward for each sample, on this model and batch.

    In float64, on a copy of the model, it compares the norms of every parameter and the clipped sums with those of
    samples alone, in every memory mode. The clipper proves that samples do not mix, and names the layer where they do.
    It does all of this twice, once with noise on the parameters, because a factor of zero can hide a difference. This
    takes 2 B backwards of single samples. So check once, with a few samples that differ.

    It finds wrong rules, samples that mix even without a gradient, a batch dimension in another place than declared,
    and a loss that is not the declared mean or sum over samples. It does not find errors that occur only in another
    mode, or with other values, lengths or numbers of samples.

    Args:
        model: The model. If it draws random numbers, as dropout does, call ``eval()`` first.
        batch: A tensor, or a tuple, list, dict or other tree of tensors. ``batch_first`` declares the dimension of the
            samples. All samples share the tensors with another size in this dimension.
        loss_fn: Called as ``loss_fn(model, batch)``. It returns one loss for each sample, of shape (B,), as for
            `PerSampleGradientClipper.backward`, or a single loss, reduced according to ``loss_reduction``.
        batch_first: As in `PerSampleGradientClipper`.
        loss_reduction: As in `PerSampleGradientClipper`: "mean" or "sum" if ``loss_fn`` returns a single loss.
        tolerance: The largest difference that passes, relative to the largest magnitude in the same tensor.
        whole: As in `PerSampleGradientClipper`. These modules must not mix samples either.

    Returns:
        The norms of the per-sample gradients, by parameter: of shape (B,), float64.

    Raises:
        ValueError: If gradients differ from those of samples alone. The message names the first layer, in the order of
            the model, or the declared reduction. Also if the model draws random numbers, cannot be clipped, or is
            on a device without float64.
        RuntimeError: If samples mix, with the name of the layer. Also if a parameter is used outside the call of its
            layer, or ``loss_fn`` fails for a single sample.
        TypeError: If an argument has the wrong type.

    Examples:
        >>> import torch
        >>> from torchzero_clip import check_per_sample
        >>> model, batch = torch.nn.Linear(4, 3), (torch.randn(5, 4), torch.randn(5, 3))
        >>> def loss_fn(model, batch):
        ...     return (model(batch[0]) - batch[1]).square().sum(1)
        >>> check_per_sample(model, batch, loss_fn)["weight"].shape
        torch.Size([5])
    """
    instance("model", model, nn.Module)
    if isinstance(model, DistributedDataParallel):
        raise ValueError("model must be the model itself: check it before you wrap it in DistributedDataParallel")
    if any_distributed(list(model.parameters())):
        raise ValueError("model must hold plain tensors: check it before you shard it")
    if any(map(is_narrow, model.parameters())):
        raise ValueError("model must be on a device with float64: check it on the CPU before you move it")
    non_negative("tolerance", tolerance)
    if not trainable(model):
        raise ValueError("model has no parameters that train: there is nothing to compare")
    twin, batch, dim = _twin(model), _wide(batch), 0 if batch_first else 1
    attach = partial(PerSampleGradientClipper, batch_first=batch_first, loss_reduction=loss_reduction, whole=whole)
    attach(_fresh(twin), ConstantFlatClipper(1.0)).detach()  # or it raises
    expected = _one_by_one(twin, batch, loss_fn, dim=dim)
    for subject in (_with_noise(twin), twin):
        try:
            alone = expected if subject is twin else _one_by_one(subject, batch, loss_fn, dim=dim)
        except (RuntimeError, ValueError):  # some models accept no other parameters
            continue
        if subject is twin or all(bool(grads.isfinite().all()) for grads in alone.values()):
            for memory in ("auto", "low"):
                clip = partial(attach, memory=memory)
                _check(subject, batch, loss_fn, clip, alone, reduction=loss_reduction, tolerance=tolerance)
    return _norms(expected)


def _check(
    twin: nn.Module,
    batch: object,
    loss_fn: LossFunction,
    clip: Callable[..., PerSampleGradientClipper],
    expected: Norms,
    *,
    reduction: LossReduction,
    tolerance: float,
) -> None:
    """Compare the clipper with the gradients of samples alone."""
    norms = _norms(expected)
    total = torch.stack(list(norms.values())).norm(dim=0)
    limit = (total.median().item() if len(total) else 0.0) or 1.0
    factors = (limit / (total + STABILITY)).clamp(max=1) / (len(total) if reduction == "mean" else 1)
    compare = partial(_compare, twin, tolerance, 1e-3 * total.max().item())  # some gradients are 0 but for rounding
    twin.zero_grad()
    fresh = _fresh(twin)
    with clip(fresh, ConstantFlatClipper(limit)) as clipper:
        loss = loss_fn(fresh, _wide(batch))
        if loss.ndim > 1:
            raise ValueError(f"loss_fn must return one loss for each sample, (B,), or one, got {tuple(loss.shape)}")
        restore = outside_gradients(loss, set(map(id, twin.parameters())), ())
        try:
            if loss.ndim:
                result = clipper.backward(loss)
            else:
                loss.backward()
                result = clipper.clip_and_accumulate(batch_size=len(total))
                clipper.pre_step()
        finally:
            restore()
    _check_reduction(result.param_norms, norms, reduction, tolerance)
    for name, norm in norms.items():
        compare(name, "norm of single samples", result.param_norms[name], norm)
    for name, grads in expected.items():
        compare(name, "clipped sum", twin.get_parameter(name).grad, torch.tensordot(factors, grads, 1))


def _norms(gradients: Norms) -> dict[str, Tensor]:
    return {name: grads.unsqueeze(-1).flatten(1).norm(dim=1) for name, grads in gradients.items()}


def _one_by_one(twin: nn.Module, batch: object, loss_fn: LossFunction, *, dim: int) -> dict[str, Tensor]:
    samples, params = _samples(batch, dim), trainable(twin)
    # the first one twice, which shows whether the model draws random numbers
    try:
        rows = [_gradients(loss_fn(_fresh(twin), _wide(one)).sum(), params) for one in (samples[0], *samples)]
    except (RuntimeError, IndexError, ValueError) as error:
        raise RuntimeError(
            "loss_fn raised for one sample alone, in float64. Put tensors that it holds itself into the batch, or cast "
            f"them to the dtype of the output. The loss must not need other samples: {error}"
        ) from error
    if not all(map(torch.equal, *rows[:2])):
        raise ValueError("model gives different gradients for the same sample: call model.eval() before the check")
    return {name: torch.stack(column) for name, column in zip(params, zip(*rows[1:], strict=True), strict=True)}


def _gradients(loss: Tensor, params: Mapping[str, nn.Parameter]) -> list[Tensor]:
    """The gradients of one sample, by a backward, because reentrant checkpoints do not run in `torch.autograd.grad`.

    The gradients of other tensors stay as they are.
    """
    for param in params.values():
        param.grad = None
    restore = outside_gradients(loss, set(map(id, params.values())), ())
    try:
        loss.backward()
    finally:
        restore()
    return [torch.zeros_like(param) if param.grad is None else param.grad for param in params.values()]


def _twin(model: nn.Module) -> nn.Module:
    """A copy in float64."""
    with _WithoutGraphs():
        twin = copy.deepcopy(model).double()
    choose: Any = getattr(twin, "set_experts_implementation", None)
    if choose is not None:
        choose("eager")  # others of transformers take no float64
    return twin


class _WithoutGraphs(Mode):
    """Copies what a model stores of its last forward without its graph, because torch does not copy graphs."""

    @override
    def called(self, func: Callable[..., object], args: tuple[Any, ...], kwargs: dict[str, object]) -> Any:
        if func is Tensor.__deepcopy__ and not args[0].is_leaf:
            return args[0].detach().clone()
        return func(*args, **kwargs)


def _fresh(twin: nn.Module) -> nn.Module:
    """A copy with the same parameters. The twin itself never runs, so that all runs start from the same state."""
    return copy.deepcopy(twin, {id(param): param for param in twin.parameters()})


def _samples(batch: object, dim: int) -> list[Any]:
    leaves = [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.ndim]
    if not leaves or not (count := leaves[0].shape[min(dim, leaves[0].ndim - 1)]):
        raise ValueError("batch must hold at least one sample, in a tensor with a batch dimension")

    def one(leaf: Tensor, i: int) -> Tensor:
        where = min(dim, leaf.ndim - 1)
        return leaf.narrow(where, i, 1) if leaf.ndim and leaf.shape[where] == count else leaf

    return [pytree.tree_map_only(Tensor, partial(one, i=i), batch) for i in range(count)]


def _with_noise(twin: nn.Module) -> nn.Module:
    """A copy with noise on its parameters, except in rows of zeros, such as those of padding."""
    twin, generator = copy.deepcopy(twin), torch.Generator("cpu").manual_seed(0)
    for param in twin.parameters():
        noise = torch.randn(param.shape, generator=generator, dtype=param.dtype, device="cpu").to(param.device)
        zeros = (param == 0).all(-1, keepdim=True) & param.any()
        param.data = torch.where(zeros, param.data, param.data + 0.1 * noise * (1 + param.data.abs()))
    return twin


def _check_reduction(found: Norms, expected: Norms, declared: LossReduction, tolerance: float) -> None:
    mine, theirs = (torch.stack([norms[name] for name in expected]) for norms in (found, expected))
    if mine.shape != theirs.shape:
        raise ValueError(f"the clipper saw {mine.shape[1]} samples, the batch has {theirs.shape[1]}")
    factor, other = (mine.shape[1], "sum") if declared == "mean" else (1 / mine.shape[1], "mean")
    if factor != 1 and theirs.any() and torch.allclose(mine, theirs * factor, rtol=tolerance, atol=0):
        raise ValueError(
            f"the loss is the {other} over samples, but loss_reduction={declared!r} was declared: norms are "
            f"{factor:g} times those of single samples. Use loss_reduction={other!r}"
        )


def _compare(
    model: nn.Module, tolerance: float, tiny: float, name: str, what: str, mine: Tensor | None, true: Tensor
) -> None:
    error, scale = (x.abs().max().item() if x.numel() else 0.0 for x in (true - (0 if mine is None else mine), true))
    if not error <= tolerance * max(scale, tiny):
        layer, _, key = name.rpartition(".")
        kind = type(model.get_submodule(layer)).__name__
        raise ValueError(
            f"layer {layer!r} ({kind}) is the first that differs from one backward per sample: the {what} of its "
            f"{key!r} is off by {error:.3g}, where the largest is {scale:.3g}. Its rule is wrong, positions are taken "
            "for samples, or the loss of a sample depends on others"
        )


def _wide(batch: object) -> object:
    return pytree.tree_map_only(Tensor, lambda x: (x.double() if x.is_floating_point() else x).clone(), batch)
