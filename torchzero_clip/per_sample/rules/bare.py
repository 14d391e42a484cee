"""Modules with parameters of their own beside submodules, such as class tokens and layer scales."""

from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree
from typing_extensions import override

from torchzero_clip.compat import checkpoint_around
from torchzero_clip.per_sample.captured_layer import CapturedLayer, Rule
from torchzero_clip.per_sample.rules.copies import copy_of
from torchzero_clip.per_sample.rules.generic import GenericRule
from torchzero_clip.per_sample.samples.arguments import flattened
from torchzero_clip.per_sample.samples.broadcast_row import TRANSPOSED, row_of_param
from torchzero_clip.per_sample.samples.following import OwnMode, without_own_modes

GENERIC = GenericRule()


class BareRule(Rule):
    """Runs the module with a `BroadcastRow` for each parameter that it uses itself, so submodules keep their rules."""

    runs_layers = True

    @override
    def run(self, layer: CapturedLayer, /, *args: Any, **kwargs: Any) -> object:
        count = layer.count_in(flattened(args, kwargs)[0])
        if count is None:
            with without_own_modes():
                return GENERIC.run(layer, *args, **kwargs)
        layer.note()
        with _Rows(layer, count):
            return type(layer.module).forward(layer.module, *args, **kwargs)


class _Rows(OwnMode):
    """Replaces parameters of a layer and its submodules by rows where the layer uses them itself."""

    def __init__(self, layer: CapturedLayer, count: int) -> None:
        super().__init__()
        self._layer = layer
        self._count = count
        self._params = {id(param) for param in layer.module.parameters() if param.requires_grad}
        self._rows: dict[int, Tensor] = {}
        self._around = checkpoint_around()

    def _row(self, x: Any) -> Any:
        """The row of a parameter; any other value itself."""
        layer = self._layer
        if id(x) in self._params and id(x) not in self._rows:
            param = next((param for param, value in layer.values if value is x), None)
            if param is None:  # of a submodule
                name = next(name for name, value in layer.module.named_parameters() if value is x)
                param = layer.engine.attachment.params_of(layer.module)[name]
            with without_own_modes():
                self._rows[id(x)] = row_of_param(layer, x, copy_of(layer, param, x, self._count))
        return self._rows.get(id(x), x)

    @override
    def replaces(self, args: tuple[object, ...], kwargs: dict[str, object]) -> bool:
        # the compiler cannot trace `id`, so all parameters count
        return any(isinstance(x, nn.Parameter) and x.requires_grad for x in pytree.tree_leaves((args, kwargs)))

    @override
    def called(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # attributes, such as shape, are those of the parameter, and captured submodules have rules of their own
        reads = getattr(func, "__name__", "") == "__get__" and func.__self__.__name__ not in TRANSPOSED
        if reads or self._layer.engine.running is not self._layer:
            return func(*args, **kwargs)
        leaves, rebuilt = flattened(args, kwargs)
        if not self._params.isdisjoint(map(id, leaves)):
            if checkpoint_around() is not self._around:
                raise RuntimeError(
                    f"{self._layer} uses a parameter in a function that it gives to torch.utils.checkpoint, which "
                    "later repeats the function without the layer. Give it a module that holds the parameter, or call "
                    "the function without a checkpoint"
                )
            changed = rebuilt([self._row(x) for x in leaves])
            return func(*changed[0], **changed[1])
        return func(*args, **kwargs)
