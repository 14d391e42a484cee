"""Follows tensors without a graph, such as indices of words, which a forward computes from its arguments."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from torchzero_clip.compat import get_interpreter_stack
from torchzero_clip.per_sample.arguments import Rebuild, flattened
from torchzero_clip.per_sample.labels import LOST, Known, Labels, agree, aligned, padded, simplest, wider
from torchzero_clip.per_sample.modes import OwnMode
from torchzero_clip.per_sample.provenance import Provenance

ELEMENTS = {  # functions of single elements
    *("abs", "add", "and", "bfloat16", "bool", "ceil", "clamp", "clip", "clone", "contiguous", "copy", "cos", "cpu"),
    *("cuda", "data", "detach", "div", "double", "eq", "exp", "float", "floor", "floordiv", "ge", "gt", "half", "int"),
    *("invert", "isnan", "le", "log", "logical_and", "logical_not", "logical_or", "long", "lt", "masked_fill"),
    *("maximum", "minimum", "mod", "mul", "ne", "neg", "or", "pow", "radd", "rand_like", "randn_like", "remainder"),
    *("rmul", "round", "rsqrt", "rsub", "rtruediv", "sigmoid", "sign", "sin", "sqrt", "square", "sub", "tanh", "to"),
    *("true_divide", "truediv", "type", "type_as", "where", "zeros_like", "ones_like", "full_like", "empty_like"),
    *("relu", "gelu", "silu", "dropout", "nan_to_num"),
}
ROWS = {"embedding", "group_norm", "layer_norm", "linear", "matmul", "mm", "normalize", "rms_norm", "softmax"}
MOVES = {  # functions that move elements of their first argument
    *("chunk", "diagonal", "fliplr", "flipud", "rot90", "take", "tensor_split"),
    *("expand", "expand_as", "flatten", "flip", "gather", "getitem", "index_select", "masked_select", "movedim", "mT"),
    *("narrow", "permute", "ravel", "repeat", "repeat_interleave", "reshape", "roll", "select", "split", "squeeze"),
    *(
        "swapaxes",
        "t",
        "T",
        "take_along_dim",
        "tile",
        "transpose",
        "unbind",
        "unflatten",
        "unfold",
        "unsqueeze",
        "view",
    ),
}
JOINS = {"cat", "concat", "concatenate", "hstack", "pad_sequence", "stack", "vstack"}
PACKS = {"pack_padded_sequence", "pad_packed_sequence", "pad_sequence"}
"""Functions that are followed in the graph too, where they are many operations."""
REDUCES = {
    "all",
    "amax",
    "amin",
    "any",
    "argmax",
    "argmin",
    "max",
    "mean",
    "median",
    "min",
    "norm",
    "prod",
    "std",
    "sum",
}
PLACES = {
    *("index_add", "index_copy", "index_put", "masked_scatter", "scatter", "scatter_add", "scatter_reduce"),
}
"""Functions that put elements into their first argument."""
REPLACES = {"index_copy", "index_put", "masked_scatter", "scatter"}
"""Functions that put elements in place of others."""
ALONG = {
    *("argsort", "cummax", "cummin", "cumprod", "cumsum", "kthvalue", "log_softmax", "logcumsumexp", "mode", "msort"),
    *("softmax", "sort", "topk"),
}
"""Functions along one dimension."""
PRODUCTS = {
    "addmm": 1,
    "baddbmm": 1,
    "bmm": 0,
    "cdist": 0,
    "ger": 0,
    "linear": 0,
    "matmul": 0,
    "mm": 0,
    "mv": 0,
    "outer": 0,
}
"""Products of matrices, and the place of the left factor among the arguments."""
COUNTED = {"kthvalue", "topk"}
"""Functions with a number before the dimension."""
UNKNOWN = {
    *(
        "argwhere",
        "as_strided",
        "bincount",
        "block_diag",
        "cartesian_prod",
        "combinations",
        "diagonal_scatter",
        "einsum",
    ),
    *("inner", "kron", "nonzero", "segment_reduce", "select_scatter", "slice_scatter", "tensordot"),
    *("unique", "unique_consecutive", "vander"),
}


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
        changed = args[0] if func is Tensor.__setitem__ else output
        first = changed[0] if isinstance(changed, list | tuple) and changed else changed
        if not isinstance(first, Tensor) or not first.ndim:  # most are sizes and dtypes, which need no name
            return output
        name = getattr(func, "__name__", "").strip("_")
        if (first.grad_fn is None or name in PACKS) and not get_interpreter_stack():
            if name == "setitem":
                self._set(*args)
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
        self._provenance.note(tensor, simplest(labels, self._provenance.count))

    def _changed(self, name: str, args: Any, kwargs: Any) -> None:
        """Note the labels of a tensor that a function has changed in place."""
        tensor, given = args[0], (*args[1:], *kwargs.values())
        if name == "copy":
            self._set(tensor, ..., given[0])
        elif name in PLACES:
            self._lose(tensor, self._placed(tensor, args, kwargs))
        else:
            name = name.removeprefix("i") if name.removeprefix("i") in ELEMENTS else name
            labels = [(x, self._provenance.of(x)) for x in (tensor, *given) if isinstance(x, Tensor) and x.ndim]
            known = [(x, found) for x, found in labels if found is not None]
            if any(x is not tensor for x, _ in known):
                self._lose(tensor, self._joint(tensor, known) if name in ELEMENTS else LOST)

    def _joint(self, output: Tensor, known: Sequence[tuple[Tensor, Known]]) -> Labels:
        """The labels of single elements that are computed from elements of tensors with labels."""
        if any(labels is LOST or x.ndim > output.ndim for x, labels in known):
            return LOST
        found = [aligned(labels, x.ndim, output.ndim) for x, labels in known]
        count = self._provenance.count
        fits = [x for x in found if isinstance(x, Tensor) or output.shape[x] == count]
        return fits[0] if fits and all(agree(fits[0], x, output.ndim, count) for x in found) else LOST

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
        elif not (name in UNKNOWN | PLACES or (name == "where" and len(tensors) == 1)):
            results = [self._kept(name, x, leaves, labels, args, kwargs) for x in outputs]
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
            labels = self._joint(first, known)
            if labels is None or isinstance(labels, int):
                return labels
            labels = labels.expand(first.shape)
        return simplest(labels.view(*labels.shape, *[1] * (output.ndim - labels.ndim)), self._provenance.count)

    def _kept(
        self, name: str, output: Tensor, leaves: list[Any], given: Mapping[int, Known], args: Any, kwargs: Any
    ) -> Labels:
        """The labels of an output whose elements are where those of the arguments were."""
        count = self._provenance.count
        for i, labels in given.items():
            before = leaves[i].shape
            if name in ELEMENTS:
                return self._joint(output, [(leaves[j], x) for j, x in given.items()])
            if (name in ALONG and name == "msort" and labels == 0) or (
                name in ALONG
                and isinstance(labels, int)
                and labels == self._dim(before, args[name in COUNTED :], kwargs)
            ):
                return LOST
            if name in PRODUCTS and _is_summed(name, i - PRODUCTS[name], labels, len(before)):
                return LOST
            if name in REDUCES:
                return self._reduced(output, labels, before, args, kwargs)
            if isinstance(labels, Tensor):
                kept = max((dim + 1 for dim, size in enumerate(labels.shape) if size != 1), default=0)
                if name in ROWS | {"getitem"} and output.shape[:kept] == before[:kept] and output.ndim >= kept:
                    return labels.reshape(*labels.shape[:kept], *[1] * (output.ndim - kept))
            else:
                wider_by = max(output.ndim - len(before), 0) if name == "matmul" else 0
                labels += wider_by
                if output.ndim > labels and output.shape[labels] == count:
                    return labels
        return LOST

    @staticmethod
    def _dim(before: Sequence[int], args: Any, kwargs: Any) -> int:
        """The dimension along which a function works: the last one if it is not given."""
        given = [x for x in args[1:] if isinstance(x, int)]
        dim = kwargs.get("dim", given[-1] if given else -1)
        return (dim if isinstance(dim, int) and -len(before) <= dim < len(before) else -1) % len(before)

    def _reduced(self, output: Tensor, labels: Known, before: Sequence[int], args: Any, kwargs: Any) -> Labels:
        dims = kwargs.get("dim", args[1] if len(args) > 1 else None)
        dims = [dims] if isinstance(dims, int) else dims
        if not dims or isinstance(dims, Tensor):
            return LOST
        dims = {dim % len(before) for dim in dims}
        full = wider(labels, len(before), self._provenance.count)
        if any(full.shape[dim] > 1 for dim in dims):
            return LOST
        full = full if full.numel() else full.new_full([max(size, 1) for size in full.shape], -1)
        kept = [1 if i in dims else n for i, n in enumerate(full.shape) if i not in dims or output.ndim == len(before)]
        return simplest(full.reshape(kept), self._provenance.count)

    def _full(self, tensor: Tensor, labels: Labels) -> Tensor:
        """The label of each element of a tensor."""
        return wider(labels, tensor.ndim, self._provenance.count).to(tensor.device).expand(tensor.shape)


def _is_summed(name: str, place: int, labels: Known, ndim: int) -> bool:
    """True if a product of matrices sums over samples of a factor, the left one (``place`` 0) or the right one (1)."""
    dim = ndim - 1 - (place == 1 and ndim > 1)
    varies = labels.shape[dim] != 1 if isinstance(labels, Tensor) else labels == dim
    return (varies and name not in ("cdist", "ger", "outer")) or (place == 1 and (varies or name == "linear"))
