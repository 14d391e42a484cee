"""Computes the clipped sums from the norms of the samples."""

from collections.abc import Callable, Iterable, Iterator, Sized
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from torchzero_clip.checks import instance
from torchzero_clip.compat import without_autocast
from torchzero_clip.functional.dtypes import widest
from torchzero_clip.per_sample.engine import Engine
from torchzero_clip.per_sample.gradients.contributions import Contribution
from torchzero_clip.per_sample.gradients.row_norms import joint_norms, stacked
from torchzero_clip.per_sample.hooks import accumulate
from torchzero_clip.per_sample.norm_clippers import NormClipper

NonfiniteSample: TypeAlias = Literal["zero", "raise"]


@dataclass(frozen=True)
class ClippingResult:
    """The norms and clipping factors of the samples of one backward, in several processes those of this process.

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
    engine: Engine, losses: Tensor, norm_clipper: NormClipper, *, mean: bool, nonfinite: NonfiniteSample = "zero"
) -> ClippingResult:
    """Run the backward of the losses, and add the clipped gradients to ``.grad``, which an error leaves unchanged."""
    sums, used, result = clipped_sums(engine, losses, norm_clipper, mean=mean, nonfinite=nonfinite)
    params = engine.params
    if engine.processes.group is not None:
        sums = engine.processes.added_up(sums, params, used)
    accumulate([(params[name], value) for name, value in sums.items()])
    return result


def clipped_sums(
    engine: Engine, losses: Tensor, norm_clipper: NormClipper, *, mean: bool, nonfinite: NonfiniteSample = "zero"
) -> tuple[dict[str, Tensor], set[str], ClippingResult]:
    """Run the backward of the losses; ``.grad`` does not change.

    It returns the clipped sums of this process, which are means over the samples of all processes with ``mean``; the
    names of the parameters that have a sum on any process; and the result for the user.
    """
    processes, params = engine.processes, engine.params
    try:
        if processes.group is None:  # no agreement, which would take a dozen Python calls
            _check(engine, losses)
            further = engine.prover.plan(losses)
            with engine.of_losses(losses, further, keeps_graph=engine.prover.keeps_graph) as backward:
                found = weighed(engine, _gathered(engine, losses, backward), norm_clipper, nonfinite)
            return dict(found.sums(float(max(len(losses), 1)) if mean else 1.0)), {*params}, found.result
        with processes.start("backward", params, mean) as start:
            _check(engine, losses)
            further = engine.prover.plan(losses)
            keeps_graph = engine.prover.keeps_graph
            numbers = {"samples": len(losses), "further": further, "keeps graph": keeps_graph}
            start.numbers = {**numbers, "has graph": losses.requires_grad}
        if processes.sharded:  # each backward collects shards, so all processes run equally many
            further, keeps_graph = int(start.largest("further")), start.anywhere("keeps graph")
            if not all(start.of_all("has graph")):
                raise RuntimeError(
                    "the losses of a process do not require grad: with fully_shard, all processes have to run forward "
                    "and backward, also those without samples, on an empty batch"
                )
        with engine.of_losses(losses, further, keeps_graph=keeps_graph) as backward:
            with processes.agreement(params, len(params)) as agreement:
                gathered = _gathered(engine, losses, backward)
                # `weighed` empties ``gathered``
                agreement.numbers = {name: id(param) in gathered for name, param in params.items()}
                found = weighed(engine, gathered, norm_clipper, nonfinite)
            used = {name for name in params if agreement.anywhere(name)}
            if not used:
                raise RuntimeError("no process has samples")
        divisor = float(max(start.total("samples"), 1)) if mean else 1.0
        return processes.collected(found.sums(divisor), params, used), used, found.result
    finally:
        engine.prover.clear()


def _check(engine: Engine, losses: Tensor) -> None:
    """Raise if losses cannot be sent backward now."""
    if not isinstance(losses, Tensor) or losses.ndim != 1:  # pyright: ignore[reportUnnecessaryIsInstance]
        instance("losses", losses, Tensor)
        way_out = "one loss for each sample is needed, such as losses.flatten(1).mean(1)"
        if not losses.ndim:
            way_out = 'use reduction="none", or loss.backward() and clip_and_accumulate()'
        raise ValueError(f"losses must have shape (B,), got {tuple(losses.shape)}: {way_out}")
    if not engine.attached:
        raise RuntimeError("the clipper is detached: make a new one, and run the forward again")
    if not engine.enabled:
        raise RuntimeError("hooks are disabled: call enable_hooks() before the forward")
    if engine.pauses:
        raise RuntimeError(
            "the clipper is paused: leave the paused() block before the forward, or call loss.backward()"
        )
    if engine.captured.by_param:
        raise RuntimeError("gradients of an earlier backward wait: call clip_and_accumulate() or discard() first")


def _gathered(engine: Engine, losses: Tensor, backward: Callable[[], None]) -> dict[int, tuple[Contribution, Tensor]]:
    """Run the backwards, and return what they bring to each parameter."""
    params = engine.params
    if losses.requires_grad:
        backward()
    gathered = engine.gathered(len(losses))
    must_reach = len(losses) or engine.processes.group is None  # another process may have all samples
    if must_reach and gathered.keys().isdisjoint(map(id, params.values())):
        raise RuntimeError(
            "no gradient reached the module: the losses do not depend on it, or nothing in it trains"
            if losses.requires_grad
            else "losses do not require grad: the forward ran under torch.no_grad(), or nothing in it trains"
        )
    return gathered


def _checked_factors(norm_clipper: NormClipper, answer: object, count: int, norms: Tensor) -> list[Tensor]:
    """Check the answer of a norm clipper, and return one tensor for each parameter tensor."""
    who = f"{type(norm_clipper).__name__}.calc_clipping_factors"
    expected = f"factors for {count} parameter tensors, or itertools.repeat(factors) for the same in all"
    if isinstance(answer, Tensor) or not isinstance(answer, Iterable):
        raise TypeError(f"{who} must return {expected}; got {type(answer).__name__}")
    factors = [value for value, _ in zip(answer, range(count), strict=False)]  # iterators may have no end
    given = len(answer) if isinstance(answer, Sized) else len(factors)
    if given != count:
        raise ValueError(f"{who} must return {expected}; got {given}")
    for value in factors:
        if not isinstance(value, Tensor) or value.shape != norms.shape:
            found = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(f"{who} must return tensors of shape {tuple(norms.shape)}, got {found}")
    return factors


@dataclass(frozen=True)
class Weighed:
    """The gradients of the samples and their factors, of which clipped sums are made."""

    result: ClippingResult
    parts: list[tuple[str, Contribution, int]]  # name, contribution, index of the factors; the last parameter first
    factors: list[Tensor]  # those that differ
    loss_scale: float  # between the given gradients and those of the losses of single samples
    some_bad: bool  # whether samples are left out

    def sums(self, divisor: float = 1.0) -> Iterator[tuple[str, Tensor]]:
        """Make the clipped sums, divided by a number. This works only once: it removes parts to free activations."""
        weights = [value * (self.loss_scale / divisor) for value in self.factors]
        while self.parts:
            name, contribution, index = self.parts.pop()
            if self.some_bad:
                contribution.make_finite()
            with without_autocast(contribution.param):  # it would round the sum
                value = contribution.weighted_sum(weights[index])
            yield name, value


def weighed(
    engine: Engine,
    gathered: dict[int, tuple[Contribution, Tensor]],
    norm_clipper: NormClipper,
    nonfinite: NonfiniteSample,
) -> Weighed:
    """Compute the norms and factors of the samples. Contributions are removed from ``gathered``."""
    params = engine.params
    if gathered:
        _, first = next(iter(gathered.values()))
    else:
        device = engine.processes.device(params)
        first = torch.zeros(0, dtype=widest(device), device=device)
    of_params = [
        gathered[id(param)][1] if id(param) in gathered else torch.zeros_like(first) for param in params.values()
    ]
    table = stacked(of_params)
    dtype = engine.norm_dtype() if table.dtype == torch.float64 else table.dtype
    scale = engine.loss_scale(table.shape[1])
    norms = joint_norms(table).mul_(scale).to(dtype)
    param_norms = dict(zip(params, table.mul_(scale).to(dtype).unbind(), strict=True))
    bad = ~norms.isfinite()
    some_bad = bool(bad.any())
    if some_bad and nonfinite == "raise":
        chosen = bad.nonzero()[:, 0].tolist()
        raise RuntimeError(
            f'the gradients of samples {chosen} are not finite; nonfinite="zero" leaves such samples out'
        )
    per_layer = norm_clipper.is_per_layer
    answer = norm_clipper.calc_clipping_factors(list(param_norms.values()) if per_layer else [norms])
    factors = _checked_factors(norm_clipper, answer, len(of_params), norms)
    one_for_all = len({*map(id, factors)}) < 2  # as `repeat` gives: weights are made once
    distinct = factors[:1] if one_for_all else factors
    if some_bad:
        distinct = [value.masked_fill(bad, 0) for value in distinct]
    of_each = distinct * len(of_params) if one_for_all else distinct
    result = ClippingResult(norms, of_each if per_layer or not one_for_all else distinct[0], bad, param_norms)
    parts = [
        (name, gathered.pop(id(param))[0], 0 if one_for_all else i)
        for i, (name, param) in enumerate(params.items())
        if id(param) in gathered
    ]
    return Weighed(result, parts[::-1], distinct, scale, some_bad)
