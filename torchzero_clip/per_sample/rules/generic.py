"""The rule for any module: vmap runs it with a view of the parameters for each sample, which takes no memory."""

import functools
import itertools
from collections.abc import Callable, Generator, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call
from torch.nn.utils import parametrize
from typing_extensions import override

from torchzero_clip.compat import (
    checkpoint_around,
    current_graph_task_id,
    fully_sharded,
    get_interpreter_stack,
    get_unwrapped,
    is_batchedtensor,
    pytree,
    warn_user,
)
from torchzero_clip.functional.dtypes import widened
from torchzero_clip.per_sample.arguments import counts_up
from torchzero_clip.per_sample.beside_rows import has_layers
from torchzero_clip.per_sample.broadcast_row import BroadcastRow, row_of, without_padding
from torchzero_clip.per_sample.captured_layer import CapturedLayer, Rule
from torchzero_clip.per_sample.each_sample import by_vmap, differ, own_entries
from torchzero_clip.per_sample.function_names import HOOKS, is_in_place
from torchzero_clip.per_sample.gradients.autograd_graph import nodes_of
from torchzero_clip.per_sample.hooks import Hook
from torchzero_clip.per_sample.modes import Mode, attribute_read
from torchzero_clip.per_sample.processes.sharding import storages_of
from torchzero_clip.per_sample.rules.copies import EMPTY, WithoutHooks, copy_of
from torchzero_clip.per_sample.rules.outside import hook_modules, note_functions
from torchzero_clip.per_sample.rules.state import ModuleState
from torchzero_clip.per_sample.samples.graph import CHECKPOINT

WARN = 2 << 30  # bytes of per-sample gradients of one module, above which a warning tells of them


class GenericRule(Rule):
    """Runs the whole module, submodules included, sample by sample, also if it draws random numbers.

    Tensors that have the size of the batch in the batch dimension are split into samples. Others are shared, and stay
    so in later calls, whatever the size of the batch is then. Parameters and buffers are always shared.
    """

    covers_submodules = True

    is_checked = True
    """Whether modules may mix samples, or run again in the backward, so that they are compared with their batch."""

    @override
    def run(self, layer: CapturedLayer, /, *args: Any, **kwargs: Any) -> Any:
        _check_inside(layer, hooks=self.is_checked)
        leaves, structure = pytree.tree_flatten((args, kwargs))
        dims, shared = self.dims(layer, args, kwargs, leaves)
        if not any(dim is not None for dim in dims):
            dims = _dims_of_rows(layer, leaves)
            if any(dim is not None for dim in dims):  # so their number says nothing of what samples share
                shared = set()
        inputs = _inputs(layer, leaves, dims)
        count = _batch_size(layer, leaves, {len(x) for x in inputs.values()})
        if not count:
            return EMPTY.run(layer, *args, **kwargs)
        copies = copies_of(layer, count, inputs.values(), ordered=count == layer.capture.forward.batch_size)
        has_samples = any(dim is not None for dim in dims)

        def output_dim(i: int) -> int | None:
            return self.output_dim(layer, i) if has_samples else None

        one = _One(layer, leaves, structure, {i: dims[i] for i in inputs}, output_dim)
        # tensors of inference have no version
        given = [leaf for leaf in leaves if isinstance(leaf, Tensor) and not leaf.is_inference()]
        versions = [leaf._version for leaf in given]
        # with one sample, the comparison cannot show whether samples mix
        decision = (count > 1, *dims, *[(x.ndim, x.dtype) if isinstance(x, Tensor) else type(x) for x in leaves])
        with _alone(layer, one) as state:
            tensors = _mapped(layer, state, one, copies, list(inputs.values()))
            changed = versions != [leaf._version for leaf in given]  # so that it cannot run again
            if self.is_checked:
                hook_modules(layer)
            if self.is_checked and decision not in layer.learnt.compared:
                note_functions(layer, tensors, inputs.values())
                if not changed:
                    _refuse_reentrant(layer, tensors, inputs.values())
                    _compare(layer, state, one.output(tensors), args, kwargs)
                    layer.learnt.compared.add(decision)
            state.join()
        if current_graph_task_id() == -1:  # in a backward, where a checkpoint repeats a call that was noted
            layer.learnt.known_arguments |= shared
        return one.output(tensors)

    def dims(
        self, layer: CapturedLayer, args: tuple[Any, ...], kwargs: dict[str, Any], leaves: Sequence[object]
    ) -> tuple[list[int | None], set[Hashable]]:
        """The batch dimension of each argument, None if it has none; and what is known of them for later calls."""
        dim, size = layer.capture.batch_dim, layer.count_in(leaves)
        own = layer.capture.own_storages()
        shared = set(layer.learnt.known_arguments)
        result: list[int | None] = []
        for path, leaf in pytree.tree_flatten_with_path((args, kwargs))[0]:
            result.append(None)
            if not isinstance(leaf, Tensor) or leaf.ndim <= dim or isinstance(leaf, BroadcastRow):
                continue
            if leaf.requires_grad or not storages_of((leaf,)) & own:  # copies share memory with a parameter
                argument = str(path), leaf.ndim
                if leaf.shape[dim] not in (1, size) or (size != 1 and not leaf.stride(dim) and not leaf.requires_grad):
                    shared.add(argument)
                split = (*argument, dim)  # one that was split before stays so, even if it is 0, 1, 2, ... once
                positions = counts_up(leaf) and split not in shared and not layer.capture.forward.is_batch(leaf)
                if leaf.shape[dim] == size and argument not in shared and not positions:
                    shared.add(split)
                    result[-1] = dim
        return result, shared

    def output_dim(self, layer: CapturedLayer, index: int) -> int:
        """The batch dimension of an output."""
        return layer.capture.batch_dim


GENERIC = GenericRule()


def _dims_of_rows(layer: CapturedLayer, leaves: Sequence[Any]) -> list[int | None]:
    """The dimensions of the arguments if these are rows of several samples, such as nodes: each runs as a sample."""
    tensors = [x for x in leaves if isinstance(x, Tensor) and x.ndim and not isinstance(x, BroadcastRow)]
    counts = {len(x) for x in tensors if has_layers(x)}
    if layer.capture.batch_dim or len(counts) != 1:
        return [None] * len(leaves)
    return [0 if any(x is y for y in tensors) and len(x) in counts else None for x in leaves]


def _inputs(layer: CapturedLayer, leaves: Sequence[Any], dims: Sequence[int | None]) -> dict[int, Tensor]:
    """The arguments that have samples, with these first."""
    inputs: dict[int, Tensor] = {}
    for i, (leaf, dim) in enumerate(zip(leaves, dims, strict=True)):
        if isinstance(
            leaf, BroadcastRow
        ):  # with a dimension, it is such as a first state for all, expanded to the batch
            inputs[i] = leaf.copies() if dim is None else own_entries(leaf.copies(), dim)
        elif isinstance(leaf, Tensor) and dim is not None:
            inputs[i] = leaf.movedim(dim, 0)
    return inputs


class _One:
    """Runs the module for one sample, and makes the output of the batch of those of its samples.

    ``dims`` has the batch dimensions of those leaves of the arguments that have samples, and ``output_dim`` that of
    each leaf of the output.
    """

    def __init__(
        self,
        layer: CapturedLayer,
        leaves: Sequence[object],
        structure: Any,
        dims: dict[int, int | None],
        output_dim: Callable[[int], int | None],
    ) -> None:
        self._layer, self._leaves, self._structure, self._dims = layer, leaves, structure, dims
        self._output_dim = output_dim
        self._bare, self._inside = WithoutHooks(layer.module), _Inside(layer)
        self.gets_cache = any(hasattr(x, "get_seq_length") for x in leaves)  # of transformers, which is not imported
        self._output: tuple[list[Any], Any] = [], None  # what it holds beside tensors, and its structure
        self._output_dims: dict[int, int | None] = {}  # of its tensors

    def __call__(self, copies: dict[str, Tensor], *samples: Tensor) -> tuple[Tensor, ...]:
        """The output for tensors of one sample, without their batch dimensions."""
        given = zip(self._dims.values(), samples, strict=True)
        return self._run(copies, [x if dim is None else x.unsqueeze(dim) for dim, x in given])

    def of_each(
        self, copies: dict[str, Tensor], inputs: Sequence[Tensor]
    ) -> Iterator[Callable[[], tuple[Tensor, ...]]]:
        """What computes the output of each sample. An image is a part of the batch, with the strides of the batch.

        Other strides would be misread by torch, see `with_strides`.
        """
        params = zip(*[x.unbind() for x in copies.values()], strict=True)  # at once, so that the backward stacks once
        given = [
            x.unbind() if dim is None else [part.movedim(0, dim) for part in x.split(1)]
            for dim, x in zip(self._dims.values(), inputs, strict=True)
        ]
        rows = zip(*given, strict=True) if given else itertools.repeat(())
        for own, samples in zip(params, rows, strict=False):
            yield functools.partial(self._run, dict(zip(copies, own, strict=True)), samples)

    def _run(self, copies: dict[str, Tensor], samples: Sequence[Tensor]) -> tuple[Tensor, ...]:
        given = list(self._leaves)
        for i, sample in zip(self._dims, samples, strict=True):
            given[i] = sample
        args, kwargs = pytree.tree_unflatten(given, self._structure)
        with self._inside:
            # the copies have all names of tied parameters already
            output = functional_call(self._bare, copies, args, kwargs, tie_weights=False)
        after = pytree.tree_leaves((args, kwargs))
        if len(after) != len(given) or any(a is not b for a, b in zip(after, given, strict=True)):
            raise ValueError(
                f"{self._layer} changes a list or dict among its arguments, which would not be seen outside: return "
                "what it adds, or freeze its parameters"
            )
        return self._taken(output)

    def _taken(self, output: object) -> tuple[Tensor, ...]:
        """Store the structure of an output, and return the tensors of one sample, without their batch dimensions."""
        leaves, structure = pytree.tree_flatten(output)
        self._output_dims = {i: self._output_dim(i) for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)}
        self._output = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves], structure
        for i, d in self._output_dims.items():
            if d is not None and (leaves[i].ndim <= d or leaves[i].shape[d] != 1):
                raise ValueError(
                    f"{self._layer} gives an output of shape {tuple(leaves[i].shape)} for one sample, where dimension "
                    f"{d} should have size 1: something of the batch was not split into samples, or the output has no "
                    f"samples. Pass all tensors with samples as arguments{self._layer.way_out}"
                )
        return tuple(leaves[i] if d is None else leaves[i].squeeze(d) for i, d in self._output_dims.items())

    def output(self, tensors: Sequence[Tensor]) -> Any:
        """The output of the batch, from tensors with the samples first. Without a batch dimension, it is a row."""
        leaves, structure = [*self._output[0]], self._output[1]
        for (i, dim), tensor in zip(self._output_dims.items(), tensors, strict=True):
            leaves[i] = row_of(self._layer, tensor) if dim is None else tensor.movedim(0, dim)
        return pytree.tree_unflatten(leaves, structure)


@contextmanager
def _alone(layer: CapturedLayer, one: _One) -> Generator[ModuleState]:
    """A block in which the module runs for one sample at a time. An error leaves its state as before."""
    # under parametrize.cached(), a run would get the weights of another; torch has no public name for this switch
    layer.capture.runs_whole, caches = True, parametrize._cache_enabled
    parametrize._cache_enabled = 0
    state = ModuleState(layer)
    try:
        yield state
    except BaseException as error:
        state.undo()
        layer.learnt.by_vmap = True  # the loop raised too, so the error was not that of vmap
        if isinstance(error, RuntimeError) and one.gets_cache:
            raise ValueError(
                f"{layer} runs sample by sample, and got a cache that holds values of the whole batch: switch it "
                "off with use_cache=False, in the call or in the config of the model"
            ) from error
        raise
    finally:
        layer.capture.runs_whole, parametrize._cache_enabled = False, caches


class _Inside(Mode):
    """Gives the padding row of embeddings no gradient. Refuses what each sample would do again: hooks and changes."""

    def __init__(self, layer: CapturedLayer) -> None:
        super().__init__()
        self._layer = layer
        self._storages = storages_of(layer.params.values())
        self._around = checkpoint_around()

    @override
    def called(self, func: Callable[..., object], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = getattr(func, "__name__", "")
        if attribute_read(func) == "requires_grad" and is_batchedtensor(args[0]):
            # torch says False under vmap, after which a model that asks sets no hook
            return get_unwrapped(args[0]).requires_grad
        by_vmap = self._layer.learnt.by_vmap and get_interpreter_stack()
        if by_vmap and checkpoint_around() is not self._around:
            raise RuntimeError("vmap cannot run a checkpoint")
        if name in HOOKS:
            raise ValueError("a module that runs sample by sample sets a hook on a tensor, which would get samples")
        changed = [get_unwrapped(x) if is_batchedtensor(x) else x for x in args[:1]] if is_in_place(name) else []
        if storages_of(changed) & self._storages:
            raise ValueError(f"{self._layer} changes a parameter in place in its forward: change it after the step")
        if func is F.embedding:
            args, kwargs = without_padding(args, kwargs)
        return func(*args, **kwargs)


def copies_of(
    layer: CapturedLayer, count: int, inputs: Iterable[Tensor] = (), *, ordered: bool = True
) -> dict[str, Tensor]:
    """The views of each parameter of a layer, under all its names."""
    of = {
        id(value): copy_of(layer, param, value, count, beside=inputs, ordered=ordered) for param, value in layer.values
    }
    size = count * sum(param.nbytes for param in layer.params.values())
    if size > WARN and not layer.learnt.has_warned:
        layer.learnt.has_warned = True
        warn_user(
            f"{layer} runs sample by sample: its per-sample gradients take {size / 2**30:.1f} GiB for {count} samples"
        )
    result: dict[str, Tensor] = {}
    for prefix, module in layer.module.named_modules(prefix="inner", remove_duplicate=False):
        for name, param in module.named_parameters(recurse=False):
            if id(param) in of:
                result[f"{prefix}.{name}"] = of[id(param)]
    return result


def _check_inside(layer: CapturedLayer, *, hooks: bool) -> None:
    """Raise if modules in the layer are sharded; with ``hooks``, also if they have hooks that would not be called."""
    if any(module is not layer.module for module in fully_sharded(layer.module)):
        raise ValueError(
            f"{layer} runs sample by sample, but modules in it are sharded by themselves: call fully_shard on "
            f"{layer}, and not on modules inside"
        )
    for name, module in layer.module.named_modules():
        # torch has no public list of hooks
        if hooks and name and (module._backward_hooks or module._backward_pre_hooks):
            raise ValueError(
                f"{name!r} in {layer} has a backward hook, which would not be called where {layer} is run by vmap: "
                f"hook {layer} itself"
            )


def _refuse_reentrant(layer: CapturedLayer, outputs: Iterable[Tensor], inputs: Iterable[Tensor]) -> None:
    """Raise if the module has a reentrant checkpoint, which would run again with the parameters, not their copies."""
    if any(node.name() == CHECKPOINT for node in {*nodes_of(outputs)}.difference(nodes_of(inputs))):
        raise ValueError(
            f"{layer} runs sample by sample, and its reentrant checkpoint would run again on the whole batch: call "
            "checkpoint with use_reentrant=False"
        )


def _compare(
    layer: CapturedLayer, state: ModuleState, output: object, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Run the module once more, on its batch, and raise unless it gives the same output as sample by sample.

    If it draws random numbers, only shapes are compared. Numbers of other generators are noticed if a second run
    differs; then nothing is compared. It is not run if there are hooks inside, which would be called twice.
    """
    inner = [module for module in layer.module.modules() if module is not layer.module]
    hooks = [  # torch has no public list of them
        hook
        for module in inner
        for hooks in (module._forward_hooks, module._forward_pre_hooks)
        for hook in hooks.values()
    ]
    hooked = any(not isinstance(hook, Hook) for hook in hooks)
    tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    if hooked or any(isinstance(x, BroadcastRow) or not x.numel() for x in tensors):
        return

    def whole() -> list[Any]:
        state.begin()
        given = pytree.tree_map_only(Tensor, lambda x: x.detach().clone(), (args, kwargs))
        with torch.no_grad():
            return pytree.tree_leaves(type(layer.module).forward(layer.module, *given[0], **given[1]))

    dim, before = layer.capture.batch_dim, torch.get_rng_state()
    devices = {x.device.index for x in tensors if x.is_cuda} if torch.cuda.is_initialized() else ()
    with torch.random.fork_rng(devices):
        try:
            together = whole()
        except Exception:  # a cache among its arguments, for example, has been filled by the runs before
            return
        drew = not torch.equal(before, torch.get_rng_state())
        if _all_agree(pytree.tree_leaves(output), together, dim, drew):
            return
        try:
            again = whole()
        except Exception:
            again = together
        if not _all_agree(again, together, dim, drew):
            return
    raise ValueError(
        f"{layer} gives another output for a batch than for its samples one by one: it mixes samples, or a tensor "
        "among its arguments that all samples share has the size of the batch. Give that one a batch "
        f"dimension{layer.way_out}"
    )


def _all_agree(alone: Sequence[Any], together: Sequence[Any], dim: int, drew: bool) -> bool:
    pairs = zip(alone, together, strict=False)
    return all(_agree(x.detach(), y, dim, drew) for x, y in pairs if isinstance(x, Tensor) and isinstance(y, Tensor))


def _agree(alone: Tensor, together: Tensor, dim: int, drew: bool) -> bool:
    """True if an output sample by sample is that of the batch, or one row for all."""
    if alone.ndim == together.ndim > dim and together.shape[dim] == 1:
        together = together.expand(*together.shape[:dim], alone.shape[dim], *together.shape[dim + 1 :])
    if alone.shape != together.shape or drew or not alone.is_floating_point():
        return alone.shape == together.shape
    tolerance = torch.finfo(together.dtype if together.element_size() < 4 else torch.float32).eps ** 0.5
    return not differ(widened(together), widened(alone), tolerance)


def _batch_size(layer: CapturedLayer, leaves: Sequence[object], counts: set[int]) -> int:
    expected = layer.capture.forward.batch_size
    if not counts and expected is not None:
        return expected  # no argument has samples: the output is the same for all
    if len(counts) != 1:
        shapes = [tuple(leaf.shape) for leaf in leaves if isinstance(leaf, Tensor)]
        raise ValueError(
            f"{layer} uses its parameters in a call without a common batch dimension: its inputs have shapes {shapes}, "
            f"the batch has {expected} samples. Pass the tensors of the batch to the model and to the module"
        )
    return counts.pop()


def _mapped(
    layer: CapturedLayer,
    state: ModuleState,
    one: _One,
    copies: dict[str, Tensor],
    inputs: Sequence[Tensor],
) -> Sequence[Tensor]:
    """Run ``one`` for every sample, by vmap or one by one. The results have the samples in the first dimension."""
    if layer.learnt.by_vmap and len(next(iter(copies.values()))) > 1:
        try:
            state.begin()
            outputs = by_vmap(one, copies, *inputs)
            state.end()
            return outputs
        except (RuntimeError, ValueError):  # an error of the module itself is raised again by the loop
            if one.gets_cache:  # to which each sample would append
                raise
            layer.learnt.by_vmap = False
    results: list[tuple[Tensor, ...]] = []
    for run in one.of_each(copies, inputs):
        state.begin()
        results.append(run())
        state.end()
    return [torch.stack(column) for column in zip(*results, strict=True)]
