"""A layer of the model whose calls are captured."""

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import nullcontext
from types import MethodType
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from typing_extensions import override

from torchzero_clip.compat import current_graph_task_id, get_interpreter_stack, never_compiled, without_autocast
from torchzero_clip.per_sample.gradients.autograd_graph import leaves_of
from torchzero_clip.per_sample.gradients.captured_gradients import Forward, GivenRows
from torchzero_clip.per_sample.gradients.contributions import Contribution, Dense
from torchzero_clip.per_sample.gradients.rows import regrouped
from torchzero_clip.per_sample.gradients.squared_norms import wide
from torchzero_clip.per_sample.mixing import MixingCheck
from torchzero_clip.per_sample.processes.processes import Processes
from torchzero_clip.per_sample.processes.sharding import memory_of, slots, stands_for
from torchzero_clip.per_sample.rules.whole import written
from torchzero_clip.per_sample.samples.broadcast_row import BroadcastRow, is_row, row_of
from torchzero_clip.per_sample.samples.following import is_followed, without_own_modes
from torchzero_clip.per_sample.samples.labels import LOST, Labels, Place, depth_of, place_of, simplest, step_at, wider
from torchzero_clip.per_sample.samples.probe import NOT_REENTRANT, LostRows, Probe


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


class Samples(NamedTuple):
    """The input of a layer, and where its samples are.

    If the layer got one row for all samples, ``had_dim`` says whether that had the batch dimension.
    """

    tensor: Tensor
    where: Place | Tensor
    """The place of the samples; or the sample of each entry of the first dimensions, `LOST` if it is not known yet."""
    had_dim: bool | None = None
    lost: bool = False
    """True if the samples of the rows are not known yet."""


class Attached(Protocol):
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


class Host(Protocol):
    """What a captured layer asks of the engine."""

    anchor: Tensor
    attached: bool
    batch_dim: int
    batch_first: bool
    enabled: bool
    forward: Forward
    given: GivenRows | None
    inside: bool  # while a layer runs its submodules by itself
    mixing: MixingCheck
    outputs: list[weakref.ref[Tensor]]
    pauses: int
    probe: Probe
    processes: Processes
    repeats: bool
    running: "CapturedLayer | None"

    @property
    def attachment(self) -> Attached:
        """The model, and what is attached to it."""
        ...

    def enter(self, layer: "CapturedLayer") -> Rule | None:
        """Note that a layer runs. Return its rule; None if it is not captured."""
        ...

    def wants(self, layer: "CapturedLayer") -> bool:
        """True if the current backward gives gradients to parameters."""
        ...

    def add(self, layer: "CapturedLayer", forward: Forward, contributions: Iterable[Contribution]) -> None:
        """Store the contributions of one call of a layer."""

    def clear(self) -> None:
        """Drop all gradients that have arrived."""


class CapturedLayer:
    """A layer in a model, with its trainable parameters by their names in the layer. It replaces the forward."""

    def __init__(self, engine: Host, name: str, module: nn.Module, rule: Rule, params: dict[str, nn.Parameter]) -> None:
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
        is_seen = torch.is_grad_enabled() if self.params else is_followed()
        is_ordinary = lent or not is_seen or get_interpreter_stack()
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
            # rules mark their outputs, so what they compute need not be followed
            with nullcontext() if rule.runs_layers else without_own_modes():
                if self.params and any(isinstance(x, Tensor) and x.is_nested for x in (*args, *kwargs.values())):
                    way_out = "pad it, with x.to_padded_tensor(0.0), and mask the loss"
                    raise ValueError(f"{self} got a nested tensor: {way_out}")
                output = rule.run(self, *args, **kwargs)
            if type(output) is Tensor:
                engine.outputs.append(weakref.ref(output))
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

    def note(self, *decision: Hashable) -> None:
        """Note where the samples are in this call. Every rule calls this, directly or by `samples`."""
        self.engine.mixing.note((self.name, *decision))

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
        if count == 1:
            return Samples(input, Place(0, len(input)))
        if isinstance(input, BroadcastRow) and is_row(input):
            each, had_dim = input.samples(dim)
            found = Samples(each, Place(dim), had_dim)
        elif forward.provenance is None:
            found = Samples(input, Place(dim))
        else:
            labels = self.labels(input)
            if labels is None and input.shape[dim] == 1 != count:
                found = Samples(
                    input.expand(*input.shape[:dim], forward.count, *input.shape[dim + 1 :]), Place(dim), True
                )
            elif isinstance(labels, Place) and labels.dim < leading:
                found = Samples(input, labels)
            else:
                found = self._found(input, labels, leading, dim)
        how = found.where.ndim if isinstance(found.where, Tensor) else (found.where.dim, found.where.run > 1)
        self.engine.mixing.note((self.name, how, found.had_dim, found.lost))
        return found

    def _found(self, input: Tensor, labels: Place | Labels, leading: int, dim: int) -> Samples:
        count = self.engine.forward.count
        alike = labels is None and is_same(input, dim, count, of_batch=leading > 1 or input.ndim > 2)
        if alike:
            return Samples(input, Place(dim))
        if isinstance(labels, Tensor):
            depth = max(depth_of(labels), 1)
            if depth <= leading and bool((labels >= 0).all()):
                rows = labels.reshape(labels.shape[:depth]).expand(input.shape[:depth])
                return Samples(input, rows.reshape(rows.shape))
        self.refuse_made_of_params(input)
        if not self.engine.probe.possible:
            raise self.unknown_rows(how=NOT_REENTRANT if current_graph_task_id() != -1 else "")
        unknown = torch.full((1,) * leading, LOST, device="cpu")
        return Samples(input, unknown.expand(input.shape[:leading]), lost=True)

    def rows_along(self, input: Tensor, dim: int) -> Tensor | None:
        """The sample of each entry along a dimension; None if these are the samples in order."""
        provenance = self.engine.forward.provenance
        if self.engine.forward.batch_size == 1 and input.shape[dim] != 1:  # all rows are of the only sample
            return torch.zeros(input.shape[dim], dtype=torch.int64, device=input.device)
        if provenance is None:
            return None
        labels = self.labels(input)
        if labels == Place(dim) or (labels is None and is_same(input, dim, provenance.count)):
            return None
        if isinstance(labels, Place):
            labels = wider(step_at(labels, tuple(input.shape)), input.shape, provenance.count)
        if not isinstance(labels, Tensor) or labels.shape[dim] != labels.numel() or bool((labels < 0).any()):
            raise self.unknown_rows()
        return labels.flatten().expand(input.shape[dim]).to(input.device)

    def unknown_rows(self, *, why: str = "", instead: str = "", how: str = "") -> ValueError:
        """The error for rows whose samples are not known. ``how`` replaces the way out that the message shows."""
        provenance = self.engine.forward.provenance
        given = sorted(provenance.given) if provenance is not None else []
        how = how or (
            f"rows() got vectors for {' and '.join(map(str, given))} rows only: give it one for each number of rows"
            if given
            else "Say which sample each row belongs to, with `with clipper.rows(sample_of_row, batch_size=B):` around "
            "the forward"
        )
        return ValueError(f"{self} got rows whose samples are not known{why}. {how}{instead}{self.way_out}")

    def refuse_made_of_params(self, input: Tensor) -> None:
        """Raise a ValueError if an input without samples is made of a parameter of the model."""
        attachment = self.engine.attachment
        if not input.requires_grad or self.engine.forward.provenance is None or self.labels(input) is not None:
            return
        leaves = set(map(id, (input, *leaves_of([input]))))
        for name, params, key in slots(attachment.model, attachment.params):
            if id(value := params.get(key)) in leaves:
                raise ValueError(
                    f"{self} got values that are made of parameters alone, such as {name!r}, which all samples share: "
                    f"{self.engine.attachment.whole_line(self.name, value) or 'freeze it'}"
                )

    def check_rows(self, input: Tensor, dim: int | None) -> None:
        """Raise a ValueError if the samples of an input are not in this dimension, in order."""
        labels = self.labels(input)
        if labels is not None and not (isinstance(labels, Place) and labels == (dim, 1)):
            own: object = getattr(self.module, "batch_first", None)
            if isinstance(own, bool) and labels in (Place(0), Place(1)) and dim is not None:
                raise self._elsewhere(own)
            ways = self.line, "run it on all positions and select from its output: layer(x)[mask]"
            raise ValueError(
                f"{self} got rows of several samples, and runs sample by sample: {', or '.join(filter(None, ways))}"
            )

    def _elsewhere(self, batch_first: bool) -> ValueError:
        """The error for a layer that gets the samples in dimension 1 instead of 0, or 0 instead of 1."""
        way_out = f"give the layer batch_first={not batch_first} and remove the transposes around it"
        if self.engine.batch_first == batch_first:
            way_out += f", and declare batch_first={not batch_first} for the clipper"
        else:
            way_out += self.way_out
        return ValueError(
            f"{self} has batch_first={batch_first}, and got the samples in dimension {int(batch_first)}: {way_out}"
        )

    def is_constant(self, input: Tensor, *, of_batch: bool = True) -> bool:
        """True for values that depend on no sample, and are not such as zeros for each of them."""
        dim, provenance = self.engine.batch_dim, self.engine.forward.provenance
        depends = provenance is None or self.labels(input) is not None
        return not (depends or is_same(input, dim, input.shape[dim], of_batch=of_batch))

    def labels(self, input: Tensor) -> Place | Labels:
        """The place of the samples in an input, if it has all of them in order; else labels, as in `samples.labels`.

        None if the input does not depend on samples, or if their number is not known.
        """
        provenance = self.engine.forward.provenance
        labels = None if provenance is None else provenance.asked(input, self)
        if provenance is None or not isinstance(labels, int) or labels is LOST:
            return labels
        shape, count = tuple(input.shape), provenance.count
        place = place_of(labels, shape, count)
        if place is None or shape[place.dim] != count * place.run:
            return wider(labels, shape, count)
        return place

    def watch_params(
        self,
        output: Tensor,
        samples: Samples,
        *,
        weight: Callable[[Tensor, Tensor], Contribution],
        bias: Callable[[Tensor], Tensor],
    ) -> Tensor:
        """Watch the output of a layer with a weight and a bias.

        ``weight`` returns its contribution, from the input and the gradient of the output; ``bias`` its gradients for
        each sample. Both get tensors with the samples first, in one dtype, which is float32 or wider.
        """
        where = samples.where  # the graph holds this function, which must not hold the input

        def contribute(*tensors: Tensor) -> list[Contribution]:
            grad, *inputs = rows_first(where, *wide(*tensors))
            found = [weight(x, grad) for x in inputs]
            return [*found, Dense(self.params["bias"], bias(grad))] if "bias" in self.params else found

        return self.watch(output, [samples.tensor] if "weight" in self.params else [], contribute, samples)

    def watch(
        self,
        output: Tensor,
        inputs: Sequence[Tensor],
        contribute: Callable[..., Iterable[Contribution]],
        samples: Samples | None = None,
    ) -> Tensor:
        """Return the output. Its gradient and the inputs will be passed to ``contribute``, which returns contributions.

        ``samples`` is the input of the layer. Without it, the output is a step of the layer, whose rows are its own.
        """
        before = output if output.requires_grad else None
        where: Place | Tensor | None = None
        engine = self.engine
        in_order = samples is not None and isinstance(samples.where, Place) and samples.where == Place(0)
        if samples is not None and samples.lost:
            contribute = LostRows(self, contribute, samples.where, shared=self.labels(samples.tensor) is None)
        # the number of samples may be known only from the losses
        elif samples is not None and in_order and engine.forward.batch_size is None and engine.probe.possible:
            contribute = LostRows(self, contribute, samples.where, rows=len(output))
        elif samples is not None:
            where = samples.where
            rows = where if isinstance(where, Tensor) else where.run
            if isinstance(rows, Tensor) or rows != 1:
                contribute = _regrouping(contribute, rows, engine.forward.count)
        lasting = self.lasting(inputs) if engine.processes.sharded else inputs
        watched: Any = _Watched.apply(engine.anchor, before, [output.detach()], lasting, self, contribute, where)
        if samples is not None:
            self.mark(watched, LOST if where is None else where)
        if samples is None or samples.had_dim is None or isinstance(samples.where, Tensor):
            return watched
        dim = samples.where.dim
        each = watched.movedim(dim, 0)
        return row_of(self, each.unsqueeze(dim + 1) if samples.had_dim else each)

    def lasting(self, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        """Inputs to keep until the end of the step: copies of those in a parameter that `fully_shard` frees before."""
        shown = memory_of(self.engine.attachment.model.parameters())
        return [x.clone() if memory_of((x,)) & shown else x for x in inputs]

    def mark(self, output: Tensor, labels: Place | Labels) -> None:
        """Note the samples of an output, which are as in `CapturedLayer.labels`, or those of its first dimensions."""
        provenance = self.engine.forward.provenance
        if provenance is not None and output.ndim:
            if isinstance(labels, Tensor):
                labels = labels.view(*labels.shape, *[1] * (output.ndim - labels.ndim))
                labels = simplest(labels, output.shape, provenance.count)
            if isinstance(labels, Place):
                fits = output.shape[labels.dim] == provenance.count * labels.run
                labels = step_at(labels, tuple(output.shape)) if fits else LOST
            provenance.note(output, labels)

    def refuse_row(self) -> None:
        """Raise for a gradient that is summed over samples."""
        self.engine.clear()
        name, inside = self.misuse or ("a function such as a torch.autograd.Function", self.rule.runs_layers)
        if inside:
            kind = written(self.engine.attachment.model, type(self.module))
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


def rows_first(where: Place | Tensor, *tensors: Tensor) -> list[Tensor]:
    """Tensors with the rows of samples in the first dimension."""
    if isinstance(where, Place):
        return [x.movedim(where.dim, 0) for x in tensors]
    return [x.flatten(0, where.ndim - 1) for x in tensors]


def class_forward(module: nn.Module) -> Callable[..., object]:
    """The forward of the class of a module, bound to the module."""
    return MethodType(type(module).forward, module)


def is_same(tensor: Tensor, dim: int, count: int, *, of_batch: bool = True) -> bool:
    """True if a tensor without a graph has equal values for all samples along a dimension.

    Without ``of_batch``, only expanded values count, because others may belong to positions.
    """
    if tensor.grad_fn is not None or tensor.ndim < 2 or tensor.ndim <= dim or tensor.shape[dim] != count:
        return False
    if tensor.stride(dim) == 0 or count == 1:
        return True
    return of_batch and bool((tensor == tensor.narrow(dim, 0, 1)).all())


def _regrouping(
    contribute: Callable[..., Iterable[Contribution]], rows: Tensor | int, count: int
) -> Callable[..., Iterable[Contribution]]:
    return lambda *tensors: [regrouped(part, rows, count) for part in contribute(*tensors)]


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
        contribute: Callable[..., Iterable[Contribution]],
        where: Place | Tensor | None,
    ) -> Tensor:
        ctx.layer, ctx.of, ctx.contribute, ctx.goes_on = layer, layer.engine.forward, contribute, before is not None
        ctx.where, ctx.call = where, contribute if isinstance(contribute, LostRows) else None
        ctx.save_for_backward(*(x.detach() for x in inputs))  # which would hold their graph
        return output[0]  # passed in a list, it counts as created here, so later layers may change it in place

    @staticmethod
    @override
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        layer, grad = ctx.layer, grads[0]
        if layer.engine.wants(layer):
            try:
                inputs, own = ctx.saved_tensors, grad
            except RuntimeError as error:
                layer.engine.clear()
                if "modified by an inplace operation" not in str(error):
                    raise
                raise RuntimeError(
                    f"the input of {layer} was changed in place after the layer used it: its gradient would be wrong"
                ) from error
            if layer.engine.repeats:
                own = grad.clone()  # a loss may write into it in the next backward
                if ctx.where is not None:
                    ctx.call = layer.engine.probe.known(layer, ctx.where, own)
            with without_autocast(grad):
                layer.engine.add(layer, ctx.of, ctx.contribute(own, *inputs))
        elif ctx.call is not None:
            ctx.call.compare(grad)
        # torch takes no gradient for a None among the inputs
        return None, grad if ctx.goes_on else None, None, None, None, None, None


def described(name: str, module: nn.Module) -> str:
    """A module in a message: its name in the model, if it has one, and its class."""
    return f"{name!r} ({type(module).__name__})" if name else type(module).__name__


def trainable(module: nn.Module) -> dict[str, nn.Parameter]:
    """The trainable parameters of a module, by name."""
    return {name: param for name, param in module.named_parameters() if param.requires_grad}
