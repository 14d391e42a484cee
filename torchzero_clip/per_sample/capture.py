"""What is captured of a model: the state that its layers, the proofs and the engine share."""

import weakref
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Generator, Hashable, Iterable, Sequence
from contextlib import contextmanager
from enum import Enum, auto
from functools import partial
from threading import get_ident
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.utils.hooks import RemovableHandle

from torchzero_clip.compat import at_end_of_backward, backward_is_of_all, current_graph_task_id
from torchzero_clip.per_sample.arguments import plain_tensors
from torchzero_clip.per_sample.gradients.captured_gradients import CapturedGradients, DeclaredRows, Forward
from torchzero_clip.per_sample.gradients.contributions import Contribution, Dense, Memory
from torchzero_clip.per_sample.layer import Layer, trainable
from torchzero_clip.per_sample.processes.agreement import Processes
from torchzero_clip.per_sample.processes.sharding import shown_as_before, slots, storages_of
from torchzero_clip.per_sample.samples.call import Call
from torchzero_clip.per_sample.samples.prover import Prover

_WHOLE_MODEL = 'run the model sample by sample: whole=("",)'


class Phase(Enum):
    """What a model that is captured is doing."""

    IDLE = auto()
    """Gradients of the last backward may wait to be clipped."""
    FORWARD = auto()
    BACKWARD = auto()
    """Gradients arrive. If the backward raises, the phase lasts until the next forward."""


class Capture(ABC):
    """A model whose layers are captured, and the per-sample gradients that have arrived from them.

    A clipper has an `Engine`. Files between this one and the engine, such as those of layers, know this class alone.
    """

    tasks_of_losses: ClassVar[dict[int, int]] = {}
    """The ids of the graph tasks of `backward(losses)` that run now, of all clippers, each with its thread."""
    params: dict[str, nn.Parameter]
    """The trainable parameters, by name."""
    modules: list[nn.Module]
    owners: Counter[int]
    """How many layers have each parameter, by its id."""

    def __init__(
        self,
        model: nn.Module,
        processes: Processes,
        prover: Prover,
        *,
        batch_first: bool,
        memory: Memory,
        may_share: bool,
        of_mean: bool,
        keep_grad_samples: bool,
    ) -> None:
        self.model, self.processes, self.prover = model, processes, prover
        self.batch_first = batch_first
        self.batch_dim = 0 if batch_first else 1
        """The batch dimension of sequences."""
        self.of_mean = of_mean
        self.may_share = may_share
        """Whether rows without samples may be found to be shared by all of them."""
        self.anchor = torch.empty(0, dtype=torch.float32, device="cpu", requires_grad=True)
        """An input of every captured call, so that a backward can be asked for these calls alone."""
        self.enabled = True
        """False after Opacus's ``disable_hooks()``: forwards are not captured."""
        self.attached = True
        """False after the clipper was detached: the model is an ordinary one."""
        self.pauses = 0
        """How many blocks of `paused` are open."""
        self.runs_whole = False
        """True while a layer runs with its submodules as a whole, so that these are not captured."""
        self.running: Layer | None = None
        """The layer that runs, the innermost one."""
        self.forward = Forward()
        self.forwards = 0
        """How many forwards have begun."""
        self.declared_rows: DeclaredRows | None = None
        """The sample of each row, as the user gave it to `rows`. None outside of its block."""
        self.outputs: list[weakref.ref[Tensor]] = []
        """What layers and the model have returned."""
        self.reruns: set[str] = set()
        """The names of layers that a function of the model has run in a backward."""
        self.handles: list[RemovableHandle] = []
        """Hooks that are removed when the layers are."""
        self.accumulated: set[int] = set()
        """The ids of the parameters whose clipped sums are not in ``.grad`` yet."""
        self._is_of_sum = False  # the last gradients came from another clipper's `backward`, which adds up its losses
        self._memory: Memory = memory
        self._keep_grad_samples = keep_grad_samples
        self._attributes: list[tuple[Tensor, str]] = []
        self.clear()

    @abstractmethod
    def layer_starts(self, layer: Layer) -> bool:
        """A layer starts to run. Return whether this call of it is captured."""

    @abstractmethod
    def contributions(
        self, call: Call, grad: Tensor, inputs: tuple[Tensor, ...], before: tuple[Node | None, int]
    ) -> list[Contribution]:
        """The contributions of a call in the ordinary backward; none yet if a proof has to find its samples."""

    @property
    def is_active(self) -> bool:
        """True until the clipper is detached, except in a block of `paused`."""
        return self.attached and not self.pauses

    @property
    def may_find_shared(self) -> bool:
        """True if a proof may find that all samples share a row."""
        return self.may_share and not self.processes.sharded

    def norm_dtype(self) -> torch.dtype:
        """Float32, or float64 if a parameter is."""
        dtypes = {param.dtype for param in self.params.values()}
        return torch.float64 if torch.float64 in dtypes else torch.float32

    def loss_scale(self, count: int) -> float:
        """The factor by which gradients that arrive become those of the losses of ``count`` single samples."""
        # `backward(losses)` adds up the losses, also if another clipper calls it
        return float(count) if self.of_mean and self.prover.loss_count is None and not self._is_of_sum else 1.0

    def own_storages(self) -> set[int]:
        """The memory of parameters and buffers."""
        return storages_of((*self.model.parameters(), *self.model.buffers()))

    def params_of(self, module: nn.Module) -> dict[str, nn.Parameter]:
        """The trainable parameters of a module in the model, by their names in the module."""
        # `fully_shard` shows other tensors in their place during a forward, and the optimizer has `self.params`
        unsharded = {id(params[key]): self.params[name] for name, params, key in slots(self.model, self.params)}
        return {name: unsharded.get(id(param), param) for name, param in trainable(module).items()}

    @contextmanager
    def paused(self) -> Generator[None]:
        """A block in which the model runs as without a clipper. What was captured before stays as it is."""
        self.pauses += 1
        try:
            yield
        finally:
            self.pauses -= 1

    @contextmanager
    def rows(self, samples: Sequence[Tensor], batch_size: int) -> Generator[None]:
        """A block in which the user says which sample each row of the arguments of forwards belongs to."""
        rows = DeclaredRows.checked(samples, batch_size)
        if self.declared_rows is not None:
            raise RuntimeError("a block of rows() is open: give all vectors to one call")
        self.declared_rows = rows
        try:
            yield
        finally:
            self.declared_rows = None

    def discard(self) -> None:
        """Drop all gradients that have arrived, and the attributes that were set from them."""
        self.clear()
        self.remove_attributes()

    def clear(self) -> None:
        """Drop all gradients that have arrived."""
        self.phase = Phase.IDLE
        self.captured = CapturedGradients(self._memory)
        self.calls_by_kind: Counter[Hashable] = Counter()
        """How many calls of each kind this forward has made."""
        self.calls_by_layer: Counter[int] = Counter()
        """How often each layer was called, by its id."""
        self.tasks: set[int] = set()
        """The backwards that run: several, if a reentrant checkpoint runs one in another."""

    def backward_is_for_params(self, layer: Layer) -> bool:
        """True unless the backward that runs is for some tensors only, as `torch.autograd.grad` of an input is."""
        of_all = backward_is_of_all()
        # gradients are enabled in a backward only with create_graph=True
        if self.pauses and (torch.is_grad_enabled() or of_all):
            raise RuntimeError(
                f"the forward of {layer} ran outside of this paused() block: run it again inside of the block, or run "
                "the backward after it"
            )
        if torch.is_grad_enabled():
            self.clear()
            raise RuntimeError(
                f"{layer} is in a backward with create_graph=True, such as that of a gradient penalty: "
                f"{layer.whole_hint or _WHOLE_MODEL}"
            )
        return of_all

    def add(self, call: Call, contributions: Iterable[Contribution]) -> None:
        """Store the contributions of one call of a layer."""
        if not self.attached:
            raise RuntimeError(f"the clipper was detached before the backward of {call.layer}; run the forward again")
        if self.enabled:
            self.captured.forwards.add(call.forward)
        if self.of_mean and self.prover.loss_count is None:
            is_of_sum = current_graph_task_id() in Capture.tasks_of_losses
            if not is_of_sum and get_ident() in Capture.tasks_of_losses.values():
                self.clear()
                raise RuntimeError(
                    f"{call.layer} got a gradient in a backward that runs inside the backward(losses) of another "
                    'clipper, so it is not known whether it is that of a mean: with loss_reduction="sum", gradients '
                    "are taken as they come"
                )
            if self.captured.by_param and is_of_sum is not self._is_of_sum:
                self.clear()
                raise RuntimeError(
                    f"{call.layer} got gradients of a mean, and those of a backward(losses) of another clipper: call "
                    "clip_and_accumulate() or discard() between the two backwards"
                )
            self._is_of_sum = is_of_sum
        self.backward_began()
        for part in contributions:
            self.receive(call.layer, part)

    def receive(self, layer: Layer, part: Contribution) -> None:
        """Store a contribution."""
        if self._keep_grad_samples:
            part = Dense(part.param, part.dense(0, part.batch_size))
            grads = part.grads if (scale := self.loss_scale(part.batch_size)) == 1 else part.grads * scale
            earlier = getattr(part.param, "grad_sample", None)
            if earlier is not None and len(earlier) == len(grads):  # different numbers of samples raise at the end
                grads = earlier + grads
            self.set_attributes(part.param, grad_sample=grads)
        # a contribution is alone if no other one to its parameter is expected
        alone = self.calls_by_layer[id(layer)] < 2 and self.owners[id(part.param)] < 2
        self.captured.add(layer, part, alone=alone)

    def backward_began(self) -> None:
        """Note that a backward of the user runs."""
        self.phase = Phase.BACKWARD
        task = current_graph_task_id()
        if task not in self.tasks:
            self.tasks.add(task)
            at_end_of_backward(partial(self.backward_ended, task))

    def backward_ended(self, task: int) -> None:
        """A backward has ended. The last one is that of the user, and others ran in it."""
        self.tasks.discard(task)
        if not self.tasks:
            self.phase = Phase.IDLE

    def agreed(self, *numbers: int) -> list[int]:
        """With shards, the largest of each number over the processes; otherwise the numbers as they are."""
        if not self.processes.sharded:
            return [*numbers]
        with self.processes.agreement(self.params, len(numbers)) as agreement:
            agreement.numbers = dict(enumerate(numbers))
        return [int(agreement.largest(i)) for i in range(len(numbers))]

    @contextmanager
    def nested(self) -> Generator[None]:
        """A block for further backwards inside a backward of the user."""
        with self.retaining(), shown_as_before(self.model):
            yield

    @contextmanager
    def retaining(self) -> Generator[None]:
        """A block whose backwards do not change the gradients of `retained` tensors."""
        retained = [(x, x.grad) for x in self.retained()]
        try:
            yield
        finally:
            for x, grad in retained:
                x.grad = grad

    def retained(self) -> list[Tensor]:
        """What layers and the model have returned in this forward, and modules store, if it retains its gradient."""
        outputs = [reference() for reference in self.outputs]
        stored = plain_tensors([list(vars(module).values()) for module in self.modules])
        found = {id(x): x for x in [*outputs, *stored] if x is not None and x.retains_grad}
        return [*found.values()]

    def set_attributes(self, param: Tensor, **values: Tensor) -> None:
        """Set attributes of a parameter, until the next forward."""
        for name, value in values.items():
            setattr(param, name, value)
            self._attributes.append((param, name))

    def remove_attributes(self) -> None:
        """Remove what `set_attributes` has set."""
        for param, name in self._attributes:
            vars(param).pop(name, None)
        self._attributes.clear()
