"""What was recorded of a run, as vectors, and what is computed from them alone."""

import math
import operator
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, reduce
from itertools import chain
from typing import NamedTuple, Self, SupportsIndex

import torch
from torch import Tensor

from torchzero_clip.checks import count
from torchzero_clip.recorder.arithmetic import medians
from torchzero_clip.recorder.precision import FLOAT32_ROUNDING, relative
from torchzero_clip.recorder.series import Doubt, EarlySign, early_signs, spikes_among
from torchzero_clip.recorder.words import as_table, counted, short, was

MOST_NAMED = 5


class RankedLayer(NamedTuple):
    """The gradient of a layer in one step."""

    name: str
    norm: float
    usual: float  # the median norm of the steps before; NaN if there is none
    ratio: float  # what `relative` returns


class Layers(list[RankedLayer]):
    """Layers, the worst first. Prints as a table."""

    note = ""
    """A sentence that is printed above the table."""

    def __repr__(self) -> str:
        rows = [("name", "norm", "usual", "ratio")]
        rows += [(name, *(f"{x:.4g}" for x in numbers)) for name, *numbers in self]
        return f"{self.note}\n{as_table(rows)}" if self.note else as_table(rows)


class Block(NamedTuple):
    """Norms of layers over several steps."""

    first: int
    last: int
    median: Tensor
    maximum: Tensor


class Ratios(NamedTuple):
    """Norms of parameters and of their updates in one step; -1 without a gradient."""

    step: int
    params: Tensor
    updates: Tensor

    @property
    def relative(self) -> Tensor:
        """The norm of each update divided by that of the parameters; NaN if unknown, or if the parameters are 0."""
        return torch.where((self.params > 0) & (self.updates >= 0), self.updates / self.params, torch.nan)


@dataclass
class Data:
    """The numbers of a `Record`, whose docstring has the arguments."""

    steps: list[int]
    reasons: list[str]
    norm: Tensor
    loss: Tensor
    metrics: dict[str, Tensor]
    layers: list[str]
    layer_steps: list[int]
    layer_norms: Tensor = field(repr=False)
    blocks: list[Block] = field(default_factory=list, repr=False)
    ratios: list[Ratios] = field(default_factory=list, repr=False)
    joint: list[str] = field(default_factory=list)
    precision: float = FLOAT32_ROUNDING
    jumps: list[tuple[int, str]] = field(default_factory=list, repr=False)

    @cached_property
    def _index_by_step(self) -> dict[int, int]:
        return {step: i for i, step in enumerate(self.steps)}

    @cached_property
    def _layer_index_by_step(self) -> dict[int, int]:
        return {step: i for i, step in enumerate(self.layer_steps)}

    def layer_norms_of(self, step: int) -> Tensor:
        """The norms of all layers in a step, which must be one of ``layer_steps``."""
        return self.layer_norms[self._layer_index_by_step[step]]

    @property
    def share_clipped(self) -> Tensor:
        """The largest share that a transform clipped, for each step; NaN if no transform reports a share."""
        shares = [values for name, values in self.metrics.items() if name.endswith("/clipped")]
        return reduce(torch.fmax, shares, torch.full_like(self.norm, torch.nan))

    def limits(self) -> Tensor:
        """The lowest limit that a transform sets to the joint norm, for each step; NaN if none is known."""
        lowest = torch.full_like(self.norm, torch.nan)
        for name in self.joint:
            lowest = torch.fmin(lowest, self.metrics.get(f"{name}/limit", lowest))
        return torch.where(lowest.isfinite(), lowest, torch.nan)

    def last(self, count: int) -> Self:
        return self.part(max(len(self.steps) - count, 0), len(self.steps))

    def part(self, first: int, end: int) -> Self:
        """The steps from index ``first`` to ``end``, without blocks."""
        steps = self.steps[first:end]
        since, until = (steps[0], steps[-1]) if steps else (0, -1)
        of_layers = slice(bisect_left(self.layer_steps, since), bisect_right(self.layer_steps, until))
        return replace(
            self,
            steps=steps,
            reasons=self.reasons[first:end],
            norm=self.norm[first:end],
            loss=self.loss[first:end],
            metrics={name: values[first:end] for name, values in self.metrics.items()},
            layer_steps=self.layer_steps[of_layers],
            layer_norms=self.layer_norms[of_layers],
            blocks=[],
            ratios=[ratios for ratios in self.ratios if since <= ratios.step <= until],
            jumps=[jump for jump in self.jumps if since <= jump[0] <= until],
        )

    def index(self, step: int) -> int:
        """The index of a step; a ValueError if the record does not have the step."""
        if step in self._index_by_step:
            return self._index_by_step[step]
        kept = f"steps {self.steps[0]} to {self.steps[-1]}" if self.steps else "no steps"
        if not self.steps or step > self.steps[-1]:
            raise ValueError(f"step {step} was not recorded: the record has {kept}")
        raise ValueError(
            f"the record no longer has step {step}, it has {kept}. To keep more steps, pass a larger keep= or a path= "
            "to the Recorder"
        )

    def worst(self, step: int | None = None, top: int = 5) -> Layers:
        """Return the layers whose gradients stood out most in one step: see `Recorder.worst`."""
        step = self._most_unusual() if step is None else step_number(step)
        count("top", top)
        self.index(step)
        if step not in self._layer_index_by_step:
            text = f"the file does not have the layers of step {step}. It has those of spikes, skipped steps and steps "
            text += f"with ratios: {'..., ' if len(self.layer_steps) > 20 else ''}"
            raise ValueError(text + (", ".join(map(str, self.layer_steps[-20:])) or "none"))
        return Layers(self.layers_of(step)[:top])

    def layers_of(self, step: int) -> Layers:
        """All layers with a gradient in a step, the worst first. The step must be one of ``layer_steps``."""
        norms, usual = self.layer_norms_of(step), self.usual(step)
        columns = (norms, usual, relative(norms, usual, self.precision))
        named = zip(self.layers, *(column.tolist() for column in columns), strict=True)
        layers = [RankedLayer(*values) for values in named if not values[1] < 0]
        layers.sort(key=lambda layer: (math.isfinite(layer.norm), -_or_zero(layer.ratio), -_or_zero(layer.norm)))
        return Layers(layers)

    def usual(self, step: int) -> Tensor:
        """The median of the finite norms of each layer before a step, or of the medians of blocks; NaN if unknown."""
        if not self.blocks:
            return medians(self.layer_norms[: bisect_left(self.layer_steps, step)])
        blocks = sorted(self.blocks, key=lambda block: block.last)
        # a step of the first block has only the median of this block
        count = bisect_left(blocks, step, key=lambda block: block.last) or int(blocks[0].first < step)
        return medians(torch.stack([block.median for block in blocks])[:count])

    def _most_unusual(self) -> int:
        """The first step whose joint norm is not finite, or else the step with the largest one."""
        if not self.layer_steps:
            raise ValueError("the record does not have the layers of any step")
        norms = [math.inf if self._is_bad(i) else _or_zero(norm) for i, norm in enumerate(self.norm.tolist())]
        with_layers = [i for i, step in enumerate(self.steps) if step in self._layer_index_by_step]
        return self.steps[max(with_layers, key=lambda i: norms[i])]

    def _is_bad(self, i: int) -> bool:
        """True if a gradient of a step was not finite; False if the step had no gradients."""
        norm, step = float(self.norm[i]), self.steps[i]
        if not math.isnan(norm):
            return math.isinf(norm)
        return step in self._layer_index_by_step and not bool((self.layer_norms_of(step) < 0).all())

    def norms_of_gradients(self) -> Tensor:
        """The joint norms, with -1 for steps without gradients, and for those that a GradScaler refused."""
        norms, bad = self.norm.clone(), -1
        for i in (~norms.isfinite()).nonzero().flatten().tolist():
            # a file has the layers of only the first ten of a series of steps that are not finite
            if self._is_bad(i) or (bad == i - 1 >= 0 and self.steps[i] not in self._layer_index_by_step):
                bad = i
            if bad != i or self.reasons[i] == "found_inf":
                norms[i] = -1.0
        return norms

    def spikes(self) -> list[int]:
        """Return the steps with a spike or an early sign of one, and skipped steps: see `Recorder.spikes`."""
        skipped = {step for step, reason in zip(self.steps, self.reasons, strict=True) if reason}
        return sorted({*self.norm_spikes(), *skipped, *(sign.step for sign in self.early_signs())})

    def norm_spikes(self) -> set[int]:
        """The steps whose joint norm was a spike or not finite."""
        lost: list[int] = (~self.norm.isfinite()).nonzero().flatten().tolist()
        spikes: list[int] = spikes_among(self.norm).nonzero().flatten().tolist()
        return {self.steps[i] for i in [*spikes, *filter(self._is_bad, lost)]}

    def early_signs(self) -> list[EarlySign]:
        """Return the norms and updates of layers that were unusually large: see `Recorder.early_signs`."""
        signs = list[EarlySign]()
        for step in {step for step, _ in self.jumps} - self.norm_spikes():
            layers = [layer for layer in self.layers_of(step) if (step, layer.name) in self.jumps]
            signs += [EarlySign(step, name, "norm", *numbers) for name, *numbers in layers]
        if self.ratios:
            steps, ratios = [ratios.step for ratios in self.ratios], torch.stack([r.relative for r in self.ratios])
            above_rounding = dict(zip(steps, ~self.update_ratios().isnan(), strict=True))
            updates = early_signs(steps, self.layers, ratios)
            signs += [sign for sign in updates if above_rounding[sign.step][self.layers.index(sign.layer)]]
        return sorted(signs, key=lambda sign: sign.step)

    def update_ratios(self) -> Tensor:
        """The relative norms of updates in each of ``ratios``; NaN if rounding alone explains the gradient."""
        # Adam makes large updates out of rounding
        unknown = torch.full_like(self.ratios[0].params, torch.inf)
        norms = [self.layer_norms_of(r.step) if r.step in self._layer_index_by_step else unknown for r in self.ratios]
        is_rounding = relative(torch.stack(norms), torch.zeros_like(unknown), self.precision).isnan()
        return torch.where(is_rounding, torch.nan, torch.stack([ratios.relative for ratios in self.ratios]))

    def skips(self) -> str:
        """How many steps were skipped, and by what; empty if none was. Those of a gradient scaler do not count."""
        counts = Counter(reason for reason in self.reasons if reason not in ("", "found_inf"))
        if not counts:
            return ""
        by = ", ".join(f"{short(reason)} {count:,}" for reason, count in counts.most_common())
        total = counts.total()
        return f"{total:,} of {len(self.steps):,} steps {was(total)} skipped ({by})"

    def doubts(self) -> list[Doubt]:
        """Why the norms may not be those of a run that trains."""
        doubts: list[Doubt] = []
        updates = [ratios.updates for ratios in self.ratios if bool((ratios.updates >= 0).any())]
        frozen = sum(not bool((norms > 0).any()) for norms in updates)
        if 2 * frozen > len(updates):
            steps = f"{frozen:,} of the {counted(len(updates), 'step')} whose updates were measured"
            doubts.append(Doubt(f"the run is frozen, since {steps} changed no parameter", is_serious=True))
        if sum(reason not in ("", "found_inf") for reason in self.reasons) > len(self.reasons) / 10:
            doubts.append(Doubt(self.skips(), is_serious=True))
        return doubts

    def alarm(self, since: int) -> str | None:
        """Describe the first step, from ``since`` on, that has a norm of inf or NaN. None if there is no such step."""
        lost = self.layer_norms.isfinite().logical_not()
        bad: list[int] = lost.any(dim=1).nonzero().flatten().tolist()
        # a gradient scaler tries large scales on purpose
        bad = [i for i in bad if self.steps[i] >= since and "found_inf" not in self.reasons[i]]
        if not bad:
            return None
        step, norms = self.layer_steps[bad[0]], self.layer_norms[bad[0]]
        names = [name for name, is_lost in zip(self.layers, lost[bad[0]].tolist(), strict=True) if is_lost]
        shown = ", ".join(names[:MOST_NAMED]) + (", ..." if len(names) > MOST_NAMED else "")
        text = (
            f"step {step:,}: the gradients of {len(names):,} of {len(self.layers):,} layers are inf or NaN. In the "
            f"order of the optimizer: {shown}."
        )
        order = [i for i in norms.argsort(descending=True).tolist() if norms[i].isfinite() and norms[i] >= 0]
        if order:
            usual = [f" (usual {number:.4g})" if number == number else "" for number in self.usual(step).tolist()]
            near = ", ".join(f"{self.layers[i]} {norms[i]:.4g}{usual[i]}" for i in order[:MOST_NAMED])
            text += f" The largest finite norms of the other layers: {near}."
        return text


def places_of(layers: Iterable[Iterable[str]]) -> dict[str, int]:
    return {name: place for place, name in enumerate(dict.fromkeys(chain(*layers)))}


def at_places(values: Tensor, layers: Sequence[str], places: Mapping[str, int]) -> Tensor:
    """Norms of some layers, in one step or several, as norms of all layers at their places; -1 for the others."""
    result = values.new_full((*values.shape[:-1], len(places)), -1.0)
    result[..., [places[name] for name in layers]] = values
    return result


def step_number(step: SupportsIndex) -> int:
    try:
        return operator.index(step)
    except TypeError:
        raise TypeError(f"step must be an integer, got {step!r}") from None


def _or_zero(value: float) -> float:
    return 0.0 if math.isnan(value) else value
