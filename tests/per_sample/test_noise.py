"""Noise from the operating system: its distribution, its size, and what does not change it."""

import math

import pytest
import torch
from defaults import DEFAULTS

from torchzero_clip.per_sample.private import noise
from torchzero_clip.per_sample.private.noise import CHUNK, gaussian, secure_normal


def test_moments_and_tails_are_those_of_the_normal_distribution():
    numbers = secure_normal(400_001, torch.float64)
    for power, moment in ((1, 0), (2, 1), (3, 0), (4, 3), (6, 15)):  # the bounds are six standard deviations
        spread = math.sqrt(math.prod(range(1, 2 * power, 2)) - moment**2)
        assert abs(numbers.pow(power).mean().item() - moment) < 6 * spread / math.sqrt(len(numbers))
    for bound in (0.5, 1.0, 2.0, 3.0):
        share = math.erfc(bound / math.sqrt(2))
        spread = math.sqrt(share * (1 - share) / len(numbers))
        assert abs((numbers.abs() > bound).double().mean().item() - share) < 6 * spread


def test_neighbours_halves_of_a_chunk_and_two_calls_are_independent():
    one, other = secure_normal(2 * CHUNK), secure_normal(2 * CHUNK)
    half = CHUNK // 2  # the two numbers of a pair are half a chunk apart
    for a, b in ((one, other), (one[:-1], one[1:]), (one[:-half], one[half:]), (one[:CHUNK], one[CHUNK:])):
        for f in (lambda x: x, torch.square):
            pair = torch.stack([f(a), f(b)])
            assert abs(torch.corrcoef(pair)[0, 1].item()) < 6 / math.sqrt(len(a))


@pytest.mark.parametrize("count", [0, 1, 2, 3, CHUNK - 1, CHUNK, CHUNK + 1])
def test_every_number_is_drawn(count):
    numbers = secure_normal(count)
    assert numbers.shape == (count,)
    assert numbers.isfinite().all()
    assert len(numbers.unique()) >= count - count**2 // 2**22


def test_the_ends_of_the_uniform_numbers_are_finite(monkeypatch):
    for byte in (b"\x00", b"\xff"):
        monkeypatch.setattr(noise.os, "urandom", lambda count, byte=byte: byte * count)
        numbers = secure_normal(4, torch.float64)
        assert numbers.isfinite().all()
        assert numbers.abs().max() < 8.6


def test_seeds_of_torch_do_not_matter_and_do_not_change():
    torch.manual_seed(0)
    one = secure_normal(5)
    torch.manual_seed(0)
    state = torch.get_rng_state()
    assert not torch.equal(one, secure_normal(5))
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_noise_is_float32_or_wider(dtype):
    for generator in (None, torch.Generator().manual_seed(0)):
        found = gaussian(torch.zeros(3, 40, dtype=dtype), 2.0, generator)
        assert found.dtype == torch.promote_types(dtype, torch.float32)
        assert found.shape == (3, 40)
        assert 1.5 < found.std() < 2.6


@pytest.mark.parametrize("name", DEFAULTS)
def test_defaults_of_the_process_do_not_matter(name):
    like = torch.zeros(3)
    with DEFAULTS[name]():
        found = gaussian(like, 1.0, None), gaussian(like, 1.0, torch.Generator("cpu"))
    assert all(x.dtype == torch.float32 and x.device.type == "cpu" for x in found)
