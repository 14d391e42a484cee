"""The rule for any module: vmap runs it with a view of the parameters for each sample, which takes no memory."""

import inspect
import warnings
from collections.abc import Callable, Sequence
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from typing_extensions import override

from torchzero_clip.per_sample.broadcast_row import anchor, each, is_shared, shared
from torchzero_clip.per_sample.captured_layer import CapturedLayer, Rule, wanted
from torchzero_clip.per_sample.contributions import Dense
from torchzero_clip.per_sample.rules.agreement import Agreement
from torchzero_clip.per_sample.rules.state import State
from torchzero_clip.per_sample.squared_norms import wide

OF_TORCH = ("Batching rule", "vmap", "functorch", "_Copies", "written-to tensor")  # in torch's errors about vmap
BY_VMAP = "by vmap"  # a key of CapturedLayer.agreed: False if vmap cannot run the module


class GenericRule(Rule):
    """Runs the whole module, submodules included, sample by sample, also if it draws random numbers.

    Tensors that have the size of the batch in the batch dimension are split into samples. Others are shared.
    """

    @override
    def run(self, layer: CapturedLayer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        signature = inspect.signature(MethodType(type(layer.module).forward, layer.module))
        arguments = signature.bind(*args, **kwargs).arguments
        leaves, structure = pytree.tree_flatten(arguments)
        names = [name for name, value in arguments.items() for _ in pytree.tree_leaves(value)]
        size = _size(layer, leaves)
        dims = [self.input_dim(layer, name, leaf, size) for name, leaf in zip(names, leaves, strict=True)]
        expanded = all(dim is None for dim in dims)
        if expanded or any(map(is_shared, leaves)):
            leaves = [self._repeated(layer, leaf) if expanded else each(leaf) for leaf in leaves]
            dims = [self.input_dim(layer, name, leaf, size) for name, leaf in zip(names, leaves, strict=True)]
        count = _batch_size(layer, leaves, dims)
        copies = _copies(layer, count)
        if not count:
            return _without_samples(layer, copies, args, kwargs)
        if type(self) is GenericRule:
            _refuse_backward_hooks(layer)
        bare, layout = Bare(layer.module), _Layout()
        split = [(i, dim) for i, dim in enumerate(dims) if dim is not None]

        def bound(given: list[Any]) -> inspect.BoundArguments:
            return inspect.BoundArguments(signature, pytree.tree_unflatten(given, structure))

        def one(copies: dict[str, Tensor], *samples: Tensor) -> tuple[Tensor, ...]:
            given = list(leaves)
            for (i, dim), sample in zip(split, samples, strict=True):
                given[i] = sample.unsqueeze(dim)
            call = bound(given)
            with _Padding():
                output = functional_call(bare, copies, call.args, call.kwargs, tie_weights=False)
            return layout.taken(output, lambda i: self.output_dim(layer, i))

        layer.recorder.inside, caches = True, parametrize._cache_enabled
        parametrize._cache_enabled = 0  # under parametrize.cached(), a run would get the weights of another run
        state = State(layer)
        try:
            agreement = Agreement(layer, leaves, dims, bound)
            inputs = [leaves[i] for i, _ in split]
            outputs = _mapped(one, copies, inputs, [dim for _, dim in split], count, layer, state)
            output = layout.given_back(outputs)
            agreement.check(output, lambda i: self.output_dim(layer, i))
            layer.stores = state.join() or layer.stores
        except BaseException:
            state.undo()
            raise
        finally:
            layer.recorder.inside, parametrize._cache_enabled = False, caches
        return shared(output, lambda i: self.output_dim(layer, i), layer.refuse_row) if expanded else output

    def input_dim(self, layer: CapturedLayer, name: str, value: Any, size: int | None) -> int | None:
        """The batch dimension of an input; None if it has none."""
        dim = 0 if layer.recorder.batch_first else 1
        return dim if isinstance(value, Tensor) and value.ndim > dim and value.shape[dim] == size else None

    def output_dim(self, layer: CapturedLayer, index: int) -> int:
        """The batch dimension of an output."""
        return 0 if layer.recorder.batch_first else 1

    def _repeated(self, layer: CapturedLayer, value: Any) -> Any:
        dim = 0 if layer.recorder.batch_first else 1
        return layer.expanded(value, dim)[0] if isinstance(value, Tensor) and value.ndim > dim else value


class Bare(nn.Module):
    """The forward of a module without its hooks, which have run already."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    @override
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return type(self.inner).forward(self.inner, *args, **kwargs)


class _Padding(TorchFunctionMode):
    """Gives the padding row of embeddings no gradient, which embeddings under vmap fail to do."""

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.embedding:
            return func(*args, **(kwargs or {}))
        call = _EMBEDDING.bind(*args, **(kwargs or {}))
        weight, padding = call.arguments["weight"], call.arguments.get("padding_idx")
        if padding is not None:
            row = torch.arange(len(weight), device=weight.device) == padding % len(weight)
            call.arguments["weight"] = torch.where(row[:, None], weight.detach(), weight)
        return F.embedding(*call.args, **call.kwargs)


_EMBEDDING = inspect.signature(F.embedding)


class _Layout:
    """The structure of the output of a module: tensors and other values."""

    def __init__(self) -> None:
        self._dims: list[int | None] = []
        self._others: list[Any] = []
        self._structure: Any = None

    def taken(self, output: Any, dim: Callable[[int], int]) -> tuple[Tensor, ...]:
        """Store the structure, and return the tensors of one sample."""
        leaves, self._structure = pytree.tree_flatten(output)
        self._dims = [dim(i) if isinstance(leaf, Tensor) else None for i, leaf in enumerate(leaves)]
        self._others = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        return tuple(leaf.squeeze(d) for leaf, d in zip(leaves, self._dims, strict=True) if d is not None)

    def given_back(self, tensors: Sequence[Tensor]) -> Any:
        """Return the output, from tensors with the samples in the first dimension."""
        rest = iter(tensors)
        leaves = [
            other if dim is None else next(rest).movedim(0, dim)
            for other, dim in zip(self._others, self._dims, strict=True)
        ]
        return pytree.tree_unflatten(leaves, self._structure)


class _Copies(torch.autograd.Function):
    """Views of a parameter, one for each sample, in the same memory. Their gradients are the per-sample gradients."""

    @staticmethod
    @override
    def forward(ctx: Any, anchor: Tensor, param: list[nn.Parameter], count: int, layer: CapturedLayer) -> Tensor:
        ctx.param, ctx.layer = param[0], layer
        return param[0].detach().expand(count, *param[0].shape)

    @staticmethod
    @override
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, ...]:
        if wanted(ctx.layer):
            ctx.layer.recorder.add(ctx.layer, [Dense(ctx.param, *wide(grads[0]))])
        return (None,) * 4


def _copies(layer: CapturedLayer, count: int) -> dict[str, Tensor]:
    """The views of each parameter, under all its names."""
    of = {id(param): _Copies.apply(anchor(), [param], count, layer) for param in layer.params.values()}
    result: dict[str, Tensor] = {}
    for prefix, module in layer.module.named_modules(prefix="inner", remove_duplicate=False):
        for name, param in module.named_parameters(recurse=False):
            if id(param) not in of:
                continue
            result[f"{prefix}.{name}"] = of[id(param)]
    return result


def _refuse_backward_hooks(layer: CapturedLayer) -> None:
    for name, module in layer.module.named_modules():
        if name and (module._backward_hooks or module._backward_pre_hooks):
            raise ValueError(
                f"{name!r} in {layer} has a backward hook, which would not be called where {layer} is run by vmap: "
                f"hook {layer} itself"
            )


def _without_samples(
    layer: CapturedLayer, copies: dict[str, Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """The output for an empty batch, which vmap cannot run. It depends on the copies, so that they get gradients."""
    params = {f"inner.{name}": param.detach() for name, param in layer.module.named_parameters()}
    nothing = torch.stack([copy.sum() for copy in copies.values()]).sum()
    output = functional_call(Bare(layer.module), params, args, kwargs)
    return pytree.tree_map_only(Tensor, lambda value: value + nothing.to(value.dtype), output)


def _size(layer: CapturedLayer, leaves: Sequence[Any]) -> int | None:
    """The number of samples: that of the batch, or that of the first input if it is not known."""
    dim = 0 if layer.recorder.batch_first else 1
    first = next((x.shape[dim] for x in leaves if isinstance(x, Tensor) and x.ndim > dim), None)
    return first if layer.recorder.batch_size is None else layer.recorder.batch_size


def _batch_size(layer: CapturedLayer, leaves: Sequence[Any], dims: Sequence[int | None]) -> int:
    counts = {leaf.shape[dim] for leaf, dim in zip(leaves, dims, strict=True) if dim is not None}
    if len(counts) != 1:
        expected = layer.recorder.batch_size
        shapes = [tuple(leaf.shape) for leaf in leaves if isinstance(leaf, Tensor)]
        raise ValueError(
            f"{layer} uses its parameters in a call without a common batch dimension: "
            f"its inputs have shapes {shapes}, the batch has {expected} samples"
        )
    return counts.pop()


def _mapped(
    one: Callable[..., tuple[Tensor, ...]],
    copies: dict[str, Tensor],
    inputs: Sequence[Tensor],
    dims: Sequence[int],
    count: int,
    layer: CapturedLayer,
    state: State,
) -> Sequence[Tensor]:
    """Run ``one`` for every sample, by vmap or one by one. The results have the samples in the first dimension."""
    if layer.agreed.get(BY_VMAP, True):
        try:
            state.begin()
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "There is a performance drop")
                outputs = torch.vmap(one, in_dims=(0, *dims), randomness="different")(copies, *inputs)
            state.end()
            layer.agreed[BY_VMAP] = True
            return outputs
        except (RuntimeError, ValueError) as error:
            if not any(word in str(error) for word in OF_TORCH):
                raise
            if "Batching rule not implemented" not in str(error):
                raise RuntimeError(
                    f"{layer} cannot be run sample by sample: {error}\n"
                    "Give its class a rule with register_rule, or freeze its parameters"
                ) from error
            layer.agreed[BY_VMAP] = False
    rows = {name: copy.unbind(0) for name, copy in copies.items()}
    split = [tensor.unbind(dim) for tensor, dim in zip(inputs, dims, strict=True)]
    results: list[tuple[Tensor, ...]] = []
    for i in range(count):
        state.begin()
        results.append(one({name: row[i] for name, row in rows.items()}, *(column[i] for column in split)))
        state.end()
    return [torch.stack(column) for column in zip(*results, strict=True)]
