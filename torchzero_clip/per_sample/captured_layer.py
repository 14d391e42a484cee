"""A layer of the model whose calls are captured."""

import weakref
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import partial
from types import MethodType
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from typing_extensions import override

from torchzero_clip.compat import get_interpreter_stack, never_compiled, without_autocast
from torchzero_clip.per_sample.arguments import counts_up, tensors_in
from torchzero_clip.per_sample.gradients.captured_gradients import Forward, GivenRows
from torchzero_clip.per_sample.gradients.contributions import Contribution, Dense
from torchzero_clip.per_sample.gradients.row_norms import wide
from torchzero_clip.per_sample.processes.agreement import Processes
from torchzero_clip.per_sample.processes.sharding import memory_of, slots, stands_for
from torchzero_clip.per_sample.samples.broadcast_row import BroadcastRow, is_row, row_of
from torchzero_clip.per_sample.samples.call import Call, Contribute, Reduce, Samples, rows_first
from torchzero_clip.per_sample.samples.nodes import IDENTITIES
from torchzero_clip.per_sample.samples.pattern import Place
from torchzero_clip.per_sample.samples.prover import Prover
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


class LayersModel(Protocol):
    """What a captured layer asks of the model that it is in."""

    model: nn.Module
    params: dict[str, nn.Parameter]  # the trainable ones, by name

    def params_of(self, module: nn.Module) -> dict[str, nn.Parameter]:
        """The trainable parameters of a module in the model, by their names in the module."""
        ...

    def watch_inside(self, layer: "CapturedLayer", function: Callable[..., None]) -> None:
        """Call a function before the forward of each module in a layer."""

    def whole_line(self, name: str, holds: object = None) -> str:
        """The way out of an error: the argument ``whole`` with a module around the named one. Empty without one."""
        ...


class LayersEngine(Protocol):
    """What a captured layer asks of the engine."""

    anchor: Tensor
    attached: bool
    batch_dim: int
    batch_first: bool
    enabled: bool
    forward: Forward
    given: GivenRows | None
    inside: bool  # while a layer runs its submodules by itself
    numbers: Counter[Hashable]  # how many calls of each kind this forward has made
    outputs: list[weakref.ref[Tensor]]
    pauses: int
    prover: Prover
    processes: Processes
    running: "CapturedLayer | None"
    may_share: bool  # whether inputs may be found to be shared by all samples

    @property
    def attachment(self) -> LayersModel:
        """The model, and what is attached to it."""
        ...

    @property
    def proofs_may_share(self) -> bool:
        """True if a proof may find that all samples share a row."""
        ...

    def enter(self, layer: "CapturedLayer") -> Rule | None:
        """Note that a layer runs. Return its rule; None if it is not captured."""
        ...

    def wants(self, layer: "CapturedLayer") -> bool:
        """True if the current backward gives gradients to parameters."""
        ...

    def add(self, layer: "CapturedLayer", forward: Forward, contributions: Iterable[Contribution]) -> None:
        """Store the contributions of one call of a layer."""

    def contributions(
        self, call: Call, grad: Tensor, inputs: tuple[Tensor, ...], before: tuple[Node | None, int]
    ) -> list[Contribution]:
        """The contributions of a call in an ordinary backward."""
        ...

    def clear(self) -> None:
        """Drop all gradients that have arrived."""


class CapturedLayer:
    """A layer in a model, with its trainable parameters by their names in the layer. It replaces the forward."""

    def __init__(
        self, engine: LayersEngine, name: str, module: nn.Module, rule: Rule, params: dict[str, nn.Parameter]
    ) -> None:
        self.engine = engine
        self.name = name
        self.module = module
        self.rule = rule
        self.params = params
        self._slots = [(held, key, params[name]) for name, held, key in slots(module, params)]
        # None if the rule refuses nothing, which saves a call in each forward
        self._refusal = None if type(rule).refusal is Rule.refusal else rule.refusal
        self.known: dict[Hashable, Any] = {}
        """What rules have learnt about the layer in earlier calls."""
        self._shared: dict[tuple[int, int], Tensor | None] = {}
        """Inputs that all samples share, by their numbers of dimensions. None for one that was found to be of data."""
        self._shared_rows: set[int] = set()
        """The numbers of dimensions of inputs with one row that all samples share."""
        self.written: dict[int, tuple[Tensor, Tensor]] | None = None
        """Tensors into which the module has written rows, with rows in their place, by id; None outside of it."""
        self.misuse: tuple[str, bool] | None = None
        """The last function that got a row and cannot run for each sample, and whether the layer called it."""

    @never_compiled
    def __call__(self, *args: object, **kwargs: object) -> object:
        """The forward of the module while it is captured."""
        module, engine = self.module, self.engine
        now = module.__dict__.get("forward")
        if isinstance(now, CapturedLayer) and now is not self:  # this call of the model has attached the layer anew
            return now(*args, **kwargs)
        # what runs under `torch.func`, with lent parameters or in a transformation, is the same as without a clipper
        used = [(held.get(key), param) for held, key, param in self._slots]
        lent = any(value is not param and not stands_for(value, param) for value, param in used)
        is_ordinary = lent or not torch.is_grad_enabled() or get_interpreter_stack()
        if is_ordinary or (rule := engine.enter(self)) is None:
            return type(module).forward(module, *args, **kwargs)
        now = module.__dict__.get("forward")
        if isinstance(now, CapturedLayer) and now is not self:  # without a call of the model, to enter attaches anew
            return now(*args, **kwargs)
        # settings may have changed since the layer was captured
        if self._refusal is not None and (reason := self._refusal(module)) is not None:
            raise ValueError(f"{self} cannot be clipped per sample: {reason}")
        around, engine.running = engine.running, self
        try:
            if self.params and any(isinstance(x, Tensor) and x.is_nested for x in (*args, *kwargs.values())):
                way_out = "pad it, with x.to_padded_tensor(0.0), and mask the loss"
                raise ValueError(f"{self} got a nested tensor: {way_out}")
            output = rule.run(self, *args, **kwargs)
            if type(output) is Tensor:
                engine.outputs.append(weakref.ref(output))
            else:  # such as the output and the states of a recurrent layer
                engine.outputs += [weakref.ref(x) for x in tensors_in(output) if type(x) is Tensor]
            return output
        finally:
            engine.running = around

    @override
    def __reduce__(self) -> tuple[object, ...]:
        # copies of an attached model are ordinary models
        return class_forward, (self.module,)

    @override
    def __str__(self) -> str:
        return described(self.name, self.module)

    @property
    def line(self) -> str:
        """A way out of an error: the argument that takes a module around the layer whole. Empty if there is none."""
        return self.engine.attachment.whole_line(self.name)

    @property
    def way_out(self) -> str:
        """The end of an error after another way out."""
        return f". Or {self.line}" if self.line else ""

    @property
    def values(self) -> list[tuple[nn.Parameter, Tensor]]:
        """The parameters, with the tensors that the module uses now: others while `fully_shard` shows them in full."""
        return [(param, held[key]) for held, key, param in self._slots]

    def has(self, name: str) -> bool:
        """True if a parameter with this name in the model is in the layer."""
        return not self.name or name.startswith(f"{self.name}.")

    def count_in(self, values: Iterable[object]) -> int | None:
        """The number of samples: that of the batch, or that of the first tensor if it is not known."""
        # it is not known in a layer that is called by itself, and where arguments have several sizes
        known, dim = self.engine.forward.batch_size, self.engine.batch_dim
        if known is not None:
            return known
        return next((x.shape[dim] for x in values if isinstance(x, Tensor) and x.ndim > dim), None)

    def samples(self, input: Tensor, leading: int) -> Samples:
        """Find the samples in an input that has ``leading`` dimensions before those of a single position, or raise."""
        if leading == 0:
            raise ValueError(f"the input of {self} has no batch dimension: per-sample gradients need one{self.way_out}")
        dim = 0 if leading == 1 else self.engine.batch_dim  # without positions, samples are first in any case
        forward = self.engine.forward
        count = forward.batch_size
        if count == 1 and input.requires_grad and not input.is_contiguous():
            input.register_hook(partial(with_strides, input.stride()))
        if isinstance(input, BroadcastRow) and is_row(input):
            each, had_dim = input.samples(dim)
            return Samples(each, leading + (not had_dim), had_dim, dim)
        if count is not None and count > 1 and input.shape[dim] == 1 and self._is_shared(input):
            each = input.expand(*input.shape[:dim], count, *input.shape[dim + 1 :])
            return Samples(each, leading, True, dim)
        if (
            (input.ndim, leading) in self._shared
            and count is not None
            and count > 1
            and self._is_still_shared(input, leading)
        ):
            return Samples(input.expand(count, *input.shape).movedim(0, dim), leading + 1, False, dim)
        is_argument = input.shape[dim] == count and forward.given is None and forward.is_argument(input)
        return Samples(input, leading, dim=dim, is_argument=is_argument)

    def _is_still_shared(self, input: Tensor, leading: int) -> bool:
        """True for an input with the values of an earlier step's input that all samples share."""
        earlier = self._shared.get((input.ndim, leading))
        if earlier is None or input.requires_grad:
            return False
        common = tuple(slice(min(sizes)) for sizes in zip(earlier.shape, input.shape, strict=True))
        is_same = earlier.dtype == input.dtype and input.numel() > 1 and torch.equal(earlier[common], input[common])
        if is_same and not memory_of((input,)) & self.engine.forward.memory:
            return True  # longer or shorter, also if it has as many rows as there are samples
        if leading and not self._may_be_shared(input, self.engine.forward):
            return False
        if earlier.shape == input.shape:  # of data
            self._shared[input.ndim, leading] = None
            return False
        return leading > 0  # what the layer uses itself is known by its values alone

    def is_table(self, input: Tensor, *, learned: bool = False) -> bool:
        """True for a tensor that all samples were found to share, or whose number of rows is another than theirs."""
        if learned:
            return bool(self._shared) and self._is_still_shared(input, 0)
        return self._may_be_shared(input, self.engine.forward)

    def share_table(self, input: Tensor, forward: Forward) -> bool:
        """Note that all samples share a tensor that the layer uses itself, unless it is one of samples."""
        if input.requires_grad or forward.direct or not self.engine.may_share or memory_of((input,)) & forward.memory:
            return False
        if self._shared.get((input.ndim, 0), input) is None:
            return False
        self._shared[input.ndim, 0] = input.clone()
        return True

    def _may_be_shared(self, input: Tensor, forward: Forward) -> bool:
        """True for an input that is not known to depend on samples."""
        if input.requires_grad or forward.direct or forward.given is not None or not self.engine.may_share:
            return False
        memory, size = memory_of((input,)), input.shape[min(self.engine.batch_dim, input.ndim - 1)]
        if not forward.batch_size or memory & forward.memory:
            return False
        # data of the batch may be neither an argument nor have a graph, but have its size
        is_like_data = not size % forward.batch_size and (input.is_floating_point() or input.ndim > 1)
        return not is_like_data or bool(memory & memory_of(self.engine.attachment.model.buffers()))

    def _is_shared(self, input: Tensor) -> bool:
        """True for an input with one row, if all samples share this row."""
        if not self._may_be_of_all(input, self.engine.forward):
            return False
        if input.ndim in self._shared_rows or not self.engine.proofs_may_share:
            return True
        # it may also be a row of data, such as the only one for an expert, which the proof finds out
        if not memory_of((input,)) & memory_of(self.engine.attachment.model.buffers()) and not counts_up(
            input.flatten()
        ):
            return False
        return self._note_row(input)

    def _may_be_of_all(self, input: Tensor, forward: Forward) -> bool:
        """True for an input with one row that is not known to depend on samples."""
        if input.requires_grad or forward.direct or input.is_sparse:
            return False
        return not memory_of((input,)) & forward.memory_of_values

    def _note_row(self, input: Tensor) -> bool:
        self._shared_rows.add(input.ndim)
        return True

    def unknown_rows(self, why: str, *, how: str = "") -> ValueError:
        """The error for rows whose samples are not known."""
        how = how or (
            "Use backward(losses), or say which sample each row belongs to, with `with clipper.rows(sample_of_row, "
            "batch_size=B):` around the forward"
        )
        return ValueError(f"{self} got rows whose samples are not known: {why}. {how}{self.way_out}")

    def watch_params(
        self,
        output: Tensor,
        samples: Samples,
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
        samples: Samples | None = None,
        *,
        kind: Hashable = (),
        shape: Sequence[int] = (),
        reduce: Reduce | None = None,
        copies: bool = False,
        on_shared: Callable[[], bool] | None = None,
    ) -> Tensor:
        """Return the output. Its gradient and the inputs will be passed to ``contribute``, which returns contributions.

        ``samples`` is the input of the layer. Without it, the output has rows of items of a ``shape``. The other
        arguments are those of `Call`.
        """
        before, engine = output if output.requires_grad else None, self.engine
        declared, leading = None, 1
        if samples is not None:
            if on_shared is None and not (copies or samples.tensor.requires_grad) and samples.had_dim is None:
                on_shared = partial(self._note_shared, samples, engine.forward)
            kind, leading = (kind, samples.leading, samples.had_dim), samples.leading
            shape, declared = samples.tensor.shape[:leading], samples.dim if samples.is_argument else None
        kind = self.name, kind
        engine.numbers[kind] += 1
        call = Call(
            self,
            engine.forward,
            contribute,
            shape,
            kind=(engine.numbers[kind], kind),
            leading=leading,
            reduce=reduce,
            copies=copies,
            declared=declared,
            on_shared=on_shared,
        )
        lasting = self.lasting(inputs) if engine.processes.sharded else inputs
        watched: Any = _Watched.apply(engine.anchor, before, [output.detach()], lasting, self, call)
        if samples is None or samples.had_dim is None:
            return watched
        each = watched.movedim(samples.dim, 0)
        return row_of(self, each.unsqueeze(samples.dim + 1) if samples.had_dim else each)

    def _note_shared(self, samples: Samples, forward: Forward) -> bool:
        """Note that all samples share an input, unless it is one of samples."""
        x, key = samples.tensor, (samples.tensor.ndim, samples.leading)
        if x.shape[samples.dim] == 1 and forward.batch_size is not None:
            return self._may_be_of_all(x, forward) and self._note_row(x)
        if self._shared.get(key, x) is None or not self._may_be_shared(x, forward):
            return False
        self._shared[key] = x.clone()
        return True

    def lasting(self, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        """Inputs to keep until the end of the step: copies of those in a parameter that `fully_shard` frees before."""
        shown = memory_of(self.engine.attachment.model.parameters())
        return [x.clone() if memory_of((x,)) & shown else x for x in inputs]

    def refuse_row(self) -> None:
        """Raise for a gradient that is summed over samples."""
        self.engine.clear()
        name, inside = self.misuse or ("a function such as a torch.autograd.Function", self.rule.runs_layers)
        if inside:
            kind = class_in_code(self.engine.attachment.model, type(self.module))
            raise RuntimeError(
                f"{self} uses a parameter in {name}, which cannot run for each sample alone. Name the layer in "
                f"whole=({kind},){self.way_out}"
            )
        raise RuntimeError(
            f"{self} returned one row for all samples, and {name} cannot tell samples apart: give each sample its own "
            f"row, with x.expand(batch_size, ...){self.way_out}"
        )


def is_watched(node: object) -> bool:
    """True for a node that `CapturedLayer.watch` has put into the graph."""
    backward: Any = _Watched
    return isinstance(node, backward._backward_cls)


def class_forward(module: nn.Module) -> Callable[..., object]:
    """The forward of the class of a module, bound to the module."""
    return MethodType(type(module).forward, module)


class _Watched(torch.autograd.Function):
    """Passes an output on and its gradient back, so that the gradient includes later hooks and changes in place."""

    @staticmethod
    @override
    def forward(
        ctx: Any,
        anchor: Tensor,
        before: Tensor | None,
        output: list[Tensor],
        inputs: Sequence[Tensor],
        layer: CapturedLayer,
        call: Call,
    ) -> Tensor:
        ctx.layer, ctx.of, ctx.call, ctx.goes_on = layer, layer.engine.forward, call, before is not None
        ctx.save_for_backward(*(x.detach() for x in inputs))  # which would hold their graph
        return output[0]  # passed in a list, it counts as created here, so later layers may change it in place

    @staticmethod
    @override
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        layer, grad, call = ctx.layer, grads[0], ctx.call
        engine: LayersEngine = layer.engine
        proof = engine.prover.proof
        if proof is not None and proof.is_further:
            proof.saw(call, grad)
        elif engine.wants(layer):
            try:
                inputs = ctx.saved_tensors
            except RuntimeError as error:
                engine.clear()
                if "modified by an inplace operation" not in str(error):
                    raise
                raise RuntimeError(
                    f"the input of {layer} was changed in place after the layer used it: its gradient would be wrong"
                ) from error
            before = ctx.next_functions[1] if ctx.goes_on else (None, 0)
            with without_autocast(grad):
                engine.add(layer, ctx.of, engine.contributions(call, grad, inputs, before))
        # torch takes no gradient for a None among the inputs
        return None, grad if ctx.goes_on else None, None, None, None, None


IDENTITIES.add(_Watched)


def with_strides(strides: tuple[int, ...], grad: Tensor) -> Tensor:
    """The gradient of one image, in the layout of the image.

    `native_batch_norm_backward` of torch 2.13, also that of a normalization without parameters, misreads other strides.
    """
    return grad if 0 in strides else grad.new_empty_strided(grad.shape, strides).copy_(grad)


def described(name: str, module: nn.Module) -> str:
    """A module in a message: its name in the model, if it has one, and its class."""
    return f"{name!r} ({type(module).__name__})" if name else type(module).__name__


def trainable(module: nn.Module) -> dict[str, nn.Parameter]:
    """The trainable parameters of a module, by name."""
    return {name: param for name, param in module.named_parameters() if param.requires_grad}
