"""Follows tensors without a graph, such as indices of words, which a forward computes from its arguments."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from torchzero_clip.compat import get_interpreter_stack
from torchzero_clip.per_sample.arguments import Rebuild, flattened
from torchzero_clip.per_sample.labels import LOST, Known, Labels, padded, simplest, wider
from torchzero_clip.per_sample.modes import OwnMode
from torchzero_clip.per_sample.operations import ALONG, COUNTED, ELEMENTS, Part, unmoved
from torchzero_clip.per_sample.provenance import Provenance

MOVES = {  # functions that move elements of their first argument
    *("chunk", "diagonal", "expand", "expand_as", "flatten", "flip", "fliplr", "flipud", "gather", "getitem"),
    *("index_select", "masked_select", "movedim", "mT", "narrow", "permute", "ravel", "repeat", "repeat_interleave"),
    *("reshape", "roll", "rot90", "select", "split", "squeeze", "swapaxes", "swapdims", "t", "T", "take"),
    *("take_along_dim", "tensor_split", "tile", "transpose", "unbind", "unflatten", "unfold", "unsqueeze", "view"),
}
JOINS = {"cat", "concat", "concatenate", "hstack", "pad_sequence", "stack", "vstack"}
PACKS = {"pack_padded_sequence", "pad_packed_sequence", "pad_sequence"}
"""Functions that are followed in the graph too, where they are many operations."""
PLACES = {
    *("index_add", "index_copy", "index_put", "masked_scatter", "scatter", "scatter_add", "scatter_reduce"),
}
"""Functions that put elements into their first argument."""
SHAPES = {"as_strided", "resize", "resize_as", "set", "squeeze", "swapaxes", "swapdims", "t", "transpose", "unsqueeze"}
"""Functions that may change the shape or the memory of a tensor in place."""
REPLACES = {"index_copy", "index_put", "masked_scatter", "scatter"}
"""Functions that put elements in place of others."""


class Following(OwnMode):
    """Notes the labels of what functions return without a graph. Compiled functions are not seen."""

    def __init__(self, provenance: Provenance) -> None:
        super().__init__()
        self._provenance = provenance

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output, kwargs = func(*args, **(kwargs or {})), kwargs or {}
        if torch.compiler.is_compiling():
            return output
        sets = output is None and getattr(func, "__name__", "") in ("__setitem__", "__set__")
        changed = args[0] if sets else output
        first = changed[0] if isinstance(changed, list | tuple) and changed else changed
        if not isinstance(first, Tensor) or not first.ndim:  # most are sizes and dtypes, which need no name
            return output
        name = getattr(func, "__name__", "").strip("_")
        if (first.grad_fn is None or name in PACKS) and not get_interpreter_stack():
            if name == "setitem":
                self._set(*args)
            elif name == "set" and func.__name__ == "__set__":
                if func.__self__.__name__ == "data":
                    self._lose(first, LOST)
            elif args and output is args[0]:
                if func.__name__.endswith("_"):
                    self._changed(name, args, kwargs)
            else:
                self._note(func, func.__self__.__name__ if name == "get" else name, args, kwargs, output)
        return output

    def _set(self, tensor: Tensor, index: Any, value: Any) -> None:
        values = self._provenance.of(value) if isinstance(value, Tensor) and value.ndim else None
        if values is None:
            return
        try:
            labels = self._full(tensor, self._provenance.of(tensor)).clone()
            labels[index] = self._full(value, values)
        except RuntimeError:  # such as after a change of the shape in place
            self._lose(tensor, LOST)
            return
        before, found = self._provenance.of(tensor), simplest(labels, self._provenance.count)
        if tensor._base is not None and not (isinstance(found, int) and found == before):
            self._lose(tensor, LOST)
        self._provenance.note(tensor, found)

    def _changed(self, name: str, args: Any, kwargs: Any) -> None:
        """Note the labels of a tensor that a function has changed in place."""
        tensor, given = args[0], (*args[1:], *kwargs.values())
        if name == "copy":
            self._set(tensor, ..., given[0])
        elif name in SHAPES:
            if self._provenance.of(tensor) is not None:
                self._lose(tensor, LOST)
        elif name in PLACES:
            self._lose(tensor, self._placed(tensor, args, kwargs))
        else:
            name = name.removeprefix("i") if key(name.removeprefix("i")) in ELEMENTS else name
            tensors = [x for x in (tensor, *given) if isinstance(x, Tensor) and x.ndim]
            known = [(x, found, 0) for x in tensors if (found := self._provenance.of(x)) is not None]
            if any(x is not tensor for x, *_ in known):
                self._lose(tensor, self._unmoved(name, tensor, known) if key(name) in ELEMENTS else LOST)

    def _placed(self, tensor: Tensor, args: Any, kwargs: Any) -> Labels:
        """The labels of a tensor into which a function puts elements: the same if it does so within each sample."""
        given = [x for x in (*args[1:], *kwargs.values()) if isinstance(x, Tensor) and x.ndim]
        found = [labels for x in given if (labels := self._provenance.of(x)) is not None]
        own = self._provenance.of(tensor)
        if not found:
            return own
        dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
        dim = dim % tensor.ndim if isinstance(dim, int) else None
        first = found[0] if own is None else own
        within = isinstance(first, int) and first is not LOST and dim not in (None, first)
        within = within and all(isinstance(x, int) and x == first for x in found)
        return first if within and tensor.shape[first] == self._provenance.count else LOST

    def _lose(self, tensor: Tensor, labels: Labels) -> None:
        """Note the labels of a tensor, and that those of the tensor that it is a view of are lost if they changed."""
        if tensor._base is not None and tensor._base.grad_fn is None and labels is LOST:
            self._provenance.note(tensor._base, LOST)
        self._provenance.note(tensor, labels)

    def _note(self, func: Any, name: str, args: Any, kwargs: Any, output: Any) -> None:
        leaves, rebuilt = flattened(args, kwargs)
        if name == "grad" or self._provenance.knows_base(output):
            return
        tensors = {i: x for i, x in enumerate(leaves) if isinstance(x, Tensor) and x.ndim}
        sources = {0: leaves[0]} if name in ("to", "type_as") and 0 in tensors else tensors
        labels = {i: found for i, x in sources.items() if (found := self._provenance.of(x)) is not None}
        if not labels:
            return
        outputs = [x for x in (output if isinstance(output, list | tuple) else [output]) if isinstance(x, Tensor)]
        results: Sequence[Labels] = [LOST] * len(outputs)
        moved = [*tensors] if name in JOINS else [0] if name in MOVES | PACKS | PLACES and 0 in labels else []
        if any(labels[i] is LOST for i in moved or labels if i in labels) or "out" in kwargs:
            pass
        elif moved and name not in PLACES:
            results = self._moved(func, name, leaves, rebuilt, {i: labels.get(i) for i in moved}) or results
        elif (
            moved and len(tensors) > 2 and name in REPLACES and not any(x is True or isinstance(x, str) for x in leaves)
        ):
            results = self._moved(func, name, leaves, rebuilt, {i: labels.get(i) for i in (0, max(tensors))}) or results
        elif moved:
            results = [self._placed(leaves[0], args, kwargs)]
        elif name == "pad":
            pads = args[1] if len(args) > 1 else kwargs["pad"]
            found = padded(labels[0], leaves[0].shape, pads, self._provenance.count)
            constant = {"reflect", "replicate", "circular"}.isdisjoint(x for x in leaves if isinstance(x, str))
            results = [found if constant or found is labels[0] else LOST]
        elif name in MOVES and 0 in tensors:
            results = [self._looked_up(name, x, leaves) for x in outputs]
        elif name not in PLACES and not (name == "where" and len(tensors) == 1):
            known = [(leaves[i], found, i) for i, found in labels.items()]
            results = [self._unmoved(name, x, known, args, kwargs) for x in outputs]
        for x, found in zip(outputs, results, strict=True):
            self._provenance.note(x, found)

    def _moved(
        self, func: Any, name: str, leaves: Sequence[Any], rebuilt: Rebuild, labels: dict[int, Labels]
    ) -> list[Labels]:
        """The labels of the outputs of a function that moves elements, which moves their labels too."""
        leaves = list(leaves)
        for i, found in labels.items():
            leaves[i] = self._full(leaves[i], found).contiguous()
        if name in PACKS:
            leaves = [-1 if isinstance(x, float) else x for x in leaves]  # the value of padding
        args, kwargs = rebuilt(leaves)
        try:
            output = func(*args, **kwargs)
        except RuntimeError:  # it is not for integers, or not for labels of one element
            return []
        outputs = output if isinstance(output, list | tuple) else [output]
        results = [simplest(x, self._provenance.count) for x in outputs]
        return [results[0], None] if name in PACKS - JOINS else results  # lengths or sizes come second

    def _looked_up(self, name: str, output: Tensor, leaves: Sequence[Any]) -> Labels:
        """The labels of entries that an index selects from a tensor without samples: those of the index."""
        indices = [x for x in leaves[1:] if isinstance(x, Tensor) and x.ndim]
        if name in ("gather", "take", "take_along_dim") and indices[0].shape == output.shape:
            return self._provenance.of(indices[0])
        by_index = name in ("getitem", "masked_select") and len(indices) == len(leaves) - 1
        if not (by_index or (name == "index_select" and leaves[1] == 0)):
            return LOST  # such as table[:, index], where the samples are in another dimension than in the index
        known = [(x, labels) for x in indices if (labels := self._provenance.of(x)) is not None]
        if indices[0].dtype in (torch.bool, torch.uint8):
            if len(indices) > 1 or leaves[0].shape[: indices[0].ndim] != indices[0].shape:
                return LOST
            labels = self._full(indices[0], known[0][1])[indices[0]]
        else:
            first = torch.broadcast_tensors(*indices)[0]
            labels = self._unmoved("where", first, [(x, found, 0) for x, found in known])
            if labels is None or isinstance(labels, int):
                return labels
            labels = labels.expand(first.shape)
        return simplest(labels.view(*labels.shape, *[1] * (output.ndim - labels.ndim)), self._provenance.count)

    def _unmoved(
        self, name: str, output: Tensor, known: Sequence[tuple[Tensor, Known, int]], args: Any = (), kwargs: Any = None
    ) -> Labels:
        """The labels of an output whose elements are where those of the arguments were."""
        if any(labels is LOST for _, labels, _ in known):
            return LOST
        parts = [Part(labels, x.shape, place) for x, labels, place in known]
        dims = dims_of(key(name), parts[0], args, kwargs or {})
        return unmoved(key(name), parts, output.shape, self._provenance.count, dims)

    def _full(self, tensor: Tensor, labels: Labels) -> Tensor:
        """The label of each element of a tensor."""
        return wider(labels, tensor.ndim, self._provenance.count).to(tensor.device).expand(tensor.shape)


def key(name: str) -> str:
    """The name of a function as in the tables of operations."""
    return name.replace("_", "")


def dims_of(name: str, part: Part, args: Sequence[Any], kwargs: Mapping[str, Any]) -> set[int]:
    """The dimensions along which a function works; none if it works along all, or if they are not known."""
    given = args[2 if name in COUNTED else 1 :]
    dims = kwargs.get("dim", kwargs.get("axis", given[0] if given else None))
    if name in ALONG and not isinstance(dims, int):
        dims = 0 if name == "msort" else -1
    dims = [dims] if isinstance(dims, int) and not isinstance(dims, bool) else dims
    return {dim % len(part.shape) for dim in dims} if isinstance(dims, list | tuple) else set()
