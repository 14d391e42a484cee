"""Short tensors times one factor each, in blocks of memory."""

import pytest
import torch

from torchzero_clip.functional.scratch import Scratch
from torchzero_clip.functional.short_tensors import FACTOR_BLOCK, multiply_any_length_, multiply_short_

SIZES = [(), (3,), (0,), (FACTOR_BLOCK - 1,), (FACTOR_BLOCK,), (FACTOR_BLOCK + 1,), (3, FACTOR_BLOCK), (5, 70)]


def tensors_of(dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, generator=generator, dtype=torch.float64).to(dtype) for size in SIZES]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("most", [300, 10**6])
def test_the_product_is_rounded_once_and_longer_tensors_are_left(dtype, most):
    scratch, wide = Scratch(), torch.promote_types(dtype, torch.float32)
    for seed in (0, 1):  # the second time by the plan of the first
        tensors = tensors_of(dtype, seed)
        factors = torch.rand(len(SIZES), dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        before = [tensor.clone() for tensor in tensors]
        long = multiply_short_(tensors, factors, scratch, most)
        assert long == ([6, 7] if most == 300 else [])
        for i, (tensor, old) in enumerate(zip(tensors, before, strict=True)):
            expected = old if i in long else (old.to(wide) * factors[i].to(wide)).to(dtype)
            assert torch.equal(tensor, expected), i


def test_long_tensors_are_multiplied_too():
    tensors = [torch.full((size,), 3.0) for size in (2, 70_000)]
    multiply_any_length_(tensors, torch.tensor([0.5, 2.0], dtype=torch.float64), Scratch())
    assert [set(tensor.tolist()) for tensor in tensors] == [{1.5}, {6.0}]


def test_a_factor_beyond_float32_is_its_largest_number():
    tensor = torch.full((2,), 1e-30)
    multiply_any_length_([tensor], torch.tensor([1e50], dtype=torch.float64), Scratch())
    assert tensor.tolist() == pytest.approx([torch.finfo(torch.float32).max * 1e-30] * 2)
