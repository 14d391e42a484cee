"""Whether a module gives the same for a sample alone as in its batch."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from torchzero_clip.per_sample.site import Site


def check_agreement(site: Site, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    """Compare the output made sample by sample with that of the batch, once for every set of shapes.

    Nothing is compared where the module draws random numbers.

    Raises:
        ValueError: If they differ: the gradients of the samples would be those of another model.
    """
    shapes = tuple(tuple(x.shape) for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor))
    key = (shapes, site.module.training)
    if key in site.agreed:
        return
    args, kwargs = pytree.tree_map_only(Tensor, lambda x: x.detach().clone(), (args, kwargs))
    devices = {x.device.index for x in pytree.tree_leaves(output) if isinstance(x, Tensor) and x.is_cuda}
    with torch.random.fork_rng(devices=devices), torch.no_grad():
        before = _random_states(devices)
        together = type(site.module).forward(site.module, *args, **kwargs)
        drew = any(not torch.equal(a, b) for a, b in zip(before, _random_states(devices), strict=True))
    pairs = zip(pytree.tree_leaves(output), pytree.tree_leaves(together), strict=True)
    if not drew and not all(_close(a.detach(), b) for a, b in pairs if isinstance(a, Tensor)):
        raise ValueError(
            f"{site} gives a sample another output alone than in the batch: it mixes samples, or an input without "
            "a batch dimension has the size of one. Per-sample gradients would be wrong"
        )
    site.agreed.add(key)


def _random_states(devices: Iterable[int]) -> list[Tensor]:
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state(device) for device in devices)]


def _close(alone: Tensor, together: Tensor) -> bool:
    if alone.shape != together.shape:
        return False
    if not alone.is_floating_point():
        return torch.equal(alone, together)
    tolerance = torch.finfo(together.dtype).eps ** 0.5
    finite = alone.isfinite() & together.isfinite()
    alone, together = alone[finite].double(), together[finite].double()
    return not alone.numel() or bool((alone - together).abs().max() <= tolerance * together.abs().max())
