"""In-place functions on the gradients of parameters, for training loops with an optimizer other than `Modular`."""

import math

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from torchzero_clip.checks import as_number, boolean, finite, non_negative
from torchzero_clip.functional.clip import (
    centralize_,
    clip_factor,
    clip_factors,
    normalize_factor,
    normalize_factors,
    read_limit,
)
from torchzero_clip.functional.foreach import clamp_, clamp_plain_
from torchzero_clip.functional.gradients import (
    as_reported,
    gradients,
    listed,
    named_tensors,
    names_of_bad,
    opened,
    tensors_of,
    values_tell_all,
    warn_of_no_gradients,
    with_gradients,
)
from torchzero_clip.functional.measure import Slicing, measure_over_processes, scale_measured_
from torchzero_clip.functional.ordinary_gradients import ordinary_gradients, scale_ordinary_
from torchzero_clip.hints import explained
from torchzero_clip.types import Dim, Ord, Tensors


@explained
@torch.no_grad()
def clip_grad_norm_(
    params: Tensors,
    max_norm: float | Tensor | None,
    ord: Ord = 2,
    dim: Dim = None,
    inverse_dims: bool = False,
    min_size: int = 2,
    min_norm: float | None = None,
    *,
    error_if_nonfinite: bool = False,
    process_group: ProcessGroup | None = None,
) -> Tensor:
    """Scale the gradient of every parameter so that its norm is at most ``max_norm``, in place.

    By default each gradient has its own norm: under a limit of 1, gradients with norms 5 and 10 both get norm 1, so
    their joint norm is 1.41. With ``dim="global"`` the joint norm is limited, here to 1, as by
    `torch.nn.utils.clip_grad_norm_`. Gradients of one element are left unchanged unless ``min_size=1``; the transform
    `ClipNorm` clips them.

        g ← g · min(1, max_norm / ‖g‖)

    for every slice g, which is the whole gradient by default. The limit is exact at every magnitude, because no epsilon
    is added to the norm.

    Args:
        params: A tensor, or an iterable of tensors or of pairs (name, tensor) such as ``model.named_parameters()``.
            Parameters without a gradient are skipped. If none has one, the function warns, except in runs of several
            processes or if all are frozen.
        max_norm: The limit of the norm of every slice: a number or a tensor of one element; None for no upper limit.
            A tensor on another device than the CPU is not read, because this would synchronize with the GPU. If it is
            negative, the gradients become NaN.
        ord: The metric: a number p for the p-norm (also 0, inf, -inf and negative numbers), or one of 'l0', 'l1', 'l2',
            'l3', 'l4', 'linf', 'mad' (mean absolute value), 'std', 'var', 'sum' (magnitude of the signed sum).
        dim: The dimensions that one slice spans: None for all, one int or several (negative ones count from the end of
            each gradient), or "global" for all gradients joined. A gradient whose slices span no dimension is left
            unchanged.
        inverse_dims: Slices span the dimensions that ``dim`` does not list.
        min_size: Slices of fewer elements are left unchanged; by default slices of one element. No effect with
            "global".
        min_norm: Slices with a smaller norm, except norm 0, are scaled up to it; None for no lower limit.
        error_if_nonfinite: Raise if the norm of all gradients together is inf or NaN, before anything is changed. All
            ranks of the meshes and of the group raise if one does.
        process_group: The processes that hold *other* parameters, such as the stages of a pipeline. All of them have to
            call the function. Their gradients count in joint norms and in the result, as in `Modular`.

    Returns:
        The metric of all gradients together before clipping: a 0-d tensor of float32; of float64 for float64
            gradients, with a ``process_group``, or on the CPU if float32 cannot hold the value. On other devices, a
            finite value beyond float32 is reported as the largest float32, because reading it would wait.

    Raises:
        ValueError: For a negative or NaN limit, ``min_norm > max_norm``, an unknown ``ord`` or ``dim``, or a
            ``process_group`` as in `Modular`.
        TypeError: For an argument of the wrong type.
        RuntimeError: If ``error_if_nonfinite=True`` and the norm is not finite; the message names the gradients.

    | gradient | result |
    | --- | --- |
    | norm 0 | unchanged |
    | ``max_norm=0`` | zeros |
    | an inf in the slice | finite elements become 0, infinite ones NaN, as in torch |
    | a NaN in the slice | all elements become NaN, as in torch |
    | float16 of norm 128000, float32 of norm 1e21 | clipped; the norm does not overflow |
    | two tensors that overlap in memory | the elements in both are scaled twice, as by torch |

    Rounding can leave a norm above the limit by a relative 1e-6 in float32 (3e-5 for orders other than 2 and inf), and
    by half a unit in the last place in half precision (4e-3 in bfloat16, 5e-4 in float16).

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
    limit = math.inf if max_norm is None else read_limit("max_norm", max_norm)
    if min_norm is not None:
        finite("min_norm", min_norm)
        if not isinstance(limit, Tensor) and min_norm > limit:
            raise ValueError(f"min_norm must be <= max_norm, got min_norm={min_norm} and max_norm={limit}")
    slicing = Slicing.checked(ord, dim, inverse_dims, min_size)
    boolean("error_if_nonfinite", error_if_nonfinite)

    items = listed("params", params)
    parameters = tensors_of("params", items)
    floor, total = min_norm or 0.0, None
    if not isinstance(limit, Tensor):
        total = scale_ordinary_(parameters, slicing, lambda norm: clip_factor(norm, limit, floor), process_group)
    if total is not None:
        return total
    pairs = with_gradients(parameters, process_group, zeros_count=slicing.metric.counts_zeros)
    if not pairs and process_group is None:
        warn_of_no_gradients(params, parameters)
    grads = [grad for _, grad in pairs]
    with opened(grads, values_tell_all(slicing)) as tensors:
        judged = parameters if error_if_nonfinite else None
        measured = measure_over_processes(tensors, slicing, process_group, judged)
        if error_if_nonfinite and not measured.total.isfinite():
            named, owners = named_tensors("params", items), [param for param, _ in pairs]
            bad = names_of_bad("parameter", named, owners, tensors, process_group)
            raise RuntimeError(
                f"the norm of the gradients is {measured.total}: not finite, so none was changed. Gradients with inf "
                f"or NaN: {bad}. Pass error_if_nonfinite=False to clip all the same"
            )
        scale_measured_(measured, measured.by_norm(lambda norms: clip_factors(slicing.metric, norms, limit, floor)))
    return as_reported(measured.total, grads, process_group)


@explained
@torch.no_grad()
def clip_grad_value_(params: Tensors, value: float) -> None:
    """Clamp every element of the gradients to [-value, value], in place.

    Args:
        params: As in `clip_grad_norm_`.
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
    value = as_number(value)
    non_negative("value", value)
    parameters = tensors_of("params", params)
    ordinary = ordinary_gradients(parameters)
    if ordinary is not None:
        clamp_plain_(ordinary, value)
        return
    grads = gradients(params, parameters)
    with opened(grads, lambda values: True) as tensors:
        clamp_(tensors, value)


@explained
@torch.no_grad()
def normalize_grads_(
    params: Tensors,
    norm_value: float,
    ord: Ord = 2,
    dim: Dim = None,
    inverse_dims: bool = False,
    min_size: int = 1,
    *,
    process_group: ProcessGroup | None = None,
) -> Tensor:
    """Scale the gradient of every parameter so that its norm is ``norm_value``, in place.

        g ← g · norm_value / ‖g‖

    for every slice g, which is the whole gradient by default. With ``dim="global"`` all gradients have one joint norm.

    Args:
        params: As in `clip_grad_norm_`.
        norm_value: The norm to scale to, >= 0.
        ord: The metric, as in `clip_grad_norm_`.
        dim: The dimensions that one slice spans, as in `clip_grad_norm_`.
        inverse_dims: Slices span the dimensions that ``dim`` does not list.
        min_size: Slices of fewer elements are left unchanged. No effect with "global".
        process_group: As in `clip_grad_norm_`.

    Returns:
        The metric of all gradients together before normalization, as `clip_grad_norm_` returns it.

    Raises:
        ValueError: For a value that is negative, infinite or NaN, an unknown ``ord`` or ``dim``, or a
            ``process_group`` as in `Modular`.
        TypeError: For an argument of the wrong type.

    | gradient | result |
    | --- | --- |
    | norm 0, or up to 1e-12 | unchanged |
    | one element with 'std' or 'var' | unchanged |
    | an inf in the slice | finite elements become 0, infinite ones NaN |
    | a NaN in the slice | all elements become NaN |

    Examples:
        >>> weight = torch.tensor([3.0, 4.0], requires_grad=True)
        >>> (weight**2).sum().backward()
        >>> normalize_grads_(weight, 1.0)
        tensor(10.)
        >>> weight.grad
        tensor([0.6000, 0.8000])
    """
    finite("norm_value", norm_value)
    slicing = Slicing.checked(ord, dim, inverse_dims, min_size)
    parameters = tensors_of("params", params)
    total = scale_ordinary_(parameters, slicing, lambda norm: normalize_factor(norm, norm_value), process_group)
    if total is not None:
        return total
    grads = gradients(params, parameters, process_group, zeros_count=slicing.metric.counts_zeros)
    with opened(grads, values_tell_all(slicing)) as tensors:
        measured = measure_over_processes(tensors, slicing, process_group)
        scale_measured_(measured, measured.by_norm(lambda norms: normalize_factors(slicing.metric, norms, norm_value)))
    return as_reported(measured.total, grads, process_group)


@torch.no_grad()
def centralize_grads_(
    params: Tensors,
    dim: Dim = None,
    inverse_dims: bool = False,
    min_size: int = 2,
    *,
    process_group: ProcessGroup | None = None,
) -> None:
    """Subtract its mean from the gradient of every parameter, in place.

        g ← g - mean(g)

    for every slice g, which is the whole gradient by default. Gradient centralization as published takes one mean per
    output channel: ``dim=0, inverse_dims=True``.

    Args:
        params: As in `clip_grad_norm_`.
        dim: The dimensions that one slice spans, as in `clip_grad_norm_`. Scalars change only with "global".
        inverse_dims: Slices span the dimensions that ``dim`` does not list.
        min_size: Slices of fewer elements are left unchanged. No effect with "global".
        process_group: As in `clip_grad_norm_`. With "global", the mean covers the gradients of all processes.

    Raises:
        ValueError: For an unknown ``dim``, a negative ``min_size``, or a ``process_group`` as in `Modular`.
        TypeError: For an argument of the wrong type.

    A sparse gradient keeps its layout, but stores a value for every element afterwards.

    Examples:
        >>> weight = torch.tensor([3.0, 5.0], requires_grad=True)
        >>> (weight**2).sum().backward()
        >>> centralize_grads_(weight)
        >>> weight.grad
        tensor([-2.,  2.])

    Source: Yong, Huang, Hua, Zhang, [Gradient centralization: a new optimization technique for deep neural
    networks](https://arxiv.org/abs/2004.01461), 2020.
    """
    slicing = Slicing.checked(1, dim, inverse_dims, min_size)
    parameters = tensors_of("params", params)
    grads = gradients(params, parameters, process_group, zeros_count=slicing.dim == "global")
    with opened(grads, lambda values: False) as tensors:
        centralize_(tensors, slicing, process_group)
