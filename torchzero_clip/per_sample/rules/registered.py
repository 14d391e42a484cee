"""Rules that users register for their own layers."""

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from torch import Tensor
from torch.func import functional_call
from typing_extensions import override

from torchzero_clip.compat import pytree
from torchzero_clip.per_sample.broadcast_row import BroadcastRow
from torchzero_clip.per_sample.captured_layer import CapturedLayer, Rule
from torchzero_clip.per_sample.gradients.contributions import Contribution, Dense
from torchzero_clip.per_sample.gradients.row_norms import wide
from torchzero_clip.per_sample.rules.copies import WithoutHooks
from torchzero_clip.per_sample.samples.call import LayerInput
from torchzero_clip.per_sample.samples.pattern import Place

PerSampleGradients: TypeAlias = Callable[..., Mapping[str, Tensor]]


class RegisteredRule(Rule):
    """Runs the layer without its parameters in the graph, and calls the function of a user for their gradients."""

    covers_submodules = True

    def __init__(self, gradients: PerSampleGradients) -> None:
        self._gradients = gradients

    @override
    def run(self, layer: CapturedLayer, /, *args: Any, **kwargs: Any) -> Tensor:
        leaves, structure = pytree.tree_flatten((args, kwargs))
        rows = self._put_copies(layer, leaves)
        others = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        tensor_at = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]

        def contribute(place: Place | Tensor, grad: Tensor, *tensors: Tensor) -> list[Contribution]:
            dim = layer.capture.batch_dim
            # the second one is that of a single sample, the third that of rows which all samples share
            if place not in (Place(min(dim, grad.ndim - 1)), Place(0, len(grad)), Place(0, rows or 1)):
                raise layer.unknown_rows(f"its samples are not in dimension {dim}")
            given: list[Any] = list(others)
            for i, tensor in zip(tensor_at, tensors, strict=True):
                given[i] = tensor
            args, kwargs = pytree.tree_unflatten(given, structure)
            return _checked(layer, self._gradients(layer.module, grad, *args, **kwargs))

        params = {f"inner.{name}": param.detach() for name, param in layer.module.named_parameters()}
        layer.capture.runs_whole = True
        try:
            given = pytree.tree_unflatten(leaves, structure)
            output = functional_call(WithoutHooks(layer.module), params, *given)
        finally:
            layer.capture.runs_whole = False
        if not isinstance(output, Tensor):
            raise TypeError(f"{layer} has a registered rule and must return one tensor, got {type(output).__name__}")
        leading = max(min(layer.capture.batch_dim + 1, output.ndim), 1)
        samples = LayerInput(output, leading, is_shared=rows is not None, rows=rows)
        return layer.watch(output, [leaves[i] for i in tensor_at], contribute, samples)

    def _put_copies(self, layer: CapturedLayer, leaves: list[Any]) -> int | None:
        """Replace a value that all samples share by its copies, one after the other. Return how many rows it has."""
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        row = next((x for x in tensors if isinstance(x, BroadcastRow)), None)
        if row is None:
            return None
        if len(tensors) > 1 or layer.capture.batch_dim or not row.ndim:
            raise layer.unknown_rows("all samples share them", how="Expand them to the batch")
        copies = row.copies()
        leaves[:] = [copies.flatten(0, 1) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        return copies.shape[1]


def _checked(layer: CapturedLayer, grads: object) -> list[Contribution]:
    if not isinstance(grads, Mapping) or not all(isinstance(value, Tensor) for value in grads.values()):
        raise TypeError(f"the rule of {layer} must return a dict of tensors, got {type(grads).__name__}")
    if set(grads) != set(layer.params):
        raise ValueError(
            f"the rule of {layer} must return gradients for {sorted(layer.params)}, got some for {sorted(grads)}"
        )
    for name, param in layer.params.items():
        if grads[name].shape[1:] != param.shape:
            raise ValueError(
                f"the rule of {layer} must return a tensor of shape {('B', *param.shape)} for {name!r}, "
                f"got {tuple(grads[name].shape)}"
            )
    return [Dense(param, *wide(grads[name])) for name, param in layer.params.items()]
