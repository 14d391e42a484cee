"""What a module stores while it runs sample by sample: statistics, attention weights, auxiliary losses, counters."""

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from torchzero_clip.compat import get_unwrapped, is_batchedtensor, maybe_get_bdim
from torchzero_clip.per_sample.captured_layer import CapturedLayer

_Key = tuple[nn.Module, str]

OF_MODULES = frozenset([*vars(nn.Module()), "forward"])
MISSING = object()
SIMPLE = (bool, int, float, complex, str)


class State:
    """Starts every run with the state from before the forward, and combines the new states into that of the batch.

    A tensor that has a batch dimension of size 1 for a sample gets all samples there. Any other tensor gets a new first
    dimension with an entry for each sample. Tensors are found in lists, tuples, dicts and other trees of torch.

    Args:
        layer: The module, which has not run yet.
    """

    def __init__(self, layer: CapturedLayer) -> None:
        self._layer = layer
        self._dim = layer.engine.batch_dim
        self._before = {key: (value, _copied(value)) for key, value in self._attributes()}
        self._buffers = {(m, name): b for m in layer.module.modules() for name, b in m._buffers.items()}
        self._values = {key: None if b is None else b.clone() for key, b in self._buffers.items()}
        held = pytree.tree_leaves([value for value, _ in self._before.values()])
        self._tensors = [(x, x._version, x.detach().clone()) for x in held if _is_data(x)]
        self._runs: list[dict[_Key, Any]] = []
        self._buffers_of_runs: list[dict[_Key, Tensor | None]] = []

    def begin(self) -> None:
        """Before a run, for one sample or all at once: replace state that it could change in place by copies."""
        for (module, name), _ in list(self._attributes()):
            if (module, name) not in self._before:
                delattr(module, name)
        for (module, name), (_, copied) in self._before.items():
            vars(module)[name] = _copied(copied)
        for i, (tensor, version, values) in enumerate(self._tensors):
            if tensor._version != version:
                tensor.detach().copy_(values)
                self._tensors[i] = tensor, tensor._version, values
        for (module, name), values in self._values.items():
            module._buffers[name] = None if values is None else values.clone()

    def end(self) -> None:
        """After a run: note the state that it has left."""
        self._runs.append(dict(self._attributes()))
        self._buffers_of_runs.append({(m, name): m._buffers.get(name) for m, name in self._buffers})

    def undo(self) -> None:
        """Restore the state from before the forward."""
        self.begin()
        for (module, name), (value, copied) in self._before.items():
            vars(module)[name] = _written(value, copied)
        for (module, name), buffer in self._buffers.items():
            module._buffers[name] = _overwritten(buffer, self._values[module, name])

    def join(self) -> None:
        """Install the state of the batch.

        Raises:
            ValueError: If a value cannot be combined over the samples, or a buffer would depend on the samples.
        """
        buffers = {key: self._common(key) for key in self._buffers}
        state = {key: self._combined([run.get(key, MISSING) for run in self._runs], key[1]) for key in self._runs[-1]}
        for (module, name), buffer in buffers.items():
            module._buffers[name] = _overwritten(self._buffers[module, name], buffer)
        for (module, name), value in state.items():
            vars(module)[name] = _written(self._before.get((module, name), (MISSING,))[0], value)

    def _attributes(self) -> Iterator[tuple[_Key, Any]]:
        for module in self._layer.module.modules():
            for name, value in vars(module).items():
                if name not in OF_MODULES:
                    yield (module, name), value

    def _combined(self, values: Sequence[Any], name: str) -> Any:
        """Combine the values of all runs into one, with tensors of the batch in place of those of samples."""
        last = values[-1]
        if len(values) == 1 and not isinstance(last, Tensor | list | tuple | dict | deque):
            self._refuse_hidden(last, name)
            return last
        columns, structures = zip(*(pytree.tree_flatten(value) for value in values), strict=True)
        if any(structure != structures[-1] for structure in structures):
            raise ValueError(f"{self._layer} stores {name!r} with another structure for each sample")
        leaves = [self._leaf(column, name) for column in zip(*columns, strict=True)]
        return pytree.tree_unflatten(leaves, structures[-1])

    def _leaf(self, values: Sequence[Any], name: str) -> Any:
        last = values[-1]
        if _is_batched(last):
            return self._joined(get_unwrapped(last).movedim(maybe_get_bdim(last), 0))
        if all(value is last for value in values):
            self._refuse_hidden(last, name)
            return last
        if isinstance(last, Tensor):
            if not all(isinstance(value, Tensor) and value.shape == last.shape for value in values):
                raise ValueError(f"{self._layer} stores {name!r} with another shape for each sample")
            return self._joined(torch.stack(list(values)))
        self._refuse_hidden(last, name)
        if isinstance(last, SIMPLE) and any(value != last for value in values):
            raise ValueError(f"{self._layer} stores {name!r}, which differs between samples and is not a tensor")
        return last

    def _refuse_hidden(self, value: Any, name: str) -> None:
        """Raise if an object of an unknown class holds tensors of samples."""
        held = getattr(value, "__dict__", None)
        if isinstance(held, dict) and any(map(_is_batched, held.values())):
            raise ValueError(
                f"{self._layer} stores {name!r}, in which tensors cannot be combined over samples: "
                f"{type(value).__name__}. A dict can"
            )

    def _joined(self, rows: Tensor) -> Tensor:
        """The tensor of the batch, from one that has the samples in a new first dimension."""
        if rows.ndim > self._dim + 1 and rows.shape[self._dim + 1] == 1:
            return rows.squeeze(self._dim + 1).movedim(0, self._dim)
        return rows

    def _common(self, key: _Key) -> Tensor | None:
        """The buffer after all runs, which have to agree."""
        values: list[Any] = [run[key] for run in self._buffers_of_runs]
        last = values[-1]
        if any(value is None for value in values):
            return last
        if any(_is_batched(value) or not torch.equal(value, last) for value in values):
            raise ValueError(
                f"{self._layer} sets its buffer {key[1]!r} to a value that depends on the samples, which mixes them. "
                "Per-sample gradients would be wrong"
            )
        return last


def _is_data(value: object) -> bool:
    """True for a tensor that a module may count in, unlike parameters and results."""
    return isinstance(value, Tensor) and not isinstance(value, nn.Parameter) and not value.requires_grad


def _is_batched(value: object) -> bool:
    return isinstance(value, Tensor) and is_batchedtensor(value)


def _copied(value: Any) -> Any:
    """A copy of a container, at any depth, with the same values."""
    if isinstance(value, set):
        return set(value)
    return pytree.tree_map(_same, value) if isinstance(value, list | tuple | dict | deque) else value


def _same(value: Any) -> Any:
    return value


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


def _overwritten(original: Tensor | None, value: Tensor | None) -> Tensor | None:
    """Write the value into the original buffer, if that is possible."""
    if original is None or value is None or original.shape != value.shape or original.dtype != value.dtype:
        return value
    with torch.no_grad():
        return original if original is value or torch.equal(original, value) else original.copy_(value)
