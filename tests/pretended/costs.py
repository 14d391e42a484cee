"""Launches, bytes and kept memory of a step on the simulated device."""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import torch
from engine.test_walk import calls_of
from pretended.device import DEVICE, memory_in_use, on_cuda
from table import chain
from torch import Tensor, nn

from torchzero_clip import (
    AdaGC,
    AdamW,
    AutoClip,
    ClipNorm,
    ClipNormByEMA,
    ClipNormGrowth,
    ClipValue,
    Modular,
    SkipStep,
    ZClip,
    before_step,
)

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


class WarmLimit(NamedTuple):
    """What the twelfth step of 100 tensors may cost with AdamW."""

    calls: float
    """Calls of functions of the package."""
    launches: int
    waits: int
    """Reads of the device by the host, and copies between them."""


class Limit(NamedTuple):
    """What a chain may cost."""

    launches: int
    """With 400 short tensors of float32; with bfloat16 a quarter more."""
    bytes: float
    """For each element of float32, with the shapes of a transformer."""
    keys: int = 0
    """The keys of its state that are shaped like the parameters, without those of AdamW."""


LIMITS = {
    "AdamW": Limit(3, 29),
    "ClipNorm global + AdamW": Limit(17, 37),
    "ClipNorm + AdamW": Limit(17, 38),
    "ClipRMS + AdamW": Limit(20, 38),
    "ClipNormGrowth + AdamW": Limit(30, 38),
    "GradientStabilizer + AdamW": Limit(39, 38),
    "AdaGC + AdamW": Limit(44, 38),
    "ClipNormByEMA + AdamW": Limit(48, 75, 1),
    "AdaptiveGradientClip + AdamW": Limit(460, 50),
    "Centralize + AdamW": Limit(420, 42),
    "ClipValue + AdamW": Limit(15, 52),
    "ClipByMaxEMA + AdamW": Limit(51, 80),
    "ClipValueByEMA + AdamW": Limit(45, 125, 1),
    "ClipValueGrowth + AdamW": Limit(55, 210, 1),
    "ClipNorm global + SGD": Limit(15, 29),
    "SpikeAwareClip + AdamW": Limit(55, 200, 1),
}
"""Of chains in `table.LINKS`."""
Start: TypeAlias = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def _modular(make: Callable[[], list[Any]], **options: Any) -> Start:
    return lambda params: Modular(params, *make(), AdamW(), **options)


def _before(make: Callable[[], list[Any]], **options: Any) -> Start:
    def start(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        optimizer = torch.optim.AdamW(params, fused=True)
        before_step(optimizer, *make(), **options)
        return optimizer

    return start


def _joint() -> ClipNorm:
    return ClipNorm(0.7, dim="global")


def _gate() -> SkipStep:
    return SkipStep(max_ratio=10.0)


WARM: dict[str, tuple[Start, WarmLimit]] = {
    "joint": (_modular(lambda: [_joint()]), WarmLimit(60, 12, 0)),
    "each": (_modular(lambda: [ClipNorm(0.7)]), WarmLimit(70, 12, 0)),
    "skip": (_modular(list, nonfinite="skip"), WarmLimit(80, 15, 0)),
    "skip, joint": (_modular(lambda: [_joint()], nonfinite="skip"), WarmLimit(90, 18, 0)),
    "gate": (_modular(lambda: [_gate()]), WarmLimit(95, 25, 0)),
    "gate, joint": (_modular(lambda: [_gate(), _joint()]), WarmLimit(130, 30, 0)),
    "growth": (_modular(lambda: [ClipNormGrowth()]), WarmLimit(145, 25, 0)),
    "autoclip": (_modular(lambda: [AutoClip()]), WarmLimit(105, 28, 0)),
    "ema": (_modular(lambda: [ClipNormByEMA()]), WarmLimit(230, 40, 0)),
    "adagc": (_modular(lambda: [AdaGC(warmup_steps=3)]), WarmLimit(150, 39, 0)),
    "zclip": (_modular(lambda: [ZClip(warmup_steps=3)]), WarmLimit(120, 40, 0)),
    "gate, two clips": (_modular(lambda: [_gate(), ClipNorm(0.7), _joint()]), WarmLimit(335, 56, 0)),
    "gate, value": (_modular(lambda: [_gate(), ClipValue(0.01)]), WarmLimit(250, 36, 0)),
    "before, gate, joint": (_before(lambda: [_gate(), _joint()], nonfinite="skip"), WarmLimit(170, 37, 0)),
}
"""Chains before AdamW, or before that of torch."""
WARM_IN_BFLOAT16 = ("each", "gate, joint", "ema")
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
    for k in range(5):  # the fifth follows a plan, if there is one
        DEVICE.counts.clear()
        DEVICE.weighs = shapes is LONG and k == 4
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
            assert cost(name, SHORT, torch.bfloat16).launches <= 1.25 * wide.launches, name
        assert 28 <= long.bytes <= limit.bytes, (name, long)
        assert long.kept <= min(2**26, 2.5 * count) * (1 + limit.keys) + 0.1 * count, (name, long)


def warm_costs(start: Start, dtype: torch.dtype) -> WarmLimit:
    """What the twelfth step costs, when plans stand and statistics have warmed up."""
    generator = torch.Generator().manual_seed(0)
    params = [nn.Parameter(on_cuda(torch.randn(300 + k % 7, generator=generator).to(dtype))) for k in range(100)]
    optimizer = start(params)
    called: list[Any] = []
    for k in range(12):
        for param in params:
            param.grad = on_cuda(torch.randn(param.shape, generator=generator).to(dtype))
        DEVICE.counts.clear()
        called = calls_of(optimizer.step) if k == 11 else optimizer.step() or []
    counts = DEVICE.counts
    ours = [code for code in called if code.co_name != "is_dense"]  # which the device calls to count launches
    return WarmLimit(len(ours), counts.launches.total(), len(counts.waits) + len(counts.copies))


def warm_costs_are_bounded() -> None:
    """Calls, launches and waits of each chain; in bfloat16 a quarter more launches."""
    for name, (start, limit) in WARM.items():
        found = warm_costs(start, torch.float32)
        assert all(a <= b for a, b in zip(found, limit, strict=True)), (name, found)
        assert found.launches > 1
        if name in WARM_IN_BFLOAT16:
            in_half = warm_costs(start, torch.bfloat16)
            assert in_half.launches <= 1.25 * found.launches, (name, in_half)
            assert in_half.waits <= limit.waits
