"""Elementwise transforms and the kernel after them, piece by piece: what one leaves is in the cache of the next."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from torchzero_clip.core.elementwise import Elementwise, Flags
from torchzero_clip.core.kernels import LONG, inverse
from torchzero_clip.core.step import Step
from torchzero_clip.functional import foreach
from torchzero_clip.functional.measure import by_setting
from torchzero_clip.functional.scratch import Scratch
from torchzero_clip.types import Setting

ON_CPU = 32768
"""Elements of a piece on CPU: it stays in the cache. Other kernels would change last bits at cuts that are no multiple
of 64."""

ELSEWHERE = 2**24
"""Elements of a piece elsewhere, where each operation has to be worth its launch: 64 MiB of float32."""

Sink = Callable[[list[int], "slice | None", list[Tensor]], None]
"""Takes the updates of some parameters: their indices, which of their elements (None for all), and the updates."""


@dataclass
class Stage:
    """An elementwise transform in this step, of parameters that are plain and alike."""

    transform: Elementwise
    settings: Sequence[Setting]
    state: list[list[Tensor]]
    flags: Flags
    follows_safe: bool
    """Its updates are finite where gradients are."""
    step: Step
    done: Callable[[], None]
    """Called at the end."""
    counts: list[Tensor] = field(default_factory=list)
    """How many elements of each piece changed."""

    def usual(self) -> list[bool]:
        """Where `Elementwise.change_usual_` is right; nowhere on CUDA, where looking would wait for the device."""
        usable, started = self.flags
        if not usable.is_cpu or not self.follows_safe:
            return [False] * len(self.settings)
        return (usable & started).tolist()

    def finish(self) -> None:
        """Report the share of elements that changed."""
        elements = sum(param.numel() for param in self.step.params)
        self.step.metrics["clipped"] = torch.stack(self.counts).double().sum() / elements
        self.done()


class _Piece(NamedTuple):
    rows: list[int]
    views: list[Tensor]
    """Memory for whole tensors, in their shapes; or for elements of one, as a vector."""
    flat: Tensor
    """The same memory as a vector."""
    cut: slice | None
    owner: Tensor | None
    """The place in ``rows`` that each element belongs to; None for one tensor."""


def run_pieces(
    stages: Sequence[Stage],
    updates: Sequence[Tensor],
    settings: Sequence[Setting],
    numbers: tuple[Tensor | None, Tensor | None],
    scratch: Scratch,
    sink: Sink,
) -> None:
    """Multiply or shift updates, send them through elementwise transforms, and pass on what comes out.

    Args:
        stages: The transforms, in order.
        updates: The updates, which are not written to.
        settings: A setting for each update; neighbours that share one are taken together.
        numbers: What updates are multiplied by, one for each or a 0-d tensor for all, or None; and what is subtracted
            from each, or None.
        scratch: Memory for pieces.
        sink: Takes the results.
    """
    first = updates[0]
    shapes = [update.shape for update in updates]
    groups = [own for _, own in by_setting(settings)]
    key = (*shapes, *[group.stop for group in groups], first.dtype, first.device)
    pieces = scratch.plan("pieces", key, lambda: _planned(updates, groups, scratch))
    usual = [stage.usual() for stage in stages]
    factors, shifts = numbers
    means = [] if shifts is None else list(shifts.to(first.dtype).unbind())
    for piece in pieces:
        chosen = [updates[i] for i in piece.rows]
        if piece.cut is None:
            foreach.copy_plain_(piece.views, chosen)
        else:
            piece.flat.copy_(chosen[0].view(-1)[piece.cut])
        if factors is not None:
            _multiply(piece, factors, [updates[i].numel() for i in piece.rows])
        if means:
            foreach.subtract_plain_(piece.views, [means[i] for i in piece.rows])
        for stage, is_usual in zip(stages, usual, strict=True):
            _run(stage, piece, is_usual, scratch)
        sink(piece.rows, piece.cut, piece.views)


def _multiply(piece: _Piece, factors: Tensor, sizes: Sequence[int]) -> None:
    """Multiply a piece by the factors of its updates, with the same rounding as `run_kernel`."""
    divides = piece.flat.dtype != torch.float64 and (not factors.ndim or (factors.is_cpu and max(sizes) > LONG))
    if divides:
        own = factors if not factors.ndim else factors.select(0, piece.rows[0])
        piece.flat.div_(inverse(own))
    elif not factors.ndim:
        piece.flat.mul_(factors)
    else:
        own = factors.narrow(0, piece.rows[0], len(piece.rows))
        foreach.multiply_plain_(piece.views, list(foreach.as_factors(own, piece.flat.dtype).unbind()))


def _run(stage: Stage, piece: _Piece, usual: Sequence[bool], scratch: Scratch) -> None:
    """Send one piece through one transform."""
    columns = [[column[i] for i in piece.rows] for column in stage.state]
    setting, change = stage.settings[piece.rows[0]], stage.transform.change_
    if piece.cut is not None or len(piece.rows) == 1:
        state = [column[0].view(-1) if piece.cut is None else column[0].view(-1)[piece.cut] for column in columns]
        stage.counts.append(_change(stage, piece.flat, state, setting, piece.rows[0], usual, scratch))
        return
    flags = [usual[i] for i in piece.rows]
    if piece.flat.is_cpu and not all(flags):
        for k, (i, view) in enumerate(zip(piece.rows, piece.views, strict=True)):
            state = [column[k].view(-1) for column in columns]
            stage.counts.append(_change(stage, view.view(-1), state, setting, i, usual, scratch))
        return
    joined = [_joined(column, piece, f"state {n}", scratch) for n, column in enumerate(columns)]
    count = None
    if all(flags):
        count = stage.transform.change_usual_(piece.flat, piece.flat, [flat for flat, _ in joined], setting, scratch)
    if count is None:
        usable, started = (_of_elements(flag, piece) for flag in stage.flags)
        count = change(piece.flat, [flat for flat, _ in joined], setting, usable, started)
    stage.counts.append(count)
    for (_, views), column in zip(joined, columns, strict=True):
        foreach.copy_plain_(column, views)


def _change(
    stage: Stage, x: Tensor, state: list[Tensor], setting: Setting, row: int, usual: Sequence[bool], scratch: Scratch
) -> Tensor:
    """Change elements of one tensor."""
    count = stage.transform.change_usual_(x, x, state, setting, scratch) if usual[row] else None
    if count is None:
        usable, started = (flag.select(0, row) for flag in stage.flags)
        count = stage.transform.change_(x, state, setting, usable, started)
    return count


def _joined(column: list[Tensor], piece: _Piece, name: str, scratch: Scratch) -> tuple[Tensor, list[Tensor]]:
    """State of several tensors in one vector, and its views in their shapes."""
    flat = scratch.memory(name, piece.flat.numel(), column[0])
    parts = flat.split([tensor.numel() for tensor in column])
    views = [part.view(tensor.shape) for part, tensor in zip(parts, column, strict=True)]
    foreach.copy_plain_(views, column)
    return flat, views


def _of_elements(flag: Tensor, piece: _Piece) -> Tensor:
    """The flag of each element."""
    own = flag.narrow(0, piece.rows[0], len(piece.rows))
    assert piece.owner is not None
    return own.index_select(0, piece.owner)


def _planned(updates: Sequence[Tensor], groups: Sequence[slice], scratch: Scratch) -> list[_Piece]:
    """Pieces of memory: neighbours with equal settings together while they are short, long tensors cut."""
    most = ON_CPU if updates[0].is_cpu else ELSEWHERE
    runs: list[tuple[list[int], list[int], slice | None]] = []
    for group in groups:
        rows: list[int] = []
        sizes: list[int] = []
        for i in range(group.start, group.stop):
            size = updates[i].numel()
            if size > most:
                runs += [([i], [b - a], slice(a, b)) for a, b in _cuts(size, most)]
                continue
            if rows and (sum(sizes) + size > 2 * most or rows[-1] != i - 1):
                runs.append((rows, sizes, None))
                rows, sizes = [], []
            rows.append(i)
            sizes.append(size)
        if rows:
            runs.append((rows, sizes, None))
    memory = scratch.memory("updates", max(sum(sizes) for _, sizes, _ in runs), updates[0])
    return [_piece(rows, sizes, cut, memory, updates) for rows, sizes, cut in runs]


def _cuts(size: int, most: int) -> list[tuple[int, int]]:
    return [(a, min(a + most, size)) for a in range(0, size, most)]


def _piece(rows: list[int], sizes: list[int], cut: slice | None, memory: Tensor, updates: Sequence[Tensor]) -> _Piece:
    flat = memory.narrow(0, 0, sum(sizes))
    if cut is not None:
        return _Piece(rows, [flat], flat, cut, None)
    views = [part.view(updates[i].shape) for part, i in zip(flat.split(sizes), rows, strict=True)]
    counts = torch.tensor(sizes, device=flat.device)
    places = torch.arange(len(sizes), device=flat.device)
    owner = torch.repeat_interleave(places, counts, output_size=sum(sizes)) if len(rows) > 1 else None
    return _Piece(rows, views, flat, None, owner)
