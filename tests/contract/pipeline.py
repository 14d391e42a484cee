"""A training on 2 stages of a pipeline x 2 shards of FSDP2, with torch's own schedules; `test_pipeline` compares it."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from contract.training import fill
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.tensor import DTensor, Shard

from torchzero_clip import (
    AdaGC,
    Adam,
    AdamW,
    ClipNorm,
    ClipNormByEMA,
    ClipValue,
    Modular,
    SkipStep,
    ZClip,
    centralize_grads_,
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


def _clip() -> list[Any]:
    return [ClipNorm(0.5, dim="global"), Adam(0.01)]


def _clips() -> list[Any]:
    return [SkipStep(10.0), *_clip()]


def _many() -> list[Any]:
    joint = [ClipNorm(2.0, dim="global"), ClipNorm(1.0, "std", dim="global"), ClipNorm(1.0, torch.inf, dim="global")]
    return [*joint, ClipNormByEMA(tensorwise=False), ClipValue(0.1), Adam(0.01)]


JOBS = {
    "ClipNorm": Job(_clip),
    "ClipNormByEMA": Job(lambda: [ClipNormByEMA(tensorwise=False), AdamW(0.01)]),
    "AdaGC": Job(lambda: [AdaGC(max_norm=0.5, warmup_steps=2), Adam(0.01)]),
    "SkipStep": Job(_clips, skipped=1),
    "ZClip": Job(lambda: [ZClip(warmup_steps=2), Adam(0.01)]),
    "scoped": Job(lambda: [ClipNorm(0.1, dim="global").only("c.*", "d.weight"), Adam(0.01)]),
    "many": Job(_many),
    "skip": Job(_clip, {"nonfinite": "skip"}, change_gradients=_nan_in_bias, skipped=1),
    "magnitudes": Job(_clip, change_gradients=_by_stage),
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
            self.add_module(name, fill(nn.Linear(WIDTH, WIDTH).double(), ord(name)))

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
        stages = [PipelineStage(part, i, len(names), cpu, group=group) for i, part in zip(own, self.parts, strict=True)]
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


def clips_as_torchtitan() -> list[tuple[list[Tensor], Tensor]]:
    """The gradients and the norm after torchtitan's way of clipping, and after ours, for several orders."""
    mesh, results = make_mesh(), []
    for order in (1.0, 2.0, 3.0, torch.inf):
        for way in (torchtitan_clip, clip_grad_norm_):
            pipeline = Pipeline(mesh, "Interleaved1F1B", lambda layers: None)
            pipeline.backward(1)
            params = [param for _, param in pipeline.named_params()]
            total = way(params, 0.5, order, dim="global", process_group=mesh["pp"].get_group())
            results.append(([full(param.grad) for param in params], total))
    return results


def torchtitan_clip(
    params: Sequence[Tensor], max_norm: float, order: float, *, dim: str, process_group: dist.ProcessGroup
) -> Tensor:
    """The norm of this stage, its power summed over the stages (for order inf: the largest), and torch's scaling."""
    total = nn.utils.get_total_norm([param.grad for param in params], order)
    total = total.full_tensor() if isinstance(total, DTensor) else total
    if order == torch.inf:
        dist.all_reduce(total, dist.ReduceOp.MAX, group=process_group)
    else:
        total = total**order
        dist.all_reduce(total, group=process_group)
        total = total ** (1 / order)
    nn.utils.clip_grads_with_norm_(params, max_norm, total)
    return total


class NaNOnOneRank:
    """Each process has a sharded parameter, and a plain one whose gradient has a NaN on one of the four processes."""

    def __init__(self, nonfinite: Any) -> None:
        mesh = make_mesh()
        layer = nn.Linear(4, 4).double()
        fully_shard(layer, mesh=mesh["dp"])
        self.plain = nn.Parameter(torch.ones(2, dtype=torch.float64))
        self.named = [*layer.named_parameters(), ("plain", self.plain)]
        chain = [ClipNorm(1.0, dim="global"), Adam(0.01)]
        self.optimizer = Modular(self.named, chain, nonfinite=nonfinite, process_group=mesh["pp"].get_group())

    def step(self, value: float) -> None:
        for _, param in self.named:
            param.grad = torch.ones_like(param)
        if dist.get_rank() == 2:
            self.plain.grad[1] = value  # pyright: ignore[reportOptionalSubscript]
        self.optimizer.step()


def skips_a_nan_of_one_rank() -> list[dict[str, Any]]:
    """What is found after each of a good step, a bad one and a good one."""
    training, result = NaNOnOneRank("skip"), []
    for value in (1.0, torch.nan, 1.0):
        training.step(value)
        result.append(found(training.optimizer, training.named))
    return result


def raises_for_a_nan_of_one_rank() -> tuple[bool, Found, Found]:
    """Whether it raised, and what was there before and after."""
    training = NaNOnOneRank("raise")
    training.step(1.0)
    before = found(training.optimizer, training.named)
    try:
        training.step(torch.nan)
    except RuntimeError as error:
        has_raised = "not finite" in str(error)
    else:
        has_raised = False
    return has_raised, before, found(training.optimizer, training.named)


class Tied(nn.Module):
    """A network whose last layer multiplies with the embedding of its first layer."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.embedding = nn.Parameter(torch.randn(8, WIDTH, generator=generator, dtype=torch.float64))
        self.middle = Layers("a")
        self.last = Layers("b")


TOKENS = [torch.randint(8, (2, BATCH), generator=torch.Generator().manual_seed(step)) for step in range(STEPS)]


def tied_in_one_process() -> tuple[list[Tensor], list[Tensor]]:
    """The parameters at the end, the embedding first, and the norms."""
    model, norms = Tied(), []
    optimizer = Modular(model, Adam(0.01))
    for step in range(STEPS):
        x, y = TOKENS[step]
        logits = model.last(model.middle(model.embedding[x])) @ model.embedding.T
        (nn.functional.cross_entropy(logits, y) * FACTORS[step]).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5))
        optimizer.step()
        optimizer.zero_grad()
    return [param.detach() for param in model.parameters()], norms


def tied_in_two_stages() -> tuple[list[Tensor], list[Tensor]]:
    """Each of two processes has one stage and a copy of the embedding, which counts on the first stage only."""
    model, norms, rank, group = Tied(), [], dist.get_rank(), dist.group.WORLD
    layers = model.last if rank else model.middle
    params = [model.embedding, *layers.parameters()]
    optimizer = Modular(params, Adam(0.01))
    for step in range(STEPS):
        x, y = TOKENS[step]
        if rank == 0:
            output = layers(model.embedding[x])
            dist.send(output.detach(), 1)
            received = torch.empty_like(output)
            dist.recv(received, 1)
            output.backward(received)
        else:
            given = torch.empty(BATCH, WIDTH, dtype=torch.float64)
            dist.recv(given, 0)
            given.requires_grad_()
            (nn.functional.cross_entropy(layers(given) @ model.embedding.T, y) * FACTORS[step]).backward()
            dist.send(given.grad, 0)
        dist.all_reduce(model.embedding.grad)  # each stage has one part of it
        counted = params if rank == 0 else params[1:]
        norms.append(get_total_norm([param.grad for param in counted], process_group=group))
        clip_grads_with_norm_(params, 0.5, norms[-1])
        optimizer.step()
        optimizer.zero_grad()
    return [param.detach() for param in params], norms


def _shard_of(value: Tensor) -> DTensor:
    own = value.chunk(dist.get_world_size())[dist.get_rank()].clone()
    return DTensor.from_local(own, init_device_mesh("cpu", (dist.get_world_size(),)), [Shard(0)], run_check=False)


def functions_without_some_gradients(ranks: int) -> list[tuple[Tensor | None, list[Tensor | None]]]:
    """The second gradient is missing on the second process, and the third one on all: results and gradients."""
    result = []
    metrics: list[float | str] = [2, 0, -torch.inf, "mad", "std", "sum"]
    calls: list[Callable[[list[nn.Parameter]], Tensor | None]] = [lambda params: centralize_grads_(params, "global")]
    for order, dim in product(metrics, ("global", None)):
        calls.append(partial(clip_grad_norm_, max_norm=0.5, ord=order, dim=dim))
    for call in calls:
        generator = torch.Generator().manual_seed(0)
        values = [torch.randn(4, 3, generator=generator, dtype=torch.float64) for _ in range(3)]
        params = [nn.Parameter(value if ranks == 1 else _shard_of(value)) for value in values]
        for i, (param, value) in enumerate(zip(params[:2], values, strict=False)):
            grad = value.clone()
            if i == 1:
                grad[2:] = 0
            if ranks == 1 or i == 0 or dist.get_rank() == 0:
                param.grad = grad if ranks == 1 else _shard_of(grad)
        found = call(params)
        if ranks == 2 and params[1].grad is None:
            params[1].grad = torch.zeros_like(params[1])
        result.append((found, [full(param.grad) for param in params]))
    return result
