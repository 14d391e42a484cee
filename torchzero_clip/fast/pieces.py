"""Runs elementwise transforms and the kernel after them piece by piece, so that pieces stay in the cache."""

import operator
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import accumulate, islice, repeat
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from torchzero_clip.core.elements import Elements
from torchzero_clip.core.kinds import Kernel
from torchzero_clip.fast.ops import Op, Pointwise, Scale, Shift
from torchzero_clip.functional import foreach
from torchzero_clip.functional.clip import inverse
from torchzero_clip.functional.measure import by_setting
from torchzero_clip.functional.scratch import Scratch
from torchzero_clip.functional.short_tensors import FACTOR_BLOCK
from torchzero_clip.types import Setting

ON_CPU = 2**18
"""Elements of a piece on CPU, 1 MiB of float32. Smaller pieces need more calls, and larger ones leave the cache. It is
a multiple of 64, because cuts at other places change the last bits of the kernels' results."""

IN_ONE_PASS = 2**20  # without elementwise transforms, a piece is read only once and gains nothing from the cache

ELSEWHERE = 2**24
"""Elements of a piece on other devices, 64 MiB of float32. Pieces are large, because each one takes launches. There,
each tensor of a piece fills whole blocks of `FACTOR_BLOCK` elements, so each block needs one number."""

ALONE_ON_CPU, ALONE = 2**17, 2**19  # longer tensors have pieces of their own, because they then need not be copied


_Rows: TypeAlias = tuple[list[int], list[int], int | None]
"""The rows of a piece, how many elements each has in it, and ``part`` of the piece."""


class _Piece(NamedTuple):
    rows: list[int]
    views: list[Tensor]  # memory for whole tensors, in their shapes; or for a part of one tensor, as a vector
    flat: Tensor  # the same memory as a vector
    part: int | None  # the number of the part of a long tensor; None for whole tensors
    owner: Tensor | None
    """On other devices, the place in ``rows`` that each block of memory belongs to; None for one tensor."""
    pads: list[Tensor]  # the unused ends of blocks
    state: list[tuple[Tensor, list[Tensor]]]
    """Memory for the state of several tensors, and for numbers spread over their elements: vectors, with views of each
    in the shapes of the tensors."""
    rounded: tuple[Tensor, list[Tensor]] | None
    """Memory for results in half precision, None for wider dtypes: a vector, and its views in the shapes."""

    def laid_out(self, flat: Tensor) -> Tensor:
        """Elements of this piece as a matrix of blocks if it has an ``owner``, else unchanged."""
        return flat if self.owner is None else flat.view(-1, FACTOR_BLOCK)


class _Before(NamedTuple):
    """The operation before the elementwise transforms."""

    factors: Tensor | None
    inverses: Tensor | None
    """1 / factors, for parts of long tensors, and for all tensors if there is one factor; None to multiply."""
    means: Tensor | None

    @classmethod
    def of(cls, op: Op, dtype: torch.dtype) -> "_Before":
        """What the first operation does to updates that are computed in ``dtype``."""
        if isinstance(op, Shift):
            return cls(None, None, op.numbers.to(dtype))
        if not isinstance(op, Scale):
            return cls(None, None, None)
        # as the kernels, which divide by the inverse: bits do not depend on what applies the factors
        factors = op.factor
        divides = dtype != torch.float64 and (not factors.ndim or factors.is_cpu)
        return cls(factors, inverse(factors) if divides else None, None)


def run_pieces(
    ops: Sequence[Op],
    updates: Sequence[Tensor],
    settings: Sequence[Setting],
    scratch: Scratch,
    kernel: Kernel | None = None,
    columns: Sequence[list[Tensor]] = (),
    writes: bool = True,
) -> None:
    """Send updates through operations, of which only the first may be a scaling or a shift.

    The results go to the ``kernel``, with the parameters and their state in ``columns``. Without a kernel they are
    written over the updates, if ``writes``: some operations change only their own state. Neighbours that share a
    setting are taken together.
    """
    first = updates[0]
    stages = [op for op in ops if isinstance(op, Pointwise)]
    groups = [span for _, span in by_setting(settings)]
    max_size = ELSEWHERE if not first.is_cpu else ON_CPU if stages else IN_ONE_PASS
    per_update = max([len(stage.state) + len(stage.flags.numbers) for stage in stages], default=0)
    key = tuple(group.stop for group in groups)
    # with one name for all dtypes and numbers of tensors, each plan would evict the other in every step
    pieces = scratch.plan(
        f"pieces {per_update} {max_size} {first.dtype}",
        updates,
        lambda: _pieces(updates, groups, per_update, max_size, scratch),
        key,
    )
    for stage in stages:
        stage.begin(scratch)
    before = _Before.of(ops[0], foreach.wide_dtype(first.dtype))
    tensors = [updates, *columns, *(column for stage in stages for column in (*stage.state, *_new_columns(stage)))]
    for piece, of_piece in _with_tensors(pieces, tensors, max_size):
        old_updates, states = of_piece[0], iter(of_piece[1 + len(columns) :])
        if kernel is None and writes and piece.part is not None and piece.rounded is None:
            # a part of a long tensor needs no memory of its own, because transforms may write to what they read
            piece = piece._replace(flat=old_updates[0], views=[])
        if piece.pads and writes:
            foreach.zero_plain_(piece.pads)  # transforms count changed elements there too
        source = _read(piece, old_updates, before)
        for stage in stages:
            old = list(islice(states, len(stage.state)))
            new = list(islice(states, len(_new_columns(stage))))
            _run(stage, piece, source, old, new or old)
            source = piece.flat
        if piece.rounded is not None:
            foreach.copy_plain_([piece.rounded[0]], [piece.flat])
        views = piece.views if piece.rounded is None else piece.rounded[1]
        if kernel is not None:
            kernel(of_piece[1], views, of_piece[2 : 1 + len(columns)], settings[piece.rows[0]], None)
        elif views and writes:
            foreach.copy_plain_(old_updates, views)
    for stage in stages:
        stage.finish()


def _with_tensors(
    pieces: Sequence[_Piece], columns: Sequence[Sequence[Tensor]], max_size: int
) -> Iterator[tuple[_Piece, list[list[Tensor]]]]:
    """Each piece with its tensors in each column: whole ones, or a part of a long one as a vector."""
    parts: Iterator[tuple[Tensor, ...]] = iter(())
    for piece in pieces:
        if piece.part == 0:
            # one call cuts a tensor in the time of three calls that each cut off a part
            long = [column[piece.rows[0]] for column in columns]
            cut = (
                t.view(-1).split(max_size) if t.numel() > max_size else repeat(t.view(-1) if t.ndim else t)
                for t in long
            )
            parts = zip(*cut, strict=False)
        if piece.part is None:
            yield piece, [[column[i] for i in piece.rows] for column in columns]
        else:
            yield piece, [[part] for part in next(parts)]


def _read(piece: _Piece, updates: list[Tensor], before: _Before) -> Tensor:
    """The elements of a piece as a vector: a view of the update, or changed elements in the memory of the piece."""
    factors, inverses, means = before
    row = piece.rows[0]
    if piece.part is None:
        foreach.copy_plain_(piece.views, updates)
        if factors is not None:
            _multiply(piece, factors, inverses)
        if means is not None and piece.owner is not None:
            piece.laid_out(piece.flat).sub_(_of_elements(means, piece))
        elif means is not None:
            numbers = means.narrow(0, row, len(piece.rows))
            foreach.subtract_plain_(piece.views, numbers.unbind())
        return piece.flat
    source = updates[0]
    if piece.rounded is not None:
        foreach.copy_plain_([piece.flat], updates)
        source = piece.flat
    if inverses is not None:
        source = torch.div(source, inverses.select(0, row) if inverses.ndim else inverses, out=piece.flat)
    elif factors is not None:
        numbers = factors.select(0, row) if factors.ndim else factors
        source = torch.mul(source, foreach.as_factors(numbers, piece.flat.dtype), out=piece.flat)
    return source if means is None else torch.sub(source, means.select(0, row), out=piece.flat)


def _multiply(piece: _Piece, factors: Tensor, inverses: Tensor | None) -> None:
    """Multiply whole tensors by their factors, with the same rounding as `run_kernel`."""
    if not factors.ndim:
        _ = piece.flat.mul_(factors) if inverses is None else piece.flat.div_(inverses)
    elif piece.owner is not None:
        piece.laid_out(piece.flat).mul_(_of_elements(foreach.as_factors(factors, piece.flat.dtype), piece))
    else:
        numbers = factors.narrow(0, piece.rows[0], len(piece.rows))
        foreach.multiply_plain_(piece.views, list(foreach.as_factors(numbers, piece.flat.dtype).unbind()))


def _new_columns(stage: Pointwise) -> list[list[Tensor]]:
    """The memory of the next state; empty if this is the memory of the state."""
    return [] if all(map(operator.is_, stage.into, stage.state)) else stage.into


def _run(stage: Pointwise, piece: _Piece, source: Tensor, old: list[list[Tensor]], new: list[list[Tensor]]) -> None:
    """Send one piece through one transform, from ``source`` to its memory; state goes from ``old`` to ``new``."""
    are_unmasked = all(stage.unmasked[i] for i in piece.rows)
    is_alone = len(piece.rows) == 1
    if is_alone or (piece.flat.is_cpu and not are_unmasked):
        if new is not old:  # while the piece is in the cache
            for next_column, column in zip(new, old, strict=True):
                foreach.copy_plain_(next_column, column)
        # a gradient that is not finite, or a first update, is rare: then each tensor has masks of its own
        for k, i in enumerate(piece.rows):
            x, result = (source, piece.flat) if is_alone else (piece.views[k].view(-1), piece.views[k].view(-1))
            _change(stage, x, result, [column[k].view(-1) for column in new], i)
        return
    joined = piece.state[: len(old)]
    usable, started, numbers, _ = stage.flags
    x, *state = [piece.laid_out(flat) for flat in (piece.flat, *(flat for flat, _ in joined))]
    if numbers:
        state += _spread([vector.to(piece.flat.dtype) for vector in numbers], piece, piece.state[len(old) :])
    for (_, views), column in zip(joined, old, strict=True):
        foreach.copy_plain_(views, column)
    at = stage.elements()
    if not are_unmasked:
        at = Elements(usable, started, scratch=stage.scratch, spread=partial(_of_elements, piece=piece))
    stage.run(x, x, state, piece.rows[0], at)
    for (_, views), column in zip(joined, new, strict=True):
        foreach.copy_plain_(column, views)


def _change(stage: Pointwise, source: Tensor, result: Tensor, state: list[Tensor], row: int) -> None:
    at = stage.elements() if stage.unmasked[row] else stage.flags.elements(row, source.device, stage.scratch)
    state = [*state, *(vector.select(0, row).to(source.dtype) for vector in stage.flags.numbers)]
    stage.run(source, result, state, row, at)


def _spread(vectors: Sequence[Tensor], piece: _Piece, memory: Sequence[tuple[Tensor, list[Tensor]]]) -> list[Tensor]:
    """The numbers of each element, from vectors with one for each parameter."""
    if not piece.flat.is_cpu:
        return [_of_elements(vector, piece) for vector in vectors]
    for vector, (_, views) in zip(vectors, memory, strict=False):
        foreach.copy_plain_(views, vector.narrow(0, piece.rows[0], len(piece.rows)).unbind())
    return [flat for flat, _ in memory[: len(vectors)]]


def _of_elements(vector: Tensor, piece: _Piece) -> Tensor:
    """The number of each element or block, from a vector with one for each parameter; 0-d if all are the same."""
    if foreach.is_one_number(vector):
        return vector.select(0, 0)
    numbers = vector.narrow(0, piece.rows[0], len(piece.rows))
    return numbers if piece.owner is None else numbers.index_select(0, piece.owner).unsqueeze(1)


def _pieces(
    updates: Sequence[Tensor], groups: list[slice], per_update: int, max_size: int, scratch: Scratch
) -> list[_Piece]:
    """Pieces of memory for the updates, and for ``per_update`` tensors or numbers beside each."""
    first = updates[0]
    runs = [run for group in groups for run in _rows_of_pieces(updates, group, max_size, first.is_cpu)]
    # all pieces share the memory of the longest, so that it stays in the cache
    longest = max(sum(sizes) for _, sizes, _ in runs)
    like = first.new_empty(0, dtype=foreach.wide_dtype(first.dtype))
    memory = [scratch.memory(f"piece {k}", longest, like) for k in range(1 + per_update)]
    rounded = None if like.dtype == first.dtype else scratch.memory("rounded", longest, first)
    return [_piece(run, memory, [updates[i].shape for i in run[0]], rounded) for run in runs]


def _rows_of_pieces(updates: Sequence[Tensor], group: slice, max_size: int, on_cpu: bool) -> Iterator[_Rows]:
    """The rows of each piece of a group. Short neighbours share a piece, and long tensors are cut."""
    alone, unit = (ALONE_ON_CPU, 1) if on_cpu else (ALONE, FACTOR_BLOCK)
    rows, sizes = list[int](), list[int]()
    for i in range(group.start, group.stop):
        count = updates[i].numel()
        size = -(-count // unit) * unit
        if size > alone:
            yield from (([i], [min(max_size, count - k * max_size)], k) for k in range(-(-count // max_size)))
            continue
        if rows and (sum(sizes) + size > max_size or rows[-1] != i - 1):
            yield rows, sizes, None
            rows, sizes = [], []
        rows.append(i)
        sizes.append(size)
    if rows:
        yield rows, sizes, None


def _piece(run: _Rows, memory: list[Tensor], shapes: list[torch.Size], rounded: Tensor | None) -> _Piece:
    rows, sizes, part = run
    # a tensor that is alone is not padded, because it needs no blocks to tell tensors apart
    total = sum(sizes) if part is not None or len(rows) > 1 else shapes[0].numel()
    flats = [vector.narrow(0, 0, total) for vector in (*memory, *([] if rounded is None else [rounded]))]
    if part is not None:
        rounding = None if rounded is None else (flats[-1], flats[-1:])
        return _Piece(rows, flats[:1], flats[0], part, None, [], [], rounding)
    starts = [0, *accumulate(sizes)]
    counts_of = [shape.numel() for shape in shapes]
    spans = list(zip(starts, counts_of, shapes, strict=False))
    shaped = [[flat.narrow(0, a, n).view(shape) for a, n, shape in spans] for flat in flats]
    ends = [(a + n, b - a - n) for a, b, n in zip(starts, starts[1:], counts_of, strict=False) if b <= total]
    pads = [flat.narrow(0, a, rest) for flat in flats[: len(memory)] for a, rest in ends if rest]
    owner = None
    if len(rows) > 1 and not flats[0].is_cpu:
        counts = torch.tensor(sizes, device=flats[0].device) // FACTOR_BLOCK
        places = torch.arange(len(counts), device=counts.device)
        # with a size, so that it does not wait
        owner = torch.repeat_interleave(places, counts, output_size=total // FACTOR_BLOCK)
    state = list(zip(flats[1 : len(memory)], shaped[1 : len(memory)], strict=True))
    rounding = None if rounded is None else (flats[-1], shaped[-1])
    return _Piece(rows, shaped[0], flats[0], part, owner, pads, state, rounding)
