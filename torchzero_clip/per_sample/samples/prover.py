"""Decides which backwards are proved, and knows what was proved before."""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from random import Random
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from torchzero_clip.checks import one_of
from torchzero_clip.compat import without_autocast
from torchzero_clip.per_sample.gradients.contributions import Contribution
from torchzero_clip.per_sample.samples.call import Call
from torchzero_clip.per_sample.samples.errors import reentrant, repeating
from torchzero_clip.per_sample.samples.graph import Graph
from torchzero_clip.per_sample.samples.pattern import ZERO, KnownGraphs, Place, some_place
from torchzero_clip.per_sample.samples.powers import Trace
from torchzero_clip.per_sample.samples.proof import Backward, Proof

Verify: TypeAlias = Literal["first", "always", "never"] | int


class ProofSchedule:
    """The steps 1, 2, 4, 8, ..., and every 128th one, or those that ``verify`` says; at least every ``longest``-th."""

    def __init__(self, verify: Verify, longest: int | None = None) -> None:
        if isinstance(verify, bool) or not isinstance(verify, int) or verify < 1:
            one_of("verify", verify, ("first", "always", "never", "a number of steps, at least 1"))
        self._never = verify == "never"
        every = 1 if verify == "always" else verify if isinstance(verify, int) else 128
        self._every = every if longest is None else min(every, longest)
        self._steps = 0

    @property
    def is_due(self) -> bool:
        """True if the next step has to be proved, also if its graph was proved before."""
        step = self._steps + 1
        return not self._never and (step & (step - 1) == 0 or step % self._every == 0)

    def passed(self) -> None:
        """Count a step."""
        self._steps += 1


class Prover:
    """Finds the samples of all calls of layers in a backward. All of its proofs are ``strict``, or none."""

    def __init__(self, schedule: ProofSchedule, *, strict: bool = False) -> None:
        self.schedule, self._strict = schedule, strict
        self.loss_count: int | None = None
        """The number of losses in `backward(losses)`; None in other backwards."""
        self.proof: Proof | None = None
        """The proof that runs."""
        self.modes: Hashable = ()
        """The modes of all modules in this forward."""
        self.calls: Sequence[Call] = ()
        """The calls that the losses depend on."""
        self._kept: Graph | None = None  # a graph that is kept, because some calls were silent in its proof
        self._late: dict[Call, Trace] = {}  # those of them that got a gradient after all
        self._known = KnownGraphs()
        self._random = Random(0)  # the same numbers in every run, so that an error comes again

    def plan(self, losses: Tensor) -> int:
        """Begin `backward(losses)`. Return the number of further backwards that it needs."""
        self.clear()
        self.loss_count = len(losses)
        if self.loss_count < 2 or not losses.requires_grad:  # one sample has all rows
            return 0
        graph = Graph([losses.grad_fn], self.loss_count)
        self.calls = graph.calls
        self.proof = self.planned(graph, due=self.schedule.is_due)
        if self.proof is None:
            self._kept = graph if any(call.is_silent for call in graph.calls) else None
            return 0
        self.proof.hook_sites()
        return self.proof.backwards

    @property
    def keeps_graph(self) -> bool:
        """True if silent calls may need a proof after the backward."""
        return self._kept is not None

    def plan_late(self) -> int:
        """Begin the proof of silent calls that got a gradient. Return the number of further backwards that it needs."""
        if self._kept is None or not self._late:
            return 0
        self.proof = self.proof_of(self._kept, self._late)
        return self.proof.backwards

    def planned(self, graph: Graph, *, due: bool) -> Proof | None:
        """The proof that the graph of several samples needs. Calls get their places, as far as they are known.

        Calls that got zeros alone in all proofs are silent. They need no proof until they get another gradient.
        """
        if graph.has_checkpoint:
            raise reentrant()
        known = self._known.of((graph.outline, self.modes))
        known.needs_each_step = known.needs_each_step or graph.moves_anywhere or (self._strict and bool(graph.sites))
        is_unknown = False
        for call in graph.calls:
            key = graph.key, call.key(graph.count)
            pattern = known.patterns.get(key)
            call.where = None if pattern is None else pattern.place(call.shape, graph.count)
            call.is_silent = call.where is None and key in known.silent
            is_unknown = is_unknown or (call.where is None and not call.is_silent)
        if not graph.calls or not (is_unknown or due or known.needs_each_step):
            known.is_trusted = True
            return None
        return self.proof_of(graph)

    def proof_of(self, graph: Graph, late: Mapping[Call, Trace] | None = None) -> Proof:
        """A proof of the graph, or of ``late`` calls alone."""
        known = self._known.of((graph.outline, self.modes))
        half = torch.zeros(graph.count, dtype=torch.bool, device="cpu")
        half[self._random.sample(range(graph.count), (graph.count + 1) // 2)] = True
        return Proof(graph, known, half, self._random, strict=self._strict, late=late)

    def prove(self, backward: Backward, losses: Tensor, *, at_least: int) -> None:
        """Run the further backwards of losses, at least so many."""
        if self.proof is None:
            for _ in range(at_least):
                backward(torch.ones_like(losses))
            return
        with repeating():
            self.proof.run(backward, losses, at_least=at_least)

    def proved(self) -> Iterator[tuple[Call, list[Contribution]]]:
        """The contributions of the calls of a proof."""
        traces = {} if self.proof is None else self.proof.traces
        for call in [*traces]:
            trace = traces.pop(call)  # to free its memory
            if call.where is not None:
                with without_autocast(trace.grad):
                    yield call, call.contributions(call.where, trace.grad, trace.inputs, self.loss_count or 0)

    def contributions(self, call: Call, grad: Tensor, inputs: Sequence[Tensor]) -> list[Contribution]:
        """The contributions of a call whose samples were known before the backward; none yet of a late call."""
        count = self.loss_count or 0
        where = call.where
        if call.is_silent:
            if bool((grad != 0).any()):
                self._late[call] = Trace(grad.clone(), call.leading, tuple(inputs))
                return []
            where = some_place(torch.full(call.shape, ZERO, device=grad.device), count)
        elif where is None:  # of an empty batch, or of one sample, which has all rows
            where = Place(0, call.shape[0] if count else 1)
        return call.contributions(where, grad, inputs, count)

    def clear(self) -> None:
        """End `backward(losses)`."""
        if self.proof is not None:
            self.proof.close()
        self.proof, self.loss_count, self.calls = None, None, ()
        self._kept, self._late = None, {}
