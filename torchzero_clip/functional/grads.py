"""In-place functions on the gradients of parameters, for training loops with an optimizer of their own."""

from collections.abc import Iterable

import torch
from torch import Tensor

from torchzero_clip.checks import boolean, count, dims, non_negative
from torchzero_clip.functional.clip import clip_
from torchzero_clip.functional.foreach import clamp_, wide_dtype
from torchzero_clip.functional.measure import Slicing, measure
from torchzero_clip.functional.metric import parse_ord
from torchzero_clip.types import Dim, Ord, Tensors


@torch.no_grad()
def clip_grad_norm_(
    params: Tensors,
    max_norm: float | None,
    ord: Ord = 2,
    dim: Dim = None,
    inverse_dims: bool = False,
    min_size: int = 2,
    min_norm: float | None = None,
    *,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Scale the gradient of every parameter so that its norm is at most ``max_norm``, in place.

    By default each gradient has a norm and a limit of its own. The meaning of `torch.nn.utils.clip_grad_norm_`, one
    norm of all gradients together, is ``dim="global"``.

        g ← g · min(1, max_norm / ‖g‖)

    for every slice g: the whole gradient, or what ``dim`` says. The limit is exact at every magnitude: nothing is
    added to the norm.

    Args:
        params: A tensor or an iterable of tensors. Those without a gradient are skipped; having none is no error.
        max_norm: The limit of every slice; None for no upper limit.
        ord: The metric: a number p for the p-norm (also 0, inf, -inf and negative numbers), or one of 'l0', 'l1', 'l2',
            'l3', 'l4', 'linf', 'mad' (mean absolute value), 'std', 'var', 'sum' (magnitude of the signed sum).
        dim: The dimensions that one slice spans: None for all, an int or several (negative ones count from the end of
            each gradient), or "global" for all gradients joined. A gradient that has none of them is left alone.
        inverse_dims: Slices span the dimensions that ``dim`` does not list.
        min_size: Slices of fewer elements are left alone; by default gradients of one element. Not for "global".
        min_norm: Slices with a smaller norm, but not of norm 0, are scaled up to it.
        error_if_nonfinite: Raise if the norm of all gradients together is inf or NaN, before anything is changed.

    Returns:
        The metric of all gradients together before clipping: a 0-d tensor of float32, or of float64 for float64
            gradients. A finite value beyond the range of float32 is reported as the largest float32.

    Raises:
        ValueError: For a negative or NaN limit, ``min_norm > max_norm``, or an unknown ``ord`` or ``dim``.
        TypeError: For an argument of the wrong type.
        RuntimeError: If ``error_if_nonfinite`` and the norm is not finite; the message names the gradients.

    | gradient | result |
    | --- | --- |
    | norm 0 | unchanged |
    | ``max_norm=0`` | zeros |
    | an inf in the slice | its finite elements become 0, the inf NaN, as in torch |
    | a NaN in the slice | all NaN, as in torch |
    | float16 of norm 128000, float32 of norm 1e21 | clipped; the norm does not overflow |

    Rounding can leave a norm above the limit by a relative 1e-6 in float32, and by half a unit in the last place in
    half precision (4e-3 in bfloat16, 5e-4 in float16).

    Examples:
        >>> weight = torch.tensor([3.0, 4.0], requires_grad=True)
        >>> (weight**2).sum().backward()
        >>> clip_grad_norm_([weight], 1.0)
        tensor(10.)
        >>> weight.grad
        tensor([0.6000, 0.8000])

    Source: Pascanu, Mikolov, Bengio, [On the difficulty of training recurrent neural
    networks](https://arxiv.org/abs/1211.5063), 2013.
    """
    if max_norm is not None:
        non_negative("max_norm", max_norm)
    if min_norm is not None:
        non_negative("min_norm", min_norm)
        if max_norm is not None and min_norm > max_norm:
            raise ValueError(f"min_norm must be <= max_norm, got min_norm={min_norm} and max_norm={max_norm}")
    dims("dim", dim)
    boolean("inverse_dims", inverse_dims)
    count("min_size", min_size)
    slicing = Slicing(parse_ord(ord), dim, inverse_dims, min_size)

    grads = gradients(params)
    measured = measure(grads, slicing)
    if error_if_nonfinite and not measured.total.isfinite():
        raise RuntimeError(_nonfinite_message(grads, measured.total))
    limits = [float("inf") if max_norm is None else max_norm] * len(grads)
    clip_(measured, limits, None if min_norm is None else [min_norm] * len(grads))
    return _as_reported(measured.total, grads)


@torch.no_grad()
def clip_grad_value_(params: Tensors, value: float) -> None:
    """Clamp every element of the gradients to [-value, value], in place.

    Args:
        params: A tensor or an iterable of tensors. Those without a gradient are skipped; having none is no error.
        value: The largest magnitude allowed, in units of the gradient.

    Raises:
        ValueError: If ``value`` is negative or NaN.
        TypeError: If ``value`` is not a number.

    | element | result |
    | --- | --- |
    | inf, -inf | value, -value |
    | NaN | NaN |

    Examples:
        >>> weight = torch.tensor([3.0, -0.25], requires_grad=True)
        >>> (weight**2).sum().backward()
        >>> clip_grad_value_(weight, 1.0)
        >>> weight.grad
        tensor([ 1.0000, -0.5000])
    """
    non_negative("value", value)
    clamp_(gradients(params), value)


def gradients(params: Tensors) -> list[Tensor]:
    """The gradients of those parameters that have one."""
    if not isinstance(params, Iterable):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"params must be a tensor or an iterable of tensors, got {type(params).__name__}")
    listed = [params] if isinstance(params, Tensor) else list(params)
    for i, param in enumerate(listed):
        if not isinstance(param, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(
                f"params must be a tensor or an iterable of tensors, got {type(param).__name__} at index {i}"
            )
    grads = [param.grad for param in listed if param.grad is not None]
    for grad in grads:
        if grad.layout != torch.strided or grad.is_complex():
            raise TypeError(f"gradients must be dense and real, got one of {grad.dtype} and layout {grad.layout}")
    return grads


def _as_reported(total: Tensor, grads: list[Tensor]) -> Tensor:
    dtype = torch.float32
    for grad in grads:
        dtype = torch.promote_types(dtype, wide_dtype(grad.dtype))
    largest = torch.finfo(dtype).max
    return torch.where(total.isfinite(), total.clamp(max=largest), total).to(dtype)


def _nonfinite_message(grads: list[Tensor], total: Tensor) -> str:
    bad = [f"{i} of shape {tuple(grad.shape)}" for i, grad in enumerate(grads) if not grad.isfinite().all()]
    return (
        f"the norm of the gradients is {total}: not finite, so none was changed. Gradients with inf or NaN, by "
        f"position among those that are not None: {', '.join(bad)}. Pass error_if_nonfinite=False to clip all the same"
    )
