"""The most that one sample can add to clipped sums, and whether a norm clipper stays within it."""

import torch
from torch import Tensor

from torchzero_clip.per_sample.norm_clippers import NormClipper
from torchzero_clip.per_sample.weighting import ClippingResult

LARGEST = 1e30  # sums of larger gradients could overflow in float32, which would tell that they are there
ROUNDING = 1e-5  # how far the norm of a clipped gradient may be above the limit, relative to it


def joint_limit(norm_clipper: NormClipper, params: int) -> float:
    """The norm of the vector of limits, for so many parameter tensors.

    Raises:
        ValueError: If a limit is not finite or above 1e30, or their number does not fit.
    """
    limits = norm_clipper.thresholds.detach().double().flatten()
    if norm_clipper.is_per_layer and len(limits) == 1:
        limits = limits.expand(params)
    expected = params if norm_clipper.is_per_layer else 1
    if len(limits) != expected:
        raise ValueError(f"norm_clipper must have {expected} limits, got {len(limits)}: {norm_clipper!r}")
    if not bool(((limits >= 0) & (limits <= LARGEST)).all()):
        raise ValueError(f"the limits of norm_clipper must be between 0 and {LARGEST}, got {limits.tolist()}")
    return float(torch.linalg.vector_norm(limits))


def check_within(limit: float, norm_clipper: NormClipper, result: ClippingResult) -> None:
    """Raise a RuntimeError if the clipped gradient of a sample is above the joint limit."""
    if isinstance(result.factors, Tensor):
        added = (result.factors * result.norms).double().abs()
    else:
        pairs = zip(result.factors, result.param_norms.values(), strict=True)
        added = torch.linalg.vector_norm(torch.stack([factors * norms for factors, norms in pairs]).double(), dim=0)
    if not bool((added.masked_fill(result.nonfinite, 0) <= limit * (1 + ROUNDING)).all()):  # also if one is NaN
        raise RuntimeError(
            f"{norm_clipper!r} breaks its own limit: the norm of a clipped gradient is above {limit}. "
            "Factor times norm must not exceed the limit for any norm. Nothing was changed"
        )
