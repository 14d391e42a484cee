"""What a module stores while it runs sample by sample: statistics, attention weights, auxiliary losses, counters."""

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torchzero_clip.compat import get_unwrapped, is_batchedtensor, maybe_get_bdim, pytree
from torchzero_clip.per_sample.captured_layer import CapturedLayer

_Key = tuple[int, str]  # a place: the id of the dict of attributes or buffers, and the name

OF_MODULES = frozenset([*vars(nn.Module()), "forward"])  # attributes that are no state: those of torch and ours
MISSING = object()
SIMPLE = (bool, int, float, complex, str)


class ModuleState:
    """Starts every run with copies of what a module holds, and combines what the runs leave into that of the batch.

    A tensor that has a batch dimension of size 1 for a sample gets all samples there. Any other tensor gets a new first
    dimension with an entry for each sample. Tensors are found in lists, tuples, dicts and other trees of torch. Buffers
    and tensors that are changed in place, such as counters, must not depend on the sample.
    """

    def __init__(self, layer: CapturedLayer) -> None:
        self._layer = layer
        modules = list(layer.module.modules())
        self._buffers = {id(module._buffers) for module in modules}
        self._holders = {id(holder): holder for module in modules for holder in (vars(module), module._buffers)}
        self._before = dict(self._current())
        self._originals: dict[int, tuple[Tensor, Tensor]] = {}  # by the id of a copy: the copy, and its original
        self._runs: list[dict[_Key, Any]] = []

    def begin(self) -> None:
        """Before a run, for one sample or all at once."""
        self.undo()
        for (holder, name), value in self._before.items():
            held = isinstance(value, Tensor | list | tuple | dict | deque | set)
            self._holders[holder][name] = pytree.tree_map(self._copied, value) if held else value

    def end(self) -> None:
        """After a run: note the state that it has left."""
        self._runs.append(dict(self._current()))

    def undo(self) -> None:
        """Restore the state from before the forward."""
        for holder, name in [key for key, _ in self._current() if key not in self._before]:
            del self._holders[holder][name]
        for (holder, name), value in self._before.items():
            self._holders[holder][name] = value

    def join(self) -> None:
        """Install the state of the batch, or raise if a value cannot be combined over the samples."""
        joined = {key: self._combined(key, [run.get(key, MISSING) for run in self._runs]) for key in self._runs[-1]}
        for (holder, name), value in joined.items():
            self._holders[holder][name] = _written(self._before.get((holder, name), MISSING), value)

    def _current(self) -> Iterator[tuple[_Key, Any]]:
        for key, holder in self._holders.items():
            for name, value in holder.items():
                if key in self._buffers or name not in OF_MODULES:
                    yield (key, name), value

    def _copied(self, leaf: Any) -> Any:
        if isinstance(leaf, set):
            return set(leaf)
        if not isinstance(leaf, Tensor) or isinstance(leaf, nn.Parameter) or leaf.requires_grad:
            return leaf  # parameters and results are not changed in place
        copy = leaf.clone()
        self._originals[id(copy)] = copy, leaf
        return copy

    def _combined(self, key: _Key, values: Sequence[object]) -> Any:
        """Combine the values of all runs into one, with tensors of the batch in place of those of samples."""
        trees = [pytree.tree_flatten(value) for value in values]
        structure = trees[-1][1]
        if any(other != structure for _, other in trees):
            raise ValueError(
                f"{self._layer} stores {key[1]!r} with another structure for each sample: return it instead"
            )
        leaves = [self._leaf(key, column) for column in zip(*(leaves for leaves, _ in trees), strict=True)]
        return pytree.tree_unflatten(leaves, structure)

    def _leaf(self, key: _Key, values: Sequence[Any]) -> Any:
        last, name = values[-1], key[1]
        if isinstance(last, Tensor):
            copied = self._originals.get(id(last))
            if copied is not None or key[0] in self._buffers:
                return self._common(key, values, self._before.get(key) if copied is None else copied[1])
            if is_batchedtensor(last):
                return self._joined(get_unwrapped(last).movedim(maybe_get_bdim(last), 0))
            if all(value is last for value in values):
                return last
            if not all(isinstance(value, Tensor) and value.shape == last.shape for value in values):
                raise ValueError(f"{self._layer} stores {name!r} with another shape for each sample: pad it")
            return self._joined(torch.stack(list(values)))
        held = getattr(last, "__dict__", None)
        tensors = [x for x in held.values() if isinstance(x, Tensor)] if isinstance(held, dict) else []
        # one by one, each sample has made an object of its own
        if any(map(is_batchedtensor, tensors)) or (tensors and any(value is not last for value in values)):
            raise ValueError(
                f"{self._layer} stores {name!r}, a {type(last).__name__}, whose tensors cannot be combined over "
                "samples: store a dict"
            )
        if isinstance(last, SIMPLE) and any(value != last for value in values):
            raise ValueError(f"{self._layer} stores {name!r}, which differs between samples and is not a tensor")
        return last

    def _common(self, key: _Key, values: Sequence[Any], original: Tensor | None) -> Any:
        """A tensor that must be the same after all runs, written into the original one if that is possible."""
        if original is not None and all(id(x) in self._originals and not x._version for x in values):
            return original  # no run has changed it
        last: Tensor = values[-1]
        same = (isinstance(x, Tensor) and not is_batchedtensor(x) and torch.equal(x, last) for x in values)
        if not all(same):
            what = f"its buffer {key[1]!r}" if key[0] in self._buffers else f"{key[1]!r} in place"
            raise ValueError(
                f"{self._layer} sets {what} to a value that depends on the samples, which mixes them. "
                "Per-sample gradients would be wrong"
            )
        if original is None or last.requires_grad or original.shape != last.shape or original.dtype != last.dtype:
            return last
        with torch.no_grad():
            return original.copy_(last)

    def _joined(self, rows: Tensor) -> Tensor:
        """The tensor of the batch, from one that has the samples in a new first dimension."""
        dim = self._layer.capture.batch_dim
        if rows.ndim > dim + 1 and rows.shape[dim + 1] == 1:
            return rows.squeeze(dim + 1).movedim(0, dim)
        return rows


def _written(original: Any, value: Any) -> Any:
    """Write the value into the original container, if that is possible, so that other references see it too."""
    if type(original) is not type(value) or original is value:
        return value
    if isinstance(original, list | deque):
        original.clear()
        original.extend(value)
    elif isinstance(original, dict | set):
        original.clear()
        original.update(value)
    else:
        return value
    return original
