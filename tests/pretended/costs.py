"""Launches, bytes and kept memory of a step on the pretended device."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from pretended.device import CUDA, DEVICE, memory_in_use
from torch import Tensor, nn

from torchzero_clip import (
    SGD,
    AdaGC,
    AdamW,
    AdaptiveGradientClip,
    Centralize,
    ClipByMaxEMA,
    ClipNorm,
    ClipNormByEMA,
    ClipNormGrowth,
    ClipRMS,
    ClipValue,
    ClipValueByEMA,
    ClipValueGrowth,
    GradientStabilizer,
    Modular,
    Normalize,
    NormalizeByEMA,
    SpikeAwareClip,
)

SHORT = [(300 + k % 7,) for k in range(400)]
"""400 short tensors, with many launches."""
LONG = [(4096, 512), (512,), (2048, 512), (2048,), (512, 2048)] * 4
"""The shapes of a small transformer."""


class Cost(NamedTuple):
    """What a warm step costs."""

    launches: int
    bytes: float
    """For each element of a parameter."""
    kept: int
    """Bytes that the optimizer keeps besides its state."""


class Limit(NamedTuple):
    """What a chain may cost."""

    make: Callable[[], list[Any]]
    launches: int
    """With 400 short tensors of float32; with bfloat16 a tenth more."""
    bytes: float
    """For each element of float32, with the shapes of a transformer."""
    keys: int = 0
    """The keys of its state that are shaped like the parameters, without those of AdamW."""


LIMITS = {
    "AdamW": Limit(lambda: [AdamW()], 3, 29),
    "ClipNorm global": Limit(lambda: [ClipNorm(1, dim="global"), AdamW()], 30, 37),
    "ClipNorm": Limit(lambda: [ClipNorm(1), AdamW()], 30, 38),
    "ClipNorm linf": Limit(lambda: [ClipNorm(1, "linf"), AdamW()], 30, 38),
    "Normalize": Limit(lambda: [Normalize(), AdamW()], 30, 38),
    "ClipRMS": Limit(lambda: [ClipRMS(), AdamW()], 35, 38),
    "ClipNormGrowth": Limit(lambda: [ClipNormGrowth(), AdamW()], 55, 38),
    "GradientStabilizer": Limit(lambda: [GradientStabilizer(), AdamW()], 65, 38),
    "AdaGC": Limit(lambda: [AdaGC(warmup_steps=2), AdamW()], 95, 38),
    "ClipNormByEMA": Limit(lambda: [ClipNormByEMA(), AdamW()], 85, 75, 1),
    "NormalizeByEMA": Limit(lambda: [NormalizeByEMA(), AdamW()], 85, 75, 1),
    "AdaptiveGradientClip": Limit(lambda: [AdaptiveGradientClip(), AdamW()], 460, 50),
    "Centralize": Limit(lambda: [Centralize(), AdamW()], 420, 42),
    "ClipValue": Limit(lambda: [ClipValue(1e-3), AdamW()], 15, 52),
    "ClipByMaxEMA": Limit(lambda: [ClipByMaxEMA(), AdamW()], 65, 80),
    "ClipValueByEMA": Limit(lambda: [ClipValueByEMA(), AdamW()], 45, 125, 1),
    "ClipValueGrowth": Limit(lambda: [ClipValueGrowth(), AdamW()], 55, 210, 1),
    "ClipNorm global, SGD": Limit(lambda: [ClipNorm(1, dim="global"), SGD(0.1, momentum=0.9)], 30, 29),
    "ClipNorm, SGD": Limit(lambda: [ClipNorm(1), SGD(0.1, momentum=0.9)], 30, 30),
    "ClipValue, SGD": Limit(lambda: [ClipValue(1e-3), SGD(0.1, momentum=0.9)], 15, 44),
    "SpikeAwareClip": Limit(lambda: [SpikeAwareClip(warmup_steps=2), AdamW()], 55, 200, 1),
}


def cost(make: Callable[[], list[Any]], shapes: list[tuple[int, ...]], dtype: torch.dtype) -> Cost:
    generator = torch.Generator().manual_seed(0)

    def fresh() -> list[Tensor]:
        return [torch.randn(shape, generator=generator).to(CUDA, dtype) for shape in shapes]

    before = memory_in_use()
    params = [nn.Parameter(value) for value in fresh()]
    optimizer = Modular(params, *make())
    for _ in range(4):
        for param, grad in zip(params, fresh(), strict=True):
            param.grad = grad
        DEVICE.counts.clear()
        optimizer.step()
    launches, moved = DEVICE.counts.launches.total(), sum(DEVICE.counts.bytes.values())
    optimizer.zero_grad()
    optimizer.metrics()
    state = [v for own in optimizer.state.values() for v in own.values() if isinstance(v, Tensor)]
    known = sum(tensor.numel() * tensor.element_size() for tensor in (*params, *state))
    return Cost(launches, moved / sum(p.numel() for p in params), memory_in_use() - before - known)


def costs_are_bounded() -> None:
    """Launches, bytes and kept memory of each chain."""
    count = sum(torch.Size(shape).numel() for shape in LONG)
    for name, limit in LIMITS.items():
        wide, half = (cost(limit.make, SHORT, dtype) for dtype in (torch.float32, torch.bfloat16))
        long = cost(limit.make, LONG, torch.float32)
        assert 0 < wide.launches <= limit.launches, (name, wide)
        assert half.launches <= 1.1 * wide.launches, (name, half, wide)
        assert 28 <= long.bytes <= limit.bytes, (name, long)
        assert long.kept <= min(2**26, 2.5 * count) * (1 + limit.keys) + 0.1 * count, (name, long)
