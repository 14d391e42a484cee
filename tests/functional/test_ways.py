"""The way in which tensors are measured, and the dtype of sums."""

import math

import pytest
import torch

from torchzero_clip.functional.ways import accumulation_dtype, way_of

F16, F32, F64 = torch.float16, torch.float32, torch.float64


@pytest.mark.parametrize(
    ("device", "dtype", "p", "way"),
    [
        ("cpu", F32, 2.0, "blocks"), ("cpu", F64, math.inf, "blocks"), ("cpu", F16, 2.0, "slices"),
        ("meta", F32, 2.0, "lists"), ("meta", F16, 2.0, "lists"), ("meta", F64, 2.0, "slices"),
        ("meta", F64, math.inf, "lists"),
    ],
)  # fmt: skip
def test_the_way_of_plain_tensors(device, dtype, p, way):
    tensors = [torch.ones(2, dtype=dtype, device=device)]
    assert way_of(tensors, p, plain=True) == way
    assert way_of(tensors, p, plain=False) == "slices"


@pytest.mark.parametrize(("device", "dtype", "wide"), [("cpu", F16, F32), ("cpu", F64, F64), ("meta", F32, F64)])
def test_sums_are_added_up_in_float64_except_on_cpu(device, dtype, wide):
    assert accumulation_dtype(torch.ones(2, dtype=dtype, device=device)) == wide
