"""Modules with parameters of their own beside submodules, such as class tokens and layer scales."""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from torchzero_clip.compat import checkpoint_around, pytree
from torchzero_clip.per_sample.arguments import flattened
from torchzero_clip.per_sample.broadcast_row import BroadcastRow, Source, row_of_param
from torchzero_clip.per_sample.captured_layer import CapturedLayer, Rule
from torchzero_clip.per_sample.modes import Mode, attribute_read, sets_data
from torchzero_clip.per_sample.rules.copies import copy_of
from torchzero_clip.per_sample.rules.generic import GENERIC
from torchzero_clip.per_sample.rules.linear import LINEAR


class BareRule(Rule):
    """Runs the module with a `BroadcastRow` for each parameter that it uses itself, so submodules keep their rules."""

    runs_layers = True

    @override
    def run(self, layer: CapturedLayer, /, *args: Any, **kwargs: Any) -> object:
        count = layer.count_in(flattened(args, kwargs)[0])
        if count is None:
            return GENERIC.run(layer, *args, **kwargs)
        layer.written = {}
        try:
            with _Rows(layer, count):  # the instance's own forward is the captured layer
                return type(layer.module).forward(layer.module, *args, **kwargs)
        finally:
            layer.written = None


class _Rows(Mode):
    """Replaces parameters of a layer and its submodules by rows where the layer uses them itself."""

    def __init__(self, layer: CapturedLayer, count: int) -> None:
        super().__init__()
        self._layer = layer
        self._count = count
        self._params = {id(param) for param in layer.module.parameters() if param.requires_grad}
        self._rows: dict[int, tuple[Tensor, int]] = {}  # each with the version of its parameter
        self._around = checkpoint_around()

    def _param(self, x: Tensor) -> nn.Parameter:
        """The parameter that a tensor stands for."""
        layer = self._layer
        param = next((param for param, value in layer.values if value is x), None)
        if param is None:  # of a submodule
            name = next(name for name, value in layer.module.named_parameters() if value is x)
            param = layer.capture.params_of(layer.module)[name]
        return param

    def _row(self, x: Any) -> Any:
        """The row of a parameter; any other value itself."""
        layer = self._layer
        if id(x) not in self._params or not torch.is_grad_enabled():  # it would have no graph
            return x
        row, version = self._rows.get(id(x), (x, None))
        if version != (now := x._version):  # the forward may change the parameter without gradients
            param, value = self._param(x), x.detach()
            # cached, because all uses share the copies
            each = cache(partial(copy_of, layer, param, value, self._count))
            source = Source(layer, each, partial(copy_of, layer, param, value, ordered=False))
            row = row_of_param(source, param, value, self._count)
            self._rows[id(x)] = row, now
        return row

    @override
    def replaces(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        # the compiler cannot trace `id`, so all parameters count
        return any(isinstance(x, nn.Parameter) and x.requires_grad for x in pytree.tree_leaves((args, kwargs)))

    @override
    def called(self, func: Callable[..., object], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._layer.capture.running is not self._layer:  # captured submodules have rules of their own
            return func(*args, **kwargs)
        if getattr(func, "__name__", "") == "__set__":  # of the parameter itself
            if sets_data(func) and id(args[0]) in self._rows:
                raise RuntimeError(
                    f"{self._layer} sets .data of a parameter in its forward, after it has used the parameter: change "
                    "it in place in torch.no_grad(), or set .data before"
                )
            return func(*args, **kwargs)
        if attribute_read(func) is not None and id(args[0]) in self._params:
            # `T` is a function of the parameter, other than `shape` and `grad`
            value = func(*args)
            if not isinstance(value, Tensor) or value.grad_fn is None:
                return value
        leaves, rebuilt = flattened(args, kwargs)
        written = self._layer.written or {}
        if written and not written.keys().isdisjoint(map(id, leaves)):
            leaves = [written[id(x)][1] if id(x) in written else x for x in leaves]
            if self._params.isdisjoint(map(id, leaves)):
                changed = rebuilt(leaves)
                return func(*changed[0], **changed[1])
        if not self._params.isdisjoint(map(id, leaves)):
            if checkpoint_around() is not self._around:
                raise RuntimeError(
                    f"{self._layer} uses a parameter in a function that it gives to torch.utils.checkpoint, which "
                    "later repeats the function without the layer. Give it a module that holds the parameter, or call "
                    "the function without a checkpoint"
                )
            if func is F.linear and (output := self._linear(*args, **kwargs)) is not NotImplemented:
                return output
            changed = rebuilt([self._row(x) for x in leaves])
            return func(*changed[0], **changed[1])
        return func(*args, **kwargs)

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
        """The output of a linear layer that is written as a function; NotImplemented if rows are among its arguments.

        It needs no copy of the weight for each token.
        """
        given = {"weight": weight} if bias is None else {"weight": weight, "bias": bias}
        params = {name: self._param(x) for name, x in given.items() if id(x) in self._params}
        if any(x.requires_grad and name not in params for name, x in given.items()) or input.ndim < 2:
            return NotImplemented
        if id(input) in self._params or isinstance(input, BroadcastRow):
            return NotImplemented
        if not (input.requires_grad or self._layer.capture.may_find_shared):
            return NotImplemented
        return LINEAR.run(self._layer, input, (weight, bias), params)
