"""The recurrences of LSTM, GRU and RNN on rows of sequences, and their derivatives."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override


class Times:
    """The rows of sequences, in the order of time: those of all samples at one time, then those at the next.

    ``sizes`` has the number of rows at each time. It does not grow, because sequences that end are the last ones.
    """

    def __init__(self, sizes: Sequence[int], *, reverse: bool) -> None:
        self.sizes = list(sizes)
        self.reverse = reverse

    def split(self, rows: Tensor) -> Sequence[Tensor]:
        """The rows at each time, in the order in which the recurrence runs."""
        parts = rows.split(self.sizes)
        return parts[::-1] if self.reverse else parts

    def before(self, first: Tensor, after: Tensor) -> Tensor:
        """The state before each row, from the first states of the samples and the state after each row."""
        parts = after.split(self.sizes)
        if not self.reverse:
            return torch.cat([first, *(part[:size] for part, size in zip(parts, self.sizes[1:], strict=False))])
        found: list[Tensor] = []
        for size, part in zip(self.sizes, [*parts[1:], first[:0]], strict=True):
            found += [part, first[len(part) : size]]
        return torch.cat(found)


class Weights(NamedTuple):
    """The parameters of one layer in one direction, detached."""

    of_input: Tensor
    of_state: Tensor
    input_bias: Tensor | None
    state_bias: Tensor | None


class Gradients(NamedTuple):
    """The gradients of what is added up in each row: of the products with the input, and of those with the state."""

    of_input: Tensor
    of_state: Tensor
    states: list[Tensor]
    """The gradients of the first states."""


class Recurrence(ABC):
    """The equations of one kind of layer."""

    @abstractmethod
    def run(self, rows: Tensor, times: Times, weights: Weights, states: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """Return the outputs, and what `backward` needs beside them. The states become the last ones, in place."""

    @abstractmethod
    def backward(
        self, times: Times, weights: Weights, saved: Sequence[Tensor], before: Tensor, ends: list[Tensor], grad: Any
    ) -> Gradients:
        """Return the gradients.

        Derivatives of single steps are computed for all rows at once, before the loop over times.

        Args:
            times: The rows.
            weights: The parameters.
            saved: The first states, the outputs, and what `run` has returned beside them.
            before: The hidden state before each row.
            ends: The gradients of the last states, which are overwritten.
            grad: The gradient of the outputs, or None.
        """


class LSTM(Recurrence):
    """The gates are i, f, g and o: c = f c + i g, h = o tanh(c)."""

    @override
    def run(self, rows: Tensor, times: Times, weights: Weights, states: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        gates = F.linear(rows, weights.of_input, _sum_of_biases(weights))
        h, c = states
        turned, size = weights.of_state.t(), h.shape[1]
        outputs, cells = gates.new_empty(len(gates), size), gates.new_empty(len(gates), size)
        split = [times.split(x) for x in (gates, gates[:, : 2 * size], *gates.split(size, 1), outputs, cells)]
        for whole, i_f, i, f, g, o, output, cell in zip(*split, strict=True):
            now, memory = h[: len(whole)], c[: len(whole)]
            whole.addmm_(now, turned)
            i_f.sigmoid_()
            g.tanh_()
            o.sigmoid_()
            memory.mul_(f).addcmul_(i, g)
            cell.copy_(memory)
            torch.mul(o, torch.tanh(memory), out=output)
            now.copy_(output)
        return outputs, [gates, cells]

    @override
    def backward(
        self, times: Times, weights: Weights, saved: Sequence[Tensor], before: Tensor, ends: list[Tensor], grad: Any
    ) -> Gradients:
        _, first, _, gates, cells = saved
        dh, dc = ends
        i, f, g, o = gates.chunk(4, 1)
        size, tanh = i.shape[1], cells.tanh()
        of_cell = torch.addcmul(o, o * tanh, tanh, value=-1)
        slopes = torch.empty_like(gates)  # becomes the gradient
        of_i, of_f, of_g, of_o = slopes.chunk(4, 1)
        _slope_of_sigmoid(i, g, out=of_i)
        _slope_of_sigmoid(f, times.before(first, cells), out=of_f)
        torch.addcmul(i, i * g, g, value=-1, out=of_g)
        _slope_of_sigmoid(o, tanh, out=of_o)
        through_cell = slopes[:, : 3 * size].unflatten(1, (3, size))
        split = [times.split(x)[::-1] for x in (slopes, through_cell, of_o, of_cell, f, *_given(grad))]
        for whole, i_f_g, out, slope, keep, *added in zip(*split, strict=True):
            now, memory = dh[: len(whole)], dc[: len(whole)]
            for x in added:
                now.add_(x)
            memory.addcmul_(now, slope)
            i_f_g.mul_(memory[:, None])
            out.mul_(now)
            memory.mul_(keep)
            torch.mm(whole, weights.of_state, out=now)
        return Gradients(slopes, slopes, [dh, dc])


class GRU(Recurrence):
    """The gates are r, z and n = tanh(input + r state), where "state" is what the state adds: h = (1 - z) n + z h."""

    @override
    def run(self, rows: Tensor, times: Times, weights: Weights, states: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        gates = F.linear(rows, weights.of_input, weights.input_bias)
        (h,) = states
        size = h.shape[1]
        outputs, adds = gates.new_empty(len(gates), size), gates.new_empty(len(gates), size)
        split = [times.split(x) for x in (gates[:, : 2 * size], *gates.split(size, 1), outputs, adds)]
        for r_z, r, z, n, output, add in zip(*split, strict=True):
            now = h[: len(r_z)]
            by_state = F.linear(now, weights.of_state, weights.state_bias)
            r_z.add_(by_state[:, : 2 * size]).sigmoid_()
            add.copy_(by_state[:, 2 * size :])
            n.addcmul_(r, add).tanh_()
            torch.lerp(n, now, z, out=output)
            now.copy_(output)
        return outputs, [gates, adds]

    @override
    def backward(
        self, times: Times, weights: Weights, saved: Sequence[Tensor], before: Tensor, ends: list[Tensor], grad: Any
    ) -> Gradients:
        *_, gates, adds = saved
        (dh,) = ends
        r, z, n = gates.chunk(3, 1)
        size, slopes = r.shape[1], torch.empty_like(gates)  # becomes the gradient of what the state adds
        of_r, of_z, of_n = slopes.chunk(3, 1)
        inner = (1 - z).mul_(torch.addcmul(torch.ones_like(n), n, n, value=-1))
        torch.mul(inner, r, out=of_n)
        torch.mul(of_n * adds, 1 - r, out=of_r)
        _slope_of_sigmoid(z, before - n, out=of_z)
        split = [times.split(x)[::-1] for x in (slopes, slopes.unflatten(1, (3, size)), inner, z, *_given(grad))]
        for whole, each, new, keep, *added in zip(*split, strict=True):
            now = dh[: len(whole)]
            for x in added:
                now.add_(x)
            each.mul_(now[:, None])
            new.mul_(now)
            now.mul_(keep).addmm_(whole, weights.of_state)
        return Gradients(torch.cat([slopes[:, : 2 * size], inner], 1), slopes, [dh])


class RNN(Recurrence):
    """h is tanh or relu of what the input and the state add."""

    def __init__(self, nonlinearity: str) -> None:
        self._is_tanh = nonlinearity == "tanh"

    @override
    def run(self, rows: Tensor, times: Times, weights: Weights, states: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        outputs = F.linear(rows, weights.of_input, _sum_of_biases(weights))
        (h,) = states
        turned, activate_ = weights.of_state.t(), torch.tanh_ if self._is_tanh else torch.relu_
        for output in times.split(outputs):
            now = h[: len(output)]
            activate_(output.addmm_(now, turned))
            now.copy_(output)
        return outputs, []

    @override
    def backward(
        self, times: Times, weights: Weights, saved: Sequence[Tensor], before: Tensor, ends: list[Tensor], grad: Any
    ) -> Gradients:
        outputs, (dh,) = saved[1], ends
        slopes = 1 - outputs.square() if self._is_tanh else (outputs > 0).to(outputs.dtype)
        split = [times.split(x)[::-1] for x in (slopes, *_given(grad))]
        for whole, *added in zip(*split, strict=True):
            now = dh[: len(whole)]
            for x in added:
                now.add_(x)
            whole.mul_(now)
            torch.mm(whole, weights.of_state, out=now)
        return Gradients(slopes, slopes, [dh])


def recurrence_of(module: Any) -> Recurrence:
    """The equations of a module as it is now."""
    if isinstance(module, nn.LSTM):
        return LSTM()
    return GRU() if isinstance(module, nn.GRU) else RNN(module.nonlinearity)


def _sum_of_biases(weights: Weights) -> Tensor | None:
    if weights.input_bias is None or weights.state_bias is None:
        return None
    return weights.input_bias + weights.state_bias


def _slope_of_sigmoid(gate: Tensor, other: Tensor, *, out: Tensor) -> None:
    """The derivative of ``gate * other`` by what goes into the sigmoid of the gate."""
    torch.mul(gate, other, out=out)
    out.addcmul_(out, gate, value=-1)


def _given(grad: Tensor | None) -> list[Tensor]:
    return [] if grad is None else [grad]
