"""Whole iterations, from zero_grad to the step: what a clip, a gate and a recorder add to training."""

import itertools
import statistics
from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.cases import CLIP_AND_FUSED, GLOBAL_CLIP, step_cases
from benchmarks.device.meter import Meter, Times
from benchmarks.device.rows import NO_CLIP, RECORDER, SKIP
from benchmarks.device.run import Result
from benchmarks.per_sample import METHODS, MODELS, Transformer
from benchmarks.timing import Step

ROWS = [CLIP_AND_FUSED, NO_CLIP, GLOBAL_CLIP, SKIP, RECORDER]
CLIPPERS = ["plain training", "torchzero_clip", 'torchzero_clip, memory="low"']
WARM_UP = 14


class Residual(nn.Module):
    """Two convolutions beside a shortcut."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        stride = after // before
        self.first = nn.Sequential(nn.Conv2d(before, after, 3, stride, 1, bias=False), nn.BatchNorm2d(after))
        self.second = nn.Sequential(nn.Conv2d(after, after, 3, 1, 1, bias=False), nn.BatchNorm2d(after))
        self.shortcut = nn.Conv2d(before, after, 1, stride, bias=False) if stride > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.shortcut(x) + self.second(F.relu(self.first(x))))


def resnet(width: int) -> nn.Module:
    """A ResNet of 18 layers for small images."""
    widths = [width, width, width, 2 * width, 2 * width, 4 * width, 4 * width, 8 * width, 8 * width]
    blocks = [Residual(a, b) for a, b in itertools.pairwise(widths)]
    stem = [nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8 * width, 10))


def policy() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 12))


class Task(NamedTuple):
    """A model, and a batch for it."""

    model: Callable[[], nn.Module]
    inputs: Tensor
    targets: Tensor


def words(batch_size: int, length: int, count: int) -> tuple[Tensor, Tensor]:
    return torch.randint(0, count, (batch_size, length)), torch.randint(0, count, (batch_size, length))


def tasks(device: str) -> dict[str, Task]:
    """Models of the sizes that are trained on a GPU, and small ones for a CPU."""
    torch.manual_seed(0)
    small = device == "cpu"
    sizes = {} if small else {"width": 768, "layers": 12, "length": 1024, "words": 50257, "heads": 12}
    length, count = (128, 4096) if small else (1024, 50257)
    decoder = partial(Transformer, **sizes)
    images = torch.randn(8 if small else 256, 3, 32, 32), torch.randint(0, 10, (8 if small else 256,))
    batches = (1, 4) if small else (4, 16)
    return {
        "policy, 64 observations": Task(policy, torch.randn(64, 32), torch.randint(0, 12, (64,))),
        f"ResNet-18, {len(images[0])} images": Task(partial(resnet, 8 if small else 64), *images),
        **{f"GPT-2, {n} x {length} tokens": Task(decoder, *words(n, length, count)) for n in batches},
    }


def iteration(task: Task, row: str, device: str) -> Step:
    """One iteration, by which the parameters get gradients and a step."""
    torch.manual_seed(0)
    model = task.model().to(device)
    inputs, targets = task.inputs.to(device), task.targets.to(device)
    (case,) = (case for case in step_cases() if case.name == row)
    params = list(model.parameters())
    optimizer_step = case.make(params).step

    def step() -> None:
        for param in params:
            param.grad = None
        with torch.autocast(device, torch.bfloat16, enabled=device != "cpu"):
            loss = F.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())
        loss.backward()
        optimizer_step()

    return step


def in_turns(meter: Meter, steps: Mapping[str, Step], rounds: int) -> dict[str, Result]:
    """The medians of wall and host time of steps that take turns, and the ratios to the first."""
    times: dict[str, list[Times]] = {name: [] for name in steps}
    for number in range(WARM_UP + rounds):
        for name, step in steps.items():
            found = meter.timed(step)
            if number >= WARM_UP:
                times[name].append(found)
    first = next(iter(times.values()))
    return {
        name: {
            "host": statistics.median(each.host for each in own),
            "wall": statistics.median(each.wall for each in own),
            "wall ratio": statistics.median(a.wall / b.wall for a, b in zip(own, first, strict=True)),
            "waits": meter.waits(steps[name]),
        }
        for name, own in times.items()
    }


def iterations(meter: Meter, task: Task, device: str, rounds: int) -> dict[str, Result]:
    return in_turns(meter, {row: iteration(task, row, device) for row in ROWS}, rounds)


def per_sample(meter: Meter, name: str, device: str, rounds: int) -> dict[str, Result]:
    """Training with per-sample clipping beside plain training."""
    steps: dict[str, Step] = {}
    for method in CLIPPERS:
        torch.manual_seed(0)
        model, batch = MODELS[name]()
        inputs, targets = (data.to(device) for data in batch)
        steps[method] = METHODS[method](model.to(device), (inputs, targets))
    return in_turns(meter, steps, rounds)
