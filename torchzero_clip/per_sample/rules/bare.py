"""Modules with parameters of their own beside submodules, such as class tokens and layer scales."""

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from typing_extensions import override

from torchzero_clip.compat import stores_by_hooks
from torchzero_clip.per_sample.arguments import flattened, tensors_in
from torchzero_clip.per_sample.autograd_graph import leaves_of
from torchzero_clip.per_sample.broadcast_row import TRANSPOSED, BroadcastRow, NotARowError, row_of_param
from torchzero_clip.per_sample.captured_layer import CapturedLayer, Rule
from torchzero_clip.per_sample.modes import OwnMode, WithoutOwnModes
from torchzero_clip.per_sample.rules.generic import GenericRule, copy_of
from torchzero_clip.per_sample.rules.state import State

GENERIC = GenericRule()
WHOLE = "whole"  # a key of `CapturedLayer.known`: the layer with all submodules, once an operation was not for rows
TRIED = "tried"  # a key of `CapturedLayer.known`: a call was right without the generic rule


class BareRule(Rule):
    """Runs the module as it is, with its own parameters as rows that all samples share: see `BroadcastRow`.

    So submodules keep their rules. An operation that is not for rows starts the forward again, by the generic rule.
    """

    runs_layers = True

    @override
    def run(self, layer: CapturedLayer, /, *args: Any, **kwargs: Any) -> Any:
        count = layer.count_in(flattened(args, kwargs)[0])
        if WHOLE in layer.known or count is None:
            with WithoutOwnModes():
                return GENERIC.run(layer.known.get(WHOLE, layer), *args, **kwargs)
        if TRIED not in layer.known:
            return self._tried(layer, count, args, kwargs)
        try:
            return _run(layer, count, args, kwargs)
        except NotARowError as error:
            _take_whole(layer)
            raise RuntimeError(
                f"{layer} used a parameter in another way than in earlier calls ({error}): run the forward "
                f"again, or name it from the start: {layer.own_line}"
            ) from None

    def _tried(self, layer: CapturedLayer, count: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run it for the first time, and again if an operation was not for rows."""
        state, random, hooked = State(layer), torch.get_rng_state(), stores_by_hooks()
        versions = [(x, x._version) for x in tensors_in((args, kwargs))]
        try:
            state.begin()
            # a checkpoint counts what an attempt stores, so that it has to be made apart
            with saved_tensors_hooks(_same, _same) if hooked else nullcontext():
                output = _run(layer, count, args, kwargs, first=True)
            fits = True
            if not hooked:
                layer.known[TRIED] = True
                state.end()
                state.join()
                return output
        except NotARowError:
            fits = False
        except BaseException:
            state.undo()
            raise
        state.undo()
        torch.set_rng_state(random)
        if any(x._version != version for x, version in versions):
            raise RuntimeError(
                f"{layer} changes its input in place, and cannot be run again: name it in {layer.own_line}"
            )
        if fits:
            layer.known[TRIED] = True
        else:
            _take_whole(layer)
        return self.run(layer, *args, **kwargs)


def _run(
    layer: CapturedLayer, count: int, args: tuple[Any, ...], kwargs: dict[str, Any], *, first: bool = False
) -> Any:
    layer.engine.tries += 1
    try:
        with _Rows(layer, count) as rows:
            output = type(layer.module).forward(layer.module, *args, **kwargs)
        if first and rows.are_missed(output):
            raise NotARowError("a function that torch does not show")
        return output
    finally:
        layer.engine.tries -= 1


def _take_whole(layer: CapturedLayer) -> None:
    params = layer.engine.attachment.params_of(layer.module)
    layer.known[WHOLE] = CapturedLayer(layer.engine, layer.name, layer.module, GENERIC, params)


def _same(tensor: Tensor) -> Tensor:
    return tensor


class _Rows(OwnMode):
    """Replaces parameters of a layer by rows where it uses them itself. Raises for parameters of its submodules."""

    def __init__(self, layer: CapturedLayer, count: int) -> None:
        super().__init__()
        self._layer = layer
        with WithoutOwnModes():
            self._rows = {id(x): row_of_param(layer, x, copy_of(layer, p, x, count)) for p, x in layer.values}
        self._params = self._rows.keys() | {id(p) for p in layer.module.parameters() if p.requires_grad}

    def are_missed(self, output: Any) -> bool:
        """True if a parameter would get a gradient that is summed over samples, as from a `torch.autograd.Function`."""
        roots = [x for x in tensors_in(output) if not isinstance(x, BroadcastRow)]
        summed = {id(leaf) for leaf in leaves_of(self._rows.values())}
        return any(id(leaf) in summed or id(leaf) in self._rows for leaf in leaves_of(roots))

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        reads = getattr(func, "__name__", "") == "__get__" and func.__self__.__name__ not in TRANSPOSED
        if reads or self._layer.engine.running is not self._layer:
            return func(*args, **kwargs)
        leaves, rebuilt = flattened(args, kwargs)
        found = self._params.intersection(map(id, leaves))
        if not found:
            return func(*args, **kwargs)
        args, kwargs = rebuilt([self._rows.get(id(x), x) for x in leaves])
        output = func(*args, **kwargs)
        if not found <= self._rows.keys() and any(x.requires_grad for x in tensors_in(output)):
            raise NotARowError(getattr(func, "__name__", func))
        return output
