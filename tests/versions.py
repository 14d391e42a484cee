"""What some versions of torch lack."""

import pytest
import torch

TORCH = tuple(map(int, torch.__version__.split("+")[0].split(".")[:2]))

needs_grad_dtype = pytest.mark.skipif(
    not hasattr(torch.Tensor, "grad_dtype"), reason="this torch has no gradients of another dtype (grad_dtype)"
)

needs_compiler = pytest.mark.skipif(TORCH < (2, 13), reason="the compiler of this torch cannot trace a step")

needs_muon = pytest.mark.skipif(TORCH < (2, 9), reason="this torch has no Muon")

needs_spectral_unclamped = pytest.mark.skipif(TORCH < (2, 14), reason="Muon of this torch has no spectral_unclamped")
