"""Orthogonalization of matrices."""

import torch
from torch import Tensor

from torchzero_clip.compat import without_autocast
from torchzero_clip.functional.shards import laid_out_as, replicated


def orthogonalized(matrix: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """A matrix with the singular vectors of ``matrix`` and singular values near 1, in bfloat16, laid out alike."""
    # The quintic iteration X <- a X + (b A + c A^2) X with A = X X^T, from X scaled to a norm of at most 1. With the
    # coefficients of Muon singular values end between 0.5 and 1.5, which works as well for Muon as exactly 1.
    a, b, c = coefficients
    x = replicated(matrix).bfloat16()
    if not x.numel():
        return laid_out_as(x, matrix)
    tall = x.size(0) > x.size(1)
    if tall:
        x = x.T
    # scaling by a power of 2 is exact; after it, squares neither overflow nor underflow
    exponent = torch.frexp(x.abs().amax().float()).exponent
    x = torch.ldexp(x, -exponent)
    smallest = torch.ldexp(torch.full_like(x.select(0, 0).select(0, 0), eps), -exponent)
    x = x / torch.maximum(x.norm(), smallest)
    with without_autocast(x):
        for _ in range(steps):
            gram = x @ x.T
            x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return laid_out_as(x.T if tall else x, matrix)
