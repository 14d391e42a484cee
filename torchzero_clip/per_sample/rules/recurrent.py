"""LSTM, GRU and RNN: the weights of their gates are those of linear layers on the rows of all times.

Autograd goes through the recurrence, and gives the gradients of these rows.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from typing_extensions import override

from torchzero_clip.per_sample.broadcast_row import BroadcastRow
from torchzero_clip.per_sample.captured_layer import CapturedLayer, Rule
from torchzero_clip.per_sample.each_sample import own_entries
from torchzero_clip.per_sample.gradients.contributions import Contribution, Dense
from torchzero_clip.per_sample.gradients.products import Products
from torchzero_clip.per_sample.gradients.row_norms import wide
from torchzero_clip.per_sample.samples.call import of_samples
from torchzero_clip.per_sample.samples.graph import shorten
from torchzero_clip.per_sample.samples.pattern import Place, samples_of_items

NAMES = ("weight_ih", "weight_hh", "bias_ih", "bias_hh", "weight_hr")


class RecurrentRule(Rule):
    """Runs each layer and direction on rows: the first entry of each sample, then the second, as if it were packed."""

    covers_submodules = True  # so that `rule_for` asks for no names of parameters, such as weight_ih_l0_reverse
    runs_empty = True

    @override
    def run(self, layer: CapturedLayer, /, input: Any, hx: Any = None) -> Any:
        module: Any = layer.module
        packed, is_lstm = isinstance(input, PackedSequence), isinstance(module, nn.LSTM)
        tensor, sizes = (input.data, input.batch_sizes) if packed else (input, None)
        given: list[Any] = [] if hx is None else list(hx) if is_lstm and isinstance(hx, tuple | list) else [hx]
        if tensor.ndim != (2 if packed else 3):
            raise ValueError(f"{layer} got an input without a batch dimension: per-sample gradients need one")
        if isinstance(tensor, BroadcastRow):
            raise layer.unknown_rows("all samples share them", how="Expand them to the batch")
        module.check_input(tensor, sizes)
        if hx is not None:
            module.check_forward_args(tensor, hx, sizes)
        sequences = _Sequences(layer, input)
        rows, count = sequences.rows(tensor), module.num_layers * (2 if module.bidirectional else 1)
        widths = (module.proj_size or module.hidden_size, module.hidden_size)[: 2 if is_lstm else 1]
        states = [sequences.ordered(x) for x in given] or [rows.new_zeros(count, sequences.count, w) for w in widths]
        ends: list[Sequence[Tensor]] = []
        for depth in range(module.num_layers):
            if depth and module.dropout and module.training:
                rows = F.dropout(rows, module.dropout)
            outputs: list[Tensor] = []
            for suffix in ("", "_reverse") if module.bidirectional else ("",):
                direction = _Direction(layer, sequences, f"_l{depth}{suffix}")
                output, end = direction.run(rows, [state[len(ends)] for state in states], reverse=bool(suffix))
                outputs.append(output)
                ends.append(end)
            rows = torch.cat(outputs, 1) if len(outputs) > 1 else outputs[0]
        last = tuple(sequences.restored(torch.stack(column)) for column in zip(*ends, strict=True))
        output = sequences.output(rows)
        return output, last if is_lstm else last[0]


class _Direction:
    """One layer in one direction."""

    def __init__(self, layer: CapturedLayer, sequences: "_Sequences", suffix: str) -> None:
        self._layer = layer
        self._sequences = sequences
        own = {id(value): param for param, value in layer.values}
        found: dict[str, Any] = {name: getattr(layer.module, name + suffix, None) for name in NAMES}
        self._own = {name: own.get(id(value)) for name, value in found.items()}
        # other weights are made of parameters by a hook, and have to stay in the graph
        self._values = [value.detach() if id(value) in own else value for value in found.values()]

    def run(self, rows: Tensor, first: Sequence[Tensor], *, reverse: bool) -> tuple[Tensor, Sequence[Tensor]]:
        """The outputs, as rows, and the last states."""
        module: Any = self._layer.module
        of_input, of_state, bias, state_bias, projection = self._values
        weights = [x for x in self._values if x is not None]
        uses: dict[str, list[Tensor]] = {"hh": [], "hr": []}  # what the weights multiply: `step` fills the lists
        if isinstance(module, nn.GRU):
            # a gate multiplies what the state adds, so that part is a tensor with a gradient of its own
            none = of_state.new_zeros(()) if state_bias is None else state_bias
            added = self._watched(none.expand(len(rows), len(of_state)), {"hh": uses["hh"]})
            sums = self._watched(F.linear(rows, of_input, bias), {}, rows)
        else:
            bias = None if bias is None else bias + state_bias
            sums = added = self._watched(F.linear(rows, of_input, bias), {"hh": uses["hh"]}, rows)
        split = [x.split(self._sequences.sizes) for x in (sums, added)]
        projected = None
        if projection is not None:
            projected = self._watched(sums.new_zeros(()).expand(len(rows), len(projection)), {"hr": uses["hr"]})
            split.append(projected.split(self._sequences.sizes))
        cell = CELLS[module.mode]

        # with a projection, each time has a third tensor, to which its products are added
        def step(state: list[Tensor], new: Tensor, start: Tensor, third: Tensor = rows) -> list[Tensor]:
            uses["hh"].append(state[0].detach())
            state = cell(torch.addmm(start, state[0], of_state.t()), new, *state)
            if projection is not None:
                uses["hr"].append(state[0].detach())
                state[0] = torch.addmm(third, state[0], projection.t())
            return state

        initial = [x.to(sums.dtype) for x in first]
        outputs, last = _through_time(step, [*zip(*split, strict=True)], initial, reverse)
        for found in (uses["hh"], uses["hr"]):  # the lists stay the same objects, which `_watched` has
            found[:] = [torch.cat(found[:: -1 if reverse else 1])] if found else []
        result = torch.cat(outputs)
        if not self._sequences.is_packed:  # in a packed sequence, each has a length of its own
            split_from = [sums, added, *([] if projected is None else [projected])]
            # so that the graph is the same for all lengths: a walk skips the times
            shorten([result, *last], [*split_from, *initial, *weights], (module.mode, reverse))
        return result, last

    def _watched(self, sums: Tensor, uses: dict[str, list[Tensor]], *inputs: Tensor) -> Tensor:
        """Watch sums of biases and products. Gradients of weights are theirs times the tensors in ``uses``."""
        own, sequences = self._own, self._sequences

        def contribute(where: Place | Tensor, grad: Tensor, *inputs: Tensor, count: int) -> Iterator[Contribution]:
            outputs = sequences.by_sample(grad)
            for kind, factors in (uses | {"ih": inputs} if inputs else uses).items():
                if (param := own[f"weight_{kind}"]) is not None:
                    part = Products(param, *wide(sequences.by_sample(factors[0]), outputs))
                    yield of_samples(part, where, count)
                if (param := own.get(f"bias_{kind}")) is not None:
                    yield of_samples(Dense(param, wide(outputs)[0].sum(1)), where, count)

        reduce = sequences.samples_of_sequences
        kind = *uses, len(inputs)
        return self._layer.watch(sums, inputs, contribute, kind=kind, shape=(sequences.count,), reduce=reduce)


def _through_time(
    step: Callable[..., list[Tensor]], times: Sequence[Any], first: list[Tensor], reverse: bool
) -> tuple[list[Tensor], list[Tensor]]:
    """The states after each time, in the order of time, and the last states of the sequences."""
    state, ended_before, outputs = [x[:0] for x in first], [[x[:0] for x in first]], []
    for time in times[:: -1 if reverse else 1]:
        before, now = len(state[0]), len(time[0])
        if now > before:  # at the first time, or where shorter sequences begin
            state = [torch.cat([x, start[before:now]]) for x, start in zip(state, first, strict=True)]
        elif now < before:
            ended_before.append([x[now:] for x in state])
            state = [x[:now] for x in state]
        state = step(state, *time)
        outputs.append(state[0])
    last = [torch.cat(column) for column in zip(state, *ended_before[::-1], strict=True)]
    return outputs[:: -1 if reverse else 1], last


def _lstm(sums: Tensor, _: Tensor, h: Tensor, c: Tensor) -> list[Tensor]:
    """The gates are i, f, g and o: c = f c + i g, h = o tanh(c)."""
    i, f, g, o = sums.chunk(4, 1)
    c = torch.addcmul(f.sigmoid() * c, i.sigmoid(), g.tanh())
    return [o.sigmoid() * c.tanh(), c]


def _gru(added: Tensor, sums: Tensor, h: Tensor) -> list[Tensor]:
    """The gates are r, z and n = tanh(sums + r added): h = (1 - z) n + z h."""
    (r_z, n), (by_state, add) = (x.split([2 * h.shape[1], h.shape[1]], 1) for x in (sums, added))
    r, z = (r_z + by_state).sigmoid().chunk(2, 1)
    return [torch.lerp(torch.addcmul(n, r, add).tanh(), h, z)]


def _rnn(activation: Callable[[Tensor], Tensor], sums: Tensor, *_: Tensor) -> list[Tensor]:
    return [activation(sums)]


CELLS = {"LSTM": _lstm, "GRU": _gru, "RNN_TANH": partial(_rnn, torch.tanh), "RNN_RELU": partial(_rnn, torch.relu)}


class _Sequences:
    """Where the sequences of a batch are in rows: those of all samples at one time, then those at the next.

    In a packed sequence, the samples may be in another order than in the batch.
    """

    def __init__(self, layer: CapturedLayer, input: Any) -> None:
        module: Any = layer.module
        self._layer = layer
        self._dim = 1 - int(module.batch_first)
        self._batch_sizes: Tensor | None = None
        self._order = self._back = None
        if isinstance(input, PackedSequence):
            self._batch_sizes, self._order, self._back = input[1:]
            self.sizes: list[int] = input.batch_sizes.tolist()
        else:
            self.sizes = [input.shape[self._dim]] * input.shape[1 - self._dim]
        self.count, self.is_packed = self.sizes[0], self._batch_sizes is not None

    def _samples(self, like: Tensor) -> Tensor:
        """The sample of each sequence, on the device of a tensor."""
        return torch.arange(self.count, device=like.device) if self._order is None else self._order

    def samples_of_sequences(self, rows: Tensor) -> Tensor:
        """The sample of each sequence, from those of its rows."""
        order = self._samples(rows)
        return samples_of_items(torch.cat([order[:size] for size in self.sizes]), self.count, rows)

    def rows(self, tensor: Tensor) -> Tensor:
        """The rows of an input, or those of a packed sequence."""
        return tensor if self._batch_sizes is not None else tensor.movedim(self._dim, 1).flatten(0, 1)

    def ordered(self, states: Tensor) -> Tensor:
        """States in the order of the rows. Those that all samples share have a copy for each."""
        if isinstance(states, BroadcastRow):
            states = own_entries(states.copies(), 1).movedim(0, 1)
        return states if self._order is None else states.index_select(1, self._order)

    def restored(self, states: Tensor) -> Tensor:
        """States in the order of the batch."""
        return states if self._back is None else states.index_select(1, self._back)

    def output(self, rows: Tensor) -> Any:
        """The rows in the form of the input."""
        if self._batch_sizes is not None:
            return PackedSequence(rows, self._batch_sizes, self._order, self._back)
        full = rows.unflatten(0, (len(self.sizes), self.count))
        return full.movedim(1, self._dim)

    def by_sample(self, rows: Tensor) -> Tensor:
        """The rows of each sample, with zeros behind those of shorter sequences: (B, T, width)."""
        length = len(self.sizes)
        if self._batch_sizes is None:
            return rows.unflatten(0, (length, self.count)).transpose(0, 1)
        samples = self._samples(rows)
        places = torch.cat([samples[:size] * length + time for time, size in enumerate(self.sizes)])
        padded = rows.new_zeros(self.count * length, rows.shape[1])
        return padded.index_copy_(0, places, rows).unflatten(0, (self.count, length))
