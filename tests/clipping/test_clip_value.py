"""The promises of ClipValue."""

import math

import pytest
import torch
from clipping.updates import transformed
from contract.training import stepped
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from torchzero_clip import ClipValue, Modular

VALUES = st.lists(st.floats(allow_nan=True, allow_infinity=True, width=16), max_size=8)
DTYPES = st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16])


@given(VALUES, DTYPES, st.floats(0, 1e8))
def test_elements_are_clamped_one_by_one(numbers, dtype, value):
    tensor = torch.tensor(numbers, dtype=dtype)
    (result,) = transformed([tensor], ClipValue(value))
    bound = torch.tensor(value, dtype=dtype).item()  # rounded as the elements are
    for x, y in zip(tensor.tolist(), result.tolist(), strict=True):
        if math.isnan(x):
            assert math.isnan(y)
        elif abs(x) <= bound:
            assert x == y
        else:
            assert y == math.copysign(bound, x)


def test_groups_have_their_own_values():
    first, second = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    optimizer = Modular([{"params": first, "value": 0.25}, {"params": second}], ClipValue(1.0))
    first.grad, second.grad = torch.tensor([3.0, -0.125]), torch.tensor([3.0, -4.0])
    optimizer.step()
    assert first.tolist() == [-0.25, 0.125]
    assert second.tolist() == [-1, 1]
    assert optimizer.metrics()["clip_value/clipped"].item() == pytest.approx(3 / 4)


def test_an_element_at_the_limit_is_not_clipped():
    _, optimizer = stepped(ClipValue(1.0), [1.0, -2.0])
    assert optimizer.metrics()["clip_value/clipped"].item() == 0.5
