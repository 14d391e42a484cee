"""A layer of the model whose calls are captured, and a captured call."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from contextlib import nullcontext
from types import MethodType
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from typing_extensions import override

from torchzero_clip.compat import get_interpreter_stack, never_compiled
from torchzero_clip.per_sample.broadcast_row import anchor, each, is_shared, shared
from torchzero_clip.per_sample.contributions import Contribution
from torchzero_clip.per_sample.memory_budget import MemoryBudget


class Recorder(Protocol):
    """The part of the engine that layers use."""

    budget: MemoryBudget
    batch_first: bool
    batch_size: int | None
    inside: bool

    @property
    def listens(self) -> bool: ...

    def is_only_input(self, tensor: Tensor) -> bool: ...

    def called(self, layer: "CapturedLayer") -> None: ...

    def clear(self) -> None: ...

    def add(self, layer: "CapturedLayer", contributions: Sequence[Contribution]) -> None: ...


class Rule(ABC):
    """Runs a kind of layer so that its gradients can be computed for each sample."""

    def refusal(self, module: nn.Module) -> str | None:
        """The reason why per-sample gradients of this layer would be wrong, and the way out; None if there is none."""
        return None

    @abstractmethod
    def run(self, layer: "CapturedLayer", args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the output of the layer. The graph must not contain its parameters."""


class CapturedLayer:
    """A layer in a model.

    Args:
        recorder: Gets the contributions of the layer.
        name: The name in the model.
        module: The layer.
        rule: Runs the layer.
        params: Its trainable parameters, by their names in the layer.
    """

    def __init__(
        self, recorder: Recorder, name: str, module: nn.Module, rule: Rule, params: dict[str, nn.Parameter]
    ) -> None:
        self.recorder = recorder
        self.name = name
        self.module = module
        self.rule = rule
        self.params = params
        self.calls = 0
        paths = [(name.rpartition("."), param) for name, param in params.items()]
        self._owners = [(module.get_submodule(path[0]), path[2], param) for path, param in paths]
        self.agreed: dict[Hashable, Any] = {}
        self.awaits: Hashable = None  # the key of `agreed` that a successful backward sets
        self.stores = False

    @override
    def __str__(self) -> str:
        return f"{self.name!r} ({type(self.module).__name__})" if self.name else type(self.module).__name__

    @property
    def lent(self) -> bool:
        """True while `torch.func.functional_call` replaces the parameters by other tensors."""
        return any(owner._parameters.get(key) is not param for owner, key, param in self._owners)

    def batch_dim(self, leading: int) -> int:
        """The batch dimension of a tensor that has ``leading`` dimensions before those of a single position."""
        if leading == 0:
            raise ValueError(f"the input of {self} has no batch dimension: per-sample gradients need one")
        return 0 if self.recorder.batch_first or leading == 1 else 1

    def expanded(self, tensor: Tensor, dim: int) -> tuple[Tensor, bool]:
        """The tensor with a row for each sample in ``dim``, and whether it had one row for all of them before."""
        count = self.recorder.batch_size
        if is_shared(tensor):
            return each(tensor), True
        if tensor.shape[dim] != 1 or count is None or count == 1:
            return tensor, False
        return tensor.expand(*tensor.shape[:dim], count, *tensor.shape[dim + 1 :]), True

    def refuse_row(self) -> None:
        """Raise for a gradient that is summed over samples."""
        self.recorder.clear()
        raise RuntimeError(
            f"{self} had one row of input for all samples, and its output was used for more than additions to, and "
            "products with, tensors of the batch: give each sample a row, with x.expand(batch_size, ...)"
        )


def _called(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


uncompiled: Callable[..., Any] = never_compiled(_called)  # calls a function outside of torch.compile


class CapturedForward:
    """Replaces the forward of one layer while it is captured."""

    def __init__(self, layer: CapturedLayer) -> None:
        self.layer = layer

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return uncompiled(self._run, args, kwargs)

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        layer, recorder = self.layer, self.layer.recorder
        transformed = bool(get_interpreter_stack())
        if not torch.is_grad_enabled() or not recorder.listens or recorder.inside or layer.lent or transformed:
            return type(layer.module).forward(layer.module, *args, **kwargs)
        recorder.called(layer)
        now = layer.module.__dict__.get("forward")
        if isinstance(now, CapturedForward) and now is not self:  # this call of the model has attached the layer anew
            return now(*args, **kwargs)
        if (reason := layer.rule.refusal(layer.module)) is not None:
            raise ValueError(f"{layer} cannot be clipped per sample: {reason}")
        return layer.rule.run(layer, args, kwargs)

    @override
    def __reduce__(self) -> tuple[Any, ...]:
        # copies of an attached model are ordinary models
        return _class_forward, (self.layer.module,)


def _class_forward(module: nn.Module) -> Callable[..., Any]:
    return MethodType(type(module).forward, module)


class Call:
    """One call of a layer, until the gradient of its output arrives.

    Args:
        layer: The layer.
        inputs: The tensors that the contributions need.
        contribute: Returns the contributions, from the gradient and the inputs.
    """

    def __init__(
        self,
        layer: CapturedLayer,
        inputs: Sequence[Tensor],
        contribute: Callable[..., Sequence[Contribution]],
    ) -> None:
        self.layer = layer
        self._inputs = inputs
        self._contribute = contribute

    def take_inputs(self) -> Sequence[Tensor]:
        """Return the inputs, and drop them here, because the graph stores them."""
        inputs, self._inputs = self._inputs, ()
        return [tensor.detach() for tensor in inputs]

    def arrived(self, grad: Tensor, saved: Callable[[], Sequence[Tensor]]) -> None:
        """Pass the contributions to the recorder, now that the gradient of the output is known."""
        if not wanted(self.layer):
            return
        recorder = self.layer.recorder
        try:
            inputs = saved()
        except RuntimeError as error:
            recorder.clear()
            if "modified by an inplace operation" not in str(error):
                raise
            raise RuntimeError(
                f"the input of {self.layer} was changed in place after the layer used it: its gradient would be wrong"
            ) from error
        kind = grad.device.type
        with torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext():
            recorder.add(self.layer, self._contribute(grad, *inputs))


def wanted(layer: CapturedLayer) -> bool:
    """True if the current backward gives gradients to parameters, which `torch.autograd.grad` of an input does not.

    Raises:
        RuntimeError: With ``create_graph=True``, because the parameters are not in the graph.
    """
    if torch.is_grad_enabled():
        layer.recorder.clear()
        raise RuntimeError(
            f"{layer} is in a backward with create_graph=True: gradients of gradients cannot be clipped per sample"
        )
    return torch.autograd._is_checkpoint_valid()


def watch(output: Tensor, call: Call, *, row: int | None = None) -> Tensor:
    """Return the output, whose gradient will arrive at the call.

    Args:
        output: The output of the layer.
        call: The call.
        row: The batch dimension, if the input had one row for all samples.
    """
    before = output if output.requires_grad else anchor()
    watched: Any = _Watched.apply(before, call, [output.detach()], before is output)
    return watched if row is None else shared(watched, lambda _: row, call.layer.refuse_row)


class _Watched(torch.autograd.Function):
    """Passes an output on and its gradient back, so that the gradient includes later hooks and changes in place."""

    @staticmethod
    @override
    def forward(ctx: FunctionCtx, before: Tensor, call: Call, output: list[Tensor], goes_on: bool) -> Tensor:  # pyright: ignore
        ctx.call, ctx.goes_on = call, goes_on  # pyright: ignore[reportAttributeAccessIssue]
        ctx.save_for_backward(*call.take_inputs())
        return output[0]  # passed in a list, it counts as created here, so later layers may change it in place

    @staticmethod
    @override
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None, None, None]:
        ctx.call.arrived(grads[0], lambda: ctx.saved_tensors)
        return grads[0] if ctx.goes_on else None, None, None, None
