"""The times of a step on a device, its launches, and how often it synchronizes with the GPU."""

import math
import time
import warnings
from typing import NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.timing import Step

CYCLES = 2e6  # of a GPU in a millisecond, at about 2 GHz
LONGEST = 60.0  # milliseconds that the GPU sleeps
LAUNCHES = ("cudaLaunch", "cuLaunch", "cudaMemcpy", "cudaMemset", "cudaGraphLaunch")


class Times(NamedTuple):
    """Milliseconds: of Python until the step is enqueued, and until the device has carried it out."""

    host: float
    wall: float


class Meter:
    """Measures steps on a CUDA device or a CPU, where the times of the host, of the device and of both are the same."""

    def __init__(self, device: str) -> None:
        self.is_cuda = device == "cuda"

    def wait(self) -> None:
        if self.is_cuda:
            torch.cuda.synchronize()

    def timed(self, step: Step) -> Times:
        """The times of a step that finds the device idle."""
        self.wait()
        start = time.perf_counter()
        step()
        host = time.perf_counter() - start
        self.wait()
        return Times(host * 1000, (time.perf_counter() - start) * 1000)

    def on_device(self, step: Step, host: float) -> float:
        """Milliseconds of the device alone; NaN if it woke up before the step was enqueued.

        Args:
            step: A step that does not synchronize with the GPU.
            host: The milliseconds that Python needs to enqueue it.
        """
        if not self.is_cuda:
            return self.timed(step).wall
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        # on an idle device the time between events would be that of the host, which enqueues more slowly
        sleep = getattr(torch.cuda, "_sleep")  # noqa: B009, it is not in torch's type stubs
        sleep(int(CYCLES * min(1.5 * host + 0.3, LONGEST)))
        start.record()
        step()
        is_whole = not start.query()
        end.record()
        self.wait()
        return start.elapsed_time(end) if is_whole else math.nan

    def waits(self, step: Step) -> int | None:
        """How often a step synchronizes with the GPU; None on a CPU."""
        if not self.is_cuda:
            return None
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                step()
            finally:
                torch.cuda.set_sync_debug_mode("default")
        return sum("synchronizing CUDA operation" in str(warning.message) for warning in caught)

    def launches(self, step: Step) -> int | None:
        """How often a step launches something on the GPU, by the profiler; None on a CPU."""
        if not self.is_cuda:
            return None
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            step()
            torch.cuda.synchronize()
        return sum(event.name.startswith(LAUNCHES) for event in profiler.events() or [])
