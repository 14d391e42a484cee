"""The two halves of a global clip: the norm of all gradients, and clipping by a norm that the caller passes."""

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from torchzero_clip.checks import boolean, non_negative
from torchzero_clip.compat import warn_user
from torchzero_clip.functional.clip import clip_by_, read_limit
from torchzero_clip.functional.gradients import (
    as_reported,
    gradients,
    listed,
    named_tensors,
    names_of_bad,
    opened,
    tensors_of,
    values_tell_all,
)
from torchzero_clip.functional.measure import Slicing, measure_over_processes
from torchzero_clip.functional.metric import parse_ord
from torchzero_clip.functional.processes import check_group
from torchzero_clip.functional.shards import replicated
from torchzero_clip.types import Ord, Tensors


@torch.no_grad()
def get_total_norm(
    tensors: Tensors, ord: Ord = 2, *, error_if_nonfinite: bool = False, process_group: ProcessGroup | None = None
) -> Tensor:
    """Return the norm of all tensors together, as of one vector.

        ‖(t₁, t₂, …)‖

    It is what `torch.nn.utils.get_total_norm` returns. Every rank gets the full norm, also for distributed tensors with
    empty parts, for distributed and plain tensors together, and for several meshes. A finite non-zero input gives
    inf or 0 only if its norm is too large or too small for float64.

    Args:
        tensors: A tensor or an iterable of tensors, for example gradients; of any dtypes and devices, dense or sparse.
            Also pairs of a name, which the error then shows, and a tensor.
        ord: The metric, as in `clip_grad_norm_`.
        error_if_nonfinite: Raise if the result is inf or NaN. All ranks of the meshes and of the group raise if one
            does.
        process_group: The processes that hold *other* tensors, such as the stages of a pipeline, which all call the
            function. Their tensors count in the norm.

    Returns:
        A 0-d tensor on the device of the first tensor, of the dtype that `clip_grad_norm_` returns; 0 for no tensors.

    Raises:
        ValueError: For an unknown ``ord``, or a ``process_group`` as in `Modular`.
        TypeError: For an argument of the wrong type.
        RuntimeError: If ``error_if_nonfinite`` and the norm is not finite; the message names the tensors.

    Examples:
        >>> get_total_norm([torch.tensor([3.0]), torch.tensor([0.0, 4.0])])
        tensor(5.)
    """
    slicing = Slicing(parse_ord(ord), "global")
    boolean("error_if_nonfinite", error_if_nonfinite)
    tensors = listed("tensors", tensors)
    unnamed = tensors_of("tensors", tensors)
    if unnamed and all(isinstance(tensor, nn.Parameter) and tensor.grad is not None for tensor in unnamed):
        warn_user(
            "get_total_norm got parameters, and returns the norm of the weights. That of gradients is "
            "get_total_norm([p.grad for p in parameters if p.grad is not None]); detach the weights if theirs is meant"
        )
    check_group(process_group, unnamed)
    with opened(unnamed, values_tell_all(slicing), write=False) as dense:
        judged = unnamed if error_if_nonfinite else None
        total = measure_over_processes(dense, slicing, process_group, judged).total
        if error_if_nonfinite and not total.isfinite():
            bad = names_of_bad("tensor", named_tensors("tensors", tensors), unnamed, dense, process_group)
            raise RuntimeError(
                f"the norm of the tensors is {total}. Tensors with inf or NaN: {bad}. Pass error_if_nonfinite=False "
                "to get this norm"
            )
    return as_reported(total, unnamed, process_group)


@torch.no_grad()
def clip_grads_with_norm_(params: Tensors, max_norm: float | Tensor, total_norm: Tensor | float) -> None:
    """Scale all gradients by the factor that brings ``total_norm`` to at most ``max_norm``, in place.

        g ← g · min(1, max_norm / total_norm)

    `get_total_norm` and this function together do what ``clip_grad_norm_(params, max_norm, dim="global")`` does. In
    between, the norm can be read, logged or combined with that of other processes. Unlike torch's function, this one
    adds no epsilon to the norm.

    Args:
        params: As in `clip_grad_norm_`.
        max_norm: The limit of ``total_norm``, >= 0: a number or a tensor, as in `clip_grad_norm_`.
        total_norm: The norm of all gradients together: a tensor of one element, or a number >= 0.

    Raises:
        ValueError: For a negative or NaN limit, a negative norm, or a norm of more than one element.
        TypeError: For an argument of the wrong type.

    | norm | result |
    | --- | --- |
    | 0 | unchanged |
    | inf | zeros; infinite elements become NaN |
    | NaN | all elements become NaN |

    Examples:
        >>> weight = torch.tensor([3.0, 4.0], requires_grad=True)
        >>> (weight**2).sum().backward()
        >>> norm = get_total_norm([weight.grad])
        >>> clip_grads_with_norm_(weight, 1.0, norm)
        >>> weight.grad
        tensor([0.6000, 0.8000])
    """
    limit = read_limit("max_norm", max_norm)
    if not isinstance(total_norm, Tensor):
        if total_norm == total_norm:  # NaN is a norm too
            non_negative("total_norm", total_norm)
        total_norm = torch.tensor(total_norm, dtype=torch.float64, device="cpu")
    elif total_norm.numel() != 1:
        raise ValueError(f"total_norm must have one element, got shape {tuple(total_norm.shape)}")
    parameters = tensors_of("params", params)
    grads = gradients(params, parameters)
    with opened(grads, lambda values: True) as tensors:
        clip_by_(tensors, limit, replicated(total_norm).reshape(()))
