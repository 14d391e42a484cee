"""The classic form: proofs from the outputs of the model, inside of an ordinary backward.

The losses are not known there. When the gradient of an output arrives, a nested backward runs before the rest of the
graph. It multiplies this gradient by powers, and so proves the samples of all layers before the output. The outputs
must have the samples in the declared dimension. The gradient of a layer must then be what came through the outputs.
"""

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from torchzero_clip.compat import backward_is_of_all, current_graph_task_id, current_node
from torchzero_clip.per_sample.capture import Capture
from torchzero_clip.per_sample.gradients.captured_gradients import Forward
from torchzero_clip.per_sample.gradients.contributions import Contribution
from torchzero_clip.per_sample.samples.call import Call
from torchzero_clip.per_sample.samples.errors import repeating, runs_in_backward
from torchzero_clip.per_sample.samples.graph import Graph
from torchzero_clip.per_sample.samples.pattern import ZERO, Place, some_place
from torchzero_clip.per_sample.samples.powers import are_apart
from torchzero_clip.per_sample.samples.proof import Backward, Proof

_ELSEWHERE = "a part of their gradient did not come through the outputs of the model"


class Classic:
    """Finds the samples of all calls in backwards that the user starts."""

    def __init__(self, capture: Capture) -> None:
        self._capture, self._prover = capture, capture.prover
        self._root: tuple[Node, int] | None = None  # of a nested backward
        self._sent: Tensor | None = None  # its gradient
        self._task, self._proves = -1, False  # the backward that runs, and whether its first output was proved
        self._is_due = True  # whether the schedule asks for a proof in this backward
        self._count: int | None = None

    def before_output(self, forward: Forward, number: int, grads: Sequence[Tensor | None]) -> Any:
        """The hook of the node of an output of the model."""
        grad = grads[number]
        answer = None if grad is None else self._from_output(forward, number, grad)
        return None if answer is None else (*grads[:number], answer, *grads[number + 1 :])

    def contributions(
        self, call: Call, grad: Tensor, inputs: Sequence[Tensor], before: tuple[Node | None, int]
    ) -> list[Contribution]:
        """The contributions of a call. ``before`` is the edge of the graph before it."""
        try:
            where, count = self._where(call, grad, before)
            # a model that is run whole gets its gradients for samples, also those of a penalty on gradients
            is_model = call.copies and not call.layer.name
            if call.through is not None and not is_model and are_apart(grad, call.through):
                raise call.layer.unknown_rows(_ELSEWHERE)
        except BaseException:
            self._capture.clear()
            raise
        call.through = None
        return call.contributions(where, grad, inputs, count)

    def _from_output(self, forward: Forward, number: int, grad: Tensor) -> Tensor | None:
        """The hook of an output. A nested backward from another output gets zeros, because each is proved by itself."""
        node = current_node()
        if self._root is not None:  # hooks of the user have changed the gradient already
            return self._sent if self._root == (node, number) else torch.zeros_like(grad)
        capture = self._capture
        if not capture.is_active:
            return None
        # this backward is with create_graph=True, which alone enables gradients in a backward, or of no parameters
        if torch.is_grad_enabled() or not backward_is_of_all():
            return None
        capture.backward_began()
        found = self._samples_of(forward, grad)
        if found is None and capture.processes.sharded:  # another process may prove
            found = torch.zeros((1,) * grad.ndim, dtype=torch.int64, device=grad.device), 1
        if found is not None:
            self._prove(forward, (node, number), grad, *found)
        return None

    def _samples_of(self, forward: Forward, grad: Tensor) -> tuple[Tensor, int] | None:
        """The sample of each row of an output, and their number; None if it does not have the declared dimension."""
        declared, dim, shape = forward.declared_rows, self._capture.batch_dim, grad.shape
        if declared is not None and len(shape) and len(grad) in declared.by_length:
            return declared.by_length[len(grad)].view(-1, *[1] * (grad.ndim - 1)).to(grad.device), declared.batch_size
        count = forward.batch_size
        if count is None and grad.ndim:
            count = shape[min(dim, grad.ndim - 1)]
        if count:
            for place in (dim, 0):
                if place < grad.ndim and shape[place] == count:
                    return Place(place).rows(shape, count).to(grad.device), count
        return None

    def _prove(self, forward: Forward, root: tuple[Node, int], grad: Tensor, samples: Tensor, count: int) -> None:
        """Find the samples of the calls before a node, whose gradient has samples in known rows."""
        capture, prover = self._capture, self._prover
        self._count = count
        is_first = (task := current_graph_task_id()) != self._task
        if is_first:
            self._is_due = prover.schedule.is_due
            prover.schedule.passed()
        graph = Graph([root[0]], max(count, 1), to_outputs=True)
        capture.captured.joins += [(forward, earlier) for earlier in graph.ends]

        def backward(weights: Tensor) -> None:
            self._sent = grad * weights[samples].view(samples.shape)
            edge = GradientEdge(*root)
            torch.autograd.backward([edge], [self._sent], inputs=[capture.anchor], retain_graph=True)

        # prove now, or run one more backward to see whether silent calls get a gradient
        due = self._is_due or (self._proves and not is_first)
        proof = prover.planned(graph, due=due) if count > 1 else None
        silent = [call for call in graph.calls if call.is_silent] if proof is None and count > 1 else []
        further, has_silent = capture.agreed(_backwards(proof), len(silent))
        if has_silent:
            if self._reaches(silent, prover.proof_of(graph) if silent else None, root, backward, grad, count):
                proof = prover.proof_of(graph)  # another one, because `_nested` has closed the first
            (further,) = capture.agreed(_backwards(proof))
        if is_first:
            self._task, self._proves = task, proof is not None
        if further:
            with self._nested(root, proof):
                if proof is None:  # another process has a proof
                    for _ in range(further):
                        backward(grad.new_ones(max(count, 1)))
                else:
                    self._run(proof, backward, grad, further)

    def _reaches(
        self,
        silent: Sequence[Call],
        proof: Proof | None,
        root: tuple[Node, int],
        backward: Backward,
        grad: Tensor,
        count: int,
    ) -> bool:
        """Run one more backward. True if it brings a gradient to silent calls, which ``proof`` sees.

        Without ``proof``, only another process has silent calls.
        """
        with self._nested(root, proof):
            if proof is None:
                backward(grad.new_ones(max(count, 1)))
                return False
            proof.first(backward, grad)
            traces = [proof.traces[call] for call in silent if call in proof.traces]
            return any(bool((trace.grad != 0).any()) for trace in traces)

    @contextmanager
    def _nested(self, root: tuple[Node, int], proof: Proof | None) -> Generator[None]:
        """A block for the backwards of a proof, or for those that only another process needs, from an output on."""
        self._root, self._prover.proof = root, proof
        try:
            with self._capture.nested():
                yield
        finally:
            if proof is not None:
                proof.close()
            self._root = self._sent = self._prover.proof = None

    def _run(self, proof: Proof, backward: Backward, grad: Tensor, further: int) -> None:
        proof.hook_sites()
        proof.first(backward, grad)
        try:
            with repeating():
                proof.run(backward, grad, at_least=further - 1)
            # what is shared must be so for all outputs
            proof.conclude(None if self._capture.processes.sharded else backward, grad, may_share=self._proves)
        except BaseException:
            self._capture.clear()
            raise
        if self._proves:  # else, other outputs were not proved
            for call, trace in proof.traces.items():
                call.through = trace.grad if call.through is None else call.through + trace.grad

    def _where(self, call: Call, grad: Tensor, before: tuple[Node | None, int]) -> tuple[Place | Tensor, int]:
        """Where the samples of a call are, and their number."""
        forward, dim = call.forward, self._capture.batch_dim
        declared = forward.declared_rows
        count = forward.batch_size if forward.batch_size is not None else self._count
        if count is not None and count < 2 and call.where is None:
            return Place(0, call.shape[0] if count else 1), count
        if call.where is not None and count is not None:
            return call.where, count
        if call.in_backward:
            raise runs_in_backward(call.layer)
        if call.is_silent and count is not None:  # what came through the outputs was zeros
            if bool((grad != 0).any()):
                raise call.layer.unknown_rows(_ELSEWHERE)
            return some_place(torch.full(call.shape, ZERO, device=grad.device), count), count
        if declared is not None and len(call.shape) == 1 and call.shape[0] in declared.by_length:
            return declared.by_length[call.shape[0]].to(grad.device), declared.batch_size
        if call.reduce is not None and count is not None and call.shape[0] == count:  # sequences in their order
            return Place(0), count
        if call.reduce is None:
            if forward.outside_model and declared is None:  # each row counts as a sample
                place = Place(min(dim, len(call.shape) - 1))
                return place, call.shape[place.dim]
            if count is not None and (place := call.usual_place(dim, count)) is not None:
                if before[0] is not None and not self._capture.processes.sharded:
                    rows = place.rows(grad.shape, count).to(grad.device)
                    self._prove(forward, (before[0], before[1]), grad, rows, count)
                return place, count
        raise call.layer.unknown_rows("no gradient of an output of the model shows them")


def _backwards(proof: Proof | None) -> int:
    """The number of backwards of a proof, with the one that stands for the ordinary backward."""
    return 0 if proof is None else 1 + proof.backwards
