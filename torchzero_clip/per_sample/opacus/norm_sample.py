"""Per-sample norms as an attribute of the parameter."""

from typing import Any

import torch
from torch import Tensor

from torchzero_clip.checks import count, instance
from torchzero_clip.functional.foreach import wide_dtype
from torchzero_clip.per_sample.gradients.squared_norms import squared_norms


def create_norm_sample(*, param: Tensor, grad_sample: Tensor, max_batch_len: int) -> None:
    """Set ``param.norm_sample`` to the norms of the per-sample gradients; a frozen parameter gets no attribute.

    Args:
        param: The parameter.
        grad_sample: Its per-sample gradients, (B, *param.shape).
        max_batch_len: The length of the attribute, at least B: the norms are followed by zeros.

    Raises:
        ValueError: If the shapes do not fit, or B is above ``max_batch_len``.
        TypeError: If an argument has the wrong type.

    Examples:
        >>> import torch
        >>> from torchzero_clip import create_norm_sample
        >>> param = torch.nn.Parameter(torch.zeros(2))
        >>> create_norm_sample(param=param, grad_sample=torch.tensor([[3.0, 4.0]]), max_batch_len=2)
        >>> param.norm_sample
        tensor([5., 0.])
    """
    instance("param", param, Tensor)
    instance("grad_sample", grad_sample, Tensor)
    count("max_batch_len", max_batch_len)
    if grad_sample.shape[1:] != param.shape or grad_sample.ndim == 0:
        raise ValueError(f"grad_sample must have shape {('B', *param.shape)}, got {tuple(grad_sample.shape)}")
    if len(grad_sample) > max_batch_len:
        raise ValueError(f"max_batch_len must be at least the {len(grad_sample)} samples, got {max_batch_len}")
    if param.requires_grad:
        target: Any = param
        norms = torch.zeros(max_batch_len, dtype=wide_dtype(param.dtype), device=param.device)
        norms[: len(grad_sample)] = squared_norms(grad_sample.detach()).sqrt()
        target.norm_sample = target._norm_sample = norms
