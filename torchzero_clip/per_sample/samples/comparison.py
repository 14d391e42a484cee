"""Compares what a module returns for a sample alone with what it returns in a batch."""

from torch import Tensor


def differ(together: Tensor, alone: Tensor, tolerance: float) -> bool:
    """True if two tensors of one shape differ by more than a tolerance, relative to the largest magnitude.

    Equal values at the ends of the range, such as -1e9 in masks, do not count as magnitudes.
    """
    apart = ~together.isclose(alone, rtol=0, atol=1e-12, equal_nan=True)
    if not apart.any():
        return False
    apart |= (together > together.min()) & (together < together.max())
    scale = together[apart].nan_to_num(0, 0, 0).abs().max()
    return not bool(((together - alone)[apart].abs() <= tolerance * scale).all())
