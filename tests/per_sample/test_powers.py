"""Samples are read from ratios of gradients: a row of one sample is told exactly, and a row of several never is one."""

from random import Random

import pytest
import torch

from torchzero_clip.per_sample.samples.pattern import MIXED, UNTOLD, ZERO
from torchzero_clip.per_sample.samples.powers import Powers

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def told(powers, first, multiples, *, exact=True):
    return powers.samples([powers.ratios(first, multiple, exact=exact) for multiple in multiples])


@pytest.mark.parametrize("width", [1, 2, 7])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [2, 16, 17, 300])
def test_each_row_is_of_its_sample(count, dtype, width):
    torch.manual_seed(0)
    powers = Powers(count, Random(0), float16=dtype == torch.float16)
    samples = torch.randint(0, count, (50,))
    first = torch.randn(50, width, dtype=torch.float64).to(dtype)
    first[10:20] = torch.cat([first[10:20, :1], -first[10:20, 1:]], 1)  # the largest entry may have both signs
    first[20:30] = 0
    weights = powers.weights(first)
    found = told(powers, first, [first * weight[samples, None] for weight in weights])
    expected = samples.masked_fill((first == 0).all(1), ZERO)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("count", [2, 16, 17, 300])
def test_rows_of_two_samples_are_mixed(count):
    torch.manual_seed(0)
    powers = Powers(count, Random(0))
    parts = torch.randn(2, 200, 5)
    one = torch.randint(0, count, (200,))
    other = (one + torch.randint(1, count, (200,))) % count
    multiples = [parts[0] * x[one, None] + parts[1] * x[other, None] for x in powers.weights(parts)]
    assert torch.equal(told(powers, parts.sum(0), multiples), torch.full((200,), MIXED))


def test_a_leak_of_one_entry_by_the_last_bit_is_mixed():
    powers = Powers(4, Random(0))
    first = torch.randn(4, 3).abs() + 1
    (multiple,) = [first * weight[:, None] for weight in powers.weights(first)]
    multiple[2, 1] = torch.nextafter(multiple[2, 1], multiple[2, 1] * 2)
    assert told(powers, first, [multiple]).tolist() == [0, 1, MIXED, 3]
    assert told(powers, first, [multiple], exact=False).tolist() == [0, 1, 2, 3]


def test_what_is_not_finite_or_too_small_is_not_told():
    powers = Powers(4, Random(0))
    first = torch.tensor([[torch.inf], [torch.nan], [1e-36], [1.0]])
    multiples = [first * weight[:, None] for weight in powers.weights(first)]
    assert told(powers, first, multiples).tolist() == [UNTOLD, UNTOLD, UNTOLD, 3]
