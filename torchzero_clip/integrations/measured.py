"""The metrics of an optimizer that a trainer has wrapped."""

import torch
from torch import Tensor

from torchzero_clip.modular.modular import Modular
from torchzero_clip.modular.wrappers import unwrap
from torchzero_clip.other_optimizer.before_step import BeforeStep, chain_of
from torchzero_clip.recorder.arithmetic import finite_ones


def unwrapped(optimizer: object) -> Modular | BeforeStep:
    """Return the `Modular`, or the handle of `before_step`, inside wrappers such as those of Accelerate and Lightning.

    Args:
        optimizer: A `Modular`, an optimizer with transforms before its steps, or their handle; or an object that has
            such an optimizer as its ``optimizer`` or ``_optimizer``, at any depth.

    Raises:
        TypeError: If there is none.
    """
    chain = chain_of(optimizer)
    if chain is None:
        raise TypeError(
            f"optimizer must be a Modular or a wrapper of one, got {type(unwrap(optimizer)).__name__}, which has no "
            "transforms: call before_step on it, or give the callback of the trainer transforms=[...] or a Recorder"
        )
    return chain


def metrics(optimizer: object) -> dict[str, Tensor]:
    """Return `Modular.metrics` of what `unwrapped` returns, for example for what ``accelerator.prepare`` returned."""
    return unwrapped(optimizer).metrics()


def numbers(optimizer: object) -> dict[str, float]:
    """Return the metrics of an optimizer as Python numbers, for a log.

    Numbers that are inf or NaN, such as a limit that does not limit, are left out, because JSON cannot hold them. The
    call synchronizes with the GPU once. Calling ``item`` on each metric synchronizes once for each.

    Examples:
        >>> import torch
        >>> from torchzero_clip import ClipNorm, Modular
        >>> from torchzero_clip.integrations import numbers
        >>> weight = torch.nn.Parameter(torch.zeros(2))
        >>> optimizer = Modular([weight], ClipNorm(1.0))
        >>> weight.grad = torch.tensor([3.0, 4.0])
        >>> optimizer.step()
        >>> numbers(optimizer)
        {'clip_norm/norm': 5.0, 'clip_norm/factor': 0.2, 'clip_norm/clipped': 1.0}
    """
    measured = metrics(optimizer)
    on_device = [value for value in measured.values() if not value.is_cpu and value.is_floating_point()]
    # all on one device, in a dtype that it has, so that one copy brings them
    of_host = torch.zeros((), dtype=torch.float64, device="cpu")
    like = max(on_device, key=lambda value: value.dtype.itemsize, default=of_host)
    values = [value.to(like) for value in measured.values()]
    return finite_ones(dict(zip(measured, torch.stack(values).tolist() if values else [], strict=True)))
