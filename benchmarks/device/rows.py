"""The rows of the tables on a GPU: those of `benchmarks.cases`, captured steps, and other packages."""

from collections.abc import Callable
from functools import partial
from itertools import chain

import torch

from benchmarks.cases import (
    CLIP_AND_FOREACH,
    CLIP_AND_FUSED,
    GLOBAL_CLIP,
    Make,
    adaptive_cases,
    before_cases,
    clip_jointly,
    compiled_cases,
    step_cases,
)
from benchmarks.peers import installed_peers
from benchmarks.timing import Case, Params, Step, Timed
from torchzero_clip import AdaGC, AdamW, ClipNorm, ClipValueByEMA, Modular, Transform, captured

SKIP, RECORDER = "  and SkipStep(max_norm=1e6)", "  and a recorder"
NO_CLIP = "torch AdamW(fused=True), no clip"
FIRST = [
    CLIP_AND_FUSED,
    NO_CLIP,
    "AdamW()",
    GLOBAL_CLIP,
    SKIP,
    RECORDER,
    '  and nonfinite="skip"',
    'before_step(AdamW(fused=True), ClipNorm(1, dim="global"))',
    "four lines that set grad_scale, AdamW(fused=True)",
    CLIP_AND_FOREACH,
    "ClipNorm(1), AdamW()",
    "ZClip(), AdamW()",
    "AdaGC(warmup_steps=1), AdamW()",
]
"""What is measured first, because the others are left out if the time is over."""
BASE = CLIP_AND_FUSED
WITH_NORMS = [GLOBAL_CLIP, SKIP, "ClipNorm(1), AdamW()", "ZClip(), AdamW()", "AdaGC(warmup_steps=1), AdamW()"]
"""What is measured with norms in float32 and in float64."""
WARM_UP = 12  # ordinary steps of torch before a capture


class Captured:
    """A step of torch that is recorded as a CUDA graph after some ordinary steps, and then replayed."""

    def __init__(self, step: Step) -> None:
        self._step = step
        self._steps = 0
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(self) -> None:
        if self._graph is None:
            self._steps += 1
            if self._steps <= WARM_UP:
                self._on_a_side_stream()
                return
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):  # records, and computes nothing
                self._step()
            self._graph = graph
        self._graph.replay()

    def _on_a_side_stream(self) -> None:
        # torch asks for it, so that what warm steps allocate does not belong to the stream of the capture
        side, main = torch.cuda.Stream(), torch.cuda.current_stream()
        side.wait_stream(main)
        with torch.cuda.stream(side):
            self._step()
        main.wait_stream(side)


def captured_chain(*transforms: Callable[[], Transform]) -> Make:
    return lambda params: Timed(captured(Modular(params, *(made() for made in transforms))))


def captured_torch(params: Params) -> Timed:
    """The two calls of torch, with a learning rate that a graph can read."""
    lr = torch.tensor(1e-3, device=params[0].device)
    optimizer = torch.optim.AdamW(params, lr=lr, fused=True, capturable=True)

    def step() -> None:
        clip_jointly(params)
        optimizer.step()

    return Timed(Captured(step))


def captured_cases() -> list[Case]:
    """Steps as CUDA graphs."""
    chains = {
        GLOBAL_CLIP: captured_chain(partial(ClipNorm, 1, dim="global"), AdamW),
        "ClipNorm(1), AdamW()": captured_chain(partial(ClipNorm, 1), AdamW),
        "AdaGC(warmup_steps=1), AdamW()": captured_chain(partial(AdaGC, warmup_steps=1), AdamW),
        "ClipValueByEMA(), AdamW()": captured_chain(ClipValueByEMA, AdamW),
    }
    makes = {CLIP_AND_FUSED: captured_torch, **chains}
    return [Case(f"{name}, captured", make, (BASE,)) for name, make in makes.items()]


def cases(device: str) -> dict[str, Case]:
    """All rows by name, the most important ones first."""
    found = [*step_cases(), *before_cases(), *(case for case in adaptive_cases() if "matrices" not in case.name)]
    found += [case for case in compiled_cases() if case.name.startswith("torch")]
    found += chain(*installed_peers(device).values())
    by_name = {case.name: case for case in found}
    first = [name for name in FIRST if name in by_name]
    return {name: by_name[name] for name in dict.fromkeys([*first, *by_name])}


def compiles(case: Case) -> bool:
    """True for a row that may need a minute to compile."""
    return "compiled" in case.name
