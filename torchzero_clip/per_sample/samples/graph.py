"""The graph between losses and layers: a hash of what it does, and what in it may give rows to other samples."""

import math
from collections.abc import Hashable, Iterable, Sequence
from hashlib import blake2b
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node

from torchzero_clip.compat import TELLS_HOOKS
from torchzero_clip.per_sample.samples.call import Call, call_of
from torchzero_clip.per_sample.samples.graph_nodes import NODE_KINDS, NodeKind, kind_of
from torchzero_clip.per_sample.samples.pattern import kinds_of_sizes

OUTPUT = "output of the model"  # a key of the metadata of a node, for the forward that it is of
SHORTCUT = "shortcut"  # a key of the metadata of a `torch.cat`: see `shorten`
CAT = "CatBackward0"
CHECKPOINT = "CheckpointFunctionBackward"


def shorten(outputs: Sequence[Tensor], inputs: Sequence[Tensor], name: Hashable) -> None:
    """Let the walk go from outputs, which are made by `torch.cat`, to inputs, past functions that ``name`` stands for.

    These functions keep each row with its sample. There are as many as a sequence is long, so that the graph would
    otherwise be new for each length.
    """
    edges = [(x.grad_fn, x.output_nr) for x in inputs if x.grad_fn is not None]
    for x in outputs:
        if x.grad_fn is not None:
            metadata: Any = x.grad_fn.metadata
            metadata[SHORTCUT] = name, edges


class Graph:
    """The functions of a backward from some roots: one walk finds them all.

    Graphs with equal `outline` have the same functions, connected in the same way. With equal `key`, they also save the
    same numbers. Their rows then belong to the same samples, if `moves_anywhere` is False, and if no function of
    `sites` moves rows along the dimension of the samples.
    """

    def __init__(self, roots: Iterable[Node | None], count: int, *, to_outputs: bool = False) -> None:
        """Walk from the roots. With ``to_outputs``, the walk ends at other outputs of the model."""
        self.count = count
        self.calls: list[Call] = []
        self.sites: list[tuple[Node, Sequence[int]]] = []
        """Functions that move rows along some dimensions of their output, such as ``x[index]``, with these dimensions.

        A proof checks whether the samples are in one of them.
        """
        self.ends: list[Any] = []
        """The forwards of the other outputs of the model at which the walk has ended."""
        self.has_checkpoint = False
        """True with a reentrant checkpoint, which hides its part of the graph."""
        numbers = {node: i for i, node in enumerate(filter(None, roots))}
        said, saved, moving = self._walk(numbers, to_outputs=to_outputs)
        self.nodes = numbers.keys()
        # if torch does not tell what is in a checkpoint, everything may be
        self._may_read = TELLS_HOOKS or not any(call.may_be_in_checkpoint for call in self.calls)
        self.moves_anywhere = bool(moving) and self._find_sites(moving)
        # the index 0, 1, 2, ... moves no rows, and another index does: so the key has the axes
        saved += [tuple(axes) for _, axes in self.sites]
        # no hashes of Python, for which -1 and -2 are equal
        self.outline, self.key = (blake2b(repr(x).encode(), digest_size=16).digest() for x in (said, saved))

    def _walk(
        self, numbers: dict[Node, int], *, to_outputs: bool
    ) -> tuple[list[Hashable], list[Hashable], list[tuple[Node, NodeKind]]]:
        """Walk from the nodes in ``numbers``, and number all others.

        Return what the outline consists of, what the key consists of, and the functions that may move rows.
        """
        said, saved, moving = list[Hashable](), list[Hashable](), list[tuple[Node, NodeKind]]()
        rest = list(numbers)
        while rest:
            node = rest.pop()
            kind = NODE_KINDS.get(type(node)) or kind_of(node)
            said.append(kind.name)
            call = call_of(node) if isinstance(node, BackwardCFunction) else None
            if call is not None:
                self.calls.append(call)
                said.append(call.kind)
            elif kind.name == CHECKPOINT:
                self.has_checkpoint = True
            else:
                if kind.moves_anywhere is not None or kind.axes is not None:
                    moving.append((node, kind))
                for attribute in kind.numbers:
                    value = getattr(node, attribute)
                    saved.append(tuple(value) if isinstance(value, list) else value)
                if kind.views:
                    saved.append(_sizes_of_view(node, self.count))
            # only `shorten` writes it, and only on cat
            edges, metadata = cast(Any, node.next_functions), cast(Any, node.metadata) if kind.name == CAT else {}
            if SHORTCUT in metadata:
                name, edges = metadata[SHORTCUT]
                said.append(name)
            for following, output in edges:
                if following is None:
                    said.append(None)
                elif to_outputs and OUTPUT in following.metadata:
                    said.append(OUTPUT)
                    self.ends.append(following.metadata[OUTPUT])
                else:
                    if following not in numbers:
                        numbers[following] = len(numbers)
                        rest.append(following)
                    said += numbers[following], output
        return said, saved, moving

    @property
    def has_float16(self) -> bool:
        """True if a part of the graph computes in float16, which has no room for large factors."""
        # the shapes and dtypes of outputs have no public name, see `shape_of`
        return any(part.dtype == torch.float16 for node in self.nodes for part in node._input_metadata)

    @property
    def is_exact(self) -> bool:
        """True if the backward adds up in the same order each time, on the CPU."""
        # several threads add up the gradients of x[index] in another order each time
        return torch.get_num_threads() == 1 or all(node.name() != "IndexBackward0" for node in self.nodes)

    def can_read(self, node: Node, kind: NodeKind) -> bool:
        """True if what a function has saved can be read without running a checkpoint again."""
        return not kind.reads or (self._may_read and kind.can_read(node))

    def _find_sites(self, moving: Sequence[tuple[Node, NodeKind]]) -> bool:
        """True if rows may move to any place. Otherwise, note the functions that move them along some dimensions."""
        for node, kind in moving:
            where = kind.moves(node, can_read=self.can_read(node, kind))
            if where == "anywhere":
                return True
            if not isinstance(where, str):
                self.sites.append((node, where))
        return False


def _sizes_of_view(node: Any, count: int) -> Hashable:
    """What decides where a view puts rows: which dimensions it splits or joins, and their sizes.

    For example, a view from (B, 6, 4) to (B, 6, 2, 2) keeps B and 6, and splits 4. Sizes are left out if the batch is
    the first or the last of the dimensions that are split or joined: they do not matter then, and a sequence of another
    length needs no proof.
    """
    before, after = list(node._saved_self_sym_sizes), list(node._input_metadata[0].shape)  # `shape_of`, without a call
    if math.prod(before) != math.prod(after):  # an expanded or a reduced tensor
        return kinds_of_sizes(after, count)
    said: list[Hashable] = []
    while before or after:
        # the next dimensions of both, as few as have the same number of entries
        old = [before.pop(0)] if before else [1]
        new = [after.pop(0)] if after else [1]
        while (before or after) and math.prod(old) != math.prod(new):
            if before and (not after or math.prod(old) < math.prod(new)):
                old.append(before.pop(0))
            else:
                new.append(after.pop(0))
        for part in (old, new):
            kinds = kinds_of_sizes(part, count)
            is_free = len(part) == 1 or (kinds.count(1) == 1 and 1 in (kinds[0], kinds[-1]))
            said.append(kinds if is_free else tuple(part))
    return tuple(said)
