"""Whether a module gives the same for a sample alone as in its batch."""

import contextlib
import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.utils import _pytree as pytree

from torchzero_clip.per_sample.site import Site


class Agreement:
    """What a module gives for its batch, and what it would if the first sample were another.

    A copy of the module is run, without hooks, so that nothing the user sees happens twice; once for every set of
    shapes. Random numbers are the same in both runs, and those of the user are not used up.

    Args:
        site: The module, which has not run yet.
        leaves: The tensors and other values it is called with.
        dims: Where each has its samples; None if it has none.
        arguments: Makes the arguments of the call of such values.

    Raises:
        ValueError: If the module cannot be copied.
    """

    def __init__(
        self, site: Site, leaves: Sequence[Any], dims: Sequence[int | None], arguments: Callable[..., Any]
    ) -> None:
        self._site = site
        shapes = tuple(tuple(x.shape) for x in leaves if isinstance(x, Tensor))
        self._key = (shapes, tuple(dims), site.module.training)
        self._known = self._key in site.agreed
        if self._known:
            return
        devices = {x.device.index for x in leaves if isinstance(x, Tensor) and x.is_cuda}
        with torch.random.fork_rng(devices=devices), torch.no_grad():
            before = _random_states(devices)
            self._together = _run(_copied(site), arguments, leaves)
            self._drew = not _equal(before, _random_states(devices))
            _restore(before, devices)
            self._first_changed = _run(_copied(site), arguments, [*map(_with_another_first, leaves, dims)])
            # a factor of zero, or inputs of zeros, hide what mixes samples: once more with noise on all of them
            noisy = [_noisy(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            twins = _copied(site), _copied(site)
            for twin in twins:
                _add_noise(twin)
            self._noisy: list[Any] = []
            for twin, values in zip(twins, (noisy, [*map(_with_another_first, noisy, dims)]), strict=True):
                _restore(before, devices)
                with contextlib.suppress(Exception):  # the module may not take such values
                    self._noisy.append(_run(twin, arguments, values))

    def check(self, output: Any, dim: Callable[[int], int]) -> None:
        """Compare them with the output made sample by sample; with each other, where random numbers are drawn.

        Raises:
            ValueError: If they differ: the gradients of the samples would be those of another model.
        """
        if self._known:
            return
        alone, together, changed = map(_tensors, (output, self._together, self._first_changed))
        same = self._drew or _all_close(alone, together)
        pairs = [(together, changed), tuple(map(_tensors, self._noisy))]
        for one, other in (pair for pair in pairs if len(pair) == 2):
            same = same and _all_close(_others(one, dim), _others(other, dim))
        if not same:
            raise ValueError(
                f"{self._site} gives a sample another output alone than in the batch: it mixes samples, or an input "
                "without a batch dimension has the size of one. Per-sample gradients would be wrong"
            )
        self._site.agreed.add(self._key)


def _run(twin: nn.Module, arguments: Callable[..., Any], leaves: Sequence[Any]) -> Any:
    bound = arguments([x.detach().clone() if isinstance(x, Tensor) else copy.copy(x) for x in leaves])
    return type(twin).forward(twin, *bound.args, **bound.kwargs)


def _copied(site: Site) -> nn.Module:
    """The module with its parameters, with copies of all else it has, and without hooks."""
    memo: dict[int, Any] = {id(param): param.detach() for param in site.module.parameters()}
    held = [value for module in site.module.modules() for value in pytree.tree_leaves(dict(vars(module)))]
    memo |= {id(value): value for value in held if isinstance(value, Tensor) and _is_result(value)}
    try:
        twin = copy.deepcopy(site.module, memo)
    except Exception as error:
        raise ValueError(
            f"{site} cannot be copied, to see whether it mixes samples: give its class a rule with register_rule, or "
            "freeze its parameters"
        ) from error
    for module in twin.modules():
        for name in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"):
            vars(module)[name].clear()
    return twin


def _noisy(tensor: Tensor) -> Tensor:
    """The same noise in every call."""
    if not tensor.is_floating_point():
        return tensor
    noise = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(0)).to(tensor)
    return tensor + 0.1 * noise * (1 + tensor.abs())


def _add_noise(twin: nn.Module) -> None:
    for module in twin.modules():
        for name, param in module._parameters.items():
            module._parameters[name] = None if param is None else nn.Parameter(_noisy(param), requires_grad=False)


def _is_result(tensor: Tensor) -> bool:
    """Whether an earlier forward left it, in a form that torch does not copy."""
    return is_functorch_wrapped_tensor(tensor) or not tensor.is_leaf


def _with_another_first(value: Any, dim: int | None) -> Any:
    """The input, where the first sample is as the second."""
    if dim is None or value.shape[dim] < 2:
        return value
    rest = value.narrow(dim, 1, value.shape[dim] - 1)
    return torch.cat([rest.narrow(dim, 0, 1), rest], dim)


def _tensors(output: Any) -> list[Tensor | None]:
    return [leaf.detach() if isinstance(leaf, Tensor) else None for leaf in pytree.tree_leaves(output)]


def _others(tensors: Sequence[Tensor | None], dim: Callable[[int], int]) -> list[Tensor | None]:
    """What the samples but the first have."""
    return [
        None if x is None or x.ndim <= dim(i) or not x.shape[dim(i)] else x.narrow(dim(i), 1, x.shape[dim(i)] - 1)
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
    finite = alone.isfinite() & together.isfinite()
    alone, together = alone[finite].double(), together[finite].double()
    return not alone.numel() or bool((alone - together).abs().max() <= tolerance * together.abs().max())
