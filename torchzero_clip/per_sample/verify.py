"""Compares per-sample gradients with those of one backward for each sample, and samples alone with their batch."""

import copy
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from torchzero_clip.checks import instance, non_negative
from torchzero_clip.per_sample.clipper import LossReduction, PerSampleGradientClipper
from torchzero_clip.per_sample.engine import trainable
from torchzero_clip.per_sample.memory_budget import Memory
from torchzero_clip.per_sample.norm_clippers import STABILITY, ConstantFlatClipper
from torchzero_clip.per_sample.weighting import ClippingResult

MODES: tuple[Memory, ...] = ("auto", "low")
LOSS = "the loss"
ROUNDING = 1e-5  # of outputs, because some models compute in float32 inside
LossFunction = Callable[[nn.Module, Any], Tensor]
Named = Mapping[str, Tensor]


def check_per_sample(
    model: nn.Module,
    batch: Any,
    loss_fn: LossFunction,
    *,
    batch_first: bool = True,
    loss_reduction: LossReduction = "mean",
    tolerance: float = 1e-6,
    whole: Sequence[type[nn.Module] | str] = (),
) -> dict[str, Tensor]:
    """Raise unless `PerSampleGradientClipper` agrees with one backward for each sample, on this model and batch.

    On a float64 copy of the model, it compares the norms of every parameter and the clipped sums, in every memory mode,
    and the outputs of all modules and the loss for a sample alone with those in the batch. Outputs are compared with
    noise on the parameters and the inputs, because zeros hide what they multiply, and without. It takes B backwards and
    2 B more forwards of single samples, so check once, with a few samples that differ.

    It finds wrong rules, modules and losses that mix samples, a batch dimension that is not where it was declared,
    positions that are taken for samples where there are as many, and a loss that is not the declared mean or sum over
    samples. It does not find what happens only in another mode, or with other values, lengths or numbers of samples.

    Args:
        model: The model. If it draws random numbers, as dropout does, call ``eval()`` first.
        batch: A tensor, or a tuple, list, dict or other tree of tensors, with the samples in the dimension that
            ``batch_first`` declares. Tensors of another size there are shared by all samples.
        loss_fn: Called as ``loss_fn(model, batch)``. It returns one loss for each sample, of shape (B,), as
            `PerSampleGradientClipper.backward` takes it; or a single loss, reduced according to ``loss_reduction``.
        batch_first: As in `PerSampleGradientClipper`.
        loss_reduction: As in `PerSampleGradientClipper`: whether a single loss is the mean or the sum over samples.
        tolerance: The largest difference, relative to the largest magnitude in the same tensor. For outputs, it is at
            least 1e-5, because some models compute in float32 inside.
        whole: As in `PerSampleGradientClipper`. Modules in it must not mix samples either.

    Returns:
        The norms of the per-sample gradients, by parameter: of shape (B,), float64.

    Raises:
        ValueError: If a sample gives another output alone than in the batch: the message names the first module, in the
            order in which outputs are computed, or the loss. If gradients differ: it names the first layer, in the
            order of the model, or the declared reduction. Also if the model draws random numbers or cannot be clipped.
        RuntimeError: If a parameter is used where samples cannot be told apart, or one sample alone has no loss.
        TypeError: If an argument has the wrong type.

    Examples:
        >>> import torch
        >>> from torch import nn
        >>> from torchzero_clip import check_per_sample
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
        >>> batch = torch.randn(5, 4), torch.randint(0, 3, (5,))
        >>> def loss_fn(model, batch):
        ...     return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")
        >>> check_per_sample(model, batch, loss_fn)["0.weight"].shape
        torch.Size([5])
    """
    instance("model", model, nn.Module)
    non_negative("tolerance", tolerance)
    if not trainable(model):
        raise ValueError("model has no parameters that train: there is nothing to compare")
    twin, batch, dim = copy.deepcopy(model).double(), _wide(batch), 0 if batch_first else 1
    try:
        expected = _one_by_one(twin, batch, loss_fn, dim=dim)
    except (RuntimeError, IndexError) as error:
        raise RuntimeError(
            "loss_fn raised for one sample alone, in float64. Tensors that it holds itself have to be in the batch, or "
            f"to be cast to the dtype of the output, and its loss must not need other samples: {error}"
        ) from error
    _check_alone(twin, batch, loss_fn, dim=dim, tolerance=max(tolerance, ROUNDING))
    norms = {name: grads.flatten(1).norm(dim=1) for name, grads in expected.items()}
    total = torch.stack(list(norms.values())).norm(dim=0)
    limit = total.median().item() if len(total) else 1.0
    factors = (limit / (total + STABILITY)).clamp(max=1)
    settings: dict[str, Any] = {"whole": whole} if whole else {}
    for memory in MODES:
        twin.zero_grad()
        fresh, limits = _fresh(twin), ConstantFlatClipper(limit)
        with PerSampleGradientClipper(fresh, limits, batch_first, loss_reduction, memory=memory, **settings) as clipper:
            result = _clipped(clipper, loss_fn(fresh, _wide(batch)))
        _compare_norms(twin, result.param_norms, norms, loss_reduction, tolerance)
        for name, grads in expected.items():
            sums = torch.tensordot(factors, grads, 1) / (len(total) if loss_reduction == "mean" else 1)
            found = twin.get_parameter(name).grad
            _compare(twin, name, "clipped sum", torch.zeros_like(sums) if found is None else found, sums, tolerance)
    return norms


def _one_by_one(twin: nn.Module, batch: Any, loss_fn: LossFunction, *, dim: int) -> dict[str, Tensor]:
    """The per-sample gradients, by one backward for each sample."""
    samples, params = list(_samples(batch, dim)), trainable(twin)
    rows = [_grads(loss_fn(_fresh(twin), _wide(one)), params) for one in (samples[0], *samples)]
    if not all(map(torch.equal, *rows[:2])):
        raise ValueError("model gives different gradients for the same sample: call model.eval() before the check")
    return {name: torch.stack(column) for name, column in zip(params, zip(*rows[1:], strict=True), strict=True)}


def _fresh(twin: nn.Module) -> nn.Module:
    """A copy with the same parameters. The twin itself never runs, so that all runs start from the same state."""
    return copy.deepcopy(twin, {id(param): param for param in twin.parameters()})


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


def _check_alone(twin: nn.Module, batch: Any, loss_fn: LossFunction, *, dim: int, tolerance: float) -> None:
    for noise in (True, False):
        try:
            model, inputs = _with_noise(twin, batch) if noise else (twin, batch)
            together = _outputs(model, inputs, loss_fn)
            alone = [_outputs(model, one, loss_fn) for one in _samples(inputs, dim)]
        except Exception:
            if noise:
                continue  # some models accept no other values
            raise
        reordered = ""
        for key, output in together.items():
            rows = _rows(output, [one[key] for one in alone if key in one])
            if not _differ(rows, tolerance):
                continue
            name, mixes = key[0], _differ([_sorted(x) for x in rows], tolerance)
            if mixes or name == LOSS:  # before the loss, a model may reorder its samples
                name = name if mixes else reordered or name
                raise ValueError(f"{name} gives a sample another output alone than in the batch: it mixes samples")
            reordered = reordered or name


def _with_noise(twin: nn.Module, batch: Any) -> tuple[nn.Module, Any]:
    """Padding, which is 0, and inputs that are whole numbers, such as masks and lengths, get no noise."""
    twin, generator = copy.deepcopy(twin), torch.Generator().manual_seed(0)

    def noisy(x: Tensor, fixed: Tensor) -> Tensor:
        noise = 0.1 * torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.device) * (1 + x.abs())
        return torch.where((fixed & x.any()) | ~x.isfinite(), x, (x + noise).to(x.dtype))

    for param in twin.parameters():
        param.data = noisy(param.data, (param == 0).all(-1, keepdim=True))
    return twin, pytree.tree_map_only(Tensor, lambda x: noisy(x, (x == 0) | (x == x.round()).all()), batch)


def _outputs(twin: nn.Module, batch: Any, loss_fn: LossFunction) -> dict[tuple[str, int], Tensor]:
    """The outputs of all modules, in the order in which they are computed, and the loss."""
    model, numbers = _fresh(twin), Counter[str]()
    outputs: dict[tuple[str, int], Tensor] = {}

    def keep(name: str, _module: nn.Module, _args: Any, output: Any) -> None:
        for leaf in pytree.tree_leaves(output):
            numbers[name] += 1
            if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.layout is torch.strided:
                outputs[name, numbers[name]] = leaf.detach().clone()

    for name, module in model.named_modules():
        kind = type(module).__name__
        module.register_forward_hook(partial(keep, f"{name!r} ({kind})" if name else kind))
    with torch.random.fork_rng({param.device for param in model.parameters() if param.is_cuda}):
        keep(LOSS, model, (), loss_fn(model, _wide(batch)))
    return outputs


def _rows(together: Tensor, alone: list[Tensor]) -> list[Tensor]:
    """The batch and the samples alone, of shape (N, D) each. None if the shapes do not tell the dimension of samples."""
    alone = [part.reshape(-1) if together.ndim == 1 else part for part in alone]
    dims = range(together.ndim if all(part.ndim == together.ndim for part in alone) else 0)
    where = [i for i in dims if any(part.shape[i] != together.shape[i] for part in alone)]
    if len(where) != 1 or sum(part.shape[where[0]] for part in alone) != together.shape[where[0]]:
        return []
    return [x.movedim(where[0], 0).unsqueeze(-1).flatten(1) for x in (together, torch.cat(alone, where[0]))]


def _sorted(rows: Tensor) -> Tensor:
    weights = torch.arange(rows.shape[1], dtype=rows.dtype, device=rows.device).cos()
    return rows[((rows / (1 + rows.abs())).nan_to_num() @ weights).argsort()]


def _differ(rows: list[Tensor], tolerance: float) -> bool:
    if not rows or torch.equal(*rows):
        return False
    together, alone = rows
    apart = (together != alone) & ~(together.isnan() & alone.isnan())
    values, counts = together.unique(return_counts=True)  # what many elements share, as -1e9 of masks, sets no scale
    scale = torch.cat([together[apart], values[counts == 1], together.new_zeros(1)]).nan_to_num(0, 0, 0).abs().max()
    return not bool(((together - alone)[apart].abs() <= tolerance * scale + 1e-12).all())


def _clipped(clipper: PerSampleGradientClipper, loss: Tensor) -> ClippingResult:
    if loss.ndim == 1:
        return clipper.backward(loss)
    if loss.ndim:
        raise ValueError(f"loss_fn must return one loss for each sample, (B,), or one for all, got {tuple(loss.shape)}")
    loss.backward()
    result = clipper.clip_and_accumulate()
    clipper.pre_step()
    return result


def _compare_norms(model: nn.Module, found: Named, expected: Named, declared: LossReduction, tolerance: float) -> None:
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
    return pytree.tree_map_only(Tensor, lambda x: (x.double() if x.is_floating_point() else x).clone(), batch)
