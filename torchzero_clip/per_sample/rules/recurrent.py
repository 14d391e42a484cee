"""LSTM, GRU and RNN: the weights of their gates are those of linear layers on all times."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from typing_extensions import override

from torchzero_clip.per_sample.broadcast_row import BroadcastRow
from torchzero_clip.per_sample.captured_gradients import Forward
from torchzero_clip.per_sample.captured_layer import CapturedLayer, saved_tensors
from torchzero_clip.per_sample.contributions import Contribution, Dense
from torchzero_clip.per_sample.products import Products
from torchzero_clip.per_sample.row_products import regrouped
from torchzero_clip.per_sample.rules.recurrences import Recurrence, Times, Weights, recurrence_of
from torchzero_clip.per_sample.rules.sequences import SequenceRule
from torchzero_clip.per_sample.squared_norms import without_autocast

WEIGHTS = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")


class RecurrentRule(SequenceRule):
    """Runs each layer and direction as one function of rows, which a packed sequence has already.

    The generic rule takes calls with another dtype than float32 and float64, under autocast, with `proj_size`, with
    rows that all samples share, and with dropout outside of the CPU, where torch draws other random numbers.
    """

    def __init__(self) -> None:
        super().__init__(1)

    @override
    def run(self, layer: CapturedLayer, /, input: Any, hx: Any = None) -> Any:
        module: Any = layer.module
        is_lstm = isinstance(module, nn.LSTM)
        packed = isinstance(input, PackedSequence)
        given = [] if hx is None else list(hx) if is_lstm and isinstance(hx, tuple) else [hx]
        if not _fits(module, input.data if packed else input, given, 2 if packed else 3):
            return super().run(layer, input, hx)
        tensor, sizes = (input.data, input.batch_sizes) if packed else (input, None)
        module.check_input(tensor, sizes)
        if hx is not None:
            module.check_forward_args(tensor, hx, sizes)
        sequences = _Sequences(input, batch_first=module.batch_first)
        (rows,) = layer.kept([sequences.rows(layer, tensor)])
        shape = module.num_layers * (2 if module.bidirectional else 1), sequences.count, module.hidden_size
        states = [sequences.ordered(x) for x in given] or [rows.new_zeros(shape)] * (2 if is_lstm else 1)
        ends: list[Sequence[Tensor]] = []
        recurrence = recurrence_of(module)
        for depth in range(module.num_layers):
            if depth and module.dropout and module.training:
                rows = F.dropout(rows, module.dropout)
            outputs: list[Tensor] = []
            for suffix in ("", "_reverse") if module.bidirectional else ("",):
                names = [f"{name}_l{depth}{suffix}" for name in WEIGHTS]
                times = Times(sequences.sizes, reverse=suffix == "_reverse")
                of = layer, layer.engine.forward, recurrence, sequences, times, names
                first = [state[len(ends)] for state in states]
                found: Any = _Recurrent.apply(layer.engine.anchor, rows, *of, *first)
                outputs.append(found[0])
                ends.append(found[1:])
            # what is returned may be changed in place, and the backward needs what the function returned
            rows = torch.cat(outputs, 1) if len(outputs) > 1 or depth == module.num_layers - 1 else outputs[0]
        last = tuple(sequences.restored(torch.stack(column)) for column in zip(*ends, strict=True))
        output = sequences.output(rows)
        sequences.mark(layer, output.data if packed else output, last)
        return output, last if is_lstm else last[0]


def _fits(module: Any, data: Any, states: list[Any], ndim: int) -> bool:
    """True if a call needs no generic rule."""
    tensors = [data, *states]
    if not all(isinstance(x, Tensor) and not isinstance(x, BroadcastRow) for x in tensors):
        return False
    own = [module._parameters.get(name) for name in module._flat_weights_names]
    as_made = all(a is b is not None for a, b in zip(own, module._flat_weights, strict=True))
    if not as_made or len(own) != len(module._parameters):
        return False  # other tensors take the places of parameters, as under torch.nn.utils.weight_norm
    random = module.dropout and module.training and module.num_layers > 1 and not data.is_cpu
    dtypes = {x.dtype for x in (*tensors, *own)}
    plain = len(dtypes) == 1 and dtypes <= {torch.float32, torch.float64}
    plain = plain and len(states) in (0, 1 + isinstance(module, nn.LSTM))
    known = plain and not module.proj_size and not random and not torch.is_autocast_enabled(data.device.type)
    return known and data.ndim == ndim and all(x.ndim == 3 for x in states) and data.numel() > 0


class _Sequences:
    """Where the sequences of a batch are in rows: those of all samples at one time, then those at the next.

    In a packed sequence, the samples may be in another order than in the batch.
    """

    def __init__(self, input: Any, *, batch_first: bool) -> None:
        self._batch_first = batch_first
        self._batch_sizes: Tensor | None = None
        self._order = self._back = None
        if isinstance(input, PackedSequence):
            self._batch_sizes, self._order, self._back = input[1:]
            self.sizes: list[int] = input.batch_sizes.tolist()
        else:
            dim = 1 - int(batch_first)
            self.sizes = [input.shape[dim]] * input.shape[1 - dim]
        self.count = self.sizes[0]
        self._samples: Tensor | None = None

    def rows(self, layer: CapturedLayer, tensor: Tensor) -> Tensor:
        """The rows of an input, or those of a packed sequence."""
        if self._batch_sizes is not None:
            self._samples = self._of_packed(layer, tensor)
            layer.note("packed", self._samples is None)
            return tensor
        dim = 1 - int(self._batch_first)
        self._samples = layer.rows_along(tensor, dim)
        layer.note(dim, self._samples is None)
        return tensor.movedim(dim, 1).reshape(-1, tensor.shape[2])

    def _of_packed(self, layer: CapturedLayer, data: Tensor) -> Tensor | None:
        """The sample of each packed sequence; None if these are the samples in order."""
        count, rows = layer.engine.forward.batch_size, layer.rows_along(data, 0)
        if rows is None:
            return None
        first = rows[: self.count]
        if not torch.equal(rows, torch.cat([first[:size] for size in self.sizes])):
            raise layer.unknown_rows()
        samples = first if self._back is None else first[self._back.to(first.device)]
        in_order = torch.equal(samples, torch.arange(count, device=samples.device))
        return None if in_order else samples

    def mark(self, layer: CapturedLayer, output: Tensor, states: Sequence[Tensor]) -> None:
        """Note the samples of the output and of the last states."""
        count = layer.engine.forward.batch_size
        if count is None:
            return
        samples = torch.arange(self.count, device=output.device) if self._samples is None else self._samples
        for state in states:
            layer.mark(state, samples.view(1, -1, 1))
        if self._batch_sizes is None:
            shape = (-1, 1, 1) if self._batch_first else (1, -1, 1)
        else:
            samples, shape = samples if self._order is None else samples[self._order], (-1, 1)
            samples = torch.cat([samples[:size] for size in self.sizes])
        layer.mark(output, samples.view(shape))

    def regrouped(self, part: Contribution, count: int | None) -> Contribution:
        """A contribution of sequences as one of samples."""
        return part if self._samples is None or count is None else regrouped(part, self._samples, count)

    def ordered(self, states: Tensor) -> Tensor:
        """States in the order of the rows."""
        return states if self._order is None else states.index_select(1, self._order)

    def restored(self, states: Tensor) -> Tensor:
        """States in the order of the batch."""
        return states if self._back is None else states.index_select(1, self._back)

    def output(self, rows: Tensor) -> Any:
        """The rows in the form of the input."""
        if self._batch_sizes is not None:
            return PackedSequence(rows, self._batch_sizes, self._order, self._back)
        full = rows.unflatten(0, (len(self.sizes), self.count))
        return full.transpose(0, 1) if self._batch_first else full

    def by_sample(self, rows: Tensor) -> Tensor:
        """The rows of each sample, with zeros behind those of shorter sequences: (B, T, width)."""
        length = len(self.sizes)
        if self._batch_sizes is None:
            return rows.unflatten(0, (length, self.count)).transpose(0, 1)
        samples = torch.arange(self.count, device=rows.device) if self._order is None else self._order
        places = torch.cat([samples[:size] * length + time for time, size in enumerate(self.sizes)])
        padded = rows.new_zeros(self.count * length, rows.shape[1])
        return padded.index_copy_(0, places, rows).unflatten(0, (self.count, length))


class _Recurrent(torch.autograd.Function):
    """One layer in one direction."""

    @staticmethod
    @override
    def forward(
        ctx: Any,
        anchor: Tensor,
        rows: Tensor,
        layer: CapturedLayer,
        of: Forward,
        recurrence: Recurrence,
        sequences: _Sequences,
        times: Times,
        names: list[str],
        *states: Tensor,
    ) -> tuple[Tensor, ...]:
        weights = Weights(*(layer.module._parameters.get(name) for name in names))  # pyright: ignore[reportArgumentType]
        last = [state.clone() for state in states]
        outputs, others = recurrence.run(rows, times, weights, last)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(rows, weights.of_input, weights.of_state, *states, outputs, *others)
        ctx.layer, ctx.of, ctx.recurrence, ctx.sequences, ctx.times = layer, of, recurrence, sequences, times
        ctx.names, ctx.kinds = names, len(states)
        return outputs, *last

    @staticmethod
    @override
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        layer: CapturedLayer = ctx.layer
        rows, of_input, of_state, *saved = saved_tensors(ctx, layer, "the input or a parameter")
        states, weights = saved[: ctx.kinds], Weights(of_input, of_state, None, None)
        ends = [
            torch.zeros_like(x) if grad is None else grad.clone() for x, grad in zip(states, grads[1:], strict=True)
        ]
        with without_autocast(rows):
            inputs = [rows, ctx.times.before(states[0], saved[ctx.kinds])]
            *uses, first = ctx.recurrence.backward(ctx.times, weights, saved, inputs[1], ends, grads[0])
            grad_rows = uses[0] @ of_input if ctx.needs_input_grad[1] else None
            if layer.engine.wants(layer):
                del saved
                layer.engine.add(layer, ctx.of, _contributions(ctx, inputs, uses))
        return None, grad_rows, *[None] * 6, *first


def _contributions(ctx: Any, inputs: list[Tensor], grads: list[Tensor]) -> Iterator[Contribution]:
    """The contributions to the parameters of one layer in one direction, some of which may be those of another one.

    The lists are emptied, and contributions come one by one, so that memory can be used again.
    """
    params, own = ctx.layer.module._parameters, {id(value): param for param, value in ctx.layer.values}
    same, outputs = grads[0] is grads[1], None
    for of_matrix, of_bias in zip(ctx.names[:2], ctx.names[2:], strict=True):
        rows, grad = inputs.pop(0), grads.pop(0)
        if outputs is None or not same:
            outputs = ctx.sequences.by_sample(grad)
        del grad
        if (param := own.get(id(params[of_matrix]))) is not None:
            part: Contribution = Products(param, ctx.sequences.by_sample(rows), outputs)
            yield ctx.sequences.regrouped(part, ctx.of.batch_size)
        if (param := own.get(id(params.get(of_bias)))) is not None:
            yield ctx.sequences.regrouped(Dense(param, outputs.sum(1)), ctx.of.batch_size)
