"""Computes the clipped sums from the norms of the samples."""

from collections.abc import Callable, Iterable, Sized
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from torchzero_clip.checks import instance
from torchzero_clip.per_sample.contributions import Contribution
from torchzero_clip.per_sample.engine import Engine
from torchzero_clip.per_sample.hooks import accumulate
from torchzero_clip.per_sample.mixing import outside_gradients
from torchzero_clip.per_sample.norm_clippers import NormClipper

Nonfinite: TypeAlias = Literal["zero", "raise"]


@dataclass(frozen=True)
class ClippingResult:
    """The norms and clipping factors of the samples of one backward.

    Args:
        norms: The norm of the gradient of each sample before clipping, all parameters together: (B,), float32 or wider.
        factors: The factor of each sample: (B,). A per-layer clipper gives one such tensor for each parameter tensor.
        nonfinite: True for samples that were left out because their gradient is not finite: (B,), booleans.
        param_norms: The norms of the samples in each parameter, by its name.

    Examples:
        >>> import torch
        >>> from torch import nn
        >>> from torchzero_clip import ConstantFlatClipper, PerSampleGradientClipper
        >>> model = nn.Linear(2, 1)
        >>> clipper = PerSampleGradientClipper(model, ConstantFlatClipper(1.0))
        >>> result = clipper.backward(model(torch.tensor([[3.0, 4.0], [0.0, 0.0]])).squeeze(1))
        >>> result.norms
        tensor([5.0990, 1.0000])
        >>> result.param_norms["weight"]
        tensor([5., 0.])
    """

    norms: Tensor
    factors: Tensor | list[Tensor]
    nonfinite: Tensor
    param_norms: dict[str, Tensor] = field(repr=False)


def clipped_backward(
    engine: Engine, losses: Tensor, norm_clipper: NormClipper, *, mean: bool, nonfinite: Nonfinite = "zero"
) -> ClippingResult:
    """Run the backward of the losses, and add the clipped gradients to ``.grad``, which an error leaves unchanged."""
    sums, result = clipped_sums(engine, losses, norm_clipper, mean=mean, nonfinite=nonfinite)
    accumulate([(engine.attachment.params[name], value) for name, value in sums.items()])
    return result


def clipped_sums(
    engine: Engine, losses: Tensor, norm_clipper: NormClipper, *, mean: bool, nonfinite: Nonfinite = "zero"
) -> tuple[dict[str, Tensor], ClippingResult]:
    """Run the backward of the losses, and return what `weighted` returns. The ``.grad`` of the module stays."""
    instance("losses", losses, Tensor)
    if losses.ndim != 1:
        raise ValueError(f"losses must have shape (B,), got {tuple(losses.shape)}: {_way_out(losses)}")
    if not engine.attached:
        raise RuntimeError("the clipper is detached: make a new one, and run the forward again")
    if not engine.enabled:
        raise RuntimeError("hooks are disabled: call enable_hooks() before the forward")
    if engine.pauses:
        raise RuntimeError(
            "the clipper is paused: leave the paused() block before the forward, or call loss.backward()"
        )
    if engine.waits:
        raise RuntimeError("gradients of an earlier backward wait: call clip_and_accumulate() or discard() first")
    check, of_mean, engine.of_mean = engine.mixing.is_due(losses), engine.of_mean, False
    restore = outside_gradients(losses, set(map(id, engine.attachment.params.values()))) if check else None
    try:
        if losses.requires_grad:
            check = _backward(engine, losses, restore)
        gathered = engine.gathered(len(losses))
        if gathered.keys().isdisjoint(map(id, engine.attachment.params.values())):
            raise RuntimeError(
                "no gradient reached the module: the losses do not depend on it, or nothing in it trains"
                if losses.requires_grad
                else "losses do not require grad: the forward ran under torch.no_grad(), or nothing in it trains"
            )
        if check:
            names = {id(param): name for name, param in engine.attachment.params.items() if id(param) in gathered}
            engine.mixing.check(losses, names, engine.live_outputs(), engine.gradients_of)
        engine.mixing.passed(losses)
    except BaseException:
        if restore is not None:
            restore()
        raise
    finally:
        engine.of_mean = of_mean
        engine.clear()
    divisor = float(max(len(losses), 1)) if mean else 1.0
    return weighted(engine, gathered, norm_clipper, nonfinite, divisor=divisor)


def _backward(engine: Engine, losses: Tensor, restore: Callable[[], None] | None) -> bool:
    """Run the backward, and retain its graph if there is a function to restore gradients. Return True if it did."""
    if restore is not None:
        try:
            losses.sum().backward(retain_graph=True)
            return True
        except RuntimeError as error:
            if "donated buffers" not in str(error):
                raise
            restore()
            engine.clear()
            engine.mixing.give_up(
                "a compiled function gives its memory away in the backward, unless you set "
                "torch._functorch.config.donated_buffer = False"
            )
    losses.sum().backward()
    return False


def _factors(norm_clipper: NormClipper, answer: Any, count: int, norms: Tensor) -> list[Tensor]:
    """Check the answer of a norm clipper, and return one tensor for each parameter tensor."""
    who = f"{type(norm_clipper).__name__}.calc_clipping_factors"
    way_out = f"factors for {count} parameter tensors, or itertools.repeat(factors) for the same in all"
    if isinstance(answer, Tensor) or not isinstance(answer, Iterable):
        raise TypeError(f"{who} must return {way_out}; got {type(answer).__name__}")
    factors = [value for value, _ in zip(answer, range(count), strict=False)]
    given = len(answer) if isinstance(answer, Sized) else len(factors)
    if given != count:
        raise ValueError(f"{who} must return {way_out}; got {given}")
    for value in factors:
        if not isinstance(value, Tensor) or value.shape != norms.shape:
            found = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(f"{who} must return tensors of shape {tuple(norms.shape)}, got {found}")
    return factors


def _way_out(losses: Tensor) -> str:
    if not losses.ndim:
        return 'use reduction="none", or loss.backward() and clip_and_accumulate()'
    return "one loss for each sample is needed, such as losses.flatten(1).mean(1)"


def weighted(
    engine: Engine,
    gathered: dict[int, tuple[Contribution, Tensor]],
    norm_clipper: NormClipper,
    nonfinite: Nonfinite,
    *,
    scale: float = 1.0,
    divisor: float = 1.0,
) -> tuple[dict[str, Tensor], ClippingResult]:
    """Return the clipped sums by the name of the parameter, and the result for the user.

    Contributions are removed from ``gathered`` one by one, which frees their activations. ``scale`` is the factor
    between the given gradients and those of the losses of single samples; the sums are divided by ``divisor``.
    """
    first = next(iter(gathered.values()))[1]
    squares = {
        name: gathered[id(param)][1].to(first.device) if id(param) in gathered else torch.zeros_like(first)
        for name, param in engine.attachment.params.items()
    }
    dtype = engine.norm_dtype()
    table = torch.stack(list(squares.values()))
    norms = table.sum(0).sqrt_().mul_(scale).to(dtype)
    param_norms = dict(zip(squares, table.sqrt_().mul_(scale).to(dtype).unbind(), strict=True))
    bad = ~norms.isfinite()
    some_bad = bool(bad.any())
    if some_bad and nonfinite == "raise":
        chosen = bad.nonzero()[:, 0].tolist()
        raise RuntimeError(
            f'the gradients of samples {chosen} are not finite; nonfinite="zero" leaves such samples out'
        )
    per_layer = norm_clipper.is_per_layer
    answer = norm_clipper.calc_clipping_factors(list(param_norms.values()) if per_layer else [norms])
    factors = _factors(norm_clipper, answer, len(squares), norms)
    one_for_all = all(value is factors[0] for value in factors)
    distinct = factors[:1] if one_for_all else factors
    if some_bad:
        distinct = [value.masked_fill(bad, 0) for value in distinct]
    weights = [value * (scale / divisor) for value in distinct] * (len(squares) if one_for_all else 1)
    sums: dict[str, Tensor] = {}
    for (name, param), weight in zip(engine.attachment.params.items(), weights, strict=True):
        if id(param) in gathered:
            contribution, _ = gathered.pop(id(param))
            if some_bad:
                contribution.zero_(bad)
            sums[name] = contribution.weighted_sum(weight)
    if per_layer:
        distinct = distinct * (len(squares) // len(distinct))
    return sums, ClippingResult(norms, distinct if per_layer or not one_for_all else distinct[0], bad, param_norms)
