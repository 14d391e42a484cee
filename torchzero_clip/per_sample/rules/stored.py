"""What a module stores on itself while it runs sample by sample: statistics, attention weights, auxiliary losses."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import get_unwrapped, is_batchedtensor, maybe_get_bdim
from torch.utils import _pytree as pytree

from torchzero_clip.per_sample.site import Site

_Key = tuple[nn.Module, str]

OF_MODULES = frozenset(vars(nn.Module()))  # the dictionaries of every module


class Stored:
    """Finds what the attributes of a module hold of single samples, and puts that of the batch in its place.

    A tensor whose samples would be in the dimension of the batch has them there; any other gets a first dimension, with
    an entry for each sample.

    Args:
        site: The module, which has not run yet.
    """

    def __init__(self, site: Site) -> None:
        self._site = site
        self._dim = 0 if site.recorder.batch_first else 1
        self._before = dict(self._attributes())
        self._buffers = [(module, dict(module._buffers)) for module in site.module.modules()]
        self._runs: list[dict[_Key, Any]] = []

    def restore(self) -> None:
        """Forget what a run has left that did not come to its end."""
        for (module, name), value in self._before.items():
            setattr(module, name, value)
        for module, buffers in self._buffers:
            module._buffers.update(buffers)

    def after_sample(self) -> None:
        """Note what one of several runs, each for a sample, has left."""
        self._runs.append({key: value for key, value in self._attributes() if self._before.get(key) is not value})

    def join(self) -> None:
        """Put the values of the batch in place.

        Raises:
            ValueError: If a buffer would hold what comes of samples: it had to be of all of them together.
        """
        self._check_buffers()
        if self._runs:
            for (module, name), last in self._runs[-1].items():
                values = [run.get((module, name)) for run in self._runs]
                if all(_structure(value) == _structure(last) for value in values):
                    columns = zip(*map(pytree.tree_leaves, values), strict=True)
                    leaves = [self._joined(torch.stack(x)) if isinstance(x[0], Tensor) else x[-1] for x in columns]
                    setattr(module, name, pytree.tree_unflatten(leaves, _structure(last)))
            return
        for (module, name), value in self._attributes():
            if any(map(_is_batched, pytree.tree_leaves(value))):
                setattr(module, name, pytree.tree_map(self._settled, value))

    def _attributes(self) -> Iterator[tuple[_Key, Any]]:
        for module in self._site.module.modules():
            for name, value in list(vars(module).items()):
                if name not in OF_MODULES and name != "forward":
                    yield (module, name), value

    def _settled(self, value: Any) -> Any:
        return self._joined(get_unwrapped(value).movedim(maybe_get_bdim(value), 0)) if _is_batched(value) else value

    def _joined(self, rows: Tensor) -> Tensor:
        """Of a tensor with the samples in a dimension before all others."""
        if rows.ndim > self._dim + 1 and rows.shape[self._dim + 1] == 1:
            return rows.squeeze(self._dim + 1).movedim(0, self._dim)
        return rows

    def _check_buffers(self) -> None:
        for module, before in self._buffers:
            changed = [
                name
                for name, value in module._buffers.items()
                if value is not before.get(name) and (self._runs or _is_batched(value))
            ]
            if changed:
                module._buffers.update(before)
                raise ValueError(
                    f"{self._site} sets its buffer {changed[0]!r} to what depends on the samples: it mixes them. "
                    "Per-sample gradients would be wrong"
                )


def _is_batched(value: Any) -> bool:
    return isinstance(value, Tensor) and is_batchedtensor(value)


def _structure(value: Any) -> Any:
    return pytree.tree_structure(value)
