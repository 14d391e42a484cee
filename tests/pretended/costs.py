"""Launches, bytes and kept memory of a step on the pretended device."""

from typing import NamedTuple

import torch
from pretended.device import DEVICE, memory_in_use, on_cuda
from table import chain
from torch import Tensor, nn

from torchzero_clip import Modular

SHORT = [(300 + k % 7,) for k in range(400)]
"""400 short tensors, with many launches."""
LONG = [(4096, 512), (512,), (2048, 512), (2048,), (512, 2048)] * 4
"""The shapes of a small transformer."""


class Cost(NamedTuple):
    """What a warm step costs."""

    launches: int
    bytes: float
    """For each element of a parameter of `LONG`."""
    kept: int
    """Bytes that the optimizer keeps besides its state, for `LONG`."""


class Limit(NamedTuple):
    """What a chain may cost."""

    launches: int
    """With 400 short tensors of float32; with bfloat16 a tenth more."""
    bytes: float
    """For each element of float32, with the shapes of a transformer."""
    keys: int = 0
    """The keys of its state that are shaped like the parameters, without those of AdamW."""


LIMITS = {
    "AdamW": Limit(3, 29),
    "ClipNorm global + AdamW": Limit(30, 37),
    "ClipNorm + AdamW": Limit(30, 38),
    "ClipRMS + AdamW": Limit(35, 38),
    "ClipNormGrowth + AdamW": Limit(55, 38),
    "GradientStabilizer + AdamW": Limit(65, 38),
    "AdaGC + AdamW": Limit(95, 38),
    "ClipNormByEMA + AdamW": Limit(85, 75, 1),
    "AdaptiveGradientClip + AdamW": Limit(460, 50),
    "Centralize + AdamW": Limit(420, 42),
    "ClipValue + AdamW": Limit(15, 52),
    "ClipByMaxEMA + AdamW": Limit(65, 80),
    "ClipValueByEMA + AdamW": Limit(45, 125, 1),
    "ClipValueGrowth + AdamW": Limit(55, 210, 1),
    "ClipNorm global + SGD": Limit(30, 29),
    "SpikeAwareClip + AdamW": Limit(55, 200, 1),
}
"""Of chains in `table.LINKS`."""
IN_BFLOAT16 = [f"{name} + AdamW" for name in ("ClipNorm", "ClipNormByEMA", "ClipValueGrowth")]
"""One for each way: factors, averages, elements."""


def cost(name: str, shapes: list[tuple[int, ...]], dtype: torch.dtype) -> Cost:
    generator = torch.Generator().manual_seed(0)

    def fresh() -> list[Tensor]:
        return [on_cuda(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]

    before = memory_in_use() if shapes is LONG else 0
    params = [nn.Parameter(value) for value in fresh()]
    for param, grad in zip(params, fresh(), strict=True):
        param.grad = grad
    optimizer = Modular(params, *chain(name))
    for k in range(3):
        DEVICE.counts.clear()
        DEVICE.weighs = shapes is LONG and k == 2
        optimizer.step()
    launches, moved = DEVICE.counts.launches.total(), sum(DEVICE.counts.bytes.values())
    optimizer.zero_grad()
    optimizer.metrics()
    state = [v for own in optimizer.state.values() for v in own.values() if isinstance(v, Tensor)]
    known = sum(tensor.numel() * tensor.element_size() for tensor in (*params, *state))
    kept = memory_in_use() - before - known if shapes is LONG else 0
    return Cost(launches, moved / sum(p.numel() for p in params), kept)


def costs_are_bounded() -> None:
    """Launches, bytes and kept memory of each chain."""
    count = sum(torch.Size(shape).numel() for shape in LONG)
    for name, limit in LIMITS.items():
        wide, long = cost(name, SHORT, torch.float32), cost(name, LONG, torch.float32)
        assert 0 < wide.launches <= limit.launches, (name, wide)
        if name in IN_BFLOAT16:
            assert cost(name, SHORT, torch.bfloat16).launches <= 1.1 * wide.launches, name
        assert 28 <= long.bytes <= limit.bytes, (name, long)
        assert long.kept <= min(2**26, 2.5 * count) * (1 + limit.keys) + 0.1 * count, (name, long)
