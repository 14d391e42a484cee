"""Launches, bytes and kept memory of a step on the pretended device."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from pretended.device import CUDA, DEVICE, memory_in_use
from torch import Tensor, nn

from torchzero_clip import (
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


CHAINS: dict[str, Callable[[], list[Any]]] = {
    "AdamW": lambda: [AdamW()],
    "ClipNorm global": lambda: [ClipNorm(1, dim="global"), AdamW()],
    "ClipNorm": lambda: [ClipNorm(1), AdamW()],
    "ClipNorm linf": lambda: [ClipNorm(1, "linf"), AdamW()],
    "Normalize": lambda: [Normalize(), AdamW()],
    "ClipRMS": lambda: [ClipRMS(), AdamW()],
    "ClipNormGrowth": lambda: [ClipNormGrowth(), AdamW()],
    "GradientStabilizer": lambda: [GradientStabilizer(), AdamW()],
    "AdaGC": lambda: [AdaGC(warmup_steps=2), AdamW()],
    "ClipNormByEMA": lambda: [ClipNormByEMA(), AdamW()],
    "NormalizeByEMA": lambda: [NormalizeByEMA(), AdamW()],
    "AdaptiveGradientClip": lambda: [AdaptiveGradientClip(), AdamW()],
    "Centralize": lambda: [Centralize(), AdamW()],
    "ClipValue": lambda: [ClipValue(1e-3), AdamW()],
    "ClipByMaxEMA": lambda: [ClipByMaxEMA(), AdamW()],
    "ClipValueByEMA": lambda: [ClipValueByEMA(), AdamW()],
    "ClipValueGrowth": lambda: [ClipValueGrowth(), AdamW()],
    "SpikeAwareClip": lambda: [SpikeAwareClip(warmup_steps=2), AdamW()],
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
    known = {t.untyped_storage().nbytes() for t in ()} or sum(t.numel() * t.element_size() for t in (*params, *state))
    return Cost(launches, moved / sum(p.numel() for p in params), memory_in_use() - before - known)


def check_costs() -> None:
    for name, make in CHAINS.items():
        wide, half = (cost(make, SHORT, dtype) for dtype in (torch.float32, torch.bfloat16))
        long = cost(make, LONG, torch.float32)
        count = sum(torch.Size(shape).numel() for shape in LONG)
        print(
            f"{name:22} {wide.launches:5} bf16 {half.launches:5} | long {long.launches:5} {long.bytes:6.1f} B "
            f"kept {wide.kept / 2**20:7.1f} MiB, long {long.kept / count:5.2f} B/param"
        )
