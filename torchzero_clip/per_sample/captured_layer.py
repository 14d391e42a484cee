"""A layer of the model whose calls are captured, and a captured call."""

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from contextlib import nullcontext
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from typing_extensions import override

from torchzero_clip.compat import get_interpreter_stack, never_compiled
from torchzero_clip.per_sample.broadcast_row import BroadcastRow, is_row, row_of
from torchzero_clip.per_sample.contributions import Contribution
from torchzero_clip.per_sample.recording import Recording


class Rule(ABC):
    """Runs a kind of layer so that its gradients can be computed for each sample."""

    covers_submodules = False
    """Whether submodules run as parts of the layer, without rules of their own."""

    def refusal(self, module: nn.Module) -> str | None:
        """The reason why per-sample gradients of this layer would be wrong, and the way out; None if there is none."""
        return None

    @abstractmethod
    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Return the output of a layer: the first argument is the `CapturedLayer`, then come those of the call.

        The graph must not contain the parameters of the layer.
        """


class Samples(NamedTuple):
    """The input of a layer with its samples.

    Args:
        tensor: The input, with a row for each sample.
        dim: The batch dimension.
        kept: For an input of one row for all samples, whether that had the batch dimension; else None.
    """

    tensor: Tensor
    dim: int
    kept: bool | None = None


class CapturedLayer:
    """A layer in a model.

    Args:
        recording: Gets the contributions of the layer.
        name: The name in the model.
        module: The layer.
        rule: Runs the layer.
        params: Its trainable parameters, by their names in the layer.
    """

    def __init__(
        self, recording: Recording, name: str, module: nn.Module, rule: Rule, params: dict[str, nn.Parameter]
    ) -> None:
        self.recording = recording
        self.name = name
        self.module = module
        self.rule = rule
        self.params = params
        paths = [(name.rpartition("."), param) for name, param in params.items()]
        self._owners = [(module.get_submodule(path[0]), path[2], param) for path, param in paths]
        self.known: dict[Hashable, Any] = {}
        """What rules have learnt about the layer in earlier calls."""

    @override
    def __str__(self) -> str:
        return f"{self.name!r} ({type(self.module).__name__})" if self.name else type(self.module).__name__

    @property
    def way_out(self) -> str:
        """The end of an error: the line that takes a module around the layer whole."""
        return self.recording.whole_line(self.name)

    @property
    def lent(self) -> bool:
        """True while `torch.func.functional_call` replaces the parameters by other tensors."""
        return any(owner._parameters.get(key) is not param for owner, key, param in self._owners)

    def note(self, *decision: Hashable) -> None:
        """Note where the samples are in this call."""
        self.recording.mixing.note((self.name, *decision))

    def samples(self, input: Tensor, leading: int) -> Samples:
        """Find the samples in an input that has ``leading`` dimensions before those of a single position.

        Raises:
            ValueError: If it has no batch dimension.
        """
        recording = self.recording
        if leading == 0:
            raise ValueError(f"the input of {self} has no batch dimension: per-sample gradients need one{self.way_out}")
        dim = 0 if leading == 1 else recording.batch_dim
        if isinstance(input, BroadcastRow) and is_row(input):
            found = Samples(*input.samples(dim))
        else:
            count = recording.forward.batch_size
            found = Samples(input, dim)
            if input.shape[dim] == 1 and count is not None and count != 1:
                found = Samples(input.expand(*input.shape[:dim], count, *input.shape[dim + 1 :]), dim, True)
        self.note(found.dim, found.kept)
        return found

    def refuse_row(self) -> None:
        """Raise for a gradient that is summed over samples."""
        self.recording.clear()
        raise RuntimeError(
            f"{self} had one row of input for all samples, and its output was used for more than operations with other "
            "such rows, and additions to, and products with, tensors of the batch: give each sample a row, with "
            f"x.expand(batch_size, ...){self.way_out}"
        )


class CapturedForward:
    """Replaces the forward of one layer while it is captured."""

    def __init__(self, layer: CapturedLayer) -> None:
        self.layer = layer

    @never_compiled
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        layer, recording = self.layer, self.layer.recording
        if not torch.is_grad_enabled() or not recording.captures or layer.lent or get_interpreter_stack():
            return type(layer.module).forward(layer.module, *args, **kwargs)
        recording.enter(layer)
        now = layer.module.__dict__.get("forward")
        if isinstance(now, CapturedForward) and now is not self:  # this call of the model has attached the layer anew
            return now(*args, **kwargs)
        if (reason := layer.rule.refusal(layer.module)) is not None:
            raise ValueError(f"{layer} cannot be clipped per sample: {reason}")
        if any(isinstance(x, Tensor) and x.is_nested for x in (*args, *kwargs.values())):
            raise ValueError(f"{layer} got a nested tensor: pad it, with x.to_padded_tensor(0.0), and mask the loss")
        around, recording.running = recording.running, layer
        try:
            output = layer.rule.run(layer, *args, **kwargs)
            if type(output) is Tensor:
                recording.outputs.append(weakref.ref(output))
            return output
        finally:
            recording.running = around

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
        self, layer: CapturedLayer, inputs: Sequence[Tensor], contribute: Callable[..., Sequence[Contribution]]
    ) -> None:
        self.layer = layer
        self.forward = layer.recording.forward
        self.inputs = inputs
        self._contribute = contribute

    def arrived(self, grad: Tensor, saved: Callable[[], Sequence[Tensor]]) -> None:
        """Pass the contributions on, now that the gradient of the output is known."""
        recording = self.layer.recording
        if not recording.wants(self.layer):
            return
        try:
            inputs = saved()
        except RuntimeError as error:
            recording.clear()
            if "modified by an inplace operation" not in str(error):
                raise
            raise RuntimeError(
                f"the input of {self.layer} was changed in place after the layer used it: its gradient would be wrong"
            ) from error
        kind = grad.device.type
        with torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext():
            recording.add(self.layer, self.forward, self._contribute(grad, *inputs))


def watch(output: Tensor, call: Call, samples: Samples | None = None) -> Tensor:
    """Return the output, whose gradient will arrive at the call.

    Args:
        output: The output of the layer.
        call: The call.
        samples: The input; None if it is known to have a row for each sample.
    """
    before = output if output.requires_grad else None
    watched: Any = _Watched.apply(call.layer.recording.anchor, before, call, [output.detach()])
    if samples is None or samples.kept is None:
        return watched
    each, layer = watched.movedim(samples.dim, 0), call.layer
    each = each.unsqueeze(samples.dim + 1) if samples.kept else each
    return row_of(each, layer.recording.batch_dim, refuse=layer.refuse_row, note=layer.note)


class _Watched(torch.autograd.Function):
    """Passes an output on and its gradient back, so that the gradient includes later hooks and changes in place."""

    @staticmethod
    @override
    def forward(ctx: FunctionCtx, anchor: Tensor, before: Tensor | None, call: Call, output: list[Tensor]) -> Tensor:  # pyright: ignore
        ctx.call, ctx.goes_on = call, before is not None  # pyright: ignore[reportAttributeAccessIssue]
        ctx.save_for_backward(*(x.detach() for x in call.inputs))
        call.inputs = ()  # the graph has them
        return output[0]  # passed in a list, it counts as created here, so later layers may change it in place

    @staticmethod
    @override
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor | None, None, None]:
        ctx.call.arrived(grads[0], lambda: ctx.saved_tensors)
        return None, grads[0] if ctx.goes_on else None, None, None
