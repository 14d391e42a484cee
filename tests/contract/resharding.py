"""One half of a training under FSDP2 in each run; `test_resharding` lets runs of other numbers of processes go on."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from contract.entries import EMA, is_2d, is_matrix, later_betas, warm_up
from contract.training import fill
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, placement_types

from torchzero_clip import (
    LR,
    AdaGC,
    Adam,
    AutoClip,
    Chain,
    ClipByMaxEMA,
    ClipNorm,
    ClipNormByEMA,
    ClipNormGrowth,
    ClipValueByEMA,
    ClipValueGrowth,
    GradientStabilizer,
    Modular,
    Muon,
    RMSprop,
    SkipStep,
    SpikeAwareClip,
    WeightDecay,
    ZClip,
)

STEPS, SAVED = 6, 3
USUAL = (1.0, 0.1, 300.0, 1.0, 1000.0, 0.3)
"""Factors of the losses."""


@dataclass(frozen=True)
class Job:
    """A training.

    Args:
        skipped: How many steps are skipped before the checkpoint, and in all.
    """

    make: Callable[[], Any]
    factors: tuple[float, ...] = USUAL
    options: dict[str, Any] = field(default_factory=dict)
    skipped: tuple[int, int] = (0, 0)


def _statistics() -> list[Any]:
    of_elements = [ClipValueByEMA(0.5), ClipByMaxEMA(0.5), SpikeAwareClip(2.0, 0.5, warmup_steps=2), ClipValueGrowth()]
    of_tensors = [ClipNormGrowth(), ClipNormByEMA(0.5), AdaGC(max_norm=0.5, warmup_steps=4), GradientStabilizer()]
    return [*of_elements, *of_tensors, ClipNormByEMA(0.5, tensorwise=False), Adam(0.01, later_betas, amsgrad=True)]


def _joint() -> list[Any]:
    """Its state belongs to the chain, not to parameters."""
    gates = [SkipStep(max_ratio=20.0), SkipStep(sigma=50.0, window=4)]
    limits = [ClipNormGrowth(parameterwise=False), AutoClip(50.0, window=3), ZClip(max_norm=None, warmup_steps=2)]
    return [*gates, *limits, ClipNorm(warm_up, dim="global"), WeightDecay(warm_up), LR(warm_up)]


def _units() -> list[Any]:
    unit = Chain(ClipNormByEMA(0.5), ClipValueByEMA(0.5, ema_tfm=EMA()), target="grad").only(is_matrix)
    return [
        unit,
        ClipNormGrowth().without(is_matrix),
        Muon(0.01).only(is_2d),
        RMSprop(0.01, momentum=0.5).without(is_2d),
    ]


JOBS = {
    "statistics": Job(_statistics),
    "joint": Job(_joint, skipped=(1, 2)),
    "units": Job(_units, (1.0, torch.nan, 0.3, 1.0, torch.inf, 0.1), {"nonfinite": "skip"}, skipped=(1, 2)),
}


class Part(nn.Module):
    """Layers of a network, each with the same parameters whatever part it is in."""

    def __init__(self, names: str) -> None:
        super().__init__()
        makes = {"a": lambda: nn.Linear(3, 7), "b": lambda: nn.Conv1d(7, 5, 1), "c": lambda: nn.Linear(5, 2)}
        for name in names:
            self.add_module(name, fill(makes[name]().double(), ord(name)))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.children():
            x = layer(x.unsqueeze(-1)).squeeze(-1) if isinstance(layer, nn.Conv1d) else layer(x)
            x = x.tanh()
        return x


class Training:
    """A network, in as many parts as ``names``, each with an optimizer."""

    def __init__(self, job: Job, names: Iterable[str] = ("abc",), *, is_sharded: bool = True) -> None:
        self.factors = job.factors
        self.parts = [Part(own) for own in names]
        if is_sharded:
            for part in self.parts:
                fully_shard(part)
        self.optimizers = [Modular(self._groups(part), job.make(), **job.options) for part in self.parts]

    @staticmethod
    def _groups(part: nn.Module) -> list[dict[str, Any]]:
        """Two groups, to have more than one copy of the state of the chain."""
        params = list(part.parameters())
        return [{"params": params[::2]}, {"params": params[1::2]}]

    def steps(self, first: int, last: int) -> None:
        rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        for step in range(first, last):
            generator = torch.Generator().manual_seed(step)
            x = torch.randn(8, 3, generator=generator, dtype=torch.float64).chunk(ranks)[rank]
            for part in self.parts:
                x = part(x)
            ((x - 0.5).square().mean() * self.factors[step]).backward()
            for optimizer in self.optimizers:
                optimizer.step()
                optimizer.zero_grad()

    def found(self) -> dict[str, Any]:
        """Parameters, state, settings with the state of the chain, and metrics, by the names of parameters."""
        found: dict[str, Any] = {}
        for k, (part, optimizer) in enumerate(zip(self.parts, self.optimizers, strict=True)):
            for name, param in part.named_parameters():
                found[name] = _own(param)
                found |= {f"{name} {key}": _own(value) for key, value in optimizer.state.get(param, {}).items()}
            for i, group in enumerate(optimizer.param_groups):
                own = {key: value for key, value in group.items() if key not in ("params", "param_names")}
                found |= {f"{k} group {i} {key}": _own(value) for key, value in own.items()}
            found |= {f"{k} metric {name}": value.clone() for name, value in optimizer.metrics().items()}
        return found


@dataclass(frozen=True)
class Shard:
    """What one rank has of a tensor."""

    value: Tensor


def _own(value: Any) -> Any:
    if isinstance(value, DTensor):
        assert value.placements == (placement_types.Shard(0),), value.placements
        return Shard(value.to_local().detach().clone())
    return value.detach().clone() if isinstance(value, Tensor) else value


def joined(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Of what all ranks have found: shards put together, and all else if it is equal on all ranks, bit for bit."""
    first = found[0]
    assert all(own.keys() == first.keys() for own in found)
    result = {}
    for key, value in first.items():
        if isinstance(value, Shard):
            result[key] = torch.cat([own[key].value for own in found])
        else:
            for own in found:
                assert_near(own[key], value, 0.0, key)
            result[key] = value
    return result


def assert_near(actual: Any, expected: Any, tolerance: float, name: str = "") -> None:
    """Tensors and numbers within the tolerance, all else equal."""
    if isinstance(expected, dict):
        assert actual.keys() == expected.keys(), f"{name}: {actual.keys() ^ expected.keys()}"
        for key, value in expected.items():
            assert_near(actual[key], value, tolerance, f"{name} {key}")
    elif isinstance(expected, Tensor | float):
        torch.testing.assert_close(
            actual, expected, rtol=tolerance, atol=tolerance, equal_nan=True, msg=lambda text: f"{name}: {text}"
        )
    else:
        assert actual == expected, f"{name}: {actual} != {expected}"


class Container:
    """The optimizers of all parts as one object with flat keys, as torchtitan saves and loads them."""

    def __init__(self, training: Training) -> None:
        self.pairs = list(zip(training.parts, training.optimizers, strict=True))

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {}
        for part, optimizer in self.pairs:
            state |= get_optimizer_state_dict(part, optimizer, options=OPTIONS["flattened"])
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for part, optimizer in self.pairs:
            set_optimizer_state_dict(part, optimizer, state, options=OPTIONS["flattened"])


OPTIONS = {"nested": StateDictOptions(), "flattened": StateDictOptions(flatten_optimizer_state_dict=True)}
WAYS = (*OPTIONS, "torchtitan")


def training_of(name: str, way: str, *, is_sharded: bool = True) -> Training:
    """In torchtitan, a process that has several stages of a pipeline has an optimizer for each of them."""
    return Training(JOBS[name], ("a", "bc") if way == "torchtitan" else ("abc",), is_sharded=is_sharded)


def _states(training: Training, way: str) -> dict[str, Any]:
    weights = {key: value for part in training.parts for key, value in get_model_state_dict(part).items()}
    if way == "torchtitan":
        return {**weights, "optimizer": Container(training)}
    (part,), (optimizer,) = training.parts, training.optimizers
    return {"model": weights, "optimizer": get_optimizer_state_dict(part, optimizer, options=OPTIONS[way])}


def _load(training: Training, way: str, folder: Path) -> None:
    states = _states(training, way)
    dcp.load(states, checkpoint_id=folder)
    for part, optimizer in zip(training.parts, training.optimizers, strict=True):
        weights = states if way == "torchtitan" else states["model"]
        set_model_state_dict(part, {key: weights[key] for key in part.state_dict()})
        if way != "torchtitan":
            set_optimizer_state_dict(part, optimizer, states["optimizer"], options=OPTIONS[way])


Found = dict[tuple[str, str], Any]
"""By the name of a job, and the way in which it is saved."""


def save(folder: Path, jobs: Iterable[tuple[str, str]], *, is_sharded: bool = True) -> Found:
    """The first half of each training; the result is what was saved."""
    found = {}
    for name, way in jobs:
        training = training_of(name, way, is_sharded=is_sharded)
        training.steps(0, SAVED)
        dcp.save(_states(training, way), checkpoint_id=folder / way / name)
        found[name, way] = training.found()
    return found


def resume(folder: Path, jobs: Iterable[tuple[str, str]], *, is_sharded: bool = True) -> Found:
    """The second half: what was loaded, and what there is at the end."""
    found = {}
    for name, way in jobs:
        training = training_of(name, way, is_sharded=is_sharded)
        _load(training, way, folder / way / name)
        loaded = training.found()
        training.steps(SAVED, STEPS)
        found[name, way] = (loaded, training.found())
    return found


def save_during_training(folder: Path, jobs: Iterable[tuple[str, str]]) -> Found:
    """As `save`, and the training goes on while a thread writes the checkpoint: what was saved, and the end."""
    group = dist.new_group(backend="gloo")
    found = {}
    for name, way in jobs:
        training = training_of(name, way)
        training.steps(0, SAVED)
        saved = training.found()
        written = dcp.async_save(_states(training, way), checkpoint_id=folder / way / name, process_group=group)
        training.steps(SAVED, STEPS)
        written.result()
        found[name, way] = (saved, training.found())
    return found
