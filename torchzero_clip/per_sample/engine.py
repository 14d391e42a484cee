"""Follows a model from forward to clipping, and collects the per-sample gradients of its layers."""

import weakref
from collections.abc import Callable, Generator, Hashable, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.rnn import PackedSequence
from torch.optim import Optimizer
from typing_extensions import override

from torchzero_clip.checks import boolean, instance, one_of
from torchzero_clip.compat import current_graph_task_id, is_restored_by_checkpoint, pytree
from torchzero_clip.per_sample.arguments import tensors_held
from torchzero_clip.per_sample.attachment import Attachment
from torchzero_clip.per_sample.capture import Capture, Phase
from torchzero_clip.per_sample.classic import Classic
from torchzero_clip.per_sample.gradients.autograd_graph import outside_gradients
from torchzero_clip.per_sample.gradients.captured_gradients import CapturedGradients, Forward
from torchzero_clip.per_sample.gradients.contributions import Contribution, Memory
from torchzero_clip.per_sample.hooks import before_steps
from torchzero_clip.per_sample.layer import Layer, trainable
from torchzero_clip.per_sample.processes.agreement import Processes
from torchzero_clip.per_sample.processes.sharding import group_of_shards, reshard
from torchzero_clip.per_sample.rules.outside import outside_error
from torchzero_clip.per_sample.samples.call import Call
from torchzero_clip.per_sample.samples.errors import is_of_donated_buffers, not_repeatable, runs_in_backward
from torchzero_clip.per_sample.samples.graph import OUTPUT
from torchzero_clip.per_sample.samples.prover import ProofSchedule, Prover, Verify
from torchzero_clip.per_sample.whole import Whole

PRIVATE = 16  # in private training, every 16th step is proved again
IS_PACKED = partial(type.__instancecheck__, PackedSequence)
"""`isinstance` for `PackedSequence` as a function in C, because it is called for each argument of each forward."""


class Engine(Capture):
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
        processes, model = processes_of(model)
        boolean("batch_first", batch_first)
        one_of("memory", memory, ("auto", "low"))
        prover = Prover(ProofSchedule(verify, PRIVATE if private else None), strict=private)
        super().__init__(
            model,
            processes,
            prover,
            batch_first=batch_first,
            memory=memory,
            may_share=not private,
            of_mean=of_mean,
            keep_grad_samples=keep_grad_samples,
        )
        self.classic = Classic(self)
        # kinds of arguments that once had several sizes: see `Forward.has_several_sizes`
        self._kinds_of_several_sizes: set[Hashable] = set()
        self.attachment = Attachment(self, whole, self._refuse_outside, force_generic=force_generic)
        self.attachment.before_forward(self.forward_began, with_kwargs=True)
        self.attachment.after_forward(self.forward_ended)
        self._allow_steps = before_steps(self, Engine._refuse_step)  # unbound, so that it keeps no engine alive

    def release_with(self, owner: object) -> None:
        """Restore the model when the owner is deleted before the model."""
        # a reference would keep the engine alive, and with it the model, which may hold the owner
        weakref.finalize(owner, _release, weakref.ref(self)).atexit = False  # at exit, nobody uses the model

    def detach(self) -> None:
        """Restore the model."""
        self.attachment.detach()
        self._allow_steps()
        self.attached = False
        self.discard()

    def forward_began(self, model: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        """The hook of the model before its forward."""
        if self.runs_whole or self.pauses or not torch.is_grad_enabled():
            return
        if current_graph_task_id() != -1:  # a checkpoint of the model, in a backward
            return
        # set while a DistributedDataParallel runs its module; torch has no public name for it
        around = DistributedDataParallel._active_ddp_module
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
        in_objects = [x for leaf in leaves if not isinstance(leaf, Tensor) for x in tensors_held(leaf)]
        kind = len(args), *kwargs
        forward = Forward(
            inputs,
            self.batch_dim,
            in_objects=in_objects,
            captured=self.enabled,
            declared_rows=self.declared_rows,
            had_several_sizes=kind in self._kinds_of_several_sizes,
        )
        self.begin_forward(forward)
        if forward.has_several_sizes:
            self._kinds_of_several_sizes.add(kind)
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
            outputs = {id(x): x for x in pytree.tree_leaves(output) if type(x) is Tensor}  # as `plain_tensors`
            self.outputs += map(weakref.ref, outputs.values())
            for x in outputs.values() if self.forward.captured else ():
                node: Any = x.grad_fn
                if node is not None:  # for backwards of the user
                    node.metadata[OUTPUT] = self.forward
                    # unlike a hook of the tensor, it comes after those of the user
                    node.register_prehook(partial(self._before_output, self.forward, x.output_nr))

    def _before_output(self, forward: Forward, number: int, grads: Sequence[Tensor | None]) -> Any:
        if self.prover.loss_count is None:
            return self.classic.before_output(forward, number, grads)
        return None

    @override
    def layer_starts(self, layer: Layer) -> bool:
        in_backward = current_graph_task_id() != -1  # of a checkpoint, which is captured if its forward was
        captured = self.forward.captured if in_backward else self.enabled
        # `is_active` is written out, because each call of a layer runs it
        if not captured or self.runs_whole or self.pauses or not self.attached:
            return False
        if self.phase is not Phase.FORWARD and not in_backward:
            # layers that the user calls outside of the model's forward share one forward, as parts of one batch
            goes_on = self.forward.outside_model and self.forward.declared_rows is self.declared_rows
            self.begin_forward(self.forward if goes_on else Forward(declared_rows=self.declared_rows))
        if in_backward and not is_restored_by_checkpoint():
            self.reruns.add(layer.name)
        self.calls_by_layer[id(layer)] += 1
        return True

    def begin_forward(self, forward: Forward) -> None:
        """A forward starts."""
        if self.phase is Phase.BACKWARD:  # an earlier backward has raised
            self.clear()
        if self.captured.by_param:
            self.refuse_forward()
        if self._attributes:
            self.remove_attributes()
        self.forward = forward
        self.forwards += 1
        self.outputs.clear()
        self.attachment.refresh()
        self.prover.modes = tuple([module.training for module in self.modules])
        if not forward.outside_model:
            self.calls_by_kind.clear()

    def refuse_forward(self) -> None:
        """Raise because a forward starts while gradients wait to be clipped."""
        raise RuntimeError(
            "gradients of an earlier backward wait to be clipped: call clip_and_accumulate() after "
            "loss.backward(), or backward(losses) instead of it. discard() forgets them"
        )

    def check_joined(self) -> None:
        """Raise, and drop all gradients, if they are of several calls of the model that are not connected."""
        try:
            self.captured.check_joined()
        except ValueError:
            self.discard()
            raise

    def _check_counts(self, count: int) -> None:
        """Raise a ValueError if a call that the losses depend on has seen another number of samples."""
        calls = self.prover.calls
        seen = [(call.layer, call.forward.batch_size) for call in calls]
        if counts := [(layer, number) for layer, number in seen if number not in (None, count)]:
            captured = CapturedGradients(self._memory)
            captured.counts += counts if len(counts) == len(seen) else [*counts, (seen[0][0], count)]
            captured.forwards.update(call.forward for call in calls)
            captured.check_counts(count, batch_first=self.batch_first)

    @override
    def contributions(
        self, call: Call, grad: Tensor, inputs: tuple[Tensor, ...], before: tuple[Node | None, int]
    ) -> list[Contribution]:
        prover = self.prover
        if prover.loss_count is None:
            return self.classic.contributions(call, grad, inputs, before)
        if call.in_backward and prover.loss_count > 1:
            self.clear()
            raise runs_in_backward(call.layer)
        if prover.proof is None:
            return prover.contributions(call, grad, inputs)
        prover.proof.arrived(call, grad.clone(), inputs)  # a loss may write into it in the next backward
        return []

    def gathered(self, count: int | None) -> dict[int, tuple[Contribution, Tensor]]:
        """The contribution of each parameter, by id, and the norms of the samples."""
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
        if self.captured.by_param:
            expected = self.forward.batch_size if count is None else count
            self.captured.check_counts(expected, batch_first=self.batch_first)
        return self.captured.gathered()

    @contextmanager
    def of_losses(self, losses: Tensor, further: int, *, keeps_graph: bool) -> Generator[Callable[[], None]]:
        """A block for the backward of losses, and ``further`` ones. It yields what runs them.

        With ``keeps_graph``, calls that got only zeros so far may need more backwards, on this process or, with
        `fully_shard`, on another one. An error in the block restores the gradients of tensors outside of the model.
        """
        inside = set(map(id, self.params.values()))
        runs_again = further > 0 or keeps_graph
        restore = outside_gradients(losses, inside, self.retained()) if runs_again else None
        try:
            yield partial(self._backward, losses, further, keeps_graph)
            if len(losses) > 1:
                self.prover.schedule.passed()
        except BaseException:
            if restore is not None:
                restore()
            raise
        finally:
            self.clear()

    def _backward(self, losses: Tensor, further: int, keeps_graph: bool) -> None:
        """Run the backward of losses, and the further ones that find the samples of rows."""
        sharded = keeps_graph and self.processes.sharded
        agreement = self.processes.agreement(self.params, 1) if sharded else None
        with agreement or nullcontext():  # at its end, the processes exchange the numbers that are set in it
            tasks: list[int] = []
            total = losses.sum()
            if total.grad_fn is not None:
                total.grad_fn.register_prehook(partial(_note_task, tasks))
            try:
                total.backward(retain_graph=further > 0 or keeps_graph)
            except RuntimeError as error:
                if is_of_donated_buffers(error):
                    raise not_repeatable(error) from error
                raise
            finally:
                for task in tasks:
                    del Capture.tasks_of_losses[task]
            further = max(further, self.prover.plan_late()) if keeps_graph else further
            if agreement is not None:
                agreement.numbers = {"further": further}
        further = further if agreement is None else int(agreement.largest("further"))
        if not further:
            self._check_counts(len(losses))
            return
        repeat = partial(self._repeat, losses)
        with self.retaining():
            self.prover.prove(repeat, losses, at_least=further)
            self._check_counts(len(losses))  # after all backwards, of which processes run equally many
            if self.prover.proof is not None:
                self.prover.proof.conclude(None if self.processes.sharded else repeat, losses)
        for call, parts in self.prover.proved():
            for part in parts:
                self.receive(call.layer, part)
        self.backward_ended(-1)  # no task: it tells a subclass that all contributions have arrived

    def _repeat(self, losses: Tensor, weights: Tensor) -> None:
        """Run one more backward, of losses times weights. It adds to no ``.grad`` of leaves."""
        torch.autograd.backward(losses, weights, retain_graph=True, inputs=[self.anchor])

    def _refuse_step(self, optimizer: Optimizer, _: bool) -> None:
        """Raise before a step of an optimizer if gradients of its parameters wait, which ``.grad`` does not contain."""
        waiting = self.captured.by_param if self.phase is Phase.IDLE else {}
        if not (waiting or self.accumulated):
            return
        own = {id(param) for group in optimizer.param_groups for param in group["params"]}
        if not own.isdisjoint(waiting):
            raise RuntimeError(
                "gradients of an earlier loss.backward() wait to be clipped, and .grad does not contain them. Before "
                "the step, call either clipper.backward(losses) with one loss for each sample, or loss.backward(); "
                "clipper.clip_and_accumulate(); clipper.pre_step(). For ordinary gradients, run forward and backward "
                "in 'with clipper.paused():'. clipper.discard() drops the gradients that wait"
            )
        if not own.isdisjoint(self.accumulated):
            raise RuntimeError(
                "clipped gradients wait for clipper.pre_step(), and .grad does not contain them: call it before the "
                "step. To drop them, call pre_step() and then optimizer.zero_grad()"
            )

    def _refuse_outside(self, name: str, grad: Tensor) -> None:
        """The hook of a parameter, which gets a gradient only from outside of the captured layers."""
        if self.enabled and self.is_active:
            ran = bool(self.calls_by_layer)
            # a backward in a backward
            reruns = bool(self.tasks - {current_graph_task_id()})
            self.clear()
            raise outside_error(self.attachment.layers, self, name, ran=ran, reruns=reruns)


def _note_task(tasks: list[int], grads: object) -> None:
    """Note the graph task of this backward, before any other hook runs: other clippers ask for it in `Capture.add`."""
    tasks.append(task := current_graph_task_id())
    Capture.tasks_of_losses[task] = get_ident()


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
