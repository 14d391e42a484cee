"""Are the numbers of this device right? Steps of chains against the readable way in float64 on the CPU."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from benchmarks.cases import TRANSFORMS, written
from benchmarks.device.run import Result
from benchmarks.timing import Case, Gradients
from torchzero_clip import (
    LR,
    AdaGC,
    AutoClip,
    ClipNorm,
    ClipRMS,
    GradientStabilizer,
    Modular,
    Transform,
    ZClip,
)

CHAINS: list[Callable[[], Transform]] = [
    partial(ClipNorm, 1, dim="global"),
    *TRANSFORMS,
    partial(ClipRMS, 1e-3),
    partial(AdaGC, warmup_steps=1),
    ZClip,
    AutoClip,
    GradientStabilizer,
]
SHAPES = [(64, 32), (64,), (16, 8, 3, 3), (1000,)]
STEPS = 5
LIMITS = {torch.float32: 1e-5, torch.bfloat16: 5e-2}
"""The largest relative difference that counts as right. A step in bfloat16 rounds the parameters to 2**-9."""


def rows(device: str) -> dict[str, Callable[[], Result]]:
    """The check of each chain and dtype, by name."""
    return {
        f"{written(made)}, {str(dtype).removeprefix('torch.')}": partial(difference, device, made, dtype)
        for made in CHAINS
        for dtype in LIMITS
    }


def difference(device: str, made: Callable[[], Transform], dtype: torch.dtype) -> Result:
    """The largest difference of what was subtracted, relative to its largest element, and whether it is small."""
    generator = torch.Generator().manual_seed(1)
    rounded = [
        [(torch.randn(shape, generator=generator) * (1 + k)).to(dtype) for shape in SHAPES] for k in range(STEPS)
    ]
    # from zeros, because the rounding of larger parameters hides updates
    here = moved(rounded, made, device, dtype, fast=True)
    there = moved(rounded, made, "cpu", torch.float64, fast=False)
    relative = ((here - there).abs().max() / there.abs().max()).item()
    return {"difference": relative, "right": relative <= LIMITS[dtype]}


def moved(
    rounded: list[list[Tensor]], made: Callable[[], Transform], device: str, dtype: torch.dtype, *, fast: bool
) -> Tensor:
    params = [nn.Parameter(torch.zeros(shape, device=device, dtype=dtype)) for shape in SHAPES]
    optimizer = Modular(params, made(), LR(1.0), fast=fast)
    for grads in rounded:
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad.to(device, dtype, copy=True)
        optimizer.step()
    return torch.cat([param.detach().cpu().double().flatten() for param in params])


def replays(case: Case, ordinary: Case, device: str) -> Result:
    """The largest difference between parameters after ordinary steps, and after steps that were mostly replayed."""
    gradients = Gradients(SHAPES, device)
    ends: list[Tensor] = []
    for each in (case, ordinary):
        params = gradients.params()
        run = each.make(params)
        for number in range(30):
            gradients.refill(params, number)
            run.step()
        ends.append(torch.cat([param.detach().cpu().double().flatten() for param in params]))
    relative = ((ends[0] - ends[1]).abs().max() / ends[1].abs().max()).item()
    return {"difference": relative, "right": relative <= LIMITS[torch.float32]}
