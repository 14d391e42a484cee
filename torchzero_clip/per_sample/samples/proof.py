"""The proof of one graph, by further backwards: losses times powers of two, and NaN for each half of the samples."""

from collections.abc import Callable, Mapping, Sequence
from enum import Enum, auto
from random import Random

import torch
from torch import Tensor
from torch.autograd.graph import Node
from torch.utils.hooks import RemovableHandle

from torchzero_clip.functional.dtypes import widened
from torchzero_clip.per_sample.samples.call import Call, call_of
from torchzero_clip.per_sample.samples.choosing import let_through
from torchzero_clip.per_sample.samples.errors import (
    elsewhere,
    gated,
    mixed,
    not_repeatable,
    rows_moved,
    runs_in_backward,
    too_small,
)
from torchzero_clip.per_sample.samples.graph import Graph
from torchzero_clip.per_sample.samples.graph_nodes import shape_of
from torchzero_clip.per_sample.samples.pattern import (
    MIXED,
    UNTOLD,
    ZERO,
    Known,
    Pattern,
    Place,
    patterns_of,
    some_place,
)
from torchzero_clip.per_sample.samples.powers import Powers, Trace

NAMED = 64  # samples of which an error says whether they are mixed

Backward = Callable[[Tensor], None]
"""Runs a further backward of the losses times a factor for each sample."""


class Stage(Enum):
    """What a further backward is for."""

    FIRST = auto()
    """The gradients as they are, in the classic form."""
    POWERS = auto()
    NAN = auto()
    AGAIN = auto()
    """Once more as it was, so that an error can tell whether the graph gives other gradients each time."""
    ALONE = auto()
    """Some samples alone, to see whether values or gradients of others pass, and for an error."""
    EACH = auto()
    """One sample alone, for rows that all samples share."""
    EXTRA = auto()
    """None here, but another process needs one more backward."""


class Proof:
    """The proof of one graph. The ``like`` of its methods has the dtype and the device of factors.

    First the samples in ``half`` get NaN, then the others. A ``strict`` proof raises if values could let a gradient
    pass from one sample to another, or if a row is not proved. ``late`` has what the ordinary backward has brought to
    some calls, if only these are proved.
    """

    def __init__(
        self,
        graph: Graph,
        known: Known,
        half: Tensor,
        random: Random,
        *,
        strict: bool = False,
        late: Mapping[Call, Trace] | None = None,
    ) -> None:
        self.graph, self.known, self.count, self._strict = graph, known, len(half), strict
        self._random = random
        self._powers = Powers(self.count, random, float16=graph.has_float16)
        self._half, self._exact = half, graph.is_exact
        self._has_nan = strict or not known.needs_each_step
        self.traces = dict(late or {})
        """What the backwards have brought to each call, in the order in which the ordinary one has reached them."""
        self._is_late = bool(late)
        self._sites: dict[int, Trace] = {}  # what was brought to each of the sites of the graph
        self._handles: list[RemovableHandle] = []
        self._stage: Stage | None = None

    @property
    def is_further(self) -> bool:
        """True in a further backward."""
        return self._stage is not None

    @property
    def backwards(self) -> int:
        """The number of further backwards."""
        return self._powers.passes + 2 * self._has_nan

    def hook_sites(self) -> None:
        """Hook the sites, where rows move along some dimensions, from the next backward on.

        Not if each step is proved in any case.
        """
        if not self.known.needs_each_step:
            self._handles = [
                node.register_prehook(self._site_hook(i, _leading(node, axes)))
                for i, (node, axes) in enumerate(self.graph.sites)
            ]

    def first(self, backward: Backward, like: Tensor) -> None:
        """Run the ordinary backward once more, in the classic form."""
        self._run(Stage.FIRST, backward, like.new_ones(self.count))

    def run(self, backward: Backward, like: Tensor, *, at_least: int = 0) -> None:
        """Run the further backwards, at least so many."""
        for weights in self._powers.weights(like):
            self._run(Stage.POWERS, backward, weights)
        if self._has_nan:
            # NaN times 0 is NaN, so it passes wherever other values could let a gradient pass
            handles = let_through(self.graph, sites=not self._strict)
            try:
                with torch.autograd.set_detect_anomaly(False):  # which raises at a NaN
                    for half in (self._half, ~self._half):
                        self._run(Stage.NAN, backward, torch.where(half, torch.nan, 0.0).to(like))
            finally:
                for handle in handles:
                    handle.remove()
        for _ in range(at_least - self.backwards):
            self._run(Stage.EXTRA, backward, like.new_ones(self.count))

    def arrived(self, call: Call, grad: Tensor, inputs: tuple[Tensor, ...] = ()) -> None:
        """Keep the gradient of a call in the ordinary backward."""
        self.traces[call] = Trace(grad, call.leading, inputs)

    def saw(self, call: Call, grad: Tensor) -> None:
        """Note the gradient of a call in a further backward."""
        if self._stage is Stage.FIRST:
            self.arrived(call, grad.clone())
        elif (trace := self.traces.get(call)) is None:  # the ordinary backward has not reached it
            return
        elif self._stage is Stage.POWERS:
            trace.compare(grad, self._powers, exact=self._exact and grad.is_cpu)
        elif self._stage is Stage.AGAIN:
            trace.repeat(grad)
        elif self._stage is Stage.EACH:
            trace.alone.append(grad.clone())
        elif self._stage is not Stage.EXTRA:
            trace.reach(grad, by_nan=self._stage is Stage.NAN)

    def conclude(self, backward: Backward | None, like: Tensor, *, may_share: bool = True) -> None:
        """Find and keep the places of all calls, or raise.

        ``backward`` finds the samples that an error names. With ``may_share``, it also finds what each sample gives to
        rows that all of them share.
        """
        if not (self.known.needs_each_step or self._is_late) and self._sites_move():
            self.known.needs_each_step = True
        may_share = may_share and backward is not None
        shared: list[Call] = []
        of_several: list[tuple[Call, Tensor]] = []
        # all of them first, because `_is_behind` asks for those of other calls
        earlier = {call: call.samples for call in self.traces}
        found = {call: self._samples(call, trace) for call, trace in self.traces.items()}
        for call, trace in reversed(self.traces.items()):  # from those that others depend on
            rows, samples = found[call]
            if call.each is not None or bool((samples == MIXED).any()):
                is_shared = _is_shared(call, earlier[call]) or self._is_behind(call, shared)
                if is_shared and may_share:
                    shared.append(call)
                else:
                    of_several.append((call, samples))
                continue
            is_gated = self._lets_through(trace, rows)
            if is_gated and self._leaks(trace, rows, backward, like):
                of_several.append((call, samples))
                continue
            self._check_strictly(call, trace, rows, is_gated=is_gated)
            self.known.needs_each_step = self.known.needs_each_step or is_gated
            self._learn(call, samples)
        if of_several:  # the error names the layer that is next to the loss
            raise self._error(*of_several[-1], backward, like)
        if backward is not None and shared:
            self._share(shared, backward, like)

    def close(self) -> None:
        """Remove the hooks, and drop the gradients."""
        for handle in self._handles:
            handle.remove()
        self._handles, self.traces = [], {}

    def _run(self, stage: Stage, backward: Backward, weights: Tensor) -> None:
        self._stage = stage
        try:
            backward(weights)
        finally:
            self._stage = None

    def _site_hook(self, site: int, leading: int) -> Callable[[Sequence[Tensor | None]], None]:
        seed = self._random.randrange(2**32)

        def note(grads: Sequence[Tensor | None]) -> None:
            if (grad := grads[0]) is None:
                return
            if grad.dtype == torch.float16:  # whose range has no room for sums
                grad = grad.clone()
            else:
                # one number shows the ratio of a row too, and takes less memory. With random weights, entries of
                # several samples do not cancel
                rows = widened(grad).unsqueeze(-1).flatten(leading)
                weights = torch.rand(rows.shape[-1], generator=torch.Generator().manual_seed(seed), device="cpu")
                grad = rows @ weights.add_(1).to(rows)
            if self._stage in (None, Stage.FIRST):
                self._sites[site] = Trace(grad, leading)
            elif self._stage is Stage.POWERS and site in self._sites:
                self._sites[site].compare(grad, self._powers, exact=self._exact and grad.is_cpu)

        return note

    def _sites_move(self) -> bool:
        """True unless, at each site, the samples are in a dimension along which rows do not move."""
        for i, (_, axes) in enumerate(self.graph.sites):
            trace = self._sites.get(i)
            if trace is None or not trace.ratios:  # no layer is behind it
                return True
            samples = self._powers.samples(trace.ratios)
            found = [] if bool((samples == MIXED).any()) else patterns_of(samples, self.count)
            if not found or not _tells(samples) or any(pattern.dim in axes for pattern in found):
                return True
        return False

    def _samples(self, call: Call, trace: Trace) -> tuple[Tensor, Tensor]:
        """The sample of each row of a call, and of each item, also by the proofs of other outputs of the model."""
        if not trace.ratios:
            raise runs_in_backward(call.layer)
        rows = self._powers.samples(trace.ratios)
        samples = rows if call.reduce is None else call.reduce(rows)
        if (others := call.samples) is not None and others.shape == samples.shape:
            clash = (samples >= 0) & (others >= 0) & (samples != others)
            samples = torch.where(clash, MIXED, torch.where(samples == ZERO, others, samples))
        call.samples = samples
        return rows, samples

    def _is_behind(self, call: Call, shared: Sequence[Call]) -> bool:
        """True for a call whose input depends on shared rows alone, in a model that has calls of samples too.

        False for a recurrent layer, which cannot take such rows. A tensor without a graph may be data.
        """
        if call.reduce is not None or not any(
            other.samples is not None and _tells(other.samples) for other in self.graph.calls
        ):
            return False
        rest, before = [*call.made_by], set[Node]()
        has_other = False  # a number, a constant, a frozen parameter or data: the graph does not tell which
        while rest:
            node = rest.pop()
            has_other |= node is None
            if node is not None and node not in before and node.next_functions:
                before.add(node)
                rest += [following for following, _ in node.next_functions] if call_of(node) is None else []
        if has_other and any(size and not size % self.count for size in call.shape):  # so it may be data of the batch
            return False
        calls = [other for node in before if (other := call_of(node)) is not None]
        return bool(calls) and all(other in shared for other in calls)

    def _lets_through(self, trace: Trace, rows: Tensor) -> bool:
        """True if NaN has reached rows of other samples, so that values decide where gradients go."""
        halves = zip(trace.reached_by_nan, (self._half, ~self._half), strict=False)
        return any(self._reaches_others(reached, rows, half) for reached, half in halves)

    def _leaks(self, trace: Trace, rows: Tensor, backward: Backward | None, like: Tensor) -> bool:
        """True if half of the samples alone give gradients to rows of others. Ratios show this only up to rounding."""
        if backward is None:
            return False
        for half in (self._half, ~self._half):
            self._run(Stage.ALONE, backward, half.to(like))
            if trace.reached is not None and self._reaches_others(trace.reached, rows, half):
                return True
        return False

    def _reaches_others(self, reached: Tensor, rows: Tensor, half: Tensor) -> bool:
        """True if a row that was reached is not of a half. Rows of zeros are of the samples of their place."""
        found = patterns_of(rows, self.count)
        if len(found) == 1 and _tells(rows) and (place := found[0].place(rows.shape, self.count)) is not None:
            rows = torch.where(rows == ZERO, place.rows(rows.shape, self.count).to(rows.device), rows)
        others = (rows >= 0) & ~half.to(rows.device)[rows.clamp(min=0)]
        return bool((reached & others).any())

    def _check_strictly(self, call: Call, trace: Trace, rows: Tensor, *, is_gated: bool) -> None:
        """Raise in a strict proof if values could let a gradient pass, or if the sample of a row is not proved.

        A row without a ratio passes if its gradient is not finite, because its sample is then left out. But where
        values move rows, it may hide rows of other samples.
        """
        if not self._strict:
            return
        if is_gated:
            raise gated(call.layer)
        untold = rows == UNTOLD
        if bool(untold.any()) and (self.known.needs_each_step or bool((untold & trace.is_finite()).any())):
            raise too_small(call.layer, "In private training, each row has to be proved")

    def _learn(self, call: Call, samples: Tensor) -> None:
        """Find the place of the samples of a call, and keep their pattern if it is the only one."""
        found, patterns = patterns_of(samples, self.count), self.known.patterns
        key = self.graph.key, call.key(self.count)
        if not found and bool((samples == UNTOLD).any()):
            raise too_small(call.layer)
        if call.declared is not None and Pattern(call.declared) not in found and not _is_of(samples, call.declared):
            raise elsewhere(call.layer, call.declared)
        if isinstance(call.where, Place):
            if any(pattern.place(call.shape, self.count) == call.where for pattern in found):
                return
            self.known.learn(key, None)
            has_moved, self.known.needs_each_step = self.known.needs_each_step, True
            if self.known.is_trusted and not has_moved:  # an earlier step may have been wrong
                raise rows_moved(call.layer)
        elif not found or (len(found) == 1 and _tells(samples) and key not in patterns):
            self.known.learn(key, found[0] if found else None)
        elif call.copies and Pattern(0) in found:  # of the samples, in their order: rows of zeros too
            self.known.learn(key, Pattern(0))
        call.where = some_place(samples, self.count)
        self.known.note_silence(key, is_silent=bool((samples == ZERO).all()))

    def _share(self, calls: Sequence[Call], backward: Backward, like: Tensor) -> None:
        """Find what each sample gives to rows that all of them share. In later steps, they will have copies of them."""
        for weights in torch.eye(self.count, dtype=like.dtype, device=like.device):
            self._run(Stage.EACH, backward, weights)
        for call in calls:
            each = torch.stack(self.traces[call].alone)
            call.each = each if call.each is None else call.each + each  # of several outputs of the model
            call.where = Place(0)

    def _error(self, call: Call, samples: Tensor, backward: Backward | None, like: Tensor) -> RuntimeError:
        """The error for a row of several samples."""
        if backward is None:
            return mixed(call.layer, [])
        trace = self.traces[call]
        self._run(Stage.AGAIN, backward, like.new_ones(self.count))
        if not trace.is_repeated:
            return not_repeatable(f"{call.layer} gets other gradients from a second backward")
        givers: list[int] = []
        rows = (samples == MIXED).flatten().nonzero()
        wrong = None if call.reduce is not None or not len(rows) else int(rows[0, 0])
        for i in range(min(self.count, NAMED)):
            alone = like.new_zeros(self.count)
            alone[i] = 1
            self._run(Stage.ALONE, backward, alone)
            reached = trace.reached
            if reached is not None and bool(reached.any() if wrong is None else reached.flatten()[wrong]):
                givers.append(i)
        return mixed(call.layer, givers)


def _is_shared(call: Call, earlier: Tensor | None) -> bool:
    """True if all samples share the rows of a call. ``earlier`` says whose rows the proofs of other outputs found."""
    if call.each is not None:
        return True
    has_owner = earlier is not None and bool((earlier >= 0).any())
    return not has_owner and call.on_shared is not None and call.on_shared()


def _is_of(samples: Tensor, dim: int) -> bool:
    """True if each entry of a dimension belongs to one sample, and each sample to at most one entry."""
    entries = samples.movedim(dim, 0).flatten(1) if samples.ndim > 1 else samples[:, None]
    largest = entries.amax(1)
    told = largest[largest >= 0]
    return bool(((entries == largest[:, None]) | (entries < 0)).all()) and len(told.unique()) == len(told)


def _tells(samples: Tensor) -> bool:
    """True if rows of at least two samples are known."""
    known = samples[samples >= 0]
    return bool((known != known[:1]).any())


def _leading(node: Node, axes: Sequence[int]) -> int:
    """The number of dimensions in which the samples of a site are looked for."""
    ndim = len(shape_of(node))
    return min(axes) if axes and min(axes) > 0 else ndim
