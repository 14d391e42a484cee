"""Follows the functions that a forward calls, and finds the labels of their outputs.

A function that moves entries runs once more, on numbers that stand for the labels: the samples plus 1, and 0 for no
sample, because functions fill new entries with 0. Where a function adds entries, each must be equal to their mean: see
`_Call.added`. If a function is in no list, the operations that it consists of are followed instead.
"""

import functools
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import (
    _get_current_function_mode,  # pyright: ignore[reportPrivateUsage]
    _pop_mode,  # pyright: ignore[reportPrivateUsage]
    _push_mode,  # pyright: ignore[reportPrivateUsage]
)
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from torchzero_clip.compat import DisableTorchFunctionSubclass, get_interpreter_stack
from torchzero_clip.per_sample.modes import Mode
from torchzero_clip.per_sample.samples.arguments import Rebuild, flattened
from torchzero_clip.per_sample.samples.broadcast_row import BroadcastRow
from torchzero_clip.per_sample.samples.labels import LOST, Known, Labels, same, simplest, wider
from torchzero_clip.per_sample.samples.operations import (
    ASIDE,
    ELEMENTS,
    JOINED,
    NEW,
    POINTWISE,
    RECURRENT,
    Part,
    after_sequence,
    beside,
    dims_of,
    is_listed,
    names,
    unmoved,
)
from torchzero_clip.per_sample.samples.provenance import Provenance, version_of

VIEWS = names("""
    broadcasttensors chunk detach diagonal expand expandas movedim narrow permute select split splitwithsizes t
    tensorsplit transpose unbind unsafesplit view viewascomplex viewasreal
""")
"""Functions whose outputs lie in the memory of their argument, by their names without underscores."""
SAME = names("""
    flatten ravel reshape reshapeas squeeze unflatten unsafeview unsqueeze viewas viewcopy
""")
"""Functions that keep the order of entries, if they copy them at all."""
MOVES = SAME | names("""
    broadcastto constantpadnd diag diagembed flip gather getitem index indexselect maskedselect packpaddedsequence pad
    padpackedsequence repeat repeatinterleave roll rot90 take takealongdim
""")
"""Functions that move entries of their first argument."""
JOINS = names("cat concat concatenate padsequence stack")
"""Functions that move the entries of all arguments."""
PLACES = {"indexcopy", "indexput", "maskedscatter", "scatter", "setitem"}
"""Functions that put the entries of their last argument into their first one, in place of others."""
SUMS: dict[str, tuple[Any, Any]] = {
    "indexadd": (torch.index_add, torch.index_select),
    "indexput": (functools.partial(torch.ops.aten.index_put, accumulate=True), torch.ops.aten.index),
    **dict.fromkeys(("scatter", "scatteradd", "scatterreduce"), (torch.scatter_add, torch.gather)),
}
"""Functions that may add the entries of their last argument to their first one. The first of each pair adds them, and
the second one reads what is there."""
PADS = {"pad": 3, "constantpadnd": 2, "padpackedsequence": 3, "padsequence": 2}
"""Functions that move entries and fill what is left, and the place of the value among their arguments."""
INDEXED = {"gather", "scatter", "scatteradd", "scatterreduce", "takealongdim"}
"""Functions whose index has a number for each entry."""
ALONG = JOINED | INDEXED | PADS.keys() | {"indexadd", "indexcopy", "indexselect", "repeatinterleave", "roll"}
"""Functions that move entries along some dimensions."""
SHAPES = {"resize", "resizeas", "set"}
"""Functions that give a tensor another memory or size in place, after which its samples are not known."""
KEEPS = {"asstrided", "squeeze", "swapaxes", "swapdims", "t", "transpose", "unsqueeze", "requiresgrad"}
"""Functions that change only the form of a tensor in place."""
TENSORS = {"T", "mT", "H", "mH", "data", "real", "imag", "grad"}
"""Attributes that are tensors."""
NEUTRAL = {"value": 0, "padding_value": 0}
"""Arguments that would change labels: the values of padding."""


class OwnMode(Mode):
    """A mode around forwards. It costs a few microseconds for each function, even one that it ignores."""


def is_followed() -> bool:
    """True if a mode of the clipper sees the functions that run now."""
    return isinstance(_get_current_function_mode(), OwnMode)


@contextmanager
def without_own_modes() -> Generator[None]:
    """A block without the innermost modes of the clipper. Those outside of a mode of the user stay."""
    modes: list[Any] = []
    while isinstance(_get_current_function_mode(), OwnMode):
        modes.append(_pop_mode())
    try:
        yield
    finally:
        while modes:
            _push_mode(modes.pop())


def _make_gradient_contiguous(name: str, output: Any) -> None:
    """Do so for one normalized image: `native_batch_norm_backward` of torch 2.13 misreads other strides."""
    if name in ("batchnorm", "instancenorm") and output.requires_grad and len(output) == 1:
        output.register_hook(Tensor.contiguous)


class OneSample(OwnMode):
    """Corrects the gradients of normalized images in a batch of one sample, which needs no labels."""

    @override
    def called(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        output = func(*args, **kwargs)
        _make_gradient_contiguous(_key(getattr(func, "__name__", "")), output)
        return output


class Following(OwnMode):
    """Notes the labels of what functions return. Compiled functions are not seen."""

    def __init__(self, provenance: Provenance) -> None:
        super().__init__()
        self._provenance = provenance

    @override
    def called(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = getattr(func, "__name__", "")
        if name == "__get__":
            name = func.__self__.__name__
            if name not in TENSORS:  # a size, a dtype, a device
                return func(*args)
        if get_interpreter_stack():  # under torch.vmap and similar, where tensors have no memory of their own
            with _Inside(self):
                return func(*args, **kwargs)
        return self.call(func, _key(name), args, kwargs)

    def call(self, func: Any, name: str, args: Any, kwargs: Any, *, inside: bool = False) -> Any:
        """Return the output of a function, and note its labels."""
        target: Any = args[0] if args else None
        changes = isinstance(target, Tensor) and type(target) is not BroadcastRow
        version = version_of(target) if changes else 0
        if inside or _is_known(name) or not self._has_samples(args, kwargs):
            output = func(*args, **kwargs)
        else:
            with _Inside(self):
                output = func(*args, **kwargs)
            name = "composite"  # its operations have noted the labels
        _make_gradient_contiguous(name, output)
        with DisableTorchFunctionSubclass():  # the argument may be a `BroadcastRow`
            if changes and version_of(target) != version:
                self._changed(func, name, target, version, args, kwargs)
            outputs = output if isinstance(output, list | tuple) else (output,)
            if (new := [*filter(self._provenance.is_new, outputs)]) and name != "grad":
                self._returned(func, name, args, kwargs, new)
            if "out" in kwargs and isinstance(kwargs["out"], Tensor):
                self._provenance.note_change(kwargs["out"], LOST)
        return output

    def _has_samples(self, args: Any, kwargs: Any) -> bool:
        leaves, _ = flattened(args, kwargs)
        with DisableTorchFunctionSubclass():
            tensors = [x for x in leaves if isinstance(x, Tensor)]
            if any(x.is_nested for x in tensors):
                return False
            return any(self._provenance.of(x) is not None for x in tensors)

    def _returned(self, func: Any, name: str, args: Any, kwargs: Any, new: Sequence[Tensor]) -> None:
        """Note the labels of new tensors that a function has returned."""
        leaves, rebuilt = flattened(args, kwargs)
        provenance, known = self._provenance, dict[int, Known]()
        # others only give a dtype and a device
        for i, x in enumerate(leaves[:1] if name in ("to", "typeas") else leaves):
            if isinstance(x, Tensor) and (found := provenance.of(x)) is not None:
                known[i] = found
        results: Sequence[Labels] = [None] * len(new)
        if not known and any(type(x) is BroadcastRow for x in leaves):
            return  # the copies behind it have labels in the graph
        if any(leaves[i].is_nested for i in known):
            results = [LOST] * len(new)
        elif known and name != "composite":
            if (
                name in ELEMENTS
                and len({new[0].shape, *(leaves[i].shape for i in known)}) == len({*known.values()}) == 1
            ):
                results = [*known.values()][:1] * len(new)  # most functions
            else:
                results = self._after(_Call(func, name, args, kwargs, leaves, rebuilt, known), new)
        for x, found in zip(new, results, strict=True):
            provenance.note(x, found)

    def _after(self, call: "_Call", outputs: Sequence[Tensor]) -> Sequence[Labels]:
        """The labels of new outputs of a function that got labels."""
        name, labels, count = call.name, call.labels, self._provenance.count
        name = "maximum" if name in ("max", "min") and len(call.tensors) > 1 else name
        if call.kwargs.get("out") is not None:
            return [LOST] * len(outputs)
        if name in SAME and isinstance(labels.get(0), int):
            return [labels[0]]
        moves = [*labels] if name in JOINS else [0] if name in MOVES and 0 in labels else []
        if moves:
            if any(labels[i] is LOST for i in moves):
                return [LOST] * len(outputs)
            return self._moved(call, outputs)
        if name in PLACES or name in SUMS:
            return [self._placed(call, outputs[0])]
        if name in MOVES:
            return [self._looked_up(call, x) for x in outputs]
        # `select_scatter` writes beside what belongs to no sample, `where` of a condition returns places, several
        # quantiles have a dimension of their own, and an embedding moves the rows of its table
        of_several = name.endswith("quantile") and any(x.ndim for i, x in call.tensors.items() if i)
        of_table = name == "embedding" and any(call.leaves[i].is_floating_point() for i in labels)
        if name.endswith("scatter") or (name == "where" and len(call.tensors) == 1) or of_several or of_table:
            return [LOST] * len(outputs)
        if name in NEW:
            return [None]
        parts = call.parts
        if name in RECURRENT:
            first, *states = outputs
            if isinstance(call.args[1], Tensor) and not call.args[1].is_floating_point():  # packed: rows are steps
                known = LOST if any(part.place for part in parts) else beside(parts[0], first.shape, count, (1,))
                return [known, *[LOST] * len(states)]
            dim = 0 if call.args[-1] is True else 1  # batch_first comes last
            known = [after_sequence(parts, dim, first.shape, count, dim)]
            return [*known, *[after_sequence(parts, dim, x.shape, count, 1) for x in states]]
        dims = () if name in ELEMENTS else dims_of(name, len(parts[0].shape), call.args, call.kwargs)
        return [unmoved(name, parts, x.shape, count, dims) for x in outputs]

    def _moved(self, call: "_Call", outputs: Sequence[Tensor]) -> Sequence[Labels]:
        """The labels after a function that moves entries, which moves their labels too."""
        count, dims = self._provenance.count, call.along
        parts = [Part(found, call.leaves[i].shape) for i, found in call.labels.items() if i in call.moved]
        regular = len(outputs) == 1 and all(isinstance(part.labels, int) for part in parts)
        name = call.name if call.name == "stack" else ASIDE
        # not run if the samples are in another dimension
        if dims and regular and (found := unmoved(name, parts, outputs[0].shape, count, dims)) is not LOST:
            return [found]
        results = [x for x in call.run(self._numbers(call, call.moved)) if x.is_floating_point()]
        if not results:
            return [LOST] * len(outputs)
        found = [simplest(_labels_of(x), y.shape, count) for x, y in zip(results, outputs, strict=False)]
        return [*found, *[None] * (len(outputs) - len(found))]  # lengths or sizes come second

    def _placed(self, call: "_Call", output: Tensor) -> Labels:
        """The labels of a tensor into which a function has put entries, or added them."""
        into, last, count = call.labels.get(0), max(call.tensors), self._provenance.count
        by_mask = call.name == "setitem" and last != len(call.leaves) - 1  # z[mask] = 0.5, where the mask is last
        values = None if by_mask else call.labels.get(last)
        if values is None or into is LOST or values is LOST:
            return LOST if into is None or values is not None else into
        if call.along and isinstance(values, int) and not isinstance(into, Tensor):
            found = beside(Part(values, call.leaves[last].shape), output.shape, count, call.along)
            if found is not LOST and (into is None or found == into):
                return found
        numbers = self._numbers(call, [0, last])
        of_batch = not call.labels.keys() <= {0, last}  # the index has samples
        may_add = call.name in SUMS and any(x is True or isinstance(x, str) for x in call.leaves)
        if call.name in PLACES and not may_add:
            result = call.run({0: numbers[0].clone(), last: numbers[last]})
            return simplest(_labels_of(result[0]), output.shape, count, of_batch=of_batch) if result else LOST
        added = call.added(numbers[0], numbers[last])
        if added is None or isinstance(into, int):
            return LOST if added is None else into
        return simplest(_labels_of(added), output.shape, count, of_batch=of_batch)

    def _looked_up(self, call: "_Call", output: Tensor) -> Labels:
        """The labels of entries that an index selects from a tensor without samples: those of the index."""
        count, leaves, name = self._provenance.count, call.leaves, call.name
        indices = [x for i, x in call.tensors.items() if i]
        by_index = name in ("getitem", "index", "maskedselect") and len(indices) == len(leaves) - 1
        of_each = name in ("gather", "take", "takealongdim") and indices[0].shape == output.shape
        is_mask = any(x.dtype in (torch.bool, torch.uint8) for x in indices)
        if is_mask and (len(indices) > 1 or leaves[0].shape[: indices[0].ndim] != indices[0].shape):
            return LOST
        if name == "maskedselect" and indices[0].ndim != leaves[0].ndim:  # it broadcasts from the last dimension
            return LOST
        if not (by_index or of_each or (name == "indexselect" and leaves[1] == 0)):
            return LOST  # such as table[:, index], where the samples are in another dimension than in the index
        shape = torch.broadcast_shapes(*(x.shape for x in indices))
        parts = [Part(found, leaves[i].shape) for i, found in call.labels.items()]
        if any(part.labels is LOST for part in parts) or (found := unmoved("where", parts, shape, count, ())) is LOST:
            return LOST
        labels = wider(found, shape, count).expand(shape)
        labels = labels.to(output.device)[indices[0]] if is_mask else labels
        return simplest(labels.reshape(*labels.shape, *[1] * (output.ndim - labels.ndim)).long(), output.shape, count)

    def _changed(self, func: Any, name: str, tensor: Tensor, version: int, args: Any, kwargs: Any) -> None:
        """Note the labels of a tensor that a function has changed in place."""
        leaves, rebuilt = flattened(args, kwargs)
        tensors = {i: x for i, x in enumerate(leaves) if isinstance(x, Tensor)}
        labels = {i: self._provenance.before(x, tensor, version) for i, x in tensors.items()}
        before, known = labels[0], {i: found for i, found in labels.items() if i and found is not None}
        if name in KEEPS or (not known and name not in SHAPES):
            self._provenance.refresh(tensor, version)
            return
        call = _Call(func, name, args, kwargs, leaves, rebuilt, known if before is None else {0: before, **known})
        last, count = max(tensors), self._provenance.count
        index = args[1] if len(args) > 1 and isinstance(args[1], tuple) else args[1:2]
        if name == "setitem" and not any(isinstance(x, Tensor | bool | list) for x in index):
            tensor, name = tensor.detach()[args[1]], "copy"  # z[:, 0] = x copies into a view
            before = self._provenance.before(tensor, tensor, version)
        if name == "copy":
            found = beside(Part(known[last], leaves[last].shape), tensor.shape, count) if last in known else before
        elif name in SHAPES or not (name in LISTED or is_listed(name.removeprefix("i"))):
            found = LOST
        else:
            call.name = name if name in LISTED or is_listed(name) else name[1:]  # iadd is add in place
            (found,) = self._after(call, [tensor])
        if found is not LOST and (same(found, before) or not tensor.numel()):
            self._provenance.refresh(tensor, version)
        else:
            self._provenance.note_change(tensor, found)

    def _numbers(self, call: "_Call", places: Sequence[int]) -> dict[int, Tensor]:
        """The samples plus 1 of arguments, and 0 for no sample; with size 1 where they do not vary and move alike."""
        count, free, leaves = self._provenance.count, call.free, call.leaves
        found = {
            i: wider(call.labels.get(i), leaves[i].shape, count).to(leaves[i].device, torch.float32) + 1 for i in places
        }
        sizes: dict[int, int] = {dim: max(x.shape[dim] for x in found.values() if x.ndim >= -dim) for dim in free}
        return {
            i: x.expand([sizes[j - x.ndim] if j - x.ndim in free else n for j, n in enumerate(leaves[i].shape)])
            for i, x in found.items()
        }


class _Inside(TorchDispatchMode):
    """Notes the labels of the operations that a function consists of."""

    def __init__(self, following: Following) -> None:
        super().__init__()
        self._following = following

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = POINTWISE if torch.Tag.pointwise in func.tags else _key(func._schema.name.partition("::")[2])
        return self._following.call(func, name, args, kwargs or {}, inside=True)


@dataclass
class _Call:
    """A call of a function whose arguments have labels, by their places among the leaves."""

    func: Any
    name: str
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    leaves: list[Any]
    rebuilt: Rebuild
    labels: dict[int, Known]

    @functools.cached_property
    def tensors(self) -> dict[int, Tensor]:
        """The arguments that are tensors."""
        return {i: x for i, x in enumerate(self.leaves) if isinstance(x, Tensor)}

    @property
    def parts(self) -> list[Part]:
        """The arguments with labels. Tensors without dimensions are left out beside others, which they only scale."""
        parts = [Part(found, self.leaves[i].shape, i) for i, found in self.labels.items()]
        return [part for part in parts if part.shape] or parts

    @functools.cached_property
    def moved(self) -> list[int]:
        """The arguments whose entries are moved. `torch.cat` passes over tensors of shape (0,)."""
        return [i for i, x in self.tensors.items() if x.shape != (0,)] if self.name in JOINS else [0]

    @property
    def ndim(self) -> int:
        """The number of dimensions of the first argument."""
        return self.tensors[(self.moved or [*self.tensors])[0]].ndim

    @functools.cached_property
    def along(self) -> set[int]:
        """The dimensions along which entries are moved; none if they are not known."""
        return dims_of(self.name, self.ndim, self.args, self.kwargs) if self.name in ALONG else set()

    @property
    def free(self) -> set[int]:
        """The dimensions along which all entries move alike, counted from the last, as negative numbers."""
        if self.along:
            return {dim - self.ndim for dim in range(self.ndim) if dim not in self.along and self.name not in INDEXED}
        if self.name not in ("getitem", "index", "indexput", "setitem"):
            return set()
        last = max(self.tensors) if self.name in PLACES else len(self.leaves)
        whole = None if self.name in ("index", "indexput") else 0
        index = [slice(None) if x is whole else x for x in self.leaves[1:last]]
        if not all(isinstance(x, Tensor | slice) or type(x) is int for x in index):
            return set()  # the index has `None` or `...`
        taken = sum(x.ndim if isinstance(x, Tensor) and x.dtype in (torch.bool, torch.uint8) else 1 for x in index)
        return {*range(taken - self.ndim, 0)}

    def added(self, before: Tensor, given: Tensor) -> Tensor | None:
        """The labels where the function adds entries: their means; None if an entry differs from its mean.

        Entries of no sample do not count. An entry that was there before must be of the same sample too.
        """
        add, read = SUMS[self.name]
        keys = ("indices",) if self.name == "indexput" else ("dim", "index")
        where = [self.args[i] if i < len(self.args) else self.kwargs[key] for i, key in enumerate(keys, 1)]
        zeros, given = torch.zeros_like(before, dtype=torch.float64), given.double()
        try:
            found = add(zeros, *where, given) / add(zeros, *where, given.sign()).clamp(min=1)
        except RuntimeError:
            return None
        again, others = read(found, *where), read(before, *where)
        given = given[tuple(map(slice, again.shape[again.ndim - given.ndim :]))]  # a `src` may be larger than its index
        clash = (given > 0) & ((again != given) | ((others != given) & (others > 0)))
        return None if bool(clash.any()) else torch.maximum(found, before.double())

    def run(self, labels: Mapping[int, Tensor]) -> list[Tensor]:
        """The outputs of the function for labels in place of values; none if it does not take them."""
        leaves = [labels.get(i, x) for i, x in enumerate(self.leaves)]
        args, kwargs = self.rebuilt(leaves)
        kwargs = {key: NEUTRAL.get(key, x) for key, x in kwargs.items()}
        if len(args) > (place := PADS.get(self.name, len(args))):
            args = [*args[:place], 0, *args[place + 1 :]]
        try:
            output = self.func(*args, **kwargs)
        except RuntimeError:  # such as a view of labels of one entry
            return []
        output = args[0] if output is None else output
        return [x for x in (output if isinstance(output, list | tuple) else [output]) if isinstance(x, Tensor)]


def _labels_of(numbers: Tensor) -> Tensor:
    """The labels that numbers stand for."""
    return numbers.long() - 1


@functools.cache
def _key(name: str) -> str:
    """The name of a function as in the lists."""
    return name.replace("_", "")


@functools.cache
def _is_known(name: str) -> bool:
    return name in LISTED or is_listed(name) or "nested" in name


LISTED = VIEWS | MOVES | JOINS | PLACES | SUMS.keys() | SHAPES | KEEPS | TENSORS
