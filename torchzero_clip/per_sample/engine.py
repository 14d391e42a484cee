"""Captures the layers of a model, and collects their per-sample gradients during a backward."""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree as pytree

from torchzero_clip.checks import boolean, instance, one_of
from torchzero_clip.compat import current_graph_task_id
from torchzero_clip.functional.foreach import wide_dtype
from torchzero_clip.per_sample.attachment import Attachment
from torchzero_clip.per_sample.captured_gradients import CapturedGradients
from torchzero_clip.per_sample.captured_layer import CapturedLayer
from torchzero_clip.per_sample.contributions import Contribution
from torchzero_clip.per_sample.hooks import Notice, accumulate
from torchzero_clip.per_sample.memory_budget import Memory, MemoryBudget


class Engine:
    """Captures the layers of a model, and collects their per-sample gradients.

    Args:
        model: The model.
        batch_first: Whether samples are in the first dimension of sequences.
        memory: With "low", layers with a cheaper form store no per-sample gradients.
        force_generic: Run every layer by the generic rule.
    """

    def __init__(
        self, model: nn.Module, *, batch_first: bool = True, memory: Memory = "auto", force_generic: bool = False
    ) -> None:
        instance("module", model, nn.Module)
        boolean("batch_first", batch_first)
        one_of("memory", memory, ("auto", "low"))
        self.batch_first = batch_first
        self.budget = MemoryBudget(memory)
        self._memory: Memory = memory
        self.batch_size: int | None = None
        self.inside = False
        self.enabled = True
        self.formed: Callable[[nn.Parameter, Tensor], None] | None = None
        self.forward_begins: Callable[[], None] | None = None
        self.forgotten: Callable[[], None] | None = None
        self.backward_ends: Callable[[], None] | None = None
        self._arrivals = CapturedGradients()
        self._ordinary: dict[int, tuple[Tensor, Tensor]] = {}
        self._running: set[int] = set()
        self._in_forward = False
        self._consumed = False
        self._only_input: weakref.ref[Tensor] | None = None
        self._attachment = Attachment(model, self, began=self._began, force_generic=force_generic)
        self._attachment.attach()
        self._attached = True
        ended: Any = Notice(self._forward_ended)
        self._end = model.register_forward_hook(ended, always_call=True)

    @property
    def listens(self) -> bool:
        """True if forwards are captured for per-sample gradients."""
        return self.enabled and self._attached

    @property
    def attached(self) -> bool:
        """True until `detach`."""
        return self._attached

    @property
    def params(self) -> dict[str, nn.Parameter]:
        """The trainable parameters, by name."""
        return self._attachment.params

    @property
    def waits(self) -> bool:
        """True if gradients have arrived that were not clipped yet."""
        return bool(self._arrivals)

    def detach(self) -> None:
        """Restore the model."""
        self._attachment.detach()
        self._end.remove()
        self._attached = False
        self.clear()
        if self.forgotten is not None:
            self.forgotten()

    def clear(self) -> None:
        """Drop all gradients that have arrived."""
        self._arrivals, self._ordinary, self._running, self._consumed = CapturedGradients(), {}, set(), False
        self.budget = MemoryBudget(self._memory)
        self._attachment.reset_counts()

    def is_only_input(self, tensor: Tensor) -> bool:
        """True if this tensor is the only input of the model, which must be the batch then."""
        known = None if self._only_input is None else self._only_input()
        return known is not None and (tensor is known or tensor._base is known)

    def called(self, layer: CapturedLayer) -> None:
        """Note that a layer runs.

        Raises:
            RuntimeError: If gradients have arrived that were not clipped yet.
        """
        if not _in_backward():
            self._forget_unfinished()
            if not self._in_forward:
                self.batch_size = self._only_input = None
                self._forget_shown()
                self._consumed = False
                if not self.waits:
                    self._attachment.refresh()
        if self.waits and not _in_backward():
            raise RuntimeError(
                "gradients of an earlier backward wait to be clipped: call clip_and_accumulate() after "
                "loss.backward(), or backward(losses) instead of it. discard() forgets them"
            )
        layer.calls += 1

    def add(self, layer: CapturedLayer, contributions: Sequence[Contribution]) -> None:
        """Store the contributions of one call of a layer."""
        if not self._attached:
            raise RuntimeError(f"the clipper was detached before the backward of {layer}; run the forward again")
        task = current_graph_task_id()
        if task not in self._running:
            self._running.add(task)
            engine: Any = torch.autograd.Variable
            engine._execution_engine.queue_callback(lambda: self._ended(task))
        if not self.enabled:
            for part in contributions:
                value = part.weighted_sum(torch.ones(part.batch_size))
                earlier = self._ordinary.get(id(part.param))
                self._ordinary[id(part.param)] = part.param, value if earlier is None else earlier[1] + value
            return
        for part in contributions:
            shared = self._attachment.is_shared(part.param)
            self._arrivals.keep(layer, part, is_shared=shared, formed=self.formed)

    def gathered(self, count: int | None) -> dict[int, tuple[Contribution, Tensor]]:
        """The contribution of each parameter, by id, and its squared norms.

        Args:
            count: The number of samples; None for that of the inputs of the model.

        Raises:
            ValueError: If a layer has another number of samples.
            RuntimeError: If the backward did not end.
        """
        if self._attachment.is_outdated():
            raise RuntimeError(
                "parameters of the module were frozen, freed or exchanged since its forward began: run it again"
            )
        if self._running:
            raise RuntimeError(
                "the backward raised before its end, so that some gradients are missing: "
                "run forward and backward again, or forget it with discard()"
            )
        self._arrivals.check_counts(self.batch_size if count is None else count, batch_first=self.batch_first)
        return self._arrivals.gathered()

    def consume(self) -> None:
        """Drop the gradients that have arrived. The same graph may run again, for ordinary gradients."""
        self._arrivals, self._consumed = CapturedGradients(), True

    def measured(self) -> list[tuple[nn.Parameter, Tensor]]:
        """The squared norms of the gradients that have arrived, by parameter."""
        gathered = self.gathered(None)
        return [(param, gathered[id(param)][1]) for param in self.params.values() if id(param) in gathered]

    def arrived_count(self) -> int:
        """The number of samples in the gradients that have arrived."""
        return self._arrivals.batch_size

    def norm_dtype(self) -> torch.dtype:
        """Float32, or float64 if a parameter is."""
        dtype = torch.float32
        for param in self.params.values():
            dtype = torch.promote_types(dtype, wide_dtype(param.dtype))
        return dtype

    def _ended(self, task: int) -> None:
        self._running.discard(task)
        if self._running:
            return
        sums, self._ordinary = self._ordinary, {}
        accumulate(list(sums.values()))
        if self.backward_ends is not None and self.waits:
            self.backward_ends()

    def _forward_ended(self, args: tuple[Any, ...], output: Any) -> None:
        self._in_forward = False

    def _forget_shown(self) -> None:
        """Drop gradients when a new forward starts, if their norms were shown after the backward.

        Raises:
            RuntimeError: If norms were read before that backward, which should have given ordinary gradients.
        """
        if self._consumed and self.waits:
            self.clear()
            raise RuntimeError(
                "a backward after get_clipping_coef() gave norms again, not gradients: call disable_hooks() before it, "
                "and enable_hooks() after it"
            )
        if self.backward_ends is not None and self.forward_begins is not None and self.waits:
            self.forward_begins()

    def _forget_unfinished(self) -> None:
        if self._running:
            self.clear()

    def _began(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.inside or _in_backward():
            return
        self._in_forward = True
        self._forget_unfinished()
        self._forget_shown()
        if self.waits:
            return
        if not self.enabled:
            if self.forward_begins is not None:
                self.forward_begins()
            return
        if DistributedDataParallel._active_ddp_module is not None:
            raise RuntimeError("module is run by DistributedDataParallel, which would not average its gradients")
        if self._attachment.refresh():
            raise RuntimeError(
                "the module itself got parameters that train, after its forward had been called: call it once more"
            )
        inputs = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor) and x.ndim]
        self.batch_size = _batch_size(inputs, 0 if self.batch_first else 1)
        self._only_input = weakref.ref(inputs[0]) if len(inputs) == 1 else None
        if self.forward_begins is not None:
            self.forward_begins()


def _in_backward() -> bool:
    """True during a backward, in which checkpointing repeats forwards."""
    return current_graph_task_id() != -1


def _batch_size(inputs: Sequence[Tensor], dim: int) -> int | None:
    """The size of all inputs in the batch dimension; None if they differ."""
    sizes = {x.shape[min(dim, x.ndim - 1)] for x in inputs}
    return sizes.pop() if len(sizes) == 1 else None
