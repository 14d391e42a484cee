"""Follows a model from forward to clipping, and collects the per-sample gradients of its layers."""

import weakref
from collections import Counter
from collections.abc import Callable, Generator, Hashable, Iterable, Sequence
from contextlib import contextmanager, nullcontext
from enum import Enum, auto
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree as pytree

from torchzero_clip.checks import boolean, instance, one_of
from torchzero_clip.compat import (
    at_end_of_backward,
    backward_is_of_all,
    current_graph_task_id,
    is_restored_by_checkpoint,
)
from torchzero_clip.per_sample.arguments import tensors_held
from torchzero_clip.per_sample.attachment import Attachment
from torchzero_clip.per_sample.captured_layer import CapturedLayer, Rule, trainable
from torchzero_clip.per_sample.gradients.autograd_graph import outside_gradients
from torchzero_clip.per_sample.gradients.captured_gradients import CapturedGradients, Forward, GivenRows
from torchzero_clip.per_sample.gradients.contributions import Contribution, Dense, Memory
from torchzero_clip.per_sample.outside import outside_error
from torchzero_clip.per_sample.processes.agreement import Processes
from torchzero_clip.per_sample.processes.sharding import group_of_shards, reshard, shown_as_before
from torchzero_clip.per_sample.rules.copies import EMPTY
from torchzero_clip.per_sample.samples.call import Call, WatchedLayer
from torchzero_clip.per_sample.samples.classic import Classic
from torchzero_clip.per_sample.samples.graph import OUTPUT
from torchzero_clip.per_sample.samples.prover import Prover, Schedule, Verify
from torchzero_clip.per_sample.samples.refusals import not_repeatable, runs_in_backward
from torchzero_clip.per_sample.unclipped import refuse_unclipped, watch_steps
from torchzero_clip.per_sample.whole import Whole

PRIVATE = 16  # in private training, every 16th step is proved again
_ALL = 'run the model sample by sample: whole=("",)'
IS_PACKED = partial(type.__instancecheck__, PackedSequence)  # not in Python, because it sees all that forwards get


class Phase(Enum):
    """What a model that is captured is doing."""

    IDLE = auto()
    """Gradients of the last backward may wait to be clipped."""
    FORWARD = auto()
    BACKWARD = auto()
    """Gradients arrive. If the backward raises, the phase lasts until the next forward."""


class Engine:
    """Captures the layers of a model, and collects their per-sample gradients.

    ``of_mean`` is for losses that are means over the samples. ``private`` proves more often.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        batch_first: bool = True,
        memory: Memory = "auto",
        force_generic: bool = False,
        whole: Whole = (),
        verify: Verify = "first",
        private: bool = False,
        of_mean: bool = False,
        keep_grad_samples: bool = False,
    ) -> None:
        instance("module", model, nn.Module)
        self.processes, model = processes_of(model)
        boolean("batch_first", batch_first)
        one_of("memory", memory, ("auto", "low"))
        self.batch_first = batch_first
        self.batch_dim = 0 if batch_first else 1
        """The batch dimension of sequences."""
        self.of_mean = of_mean
        self.anchor = torch.empty(0, dtype=torch.float32, device="cpu", requires_grad=True)
        """An input of every captured call, so that a backward can be asked for these calls alone."""
        self.prover = Prover(self, Schedule(verify, PRIVATE if private else None), strict=private)
        self.classic = Classic(self, self.prover)
        self.may_share = not private
        """Whether rows without samples may be found to be shared by all of them."""
        self.enabled = self.attached = True
        self.inside = False
        """True while a layer runs its submodules by itself."""
        self.accumulated: set[int] = set()
        """The ids of the parameters whose clipped sums are not in ``.grad`` yet."""
        self.pauses = 0
        """How many blocks of `paused` are open."""
        self.running: CapturedLayer | None = None
        """The layer that runs, the innermost one."""
        self.forward = Forward()
        self.given: GivenRows | None = None
        """What the user says of rows, in a block of `rows`."""
        self.modes: Hashable = ()
        """The modes of all modules in this forward."""
        self.outputs: list[weakref.ref[Tensor]] = []
        """What layers and the model have returned."""
        self._several: set[Hashable] = set()  # kinds of arguments that had several sizes in the batch dimension
        self._memory: Memory = memory
        self._keep_grad_samples = keep_grad_samples
        self._shown: list[tuple[Tensor, str]] = []
        self.clear()
        self.attachment = Attachment(self, model, whole, force_generic=force_generic)
        self._allow_steps = watch_steps(self, refuse_unclipped)

    @property
    def waiting(self) -> dict[int, list[Contribution]]:
        """What waits to be clipped after a backward, by the id of the parameter."""
        return self.captured.of if self.phase is Phase.IDLE else {}

    def norm_dtype(self) -> torch.dtype:
        """Float32, or float64 if a parameter is."""
        dtypes = {param.dtype for param in self.attachment.params.values()}
        return torch.float64 if torch.float64 in dtypes else torch.float32

    def scale(self, count: int) -> float:
        """The factor between the gradients that arrive and those of the losses of ``count`` single samples."""
        return float(count) if self.of_mean else 1.0

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
        given = GivenRows.checked(samples, batch_size)
        if self.given is not None:
            raise RuntimeError("a block of rows() is open: give all vectors to one call")
        self.given = given
        try:
            yield
        finally:
            self.given = None

    def release_with(self, owner: object) -> None:
        """Restore the model when the owner is deleted before the model."""
        weakref.finalize(owner, _release, weakref.ref(self)).atexit = False  # at exit, nobody uses the model

    def detach(self) -> None:
        """Restore the model."""
        self.attachment.detach()
        self._allow_steps()
        self.attached = False
        self.discard()

    def discard(self) -> None:
        """Drop all gradients that have arrived, and what parameters show of them."""
        self.clear()
        self._hide()

    def clear(self) -> None:
        """Drop all gradients that have arrived."""
        self.phase = Phase.IDLE
        self.captured = CapturedGradients(self._memory)
        self.numbers: Counter[Hashable] = Counter()
        """How many calls of each kind this forward has made."""
        self._calls: Counter[int] = Counter()  # how often each layer was called, by its id
        self._tasks: set[int] = set()

    def forward_began(self, model: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        """The hook of the model before its forward."""
        if self.inside or self.pauses or not torch.is_grad_enabled():
            return
        if current_graph_task_id() != -1:  # a checkpoint of the model, in a backward
            return
        around = DistributedDataParallel._active_ddp_module  # set while a DistributedDataParallel runs its module
        if self.enabled and around is not None and (around.module is not model or self.processes.group is None):
            raise RuntimeError(
                "module is run by DistributedDataParallel, which would not average its gradients: give the clipper the "
                "whole DistributedDataParallel model instead"
            )
        # packed sequences are named tuples, whose rows do not tell how many samples there are
        leaves = pytree.tree_leaves((args, kwargs), is_leaf=IS_PACKED)
        packed = [x for x in leaves if isinstance(x, PackedSequence)]
        first = {id(x): x.data[: int(x.batch_sizes[0])].unsqueeze(0) for x in packed}  # the rows at the first time
        leaves = [first[id(x)].movedim(1, self.batch_dim) if id(x) in first else x for x in leaves]
        inputs = [x for x in leaves if isinstance(x, Tensor)]
        before = self.attachment.captures_model
        held = [x for leaf in leaves if not isinstance(leaf, Tensor) for x in tensors_held(leaf)]
        given = self.given
        kind = len(args), *kwargs
        several = kind in self._several
        self.begin(Forward(inputs, self.batch_dim, held=held, captured=self.enabled, given=given, several=several))
        if self.forward.several:
            self._several.add(kind)
        if self.attachment.captures_model and not before:  # torch reads the forward before it calls this hook
            raise RuntimeError(
                "the module itself got parameters that train, after its forward had been called: call it once more"
            )
        self.phase = Phase.FORWARD

    def forward_ended(self, model: nn.Module, args: tuple[object, ...], output: object) -> None:
        """The hook of the model after its forward."""
        if self.pauses:
            return
        if self.phase is Phase.FORWARD:
            self.phase = Phase.IDLE
            outputs = [x for x in pytree.tree_leaves(output) if type(x) is Tensor]
            self.outputs += [weakref.ref(x) for x in outputs]
            if self.forward.captured:
                self._watch(outputs)

    def _watch(self, outputs: Iterable[Tensor]) -> None:
        """Watch the outputs of the model, for backwards of the user."""
        for x in {id(x): x for x in outputs if x.grad_fn is not None}.values():
            node: Any = x.grad_fn
            if (metadata := getattr(node, "metadata", None)) is not None:
                metadata[OUTPUT] = self.forward
                # unlike a hook of the tensor, it comes after those of the user
                node.register_prehook(partial(self._before_output, self.forward, x.output_nr))

    def _before_output(self, forward: Forward, number: int, grads: Sequence[Tensor | None]) -> Any:
        if self.prover.count is None:  # not in `backward(losses)`
            return self.classic.before_output(forward, number, grads)
        return None

    def enter(self, layer: CapturedLayer) -> Rule | None:
        """Note that a layer runs. Return its rule, or the rule for empty batches; None if it is not captured."""
        in_backward = current_graph_task_id() != -1  # of a checkpoint, which is captured if its forward was
        captured = self.forward.captured if in_backward else self.enabled
        if not captured or self.inside or self.pauses or not self.attached:
            return None
        if self.phase is not Phase.FORWARD and not in_backward:
            # layers that the user calls outside of the model's forward share one forward, as parts of one batch
            goes_on = self.forward.direct and self.forward.given is self.given
            self.begin(self.forward if goes_on else Forward(given=self.given))
        if in_backward and not is_restored_by_checkpoint():
            self.attachment.reruns.add(layer.name)
        self._calls[id(layer)] += 1
        return EMPTY if self.forward.batch_size == 0 and not layer.rule.runs_empty else layer.rule

    def begin(self, forward: Forward) -> None:
        """A forward starts."""
        if self.phase is Phase.BACKWARD:  # an earlier backward has raised
            self.clear()
        if self.captured.of:
            self.refuse_forward()
        if self._shown:
            self._hide()
        self.forward = forward
        self.outputs.clear()
        self.attachment.refresh()
        self.modes = hash(tuple([module.training for module in self.attachment.modules]))
        if not forward.direct:
            self.numbers.clear()

    def refuse_forward(self) -> None:
        """Raise because a forward starts while gradients wait to be clipped."""
        raise RuntimeError(
            "gradients of an earlier backward wait to be clipped: call clip_and_accumulate() after "
            "loss.backward(), or backward(losses) instead of it. discard() forgets them"
        )

    def wants(self, layer: CapturedLayer) -> bool:
        """True if the current backward gives gradients to parameters, unlike `torch.autograd.grad` of an input."""
        of_all = backward_is_of_all()
        if self.pauses and (torch.is_grad_enabled() or of_all):
            raise RuntimeError(
                f"the forward of {layer} ran outside of this paused() block: run it again inside of the block, or run "
                "the backward after it"
            )
        if torch.is_grad_enabled():
            self.clear()
            raise RuntimeError(
                f"{layer} is in a backward with create_graph=True, such as that of a gradient penalty: "
                f"{layer.line or _ALL}"
            )
        return of_all

    def add(self, layer: CapturedLayer, forward: Forward, contributions: Iterable[Contribution]) -> None:
        """Store the contributions of one call of a layer."""
        if not self.attached:
            raise RuntimeError(f"the clipper was detached before the backward of {layer}; run the forward again")
        if self.enabled:
            self.captured.forwards.add(forward)
        self.backward_began()
        for part in contributions:
            self.receive(layer, part)

    @property
    def shards_backwards(self) -> bool:
        """True if all processes have to run equally many backwards."""
        return self.processes.sharded

    @property
    def proofs_may_share(self) -> bool:
        """True if a proof may find that all samples share a row."""
        return self.may_share and not self.processes.sharded

    def agreed(self, *numbers: int) -> list[int]:
        """The largest of each number over the processes if all run equally many backwards; else the numbers."""
        if not self.processes.sharded:
            return [*numbers]
        with self.processes.agreement(self.attachment.params, len(numbers)) as agreement:
            agreement.numbers = numbers
        return [int(agreement.largest(i)) for i in range(len(numbers))]

    @contextmanager
    def nested(self) -> Generator[None]:
        """A block for further backwards inside a backward of the user."""
        with self._retaining(), shown_as_before(self.attachment.model):
            yield

    def backward_began(self) -> None:
        """Note that a backward of the user runs."""
        self.phase = Phase.BACKWARD
        task = current_graph_task_id()
        if task not in self._tasks:  # several, if a reentrant checkpoint runs a backward in a backward
            self._tasks.add(task)
            at_end_of_backward(partial(self.backward_ended, task))

    def joins(self, forward: Forward, earlier: Forward) -> None:
        """Note that a graph leads from an output of a forward of the model to one of another."""
        self.captured.joins.append((forward, earlier))

    def check_joined(self) -> None:
        """Raise, and drop all gradients, if they are of several calls of the model that are not connected."""
        try:
            self.captured.check_joined()
        except ValueError:
            self.discard()
            raise

    def _check_counts(self, calls: Sequence[Call], count: int) -> None:
        """Raise a ValueError if a call has seen another number of samples."""
        seen = [(call.layer, call.forward.batch_size) for call in calls]
        if counts := [(layer, number) for layer, number in seen if number not in (None, count)]:
            captured = CapturedGradients(self._memory)
            captured.counts += counts if len(counts) == len(seen) else [*counts, (seen[0][0], count)]
            captured.forwards.update(call.forward for call in calls)
            captured.check_counts(count, batch_first=self.batch_first)

    def contributions(
        self, call: Call, grad: Tensor, inputs: tuple[Tensor, ...], before: tuple[Node | None, int]
    ) -> list[Contribution]:
        """The contributions of a call in the ordinary backward; none yet if a proof has to find its samples."""
        prover = self.prover
        if prover.count is None:
            return self.classic.contributions(call, grad, inputs, before)
        if call.in_backward and prover.count > 1:
            self.clear()
            raise runs_in_backward(call.layer)
        if prover.proof is None:
            return prover.contributions(call, grad, inputs)
        prover.proof.arrived(call, grad.clone(), inputs)  # a loss may write into it in the next backward
        return []

    def receive(self, layer: WatchedLayer, part: Contribution) -> None:
        """Store a contribution."""
        if self._keep_grad_samples:
            part = Dense(part.param, part.dense(0, part.batch_size))
            grads = part.grads * self.scale(part.batch_size) if self.of_mean else part.grads
            earlier = getattr(part.param, "grad_sample", None)
            if earlier is not None and len(earlier) == len(grads):  # different numbers of samples raise at the end
                grads = earlier + grads
            self.show(part.param, grad_sample=grads)
        alone = self._calls[id(layer)] < 2 and self.attachment.owners[id(part.param)] < 2
        self.captured.add(layer, part, alone=alone)

    def backward_ended(self, task: int) -> None:
        """A backward has ended. The last one is that of the user, and others ran in it."""
        self._tasks.discard(task)
        if not self._tasks:
            self.phase = Phase.IDLE

    def gathered(self, count: int | None) -> dict[int, tuple[Contribution, Tensor]]:
        """The contribution of each parameter, by id, and its squared norms."""
        if self.attachment.is_outdated():
            raise RuntimeError(
                "parameters of the module were frozen, unfrozen or replaced since its forward started: run the "
                "forward again"
            )
        if self.phase is Phase.BACKWARD:
            raise RuntimeError(
                "the backward raised before its end, so that some gradients are missing: "
                "run forward and backward again, or forget it with discard()"
            )
        if self.captured.of:
            expected = self.forward.batch_size if count is None else count
            self.captured.check_counts(expected, batch_first=self.batch_first)
        return self.captured.gathered()

    @contextmanager
    def of_losses(self, losses: Tensor, further: int, *, watched: bool) -> Generator[Callable[[], None]]:
        """A block for the backward of losses, and ``further`` ones. It yields what runs them.

        With ``watched``, silent calls may need more, here or, with `fully_shard`, on another process. An error in the
        block restores the gradients of tensors outside of the model.
        """
        of_mean, self.of_mean = self.of_mean, False  # the losses are added up, also with "mean"
        inside = set(map(id, self.attachment.params.values()))
        keeps = further > 0 or watched
        restore = outside_gradients(losses, inside, self.retained()) if keeps else None
        try:
            yield partial(self._backward, losses, further, watched)
            if len(losses) > 1:
                self.prover.schedule.passed()
        except BaseException:
            if restore is not None:
                restore()
            raise
        finally:
            self.of_mean = of_mean
            self.clear()

    def _backward(self, losses: Tensor, further: int, watched: bool) -> None:
        """Run the backward of losses, and the further ones that find the samples of rows."""
        sharded = watched and self.processes.sharded
        agreement = self.processes.agreement(self.attachment.params, 1) if sharded else None
        with agreement or nullcontext():
            try:
                losses.sum().backward(retain_graph=further > 0 or watched)
            except RuntimeError as error:
                if "donated buffers" in str(error):
                    raise not_repeatable(str(error)) from error
                raise
            further = max(further, self.prover.plan_late()) if watched else further
            if agreement is not None:
                agreement.numbers = [further]
        further = further if agreement is None else int(agreement.largest(0))
        with self._retaining() if further else nullcontext():
            if further:
                self.prover.prove(partial(self._repeat, losses), losses, at_least=further)
            # after all backwards, of which processes run equally many
            self._check_counts(self.prover.calls, len(losses))
            if further:
                self.prover.conclude(None if self.processes.sharded else partial(self._repeat, losses), losses)
        if not further:
            return
        for call, parts in self.prover.proved():
            for part in parts:
                self.receive(call.layer, part)
        self.backward_ended(-1)

    def _repeat(self, losses: Tensor, weights: Tensor) -> None:
        """Run one more backward, of losses times weights. It adds to no ``.grad`` of leaves."""
        torch.autograd.backward(losses, weights, retain_graph=True, inputs=[self.anchor])

    @contextmanager
    def _retaining(self) -> Generator[None]:
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
        held = [x for module in self.attachment.modules for x in vars(module).values() if type(x) is Tensor]
        found = {id(x): x for x in [*outputs, *held] if x is not None and x.retains_grad}
        return [*found.values()]

    def refuse_outside(self, name: str, grad: Tensor) -> None:
        """The hook of a parameter, which gets a gradient only from outside of the captured layers."""
        if self.enabled and self.attached and not self.pauses:
            ran, reruns = bool(self._calls), bool(self._tasks - {current_graph_task_id()})  # a backward in a backward
            self.clear()
            raise outside_error(self.attachment, name, ran=ran, reruns=reruns)

    def show(self, param: Tensor, **values: Tensor) -> None:
        """Set attributes of a parameter, until the next forward."""
        for name, value in values.items():
            setattr(param, name, value)
            self._shown.append((param, name))

    def _hide(self) -> None:
        for param, name in self._shown:
            vars(param).pop(name, None)
        self._shown.clear()


def processes_of(model: nn.Module) -> tuple[Processes, nn.Module]:
    """The processes that train the model, and the model in a `DistributedDataParallel`."""
    if isinstance(model, DistributedDataParallel):
        return Processes(model.process_group), model.module
    reshard(model)
    group = group_of_shards(model, trainable(model))
    return Processes(group, sharded=group is not None), model


def _release(engine: "weakref.ref[Engine]") -> None:
    if (alive := engine()) is not None:
        alive.detach()
