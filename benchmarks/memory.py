"""Memory of a step: what is held between steps, and the peak above it during a step."""

import gc
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.profiler import profile

from benchmarks.sets import Shapes
from benchmarks.timing import WARM_UP, Case, Gradients

os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # below 6 the profiler prints a line when it starts and ends


class Memory(NamedTuple):
    """Bytes; ``held`` is beyond parameters and gradients, None for packages that do not use torch's tensors."""

    held: int | None
    peak: int
    gradients: int


def measure_memory(
    cases: Sequence[Case], shapes: Shapes, device: str, tick: Callable[[str], None]
) -> dict[str, Memory]:
    gradients = Gradients(shapes, device)
    measured: dict[str, Memory] = {}
    for case in cases:
        tick(case.name)
        measured[case.name] = of_case(case, gradients, device)
    return measured


def of_case(case: Case, gradients: Gradients, device: str, warm_up: int = WARM_UP) -> Memory:
    params = gradients.params()
    before = in_tensors(device)
    run = case.make(params)
    for number in range(warm_up + 1):
        if number > 0:
            run.step()
        gradients.refill(params, number)
        run.before()
    if run.extra_bytes is not None:
        return Memory(None, run.extra_bytes(), gradients.nbytes)
    held = in_tensors(device) - before
    return Memory(held, peak_of(run.step, device), gradients.nbytes)


def in_tensors(device: str) -> int:
    """The bytes of all tensors that Python can reach, and of all other memory that torch gave out on a GPU."""
    gc.collect()
    if device == "cuda":
        return requested("current")
    tensors: list[Tensor] = [each for each in gc.get_objects() if type(each) in (Tensor, nn.Parameter)]
    storages = [tensor.untyped_storage() for tensor in tensors if tensor.device.type == device]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def requested(which: str) -> int:
    """Bytes that tensors on the GPU asked for. `torch.cuda.memory_allocated` adds up to 1 MiB for each large tensor."""
    return torch.cuda.memory_stats()[f"requested_bytes.all.{which}"]


def peak_of(step: Callable[[], object], device: str) -> int:
    """The most bytes that are allocated at once during a step, beyond what is there before it."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = requested("current")
        step()
        return requested("peak") - before
    profiler = profile(profile_memory=True)
    with profiler:
        step()
    results: Any = profiler.kineto_results
    # one event for each allocation by torch's CPU allocator and for its release, however short the time between;
    # the release of what was allocated before the profile has no size, and torch warns about it
    events = sorted((event.start_ns(), event.nbytes()) for event in results.events() if event.name() == "[memory]")
    now = peak = 0
    for _, nbytes in events:
        now += nbytes
        peak = max(peak, now)
    return peak
