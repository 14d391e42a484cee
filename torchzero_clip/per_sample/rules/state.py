"""The state of a module that runs sample by sample: statistics, attention weights, auxiliary losses, counters."""

import copy
import dataclasses
from collections import deque
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from torchzero_clip.compat import get_unwrapped, is_batchedtensor, maybe_get_bdim
from torchzero_clip.per_sample.captured_layer import CapturedLayer

_Key = tuple[nn.Module, str]

OF_MODULES = frozenset([*vars(nn.Module()), "forward"])
MISSING = object()
SIMPLE = (bool, int, float, complex, str)


class State:
    """Starts every run with the state from before the forward, and combines the new states into that of the batch.

    A tensor that has a batch dimension of size 1 for a sample gets all samples there. Any other tensor gets a new first
    dimension with an entry for each sample.

    Args:
        layer: The module, which has not run yet.
    """

    def __init__(self, layer: CapturedLayer) -> None:
        self._site = layer
        self._dim = 0 if layer.recorder.batch_first else 1
        self._before = dict(self._attributes())
        self._buffers = {(m, name): b for m in layer.module.modules() for name, b in m._buffers.items()}
        self._runs: list[dict[_Key, Any]] = []
        self._buffers_of_runs: list[dict[_Key, Any]] = []
        self._lent: dict[_Key, tuple[Tensor, int]] = {}
        self._found = False

    def begin(self) -> None:
        """Before a run, for one sample or all at once: replace state that it could change in place by copies."""
        for (module, name), _ in list(self._attributes()):
            if (module, name) not in self._before:
                delattr(module, name)
        for (module, name), value in self._before.items():
            vars(module)[name] = _lent(value)
        for (module, name), buffer in self._buffers.items():
            if buffer is not None:
                module._buffers[name] = lent = buffer.clone()
                self._lent[module, name] = lent, lent._version

    def end(self) -> None:
        """After a run: note the state that it has left."""
        self._runs.append(dict(self._attributes()))
        self._buffers_of_runs.append({key: self._left(key) for key in self._buffers})

    def undo(self) -> None:
        """Restore the state from before the forward."""
        self.begin()
        for (module, name), value in self._before.items():
            vars(module)[name] = value
        for (module, name), buffer in self._buffers.items():
            module._buffers[name] = buffer

    def join(self) -> bool:
        """Install the state of the batch, and return True if it depends on the samples.

        Raises:
            ValueError: If a value cannot be combined over the samples, or a buffer would depend on the samples.
        """
        buffers = {key: self._common(key) for key in self._buffers}
        state: dict[_Key, Any] = {}
        for key in self._runs[-1]:
            values = [run.get(key, MISSING) for run in self._runs]
            state[key] = self._combined(values, key[1])
        for (module, name), buffer in buffers.items():
            module._buffers[name] = _overwritten(self._buffers[module, name], buffer)
        for (module, name), value in state.items():
            vars(module)[name] = _written(self._before.get((module, name), MISSING), value)
        return self._found

    def _attributes(self) -> Iterator[tuple[_Key, Any]]:
        for module in self._site.module.modules():
            for name, value in vars(module).items():
                if name not in OF_MODULES:
                    yield (module, name), value

    def _combined(self, values: Sequence[Any], name: str) -> Any:
        """Combine the values of all runs into one, with tensors of the batch in place of those of samples."""
        last = values[-1]
        if isinstance(last, Tensor):
            return self._tensor(values, name)
        if all(type(value) is type(last) for value in values):
            if isinstance(last, list | tuple | deque) and all(len(value) == len(last) for value in values):
                items = [self._combined(column, name) for column in zip(*values, strict=True)]
                return type(last)(*items) if hasattr(last, "_fields") else type(last)(items)
            if isinstance(last, dict) and all(value.keys() == last.keys() for value in values):
                return {key: self._combined([value[key] for value in values], name) for key in last}
            if is_record(last) and all(vars(value).keys() == vars(last).keys() for value in values):
                for key in vars(last):
                    object.__setattr__(last, key, self._combined([vars(value)[key] for value in values], name))
                return last
            if all(value is last for value in values) or not _holds_tensors(last):
                if isinstance(last, SIMPLE) and any(value != last for value in values):
                    raise ValueError(f"{self._site} stores {name!r}, which differs between samples and is not a tensor")
                return last
        raise ValueError(f"{self._site} stores {name!r}, which cannot be combined over samples: {type(last).__name__}")

    def _tensor(self, values: Sequence[Any], name: str) -> Tensor:
        last = values[-1]
        if is_batchedtensor(last):
            self._found = True
            return self._joined(get_unwrapped(last).movedim(maybe_get_bdim(last), 0))
        if all(value is last for value in values):
            return last
        if not all(isinstance(value, Tensor) and value.shape == last.shape for value in values):
            raise ValueError(f"{self._site} stores {name!r} with another shape for each sample")
        self._found = True
        return self._joined(torch.stack(list(values)))

    def _joined(self, rows: Tensor) -> Tensor:
        """The tensor of the batch, from one that has the samples in a new first dimension."""
        if rows.ndim > self._dim + 1 and rows.shape[self._dim + 1] == 1:
            return rows.squeeze(self._dim + 1).movedim(0, self._dim)
        return rows

    def _left(self, key: _Key) -> Tensor | None:
        """The buffer after a run: the original one, if the run did not write to it."""
        module, name = key
        value, (lent, version) = module._buffers.get(name), self._lent.get(key, (None, 0))
        return self._buffers[key] if value is lent and (lent is None or lent._version == version) else value

    def _common(self, key: _Key) -> Tensor | None:
        """The buffer after all runs, which have to agree."""
        values = [run[key] for run in self._buffers_of_runs]
        last = values[-1]
        if last is None or self._buffers[key] is None or all(value is self._buffers[key] for value in values):
            return last
        alike = all(value is not None and not is_batchedtensor(value) and torch.equal(value, last) for value in values)
        if not alike:
            raise ValueError(
                f"{self._site} sets its buffer {key[1]!r} to a value that depends on the samples, which mixes them. "
                "Per-sample gradients would be wrong"
            )
        return last


def _holds_tensors(value: Any) -> bool:
    held = getattr(value, "__dict__", {})
    return isinstance(held, dict) and any(isinstance(item, Tensor) for item in held.values())


def is_record(value: Any) -> bool:
    """True for dataclasses and namespaces, which hold values under names."""
    return isinstance(value, SimpleNamespace) or (dataclasses.is_dataclass(value) and not isinstance(value, type))


def _lent(value: Any) -> Any:
    """A copy of a container, at any depth, with the same values."""
    if isinstance(value, set):
        return copy.copy(value)
    if isinstance(value, list | deque):
        lent = copy.copy(value)
        for i, item in enumerate(value):
            lent[i] = _lent(item)
        return lent
    if isinstance(value, dict):
        lent = copy.copy(value)
        lent.update({key: _lent(item) for key, item in value.items()})
        return lent
    if is_record(value):
        lent = copy.copy(value)
        for key, item in vars(value).items():
            object.__setattr__(lent, key, _lent(item))
        return lent
    return value


def _written(original: Any, value: Any) -> Any:
    """Write the value into the original object, if that is possible, so that other references see it too."""
    if type(original) is not type(value) or original is value:
        return value
    if isinstance(original, list):
        original[:] = value
    elif isinstance(original, deque):
        original.clear()
        original.extend(value)
    elif isinstance(original, dict | set):
        original.clear()
        original.update(value)
    elif is_record(original):
        vars(original).update(vars(value))
    else:
        return value
    return original


def _overwritten(original: Tensor | None, value: Tensor | None) -> Tensor | None:
    """Write the value into the original buffer, if that is possible."""
    if original is None or value is None or original.shape != value.shape or original.dtype != value.dtype:
        return value
    with torch.no_grad():
        return original if original is value or torch.equal(original, value) else original.copy_(value)
