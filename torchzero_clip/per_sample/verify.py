"""Compares per-sample gradients with those of one backward for each sample, and samples alone with their batch."""

import copy
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree as pytree
from typing_extensions import override

from torchzero_clip.checks import instance, non_negative
from torchzero_clip.compat import any_distributed, is_functorch_wrapped_tensor
from torchzero_clip.per_sample.captured_layer import described, trainable
from torchzero_clip.per_sample.clipper import LossReduction, PerSampleGradientClipper
from torchzero_clip.per_sample.modes import Mode
from torchzero_clip.per_sample.norm_clippers import STABILITY, ConstantFlatClipper
from torchzero_clip.per_sample.samples.comparison import differ

LossFunction = Callable[[nn.Module, Any], Tensor]
Norms = Mapping[str, Tensor]
Tensors = dict[tuple[str, int], Tensor]
"""Tensors by the name of a module and a number."""


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

    In float64, on a copy of the model, it compares the norms of every parameter and the clipped sums, in every memory
    mode. It also runs each sample alone, and compares the loss and the outputs of all modules with those in the batch.
    It does this with and without noise on parameters and inputs, because a factor of zero can hide a difference. It
    takes B backwards and 3 B more forwards of single samples. So check once, with a few samples that differ.

    It finds wrong rules, modules and losses that mix samples, a batch dimension in another place than declared, and a
    loss that is not the declared mean or sum over samples. If there are as many positions as samples, it also finds
    positions that are mistaken for samples. It does not find errors that occur only in another mode, or with other
    values, lengths or numbers of samples.

    Args:
        model: The model. If it draws random numbers, as dropout does, call ``eval()`` first.
        batch: A tensor, or a tuple, list, dict or other tree of tensors. ``batch_first`` declares the dimension of the
            samples. All samples share the tensors with another size in this dimension.
        loss_fn: Called as ``loss_fn(model, batch)``. It returns one loss for each sample, of shape (B,), as for
            `PerSampleGradientClipper.backward`, or a single loss, reduced according to ``loss_reduction``.
        batch_first: As in `PerSampleGradientClipper`.
        loss_reduction: As in `PerSampleGradientClipper`: "mean" or "sum" if ``loss_fn`` returns a single loss.
        tolerance: The largest difference that passes, relative to the largest magnitude in the same tensor. For
            outputs, it is at least 1e-5.
        whole: As in `PerSampleGradientClipper`. These modules must not mix samples either.

    Returns:
        The norms of the per-sample gradients, by parameter: of shape (B,), float64.

    Raises:
        ValueError: If a sample gives another output alone than in the batch. The message names the first module, in the
            order in which outputs are computed, or the loss. If gradients differ, it names the first layer, in the
            order of the model, or the declared reduction. Also if the model draws random numbers or cannot be clipped.
        RuntimeError: If a parameter is used outside the call of its layer, or ``loss_fn`` fails for a single sample.
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
    non_negative("tolerance", tolerance)
    if not trainable(model):
        raise ValueError("model has no parameters that train: there is nothing to compare")
    twin, batch, dim = _twin(model), _wide(batch), 0 if batch_first else 1
    settings: dict[str, Any] = {"whole": whole, "verify": "never"}  # what is compared below is more
    PerSampleGradientClipper(_fresh(twin), ConstantFlatClipper(1.0), batch_first, **settings).detach()  # or it raises
    expected = _one_by_one(twin, batch, loss_fn, dim=dim)
    _check_alone(twin, batch, loss_fn, dim=dim, tolerance=max(tolerance, 1e-5))  # float32 inside some models
    norms = {name: grads.unsqueeze(-1).flatten(1).norm(dim=1) for name, grads in expected.items()}
    total = torch.stack(list(norms.values())).norm(dim=0)
    limit = (total.median().item() if len(total) else 0.0) or 1.0
    factors = (limit / (total + STABILITY)).clamp(max=1) / (len(total) if loss_reduction == "mean" else 1)
    compare = partial(_compare, twin, tolerance, 1e-3 * total.max().item())  # some gradients are 0 but for rounding
    for memory in ("auto", "low"):
        twin.zero_grad()
        fresh, limits = _fresh(twin), ConstantFlatClipper(limit)
        with PerSampleGradientClipper(fresh, limits, batch_first, loss_reduction, memory=memory, **settings) as clipper:
            loss = loss_fn(fresh, _wide(batch))
            if loss.ndim > 1:
                raise ValueError(f"loss_fn must return one loss for each sample, (B,), or one, got {tuple(loss.shape)}")
            if loss.ndim:
                result = clipper.backward(loss)
            else:
                loss.backward()
                result = clipper.clip_and_accumulate(batch_size=len(total))
                clipper.pre_step()
        _check_reduction(result.param_norms, norms, loss_reduction, tolerance)
        for name, norm in norms.items():
            compare(name, "norm of single samples", result.param_norms[name], norm)
        for name, grads in expected.items():
            compare(name, "clipped sum", twin.get_parameter(name).grad, torch.tensordot(factors, grads, 1))
    return norms


def _one_by_one(twin: nn.Module, batch: object, loss_fn: LossFunction, *, dim: int) -> dict[str, Tensor]:
    samples, params = _samples(batch, dim), trainable(twin)
    # the first one twice, which shows whether the model draws random numbers
    losses = (loss_fn(_fresh(twin), _wide(one)).sum() for one in (samples[0], *samples))
    try:
        rows = [torch.autograd.grad(loss, list(params.values()), materialize_grads=True) for loss in losses]
    except (RuntimeError, IndexError, ValueError) as error:
        raise RuntimeError(
            "loss_fn raised for one sample alone, in float64. Put tensors that it holds itself into the batch, or cast "
            f"them to the dtype of the output. The loss must not need other samples: {error}"
        ) from error
    if not all(map(torch.equal, *rows[:2])):
        raise ValueError("model gives different gradients for the same sample: call model.eval() before the check")
    return {name: torch.stack(column) for name, column in zip(params, zip(*rows[1:], strict=True), strict=True)}


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
    def called(self, func: Callable[..., object], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
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


def _check_alone(twin: nn.Module, batch: object, loss_fn: LossFunction, *, dim: int, tolerance: float) -> None:
    noisy, noisy_batch = _with_noise(twin, batch)
    for model, inputs in ((noisy, noisy_batch), (noisy, batch), (twin, batch)):
        runs: list[Tensors] = [{}]
        given: list[Tensors] = [{}]
        with nullcontext() if model is twin else suppress(Exception):  # some models accept no other values
            runs, given = map(
                list, zip(*(_seen(model, x, loss_fn) for x in (inputs, *_samples(inputs, dim))), strict=True)
            )
        others = {key[0] for run in runs for key in run.keys() ^ runs[0].keys()}  # called another number of times
        first = ""  # the first that reorders samples, which is right if a later module restores their order
        for key in (key for key in runs[0] if key[0] not in others):
            rows = _rows(*(run[key] for run in runs))
            if _differ(rows, tolerance, in_order=True):
                mixes = _differ(rows, tolerance, in_order=False)
                first = key[0] if mixes else first or key[0]
                if mixes or key[0] == "the loss":
                    raise ValueError(_blamed(first, given, tolerance))


def _blamed(name: str, given: list[Tensors], tolerance: float) -> str:
    """The message for a module with another output for a sample alone: is it the module, or what stands before it?"""
    keys = [key for key in given[0] if key[0] == name and all(key in run for run in given)]
    if any(_differ(_rows(*(run[key] for run in given)), tolerance, in_order=False) for key in keys):
        return f"{name} gets another input for a sample alone than in the batch: what comes before it mixes samples"
    return f"{name} gives a sample another output alone than in the batch: it mixes samples"


def _with_noise(twin: nn.Module, batch: object) -> tuple[nn.Module, Any]:
    """Zeros in padding, and inputs that are whole numbers, such as masks and lengths, get no noise."""
    twin, generator = copy.deepcopy(twin), torch.Generator("cpu").manual_seed(0)

    def noisy(x: Tensor, *, is_input: bool) -> Tensor:
        if not x.is_floating_point() or x.is_sparse or (is_input and x.any() and (x == x.round()).all()):
            return x
        noise = (
            0.1 * torch.randn(x.shape, generator=generator, dtype=x.dtype, device="cpu").to(x.device) * (1 + x.abs())
        )
        zeros = x == 0 if is_input else (x == 0).all(-1, keepdim=True)
        return torch.where((zeros & x.any()) | ~x.isfinite(), x, x + noise)

    for param in twin.parameters():
        param.data = noisy(param.data, is_input=False)
    return twin, pytree.tree_map_only(Tensor, partial(noisy, is_input=True), batch)


def _seen(twin: nn.Module, batch: object, loss_fn: LossFunction) -> tuple[Tensors, Tensors]:
    """The outputs of all modules, in the order in which they are computed, with the loss; and their inputs."""
    model, numbers, outputs, inputs = _fresh(twin), Counter[str](), Tensors(), Tensors()

    def keep(name: str, _module: nn.Module, args: object, output: object) -> None:
        for found, value in ((inputs, args), (outputs, output)):
            for leaf in pytree.tree_leaves(value):
                numbers[name] += 1
                other = not isinstance(leaf, Tensor) or leaf.is_nested or leaf.is_sparse
                if not (other or is_functorch_wrapped_tensor(leaf)) and leaf.is_floating_point():
                    found[name, numbers[name]] = leaf.detach().clone()

    for name, module in model.named_modules():
        module.register_forward_hook(partial(keep, described(name, module)))
    with torch.random.fork_rng({param.device for param in model.parameters() if param.is_cuda}):
        keep("the loss", model, (), loss_fn(model, _wide(batch)))
    return outputs, inputs


def _rows(together: Tensor, *alone: Tensor) -> list[Tensor]:
    """The batch and the samples alone, of shape (N, D) each. The batch twice if shapes do not tell."""
    alone = tuple(part.reshape(-1) for part in alone) if together.ndim == 1 else alone
    dims = range(together.ndim if all(part.ndim == together.ndim for part in alone) else 0)
    where = [i for i in dims if any(part.shape[i] != together.shape[i] for part in alone)]
    if len(where) != 1 or sum(part.shape[where[0]] for part in alone) != together.shape[where[0]]:
        return [together, together]
    return [x.movedim(where[0], 0).unsqueeze(-1).flatten(1) for x in (together, torch.cat(alone, where[0]))]


def _differ(rows: list[Tensor], tolerance: float, *, in_order: bool) -> bool:
    """True if rows differ; with ``in_order=False``, if they differ as sets."""
    if not in_order:
        # sort both by a sum that tells rows apart, in which no large entry outweighs the others
        weights = torch.arange(rows[0].shape[1], dtype=rows[0].dtype, device=rows[0].device).cos()
        rows = [x[((x / (1 + x.abs())).nan_to_num() @ weights).argsort()] for x in rows]
    return differ(rows[0], rows[1], tolerance)


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


def _wide(batch: object) -> Any:
    return pytree.tree_map_only(Tensor, lambda x: (x.double() if x.is_floating_point() else x).clone(), batch)
