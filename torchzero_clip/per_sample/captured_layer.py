"""A layer of the model whose calls are captured."""

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from torchzero_clip.compat import get_interpreter_stack, never_compiled, without_autocast
from torchzero_clip.per_sample.arguments import plain_tensors
from torchzero_clip.per_sample.broadcast_row import BroadcastRow, row_of
from torchzero_clip.per_sample.capture import Capture
from torchzero_clip.per_sample.gradients.contributions import Contribution, Dense
from torchzero_clip.per_sample.gradients.row_norms import wide
from torchzero_clip.per_sample.processes.sharding import slots, stands_for, storages_of
from torchzero_clip.per_sample.rows_layer import RowsLayer
from torchzero_clip.per_sample.samples.call import Call, Contribute, LayerInput, Reduce, rows_first
from torchzero_clip.per_sample.samples.pattern import Place
from torchzero_clip.per_sample.whole import class_in_code


class Rule(ABC):
    """Runs a kind of layer so that its gradients can be computed for each sample."""

    covers_submodules = False
    """Whether submodules run as parts of the layer, without rules of their own."""

    runs_layers = False
    """Whether submodules run as layers that have rules of their own."""

    takes: Sequence[str] = ("weight", "bias")
    """The names of parameters that it knows. A layer with others runs as any module with parameters of its own."""

    runs_empty = False
    """Whether the rule also runs empty batches. For other rules, `EmptyRule` runs the forward of the module itself."""

    def refusal(self, module: nn.Module) -> str | None:
        """The reason why per-sample gradients of this layer would be wrong, and the way out; None if there is none."""
        return None

    @abstractmethod
    def run(self, *args: Any, **kwargs: Any) -> object:
        """Return the output of a layer: the first argument is the `CapturedLayer`, then come those of the call.

        The graph must not contain the parameters of the layer.
        """


class CapturedLayer(RowsLayer):
    """A layer in a model, with its trainable parameters by their names in the layer. It replaces the forward.

    The ``rule`` runs it, and ``empty`` runs it on empty batches, unless the rule does.
    """

    def __init__(
        self,
        capture: Capture,
        name: str,
        module: nn.Module,
        rule: Rule,
        params: dict[str, nn.Parameter],
        empty: Rule,
    ) -> None:
        super().__init__(capture, name, module)
        self.rule, self.params = rule, params
        self._empty = rule if rule.runs_empty else empty
        self._slots = [(held, key, params[name]) for name, held, key in slots(module, params)]
        # None if the rule refuses nothing, which saves a call in each forward
        self._refusal = None if type(rule).refusal is Rule.refusal else rule.refusal

    @never_compiled
    def __call__(self, *args: object, **kwargs: object) -> object:
        """The forward of the module while it is captured."""
        module, capture = self.module, self.capture
        now = module.__dict__.get("forward")
        if isinstance(now, CapturedLayer) and now is not self:
            # a hook of this very call has captured the model again, after torch had read this forward
            return now(*args, **kwargs)
        # what runs under `torch.func`, with lent parameters or in a transformation, is the same as without a clipper
        used = [(held.get(key), param) for held, key, param in self._slots]
        lent = any(value is not param and not stands_for(value, param) for value, param in used)
        is_ordinary = lent or not torch.is_grad_enabled() or get_interpreter_stack()
        if is_ordinary or not capture.layer_starts(self):
            return type(module).forward(module, *args, **kwargs)
        now = module.__dict__.get("forward")
        if isinstance(now, CapturedLayer) and now is not self:
            # outside of the model's forward, `layer_starts` may have captured the model again
            return now(*args, **kwargs)
        # settings may have changed since the layer was captured
        if self._refusal is not None and (reason := self._refusal(module)) is not None:
            raise ValueError(f"{self} cannot be clipped per sample: {reason}")
        rule = self._empty if capture.forward.batch_size == 0 else self.rule
        around, capture.running = capture.running, self
        try:
            if self.params and any(isinstance(x, Tensor) and x.is_nested for x in (*args, *kwargs.values())):
                way_out = "pad it, with x.to_padded_tensor(0.0), and mask the loss"
                raise ValueError(f"{self} got a nested tensor: {way_out}")
            output = rule.run(self, *args, **kwargs)
            if type(output) is Tensor:  # `plain_tensors` takes longer
                capture.outputs.append(weakref.ref(output))
            else:  # such as the output and the states of a recurrent layer
                capture.outputs += map(weakref.ref, plain_tensors(output))
            return output
        finally:
            capture.running = around

    @override
    def __reduce__(self) -> tuple[object, ...]:
        # copies of an attached model are ordinary models
        return class_forward, (self.module,)

    @property
    def values(self) -> list[tuple[nn.Parameter, Tensor]]:
        """The parameters, with the tensors that the module uses now: others while `fully_shard` shows them in full."""
        return [(param, held[key]) for held, key, param in self._slots]

    def has(self, name: str) -> bool:
        """True if a parameter with this name in the model is in the layer."""
        return not self.name or name.startswith(f"{self.name}.")

    def count_in(self, values: Iterable[object]) -> int | None:
        """The number of samples: that of the batch, or that of the first tensor if it is not known."""
        # it is not known for layers outside of the model's forward, and where arguments have several sizes
        known, dim = self.capture.forward.batch_size, self.capture.batch_dim
        if known is not None:
            return known
        return next((x.shape[dim] for x in values if isinstance(x, Tensor) and x.ndim > dim), None)

    def find_samples(self, input: Tensor, leading: int, *, takes_positions: bool = False) -> LayerInput:
        """Find the samples in an input that has ``leading`` dimensions before those of a single position, or raise.

        ``takes_positions`` says whether the function may get any number of such dimensions, as that of a linear layer.
        """
        if leading == 0:
            raise ValueError(f"the input of {self} has no batch dimension: per-sample gradients need one{self.way_out}")
        dim = 0 if leading == 1 else self.capture.batch_dim  # without positions, samples are first in any case
        forward, shared = self.capture.forward, self.shared
        count = forward.batch_size
        if isinstance(input, BroadcastRow):
            each, had_dim = input.as_input(dim)
            if not had_dim:
                return self._from_copies(each, leading, dim, takes_positions)
            return LayerInput(each, leading, dim, is_shared=True, had_dim=True, takes_positions=takes_positions)
        if count == 1 and input.requires_grad and not input.is_contiguous():  # only then may strides be misread
            input.register_hook(partial(with_strides, input.stride()))
        if input.shape[dim] == count and forward.declared_rows is None and forward.is_argument(input):
            return LayerInput(input, leading, dim, is_argument=True, takes_positions=takes_positions)
        if count is not None and count > 1 and not input.requires_grad:  # else, it is an output of layers
            if input.shape[dim] == 1 and shared.is_row(input):
                each = input.expand(*input.shape[:dim], count, *input.shape[dim + 1 :])
                return LayerInput(each, leading, dim, is_shared=True, had_dim=True, takes_positions=takes_positions)
            if shared.is_known(input, leading):
                return self._from_copies(
                    input.expand(count, *input.shape).movedim(0, dim), leading, dim, takes_positions
                )
        return LayerInput(input, leading, dim, takes_positions=takes_positions)

    def _from_copies(self, each: Tensor, leading: int, dim: int, takes_positions: bool) -> LayerInput:
        """The input of a layer from copies of a shared one: one after the other, if the layer takes no positions."""
        if takes_positions:
            return LayerInput(each, leading + 1, dim, is_shared=True, takes_positions=True)
        return LayerInput(each.flatten(0, 1), leading, dim, is_shared=True, rows=each.shape[1])

    def watch_params(
        self,
        output: Tensor,
        samples: LayerInput,
        params: Mapping[str, nn.Parameter],
        *,
        weight: Callable[[Tensor, Tensor], Contribution],
        bias: Callable[[Tensor], Tensor],
    ) -> Tensor:
        """Watch the output of a function of a weight and a bias, of which ``params`` has those that train.

        ``weight`` returns its contribution, from the input and the gradient of the output; ``bias`` its gradients for
        each sample. Both get tensors with the samples first, in one dtype, which is float32 or wider.
        """

        def contribute(where: Place | Tensor, *tensors: Tensor) -> list[Contribution]:
            grad, *inputs = rows_first(where, *wide(*tensors))
            found = [weight(x, grad) for x in inputs]
            return [*found, Dense(params["bias"], bias(grad))] if "bias" in params else found

        return self.watch(output, [samples.tensor] if "weight" in params else [], contribute, samples)

    def watch(
        self,
        output: Tensor,
        inputs: Sequence[Tensor],
        contribute: Contribute,
        samples: LayerInput | None = None,
        *,
        kind: Hashable = (),
        shape: Sequence[int] = (),
        reduce: Reduce | None = None,
        copies: bool = False,
        on_shared: Callable[[], bool] | None = None,
        beside: Iterable[Tensor] | None = None,
    ) -> Tensor:
        """Return the output. Its gradient and the inputs will be passed to ``contribute``, which returns contributions.

        ``samples`` is the input of the layer. Without it, the output has rows of items of a ``shape``. The other
        arguments are those of `Call`.
        """
        before, capture = output if output.requires_grad else None, self.capture
        if samples is not None:
            if on_shared is None and not (copies or samples.tensor.requires_grad or samples.is_shared):
                on_shared = partial(self.shared.note, samples, capture.forward)
            kind = kind, samples.leading, samples.is_shared, samples.had_dim
        kind = self.name, kind
        capture.calls_by_kind[kind] += 1
        call = Call(
            self,
            capture.forward,
            contribute,
            samples,
            kind=(capture.calls_by_kind[kind], kind),
            shape=shape,
            reduce=reduce,
            copies=copies,
            on_shared=on_shared,
            beside=beside,
        )
        lasting = self.lasting(inputs) if capture.processes.sharded else inputs
        watched: Any = _Watched.apply(capture.anchor, before, [output.detach()], lasting, capture, call)
        if samples is None or not samples.is_shared:
            return watched
        if samples.rows is not None:
            return row_of(self, watched.unflatten(0, (-1, samples.rows)))
        each = watched.movedim(samples.dim, 0)
        return row_of(self, each.unsqueeze(samples.dim + 1) if samples.had_dim else each)

    def lasting(self, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        """Inputs to keep until the end of the step: copies of those in a parameter that `fully_shard` frees before."""
        shown = storages_of(self.capture.model.parameters())
        return [x.clone() if storages_of((x,)) & shown else x for x in inputs]

    @override
    def refuse_row(self) -> None:
        self.capture.clear()
        name, inside = self.misuse or ("a function such as a torch.autograd.Function", self.rule.runs_layers)
        if inside:
            kind = class_in_code(self.capture.model, type(self.module))
            raise RuntimeError(
                f"{self} uses a parameter in {name}, which cannot run for each sample alone. Name the layer in "
                f"whole=({kind},){self.way_out}"
            )
        raise RuntimeError(
            f"{self} returned one row for all samples, and {name} cannot tell samples apart: give each sample its own "
            f"row, with x.expand(batch_size, ...){self.way_out}"
        )


def class_forward(module: nn.Module) -> Callable[..., object]:
    """The forward of the class of a module, bound to the module."""
    return MethodType(type(module).forward, module)


class _Watched(torch.autograd.Function):
    """Passes an output on and its gradient back, so that the gradient includes later hooks and changes in place."""

    keeps_rows = True  # it moves no rows: see `graph_nodes`

    @staticmethod
    @override
    def forward(
        ctx: Any,
        anchor: Tensor,
        before: Tensor | None,
        output: list[Tensor],
        inputs: Sequence[Tensor],
        capture: Capture,
        call: Call,
    ) -> Tensor:
        ctx.capture, ctx.call, ctx.goes_on = capture, call, before is not None
        ctx.save_for_backward(*(x.detach() for x in inputs))  # which would hold their graph
        return output[0]  # passed in a list, it counts as created here, so later layers may change it in place

    @staticmethod
    @override
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad: Tensor = grads[0]
        call: Call = ctx.call
        capture: Capture = ctx.capture
        proof = capture.prover.proof
        if proof is not None and proof.is_further:
            proof.saw(call, grad)
        elif capture.backward_is_for_params(call.layer):
            try:
                inputs = ctx.saved_tensors
            except RuntimeError as error:
                capture.clear()
                # torch raises this error for a graph that was freed, too, and only its text tells them apart
                if "modified by an inplace operation" not in str(error):
                    raise
                raise RuntimeError(
                    f"the input of {call.layer} was changed in place after the layer used it: its gradient would be "
                    "wrong"
                ) from error
            before = ctx.next_functions[1] if ctx.goes_on else (None, 0)  # the edge of ``before``, the second argument
            with without_autocast(grad):
                capture.add(call, capture.contributions(call, grad, inputs, before))
        # torch takes no gradient for a None among the inputs
        return None, grad if ctx.goes_on else None, None, None, None, None


def with_strides(strides: tuple[int, ...], grad: Tensor) -> Tensor:
    """The gradient of one image, in the layout of the image.

    `native_batch_norm_backward` of torch 2.13, also that of a normalization without parameters, misreads other strides.
    """
    # an expanded image has strides of 0, with which a gradient cannot be written
    return grad if 0 in strides else grad.new_empty_strided(grad.shape, strides).copy_(grad)
