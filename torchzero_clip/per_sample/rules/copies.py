"""A copy of each parameter for each sample, and the rule for empty batches, in which there are no copies."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from typing_extensions import override

from torchzero_clip.compat import pytree
from torchzero_clip.per_sample.captured_layer import CapturedLayer, Rule
from torchzero_clip.per_sample.gradients.contributions import Dense
from torchzero_clip.per_sample.gradients.row_norms import wide
from torchzero_clip.per_sample.layer import trainable
from torchzero_clip.per_sample.samples.call import LayerInput, rows_first
from torchzero_clip.per_sample.samples.pattern import Place


def copy_of(
    layer: CapturedLayer,
    param: nn.Parameter,
    value: Tensor,
    count: int,
    on_shared: Callable[[], bool] | None = None,
    *,
    beside: Iterable[Tensor] = (),
    ordered: bool = True,
) -> Tensor:
    """A view of the value of a parameter for each sample, whose gradients are the per-sample gradients.

    ``beside`` are the inputs of the layer. Without ``ordered``, each view belongs to one row of the input. The proof
    finds the sample of the row. If all samples share it, the proof calls ``on_shared``.
    """

    def contribute(where: Place | Tensor, grad: Tensor) -> list[Dense]:
        (grads,) = rows_first(where, *wide(grad))
        return [Dense(param, grads)]

    copies = value.detach().expand(count, *value.shape)
    rows = LayerInput(copies, 1)
    return layer.watch(copies, [], contribute, rows, copies=ordered, on_shared=on_shared or _never, beside=beside)


def _never() -> bool:
    """False: each copy is of one row, and so of one sample."""
    return False


class WithoutHooks(nn.Module):
    """The forward of a module without its hooks, which have run already."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    @override
    def forward(self, *args: object, **kwargs: object) -> object:
        return type(self.inner).forward(self.inner, *args, **kwargs)


class EmptyRule(Rule):
    """Runs any layer on an empty batch. It adds to each parameter the sum of its copies for no samples, which is 0.

    The output depends on all parameters, even those of experts that got no row, so that the same parameters have
    gradients in all processes.
    """

    runs_layers = True  # those in a module under `BareRule`

    @override
    def run(self, layer: CapturedLayer, /, *args: Any, **kwargs: Any) -> Any:
        params = dict(zip(layer.params, layer.values, strict=True))
        if not layer.capture.processes.sharded:  # the module may use parameters of its submodules too
            params = {name: (param, param) for name, param in trainable(layer.module).items()}
        zeros = {name: copy_of(layer, param, x, 0).sum(0) for name, (param, x) in params.items()}
        nothing = torch.stack([x.sum() for x in zeros.values()]).sum()
        now = {f"inner.{name}": x.detach() + zeros[name] for name, (_, x) in params.items()}
        output = functional_call(WithoutHooks(layer.module), now, args, kwargs)
        return pytree.tree_map_only(Tensor, lambda x: x + nothing.to(x.dtype), output)


EMPTY = EmptyRule()
