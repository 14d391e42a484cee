"""Checks that a module gives the same output for a sample alone as for the sample in its batch."""

import contextlib
import copy
import random
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from torchzero_clip.compat import is_functorch_wrapped_tensor
from torchzero_clip.per_sample.captured_layer import CapturedLayer
from torchzero_clip.per_sample.rules.state import is_record

NUMBERS = 8  # sets of numbers on a module for which the check is repeated
FIRST, OTHERS = slice(0, 1), slice(1, None)
LOCKS = (type(threading.Lock()), type(threading.RLock()))


class Agreement:
    """The outputs of a module for its batch, and for the batch with some samples replaced.

    Copies of the module are run without hooks, so that the user sees no effect twice, and only once for every kind of
    arguments and every set of switches. A factor of zero, or inputs of zeros, would hide that a module mixes samples,
    so there are also runs with noise on parameters and inputs. All runs use the same random numbers, and leave the
    state of the user's generators unchanged.

    Args:
        layer: The module, which has not run yet.
        leaves: The tensors and other values of the call.
        dims: The batch dimension of each value; None if it has none.
        arguments: Returns the arguments of the call for a list of such values.

    Raises:
        ValueError: If the module cannot be copied.
    """

    def __init__(
        self, layer: CapturedLayer, leaves: Sequence[Any], dims: Sequence[int | None], arguments: Callable[..., Any]
    ) -> None:
        self._site = layer
        self._key = _key(layer, leaves, dims)
        self._says_something = not any(_is_plain(x, dim) for x, dim in zip(leaves, dims, strict=True))
        self._known = self._key in layer.agreed
        if self._known:
            return
        devices = {x.device.index for x in leaves if isinstance(x, Tensor) and x.is_cuda}
        before, python = _random_states(devices), random.getstate()
        try:
            with torch.random.fork_rng(devices=devices), torch.no_grad():
                self._run_copies(leaves, dims, arguments, before, python, devices)
        finally:
            random.setstate(python)

    def _run_copies(
        self,
        leaves: Sequence[Any],
        dims: Sequence[int | None],
        arguments: Callable[..., Any],
        before: Sequence[Tensor],
        python: Any,
        devices: Iterable[int],
    ) -> None:
        def outputs(values: Sequence[Any], *, noise: bool) -> list[Tensor | None]:
            _restore(before, devices)
            random.setstate(python)
            return _tensors(_run(_copied(self._site, noise=noise), arguments, values))

        self._together = outputs(leaves, noise=False)
        self._drew = not _equal(before, _random_states(devices)) or random.getstate() != python
        self._first_changed = [(self._together, outputs(_rearranged(leaves, dims, _another_first), noise=False))]
        self._rest_changed: list[tuple[list[Tensor | None], list[Tensor | None]]] = []
        with contextlib.suppress(Exception):  # the module may not take such values
            noisy = [_noisy(leaf, seed=0) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            together = outputs(noisy, noise=True)
            first = outputs(_rearranged(noisy, dims, _another_first), noise=True)
            rest = outputs(_rearranged(noisy, dims, _another_rest), noise=True)
            self._first_changed.append((together, first))
            self._rest_changed.append((together, rest))

    def check(self, output: Any, dim: Callable[[int], int]) -> None:
        """Compare the outputs with ``output``, which was computed sample by sample, and with each other.

        If the module draws random numbers, they are only compared with each other.

        Raises:
            ValueError: If they differ, because per-sample gradients would be those of another model.
        """
        alone = _tensors(output)
        ranks = [None if x is None else x.ndim for x in alone]
        if self._known:
            same = ranks == self._site.agreed[self._key]
        else:
            self._check_batch(alone, dim)
            same = self._agrees(alone, dim)
        if not same:
            raise ValueError(
                f"the output of {self._site} for a sample alone differs from that in the batch: it mixes samples, it "
                "reads what an earlier forward stored, or an input without a batch dimension has the size of a batch. "
                "Per-sample gradients would be wrong"
            )
        if self._says_something:
            self._site.agreed[self._key] = ranks

    def _agrees(self, alone: Sequence[Tensor | None], dim: Callable[[int], int]) -> bool:
        hooked = any(module._forward_hooks or module._forward_pre_hooks for module in _inner(self._site))
        pairs = [(_of(one, dim, OTHERS), _of(other, dim, OTHERS)) for one, other in self._first_changed]
        pairs += [(_of(one, dim, FIRST), _of(other, dim, FIRST)) for one, other in self._rest_changed]
        if not self._drew and not hooked:
            pairs.append((list(alone), self._together))
        return all(_all_close(one, other) for one, other in pairs)

    def _check_batch(self, alone: Sequence[Tensor | None], dim: Callable[[int], int]) -> None:
        for i, (one, together) in enumerate(zip(alone, self._together, strict=False)):
            if one is None or together is None or one.ndim != together.ndim or together.ndim <= dim(i):
                continue
            if one.shape[dim(i)] != together.shape[dim(i)]:
                raise ValueError(
                    f"{self._site} gives an output of shape {tuple(together.shape)}, without the samples of its input: "
                    "expand it to the batch"
                )


def _key(layer: CapturedLayer, leaves: Sequence[Any], dims: Sequence[int | None]) -> Hashable:
    """A key for all that may change how a module runs: batch dimensions, other arguments, modes and switches.

    It has no sizes, because a size that equals the batch size already changes the batch dimensions.
    """
    kinds = tuple((x.ndim, x.dtype) if isinstance(x, Tensor) else repr(x) for x in leaves)
    held = [(name, value) for module in layer.module.modules() for name, value in vars(module).items()]
    switches = tuple((name, value) for name, value in held if value is None or isinstance(value, bool | str))
    functions = tuple((name, value) for name, value in held if isinstance(value, FunctionType))
    numbers = tuple((name, value) for name, value in held if type(value) in (int, float))
    key = kinds, tuple(dims), switches, functions, layer.stores
    seen = sum(isinstance(known, tuple) and known[:1] == (key,) for known in layer.agreed)
    return (key, numbers) if seen < NUMBERS else (key, None)  # some numbers count forwards


def _is_plain(value: Any, dim: int | None) -> bool:
    """True if all samples have the same integers, or if there is one sample."""
    if dim is None or not isinstance(value, Tensor):
        return False
    if value.shape[dim] < 2 or value.is_floating_point():
        return value.shape[dim] < 2
    return torch.equal(value, value.narrow(dim, 0, 1).expand_as(value))


def _inner(layer: CapturedLayer) -> Iterator[nn.Module]:
    return (module for module in layer.module.modules() if module is not layer.module)


def _run(twin: nn.Module, arguments: Callable[..., Any], leaves: Sequence[Any]) -> Any:
    bound = arguments([x.detach().clone() if isinstance(x, Tensor) else copy.copy(x) for x in leaves])
    return type(twin).forward(twin, *bound.args, **bound.kwargs)


def _copied(layer: CapturedLayer, *, noise: bool) -> nn.Module:
    """A copy of the module without hooks, with noise on its parameters if ``noise``."""
    memo: dict[int, Any] = {
        id(param): _noisy(param.detach(), seed=1) if noise else param.detach().clone()
        for param in layer.module.parameters()
    }
    for module in layer.module.modules():
        for name, value in vars(module).items():
            memo |= {id(item): item for item in _leaves(value) if _is_shared(item)}
            if name.endswith("_hooks"):
                memo[id(value)] = type(value)()
    try:
        return copy.deepcopy(layer.module, memo)
    except Exception as error:
        raise ValueError(
            f"{layer} cannot be copied, to see whether it mixes samples: give its class a rule with register_rule, or "
            "freeze its parameters"
        ) from error


def _leaves(value: Any) -> Iterator[Any]:
    for leaf in pytree.tree_leaves(value):
        yield leaf
        if is_record(leaf):
            yield from _leaves(dict(vars(leaf)))


def _is_shared(value: Any) -> bool:
    """True for objects that copies share: results of earlier forwards, which torch does not copy, and locks."""
    return isinstance(value, LOCKS) or (isinstance(value, Tensor) and _is_result(value))


def _noisy(tensor: Tensor, *, seed: int) -> Tensor:
    """The tensor with noise, which is the same in every call."""
    generator = torch.Generator().manual_seed(seed)
    if tensor.dtype == torch.bool:
        return tensor ^ (torch.rand(tensor.shape, generator=generator) < 0.5).to(tensor.device)
    if not tensor.is_floating_point():
        return tensor
    noise = torch.randn(tensor.shape, generator=generator).to(tensor)
    return tensor + 0.1 * noise * (1 + tensor.abs())


def _is_result(tensor: Tensor) -> bool:
    """True if a tensor is the result of an earlier forward, which torch does not copy."""
    return is_functorch_wrapped_tensor(tensor) or not tensor.is_leaf


def _rearranged(leaves: Sequence[Any], dims: Sequence[int | None], source: Callable[[int], int]) -> list[Any]:
    """The inputs with samples replaced: sample i becomes the one at index ``source(i)``."""
    result = list(leaves)
    for i, (leaf, dim) in enumerate(zip(leaves, dims, strict=True)):
        if dim is not None:
            last = leaf.shape[dim] - 1
            index = torch.tensor([min(source(k), last) for k in range(last + 1)], device=leaf.device)
            result[i] = leaf.index_select(dim, index)
    return result


def _another_first(index: int) -> int:
    """The first sample becomes the second one."""
    return max(index, 1)


def _another_rest(index: int) -> int:
    """Each sample but the first becomes the one before it."""
    return max(index - 1, 0)


def _tensors(output: Any) -> list[Tensor | None]:
    return [leaf.detach() if isinstance(leaf, Tensor) else None for leaf in pytree.tree_leaves(output)]


def _of(tensors: Sequence[Tensor | None], dim: Callable[[int], int], samples: slice) -> list[Tensor | None]:
    """The parts of tensors that belong to some samples."""
    return [
        None if x is None or x.ndim <= dim(i) else x[(slice(None),) * dim(i) + (samples,)]
        for i, x in enumerate(tensors)
    ]


def _random_states(devices: Iterable[int]) -> list[Tensor]:
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state(device) for device in devices)]


def _restore(states: Sequence[Tensor], devices: Iterable[int]) -> None:
    torch.set_rng_state(states[0])
    for state, device in zip(states[1:], devices, strict=True):
        torch.cuda.set_rng_state(state, device)


def _equal(states: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(states, others, strict=True))


def _all_close(some: Sequence[Tensor | None], others: Sequence[Tensor | None]) -> bool:
    pairs = zip(some, others, strict=True)
    return all(_close(a, b) for a, b in pairs if a is not None and b is not None)


def _close(alone: Tensor, together: Tensor) -> bool:
    if alone.shape != together.shape:
        return False
    if not alone.is_floating_point():
        return torch.equal(alone, together)
    tolerance = torch.finfo(together.dtype).eps ** 0.5
    compared = alone.isfinite() & together.isfinite() & (alone != together)  # equal values, as in masks, set no scale
    alone, together = alone[compared].double(), together[compared].double()
    return not alone.numel() or bool((alone - together).abs().max() <= tolerance * together.abs().max())
