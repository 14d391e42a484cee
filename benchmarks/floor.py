"""Steps in C without checks, which show how fast a step could be. They need ``cc``."""

import ctypes
import subprocess
import tempfile
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.cases import CLIP_AND_FUSED, grads_of, written
from benchmarks.timing import Case, Params, Timed
from torchzero_clip import AdamW, ClipNorm, ClipNormByEMA, ClipValue, ClipValueByEMA, ClipValueGrowth, Transform

SOURCE = Path(__file__).with_name("floor.c")
# the compiler may reorder sums, so that it can vectorize them
OPTIONS = ("-O3", "-march=native", "-fassociative-math", "-fno-signed-zeros", "-fno-trapping-math", "-fno-math-errno")
CHAINS: dict[str, list[Callable[[], Transform]]] = {
    "adamw": [],
    "clip_norm_global": [partial(ClipNorm, 1, dim="global")],
    "clip_norm": [partial(ClipNorm, 1)],
    "clip_value": [partial(ClipValue, 1e-3)],
    "clip_norm_by_ema": [partial(ClipNormByEMA, max_ema_growth=None)],
    "clip_value_by_ema": [ClipValueByEMA],
    "clip_value_growth": [ClipValueGrowth],
}
"""The transforms before `AdamW` in the chain that each function computes."""


class _Tensor(ctypes.Structure):
    _fields_ = (
        *((key, ctypes.c_void_p) for key in ("param", "grad", "mean", "square", "state")),
        ("size", ctypes.c_long),
    )


class _Settings(ctypes.Structure):
    _fields_ = tuple((key, ctypes.c_float) for key in ("lr", "beta1", "beta2", "weight_decay", "eps"))


@cache
def _library() -> Any:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "floor.so"
        subprocess.run(["cc", *OPTIONS, "-shared", "-fPIC", "-o", path, SOURCE, "-lm"], check=True)
        return ctypes.CDLL(str(path))


def in_c(name: str) -> Callable[[Params], Timed]:
    """The steps of a function in ``floor.c``, for contiguous parameters of float32 on CPU."""

    def make(params: Params) -> Timed:
        mean, square, state = ([torch.zeros_like(param) for param in params] for _ in range(3))
        steps, settings = 0, _Settings(1e-3, 0.9, 0.999, 1e-2, 1e-8)
        tensors: Any = None

        def before() -> None:
            nonlocal tensors
            rows = zip(params, grads_of(params), mean, square, state, strict=True)
            own = [_Tensor(*(tensor.data_ptr() for tensor in row), row[0].numel()) for row in rows]
            tensors = (_Tensor * len(own))(*own)

        def step() -> None:
            nonlocal steps
            getattr(_library(), name)(tensors, ctypes.c_long(len(params)), ctypes.c_long(steps), settings)
            steps += 1

        _library()
        return Timed(step, before)

    return make


def floor_cases() -> list[Case]:
    """A row for each function."""
    rows = {name: ", ".join(map(written, [*chain, AdamW])) for name, chain in CHAINS.items()}
    return [Case(f"in C: {row}", in_c(name), (CLIP_AND_FUSED,)) for name, row in rows.items()]
