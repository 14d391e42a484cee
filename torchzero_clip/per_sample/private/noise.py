"""Gaussian noise for releases: from the random numbers of the operating system, or from a generator for tests."""

import math
import os

import torch
from torch import Tensor

from torchzero_clip.functional.foreach import wide_dtype

CHUNK = 1 << 16  # numbers that are made at a time: their temporary tensors, of 512 kB each, stay in the cache


def gaussian(like: Tensor, std: float, generator: torch.Generator | None) -> Tensor:
    """Normal numbers of a standard deviation, in the shape and on the device of a tensor, in float32 or wider."""
    dtype = wide_dtype(like.dtype)
    if generator is not None:
        device = generator.device
        return torch.normal(0.0, std, like.shape, generator=generator, device=device, dtype=dtype).to(like.device)
    return secure_normal(like.numel(), dtype).mul_(std).view(like.shape).to(like.device)


def of_rank(generator: torch.Generator, rank: int) -> torch.Generator:
    """A new generator for one release. Processes draw different noise, even if their generators have the same state."""
    seed = torch.randint(1 << 62, (), generator=generator, device=generator.device).item()
    return torch.Generator(generator.device).manual_seed(int(seed) + rank)


def secure_normal(count: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Standard normal numbers from the random numbers of the operating system: (count,), on the CPU.

    They are computed in float64 from 52 random bits each, so none is larger than 8.6. The generators of torch are not
    used, because that of the CPU can be seeded in 2**32 ways only.

    Source: Box, Muller, [A note on the generation of random normal
    deviates](https://doi.org/10.1214/aoms/1177706645), 1958.
    """
    result = torch.empty(count, dtype=dtype, device="cpu")
    for start in range(0, count, CHUNK):
        part = result[start : start + CHUNK]
        part.copy_(_pairs((len(part) + 1) // 2)[: len(part)])
    return result


def _pairs(count: int) -> Tensor:
    words = torch.frombuffer(bytearray(os.urandom(16 * count)), dtype=torch.int64)
    uniform = (words & ((1 << 52) - 1)).double().add_(0.5).mul_(2.0**-52)  # in (0, 1), exactly
    radius, angle = uniform[:count].log_().mul_(-2).sqrt_(), uniform[count:].mul_(2 * math.pi)
    return torch.cat([radius * angle.cos(), angle.sin_().mul_(radius)])
