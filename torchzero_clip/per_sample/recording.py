"""What happens between a forward of a model and the clipping of its gradients, and what is captured meanwhile."""

import weakref
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from enum import Enum, auto
from typing import Any

import torch
from torch import Tensor, nn

from torchzero_clip.compat import current_graph_task_id
from torchzero_clip.per_sample.captured_gradients import CapturedGradients
from torchzero_clip.per_sample.contributions import Contribution, Memory, MemoryBudget
from torchzero_clip.per_sample.hooks import accumulate
from torchzero_clip.per_sample.mixing import MixingCheck, Verify
from torchzero_clip.per_sample.param_attributes import ParamAttributes


class Phase(Enum):
    """What a model that is captured is doing."""

    IDLE = auto()
    FORWARD = auto()
    BACKWARD = auto()
    """Gradients arrive. If the backward raises, the phase lasts until the next forward."""
    WAITING = auto()
    """All gradients of a backward have arrived, and wait to be clipped."""
    CHECK = auto()
    """The losses of some samples are sent backward alone, to see which samples get gradients."""


class Forward:
    """A forward of the model, or of layers that are called by themselves.

    Args:
        inputs: The tensors among its arguments; None if the model itself was not called.
        dim: The batch dimension.
        captured: False if its layers run as they do without a clipper.
    """

    def __init__(self, inputs: Sequence[Tensor] | None = None, dim: int = 0, *, captured: bool = True) -> None:
        self.captured = captured
        self.direct = inputs is None
        found = [x for x in inputs or () if x.ndim]
        sizes = {x.shape[min(dim, x.ndim - 1)] for x in found}
        others = sizes - {1}
        if len(others) == 1 and found[0].shape[min(dim, found[0].ndim - 1)] in others:
            sizes = others  # the rest is one row for all samples
        self.batch_size = sizes.pop() if len(sizes) == 1 else None
        """The size of all inputs in the batch dimension; None if they differ."""
        self.tells_size = self.direct or bool(found)
        self._only_input = weakref.ref(found[0]) if len(found) == 1 else None

    def is_only_input(self, tensor: Tensor) -> bool:
        """True if this tensor is the only input of the model, which must be the batch then."""
        known = None if self._only_input is None else self._only_input()
        return known is not None and (tensor is known or tensor._base is known)


class Recording(ABC):
    """Follows a model from forward to clipping. Layers give it their contributions.

    Args:
        batch_first: Whether samples are in the first dimension of sequences.
        memory: With "low", layers with a cheaper form store no per-sample gradients.
        verify: When to check that samples do not mix.
        shown: What users read as attributes of parameters.
    """

    def __init__(self, *, batch_first: bool, memory: Memory, verify: Verify, shown: ParamAttributes) -> None:
        self.batch_first = batch_first
        self.batch_dim = 0 if batch_first else 1
        """The batch dimension of sequences."""
        self.shown = shown
        self.mixing = MixingCheck(verify)
        self.anchor = torch.empty(0, requires_grad=True)
        """An input of every captured call, so that a backward can be asked for these calls alone."""
        self.enabled = True
        self.attached = False
        self.inside = False
        """True while a layer runs its submodules by itself."""
        self.running: Any = None
        """The layer that runs, the innermost one."""
        self.forward = Forward()
        self.outputs: list[weakref.ref[Tensor]] = []
        """What layers and the model have returned."""
        self.params: dict[str, nn.Parameter] = {}
        """The trainable parameters, by name."""
        self.owners: Counter[int] = Counter()
        """How many layers have each parameter, by its id."""
        self._memory: Memory = memory
        self.clear()

    @abstractmethod
    def buffers(self) -> Sequence[Tensor]:
        """The buffers of the model."""

    @abstractmethod
    def refresh(self) -> None:
        """Capture the model again if it has changed since."""

    @abstractmethod
    def is_outdated(self) -> bool:
        """True if the model has changed since it was captured."""

    @abstractmethod
    def whole_line(self, name: str) -> str:
        """The argument ``whole`` that takes the modules around this one whole, from the nearest outwards."""

    @property
    def waits(self) -> bool:
        """True if gradients have arrived that were not clipped yet."""
        return bool(self.captured.of)

    @property
    def captures(self) -> bool:
        """True if layers that run now are captured: in a backward, where checkpoints repeat them, if they were."""
        if self.inside or not self.attached:
            return False
        return self.forward.captured if in_backward() else self.enabled

    def begin(self, forward: Forward) -> None:
        """A forward starts.

        Raises:
            RuntimeError: If gradients have arrived that were not clipped yet, or if norms were read before a backward
                that should have given ordinary gradients.
        """
        if self.phase is Phase.BACKWARD:  # an earlier backward has raised
            self.clear()
        if self.phase is Phase.WAITING:
            if not self.shown.replaces_clipping:
                raise RuntimeError(
                    "gradients of an earlier backward wait to be clipped: call clip_and_accumulate() after "
                    "loss.backward(), or backward(losses) instead of it. discard() forgets them"
                )
            consumed = self._consumed
            self.clear()
            if consumed:
                raise RuntimeError(
                    "a backward after get_clipping_coef() gave norms again, not gradients: call disable_hooks() before "
                    "it, and enable_hooks() after it"
                )
        if self.shown.names:
            self.shown.clear()
        self._consumed = False
        self.forward = forward
        self.outputs.clear()
        self.refresh()

    def enter(self, layer: Any) -> None:
        """A layer runs."""
        if self.phase is not Phase.FORWARD and not in_backward():
            self.begin(self.forward if self.forward.direct else Forward())
        self.calls[id(layer)] += 1
        self.mixing.note(layer.name)

    def wants(self, layer: Any) -> bool:
        """True if the current backward gives gradients to parameters, unlike `torch.autograd.grad` of an input.

        Raises:
            RuntimeError: With ``create_graph=True``, because the parameters are not in the graph.
        """
        if torch.is_grad_enabled():
            self.clear()
            raise RuntimeError(
                f"{layer} is in a backward with create_graph=True: gradients of gradients cannot be clipped per sample"
            )
        return self.phase is Phase.CHECK or torch.autograd._is_checkpoint_valid()

    def add(self, layer: Any, forward: Forward, contributions: Sequence[Contribution]) -> None:
        """Store the contributions of one call of a layer."""
        if not self.attached:
            raise RuntimeError(f"the clipper was detached before the backward of {layer}; run the forward again")
        if self.phase is not Phase.CHECK:
            self._follow_backward()
            self._forwards.add(forward)
        if not self.enabled:
            for part in contributions:
                value = part.weighted_sum(torch.ones(part.batch_size))
                earlier = self._ordinary.get(id(part.param))
                self._ordinary[id(part.param)] = part.param, value if earlier is None else earlier[1] + value
            return
        shown = None if self.phase is Phase.CHECK else self.shown
        for part in contributions:
            alone = self.calls[id(layer)] < 2 and self.owners[id(part.param)] < 2
            self.captured.keep(layer, part, alone=alone, shown=shown)

    def gathered(self, count: int | None) -> dict[int, tuple[Contribution, Tensor]]:
        """The contribution of each parameter, by id, and its squared norms.

        Args:
            count: The number of samples; None for that of the inputs of the model.

        Raises:
            ValueError: If a layer has another number of samples.
            RuntimeError: If the backward did not end.
        """
        if self.is_outdated():
            raise RuntimeError(
                "parameters of the module were frozen, freed or exchanged since its forward began: run it again"
            )
        if self.phase is Phase.BACKWARD:
            raise RuntimeError(
                "the backward raised before its end, so that some gradients are missing: "
                "run forward and backward again, or forget it with discard()"
            )
        self.captured.check_counts(self.forward.batch_size if count is None else count, batch_first=self.batch_first)
        return self.captured.gathered()

    def gradients_of(self, losses: Tensor, chosen: Tensor) -> dict[int, Tensor]:
        """The squared norms that the losses of chosen samples alone give to all samples, by the id of the parameter.

        Args:
            losses: One loss for each sample, (B,), whose graph was retained.
            chosen: Booleans, (B,).
        """
        before = self.phase, self.captured, self.budget
        self.phase, self.captured, self.budget = Phase.CHECK, CapturedGradients(), MemoryBudget("low")
        try:
            torch.autograd.backward(losses, chosen.to(losses), retain_graph=True, inputs=[self.anchor])
            return {key: squares for key, (_, squares) in self.captured.gathered().items()}
        finally:
            self.phase, self.captured, self.budget = before

    def live_outputs(self) -> list[Tensor]:
        """What layers and the model have returned in this forward, as far as somebody holds it."""
        return [output for reference in self.outputs if (output := reference()) is not None]

    def check_one_batch(self) -> None:
        """Raise a ValueError if the gradients that wait may belong to parts of a batch, or not to samples."""
        of_model = [forward for forward in self._forwards if not forward.tells_size]
        if of_model or len(self._forwards) > 1:
            found = (
                "the arguments of the forward hold no tensor that tells how many samples there are"
                if of_model
                else f"gradients of {len(self._forwards)} forwards have arrived, which may be parts of one batch"
            )
            raise ValueError(f"{found}: call clip_and_accumulate(batch_size=...), or use backward(losses)")

    def consume(self) -> None:
        """Drop the gradients that have arrived. The same graph may run again, for ordinary gradients."""
        self.phase, self.captured, self._consumed = Phase.IDLE, CapturedGradients(), True

    def clear(self) -> None:
        """Drop all gradients that have arrived."""
        self.phase = Phase.IDLE
        self.captured = CapturedGradients()
        self.budget = MemoryBudget(self._memory)
        self.calls: Counter[int] = Counter()
        """How often each layer was called, by its id."""
        self._forwards: set[Forward] = set()
        self._ordinary: dict[int, tuple[Tensor, Tensor]] = {}
        self._tasks: set[int] = set()
        self._consumed = False

    def _follow_backward(self) -> None:
        self.phase = Phase.BACKWARD
        task = current_graph_task_id()
        if task not in self._tasks:
            self._tasks.add(task)
            engine: Any = torch.autograd.Variable
            engine._execution_engine.queue_callback(lambda: self._backward_ended(task))

    def _backward_ended(self, task: int) -> None:
        self._tasks.discard(task)
        if self._tasks:
            return
        self.phase = Phase.WAITING if self.captured.of else Phase.IDLE
        if self._ordinary:
            sums, self._ordinary = self._ordinary, {}
            accumulate(list(sums.values()))
        if self.shown.replaces_clipping and self.phase is Phase.WAITING:
            self.shown.backward_ended(self)


def in_backward() -> bool:
    """True during a backward, in which checkpointing repeats forwards."""
    return current_graph_task_id() != -1
