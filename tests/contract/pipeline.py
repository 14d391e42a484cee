"""A training on 2 stages of a pipeline x 2 shards of FSDP2, with torch's own schedules; `test_pipeline` compares it."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.tensor import DTensor, Shard

from torchzero_clip import (
    AdaGC,
    Adam,
    AdamW,
    Centralize,
    ClipNorm,
    ClipNormByEMA,
    ClipValue,
    Modular,
    Normalize,
    SkipStep,
    ZClip,
    clip_grad_norm_,
    clip_grads_with_norm_,
    get_total_norm,
)

STEPS, BATCH, WIDTH, MICRO_BATCHES = 4, 16, 4, 4
SCHEDULES = {"GPipe": ("ab", "cd"), "Interleaved1F1B": ("a", "b", "c", "d")}
"""The layers of each stage; the second schedule has two stages on each process."""
FACTORS = (1.0, 30.0, 0.1, 3.0)
"""Of the losses: some steps are clipped and some are not."""


@dataclass(frozen=True)
class Job:
    """A training.

    Args:
        change: Changes the layers before the optimizer is made.
        change_gradients: Is given the number of the step, and the name and the gradient of each parameter; what it
            returns becomes the gradient.
        skipped: How many steps are skipped.
    """

    make: Callable[[], list[Any]]
    options: dict[str, Any] = field(default_factory=dict)
    change: Callable[[nn.Module], None] = lambda layers: None
    change_gradients: Callable[[int, str, Tensor], Tensor | None] = lambda step, name, grad: grad
    skipped: int = 0


def _freeze_last(layers: nn.Module) -> None:
    for name, param in layers.named_parameters():
        param.requires_grad_(name[0] not in "cd")


def _remove_last(layers: nn.Module) -> None:
    for name in "cd":
        if hasattr(layers, name):
            setattr(layers, name, nn.Tanh())


def _by_stage(_: int, name: str, grad: Tensor) -> Tensor:
    return grad * (1e200 if name[0] in "ab" else 1e-200)


def _only_one_stage_has_some(step: int, name: str, grad: Tensor) -> Tensor | None:
    return None if name[0] in ("cd" if step % 2 else "ab") else grad


def _nan_in_bias(step: int, name: str, grad: Tensor) -> Tensor:
    return grad * torch.nan if step == 1 and name == "c.bias" else grad


def _clips() -> list[Any]:
    return [SkipStep(10.0), ClipNorm(0.5, dim="global"), Adam(0.01)]


def _many() -> list[Any]:
    joint = [ClipNorm(2.0, dim="global"), ClipNorm(1.0, "std", dim="global"), ClipNorm(1.0, torch.inf, dim="global")]
    return [*joint, ClipNormByEMA(tensorwise=False), ClipValue(0.1), Adam(0.01)]


JOBS = {
    "ClipNorm": Job(lambda: [ClipNorm(0.5, dim="global"), Adam(0.01)]),
    "ClipNormByEMA": Job(lambda: [ClipNormByEMA(tensorwise=False), AdamW(0.01)]),
    "AdaGC": Job(lambda: [AdaGC(max_norm=0.5, warmup_steps=2), Adam(0.01)]),
    "SkipStep": Job(_clips, skipped=1),
    "ZClip": Job(lambda: [ZClip(warmup_steps=2), Adam(0.01)]),
    "Normalize": Job(lambda: [Normalize(dim="global"), Adam(0.01)]),
    "Centralize": Job(lambda: [Centralize("global"), Adam(0.01)]),
    "scoped": Job(lambda: [ClipNorm(0.1, dim="global").only("c.*", "d.weight"), Adam(0.01)]),
    "ClipValue": Job(lambda: [ClipValue(0.05), Adam(0.01)]),
    "many": Job(_many),
    "skip": Job(
        lambda: [ClipNorm(0.5, dim="global"), Adam(0.01)], {"nonfinite": "skip"}, change_gradients=_nan_in_bias, skipped=1
    ),
    "magnitudes": Job(lambda: [ClipNorm(1.0, dim="global"), Adam(0.01)], change_gradients=_by_stage),
    "frozen": Job(_clips, change=_freeze_last, skipped=1),
    "frozen, statistics": Job(_many, change=_freeze_last),
    "no gradients": Job(_clips, change_gradients=_only_one_stage_has_some, skipped=1),
    "no gradients, statistics": Job(_many, change_gradients=_only_one_stage_has_some),
    "no parameters": Job(_clips, change=_remove_last, skipped=1),
    "no parameters, statistics": Job(_many, change=_remove_last),
}


class Layers(nn.Module):
    """Layers of a network, which have the same parameters whatever stage they are in."""

    def __init__(self, names: str) -> None:
        super().__init__()
        for name in names:
            layer = nn.Linear(WIDTH, WIDTH).double()
            generator = torch.Generator().manual_seed(ord(name))
            with torch.no_grad():
                for param in layer.parameters():
                    param.copy_(torch.randn(param.shape, generator=generator, dtype=torch.float64))
            self.add_module(name, layer)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.children():
            x = layer(x).sin()
        return x


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x, y = torch.randn(2, BATCH, WIDTH, generator=generator, dtype=torch.float64)
    return x, y


def loss_of_step(step: int) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda output, target: (output - target).square().mean() * FACTORS[step]


class Pipeline:
    """The stages of this process, under one of torch's schedules."""

    def __init__(self, mesh: DeviceMesh, schedule: str, change: Callable[[nn.Module], None]) -> None:
        names, group = SCHEDULES[schedule], mesh["pp"].get_group()
        own = range(group.rank(), len(names), group.size())
        self.parts = [Layers(names[i]) for i in own]
        for part in self.parts:
            change(part)
            if list(part.parameters()):
                fully_shard(part, mesh=mesh["dp"])
        cpu = torch.device("cpu")
        stages = [
            PipelineStage(part, i, len(names), cpu, group=group) for i, part in zip(own, self.parts, strict=True)
        ]
        self.step_number = 0
        if schedule == "GPipe":
            self.schedule = ScheduleGPipe(stages[0], MICRO_BATCHES, self._loss)
        else:
            self.schedule = ScheduleInterleaved1F1B(stages, MICRO_BATCHES, self._loss)
        self.is_first, self.is_last = stages[0].is_first, stages[-1].is_last
        self.replica, self.replicas = mesh["dp"].get_local_rank(), mesh["dp"].size()

    def _loss(self, output: Tensor, target: Tensor) -> Tensor:
        return loss_of_step(self.step_number)(output, target)

    def named_params(self) -> list[tuple[str, nn.Parameter]]:
        return [named for part in self.parts for named in part.named_parameters()]

    def backward(self, step: int) -> None:
        """Leave the gradients of the mean loss over all replicas."""
        self.step_number = step
        x, y = (tensor.chunk(self.replicas)[self.replica] for tensor in batch(step))
        given = (x,) if self.is_first else ()
        self.schedule.step(*given, target=y) if self.is_last else self.schedule.step(*given)


def full(value: Any) -> Any:
    if isinstance(value, DTensor):
        value = value.full_tensor()
    return value.detach().clone() if isinstance(value, Tensor) else value


Found = dict[str, dict[str, Any]]
"""Tensors and numbers by their names: "own" ones of parameters of this process, and what all processes have."""


def found(optimizer: Modular, named: Iterable[tuple[str, Tensor]]) -> Found:
    own: dict[str, Any] = {}
    for name, param in named:
        own[name] = full(param)
        own |= {f"{name} {key}": full(value) for key, value in optimizer.state.get(param, {}).items()}
    group = optimizer.param_groups[0]
    joint = {key: full(value) for key, value in group.items() if key not in ("params", "param_names")}
    return {"own": own, "metrics": {k: v.clone() for k, v in optimizer.metrics().items()}, "joint": joint}


def train(job: Job, optimizer: Modular, named: Sequence[tuple[str, Tensor]], backward: Callable[[int], None]) -> Found:
    every_step = []
    for step in range(STEPS):
        backward(step)
        for name, param in named:
            if param.grad is not None:
                param.grad = job.change_gradients(step, name, param.grad)
        optimizer.step()
        every_step.append({f"{step} {k}": v.clone() for k, v in optimizer.metrics().items()})
        optimizer.zero_grad()
    result = found(optimizer, named)
    return {**result, "metrics": {k: v for metrics in every_step for k, v in metrics.items()}}


def one_process(job: Job) -> Found:
    """The whole model on the whole batch."""
    layers = Layers("abcd")
    job.change(layers)
    named = list(layers.named_parameters())
    optimizer = Modular(named, job.make(), **job.options)

    def backward(step: int) -> None:
        x, y = batch(step)
        loss_of_step(step)(layers(x), y).backward()

    return train(job, optimizer, named, backward)


def make_mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))


def all_jobs(schedule: str, names: Iterable[str]) -> dict[str, Found]:
    mesh = make_mesh()
    result = {}
    for name in names:
        pipeline = Pipeline(mesh, schedule, JOBS[name].change)
        named = pipeline.named_params()
        group = mesh["pp"].get_group()
        optimizer = Modular(named, JOBS[name].make(), process_group=group, **JOBS[name].options)
        result[name] = train(JOBS[name], optimizer, named, pipeline.backward)
    return result
