"""What three processes do that hold different parameters; `test_process_group` compares them with one process."""

import copy
import io
import math
import pickle
import warnings
from collections.abc import Callable, Sequence
from typing import Any
from zlib import crc32

import pytest
import torch
import torch.distributed as dist
from contract.entries import ENTRIES
from contract.training import gradients, parameters, values
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from torchzero_clip import (
    LR,
    SGD,
    AdaGC,
    Adam,
    AdamW,
    AutoClip,
    Centralize,
    Chain,
    ClipNorm,
    ClipNormByEMA,
    ClipNormGrowth,
    ClipValue,
    ClipValueByEMA,
    Modular,
    Normalize,
    NormalizeByEMA,
    SkipStep,
    WeightDecay,
    ZClip,
    centralize_grads_,
    clip_grad_norm_,
    get_total_norm,
    normalize_grads_,
)
from torchzero_clip.core.chain_state import COUNTERS

OWN = (slice(0, 2), slice(2, 4), slice(4, 4))
"""The parameters of each process. The last one has none."""
EMPTY = {"empty": 2, "all empty": 0}
"""How many tensors have elements: those of the first process, or none."""
EVENTS = ("", "inf", "none", "nobody", "zero", "range")
STEPS = 5
ORDS = ("std", "var", "mad", "sum", "l0", "l3", "linf")
CHAINS: dict[str, Callable[[], Any]] = {
    **{f"joint {o}": lambda o=o: [ClipNorm(0.1, o, dim="global"), SGD(0.1)] for o in ORDS},
    **{f"joint {p}": lambda p=p: [Normalize(0.1, p, dim="global"), SGD(0.1)] for p in (-1, 0.5, -math.inf)},
    **{f"each {o}": lambda o=o: [ClipNorm(0.1, o), SGD(0.1)] for o in ORDS},
    "after Adam": lambda: [Adam(0.1), ClipNorm(0.1, dim="global")],
    "a scope on one process": lambda: [ClipNorm(0.1, dim="global").only("0"), ZClip().without("0"), Adam(0.1)],
    "a joint child": lambda: [ClipValueByEMA(0.5, ema_tfm=Normalize(1.0, dim="global")), SGD(0.1)],
    "units": lambda: [
        ClipNorm(0.1, dim="global", target="update_difference"),
        Centralize("global", target="grad"),
        LR(1),
    ],
    "gradients before": lambda: [ClipValue(0.3), ClipNormByEMA(0.9, tensorwise=False), ClipNorm(1.0), Adam(0.1)],
    "statistics of one process": lambda: [
        SkipStep(max_ratio=2.0, beta=0.5).only("0"),
        AutoClip(50.0).only("0"),
        AdaGC(warmup_steps=3).only("0"),
        NormalizeByEMA(0.9, tensorwise=False).only("0"),
        Chain(ClipNormGrowth(parameterwise=False), target="update_difference").only("0"),
        ClipNorm(5.0).only("0"),
        LR(lambda step: 0.1 / (1 + step)),
    ],
    "norms of averages": lambda: [ClipNormByEMA(0.9, tensorwise=False), NormalizeByEMA(0.9, tensorwise=False), LR(1)],
    "joint statistics": lambda: [
        AdaGC(warmup_steps=2),
        ClipNormGrowth(parameterwise=False),
        Chain(Adam(), ZClip(warmup_steps=2), target="update_difference"),
        AutoClip(50.0),
        ClipValueByEMA(0.5, ema_tfm=NormalizeByEMA(0.9, tensorwise=False)),
        LR(1),
    ],
    "schedule": lambda: [SGD(lambda step: 0.1 / (1 + step))],
    "gates": lambda: [SkipStep(20.0).only("0", "1"), SkipStep(max_ratio=3.0), ClipNorm(0.1, dim="global"), Adam(0.1)],
}


def chain_of(name: str) -> Any:
    entry = next((entry for entry in ENTRIES if entry.name == name), None)
    return CHAINS[name]() if entry is None else entry.make()


def names(event: str) -> list[str]:
    """Chains, and entries that do not vary another one: all without an event, a third with each."""
    distinct = [entry.name for entry in ENTRIES if not entry.varies]
    return [name for name in (*CHAINS, *distinct) if not event or crc32(f"{event} {name}".encode()) % 3 == 0]


def own_part(row: Sequence[Any]) -> list[Any]:
    """Those of this process; all in one process."""
    return list(row[OWN[dist.get_rank()]]) if dist.is_initialized() else list(row)


def named(initial: Sequence[Tensor]) -> list[tuple[str, nn.Parameter]]:
    return own_part([(str(i), nn.Parameter(value.clone())) for i, value in enumerate(initial)])


def group() -> ProcessGroup | None:
    return dist.group.WORLD if dist.is_initialized() else None


def series(event: str) -> list[list[Tensor | None]]:
    """Gradients of all parameters in each step."""
    rows: list[Any] = gradients(parameters(torch.float64), STEPS)
    if event == "inf":
        rows[2][1][0] = torch.inf
    if event == "none":
        rows[1][0], rows[2][2:] = None, [None, None]
    if event == "nobody":
        rows[1] = [None] * len(rows[1])
        rows[4] = [None, None, *rows[4][2:]]
        for row in rows[2:4]:
            row[0] = None
    if event in EMPTY:
        rows = [with_empty_ones(row, EMPTY[event]) for row in rows]
    if event == "zero":
        rows[0] = [torch.zeros_like(g) for g in rows[0]]
    if event == "range":
        scales = (1e200, 1e-200, 1e150, 1.0)
        rows = [[g * s for g, s in zip(row, scales, strict=True)] for row in rows]
    return rows


def with_empty_ones(tensors: Sequence[Tensor], kept: int) -> list[Tensor]:
    """All but the first tensors have no elements."""
    return [*tensors[:kept], *(tensor.new_empty(0, *tensor.shape[1:]) for tensor in tensors[kept:])]


def train_group(name: str, event: str, **options: Any) -> dict[str, Any]:
    """Train, and return what every process and one process alone must agree on."""
    initial = values(parameters(torch.float64))
    params = named(with_empty_ones(initial, EMPTY[event]) if event in EMPTY else initial)
    optimizer = Modular(params, chain_of(name), process_group=group(), **options)
    for row in series(event):
        for (_, param), grad in zip(params, own_part(row), strict=True):
            param.grad = None if grad is None else grad.clone()
        optimizer.step()
    return {
        "params": {name: param.detach() for name, param in params},
        "states": {name: optimizer.state.get(param, {}) for name, param in params},
        "metrics": optimizer.metrics(),
        "chain": {k: v for k, v in optimizer.state_dict()["param_groups"][0].items() if k.count("/") or k in COUNTERS},
    }


def train_all(fast: bool, events: Sequence[str]) -> dict[tuple[str, str], Any]:
    """What every training finds, by event and name."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {(event, name): train_group(name, event, fast=fast) for event in events for name in names(event)}


def train_some(names: list[str], event: str) -> list[dict[str, Any]]:
    return [train_group(name, event) for name in names]


def functions() -> dict[str, list[Tensor]]:
    """The in-place functions on the gradients of all processes."""
    found: dict[str, list[Tensor]] = {}
    calls: dict[str, Callable[..., Any]] = {
        **{f"clip {o}": lambda p, o=o, **k: clip_grad_norm_(p, 0.1, o, dim="global", **k) for o in ORDS},
        "clip each": lambda p, **k: clip_grad_norm_(p, 0.1, **k),
        "normalize": lambda p, **k: normalize_grads_(p, 0.1, dim="global", **k),
        "centralize": lambda p, **k: centralize_grads_(p, "global", **k),
        "total": lambda p, **k: get_total_norm([x.grad for x in p], **k),
    }
    for name, call in calls.items():
        params = own_part(parameters(torch.float64))
        for param, grad in zip(params, own_part(gradients(parameters(torch.float64), 1)[0]), strict=True):
            param.grad = grad.clone()
        result = call(params, process_group=group())
        found[name] = [*(param.grad for param in params), *([result] if isinstance(result, Tensor) else [])]
    return found


def negative_orders() -> list[Tensor]:
    """Norms of negative order of four tensors at every magnitude, then of no tensor at all."""
    found: list[Tensor] = []
    for scales in ((1e200, 1e200, 2e200, 2e200), (1e-200, 1e-200, 2e-200, 2e-200), (1e200, 1.0, 1e-200, 1.0)):
        tensors = own_part([torch.full((2,), scale, dtype=torch.float64) for scale in scales])
        found += [get_total_norm(tensors, order, process_group=group()) for order in (-2, -0.5, -math.inf)]
    return [*found, *(get_total_norm([], order, process_group=group()) for order in (-2, -math.inf))]


def losses() -> list[Any]:
    """A gate of losses, where only the second process has a loss."""
    params = named(values(parameters(torch.float64)))
    optimizer = Modular(params, SkipStep(sigma=2.0, window=4), SGD(0.1), process_group=group())
    for k, row in enumerate(gradients(parameters(torch.float64), 8)):
        for (_, param), grad in zip(params, own_part(row), strict=True):
            param.grad = grad.clone()
        if not dist.is_initialized() or dist.get_rank() == 1:
            optimizer.report_loss(100.0 if k == 6 else 1.0 + 0.1 * (k % 2))
        optimizer.step()
    return [optimizer.metrics()["skipped_steps"].item(), optimizer.metrics()["skip_step/mean"].item()]


def non_finite(policy: str) -> list[Any]:
    """A NaN in a gradient of the first process only."""
    params = named(values(parameters(torch.float64)))
    optimizer = Modular(params, ClipNorm(0.1, dim="global"), Adam(0.1), nonfinite=policy, process_group=group())
    before = values(param for _, param in params)
    rows = gradients(parameters(torch.float64), 1)
    rows[0][0].view(-1)[0] = torch.nan
    for (_, param), grad in zip(params, own_part(rows[0]), strict=True):
        param.grad = grad.clone()
    try:
        optimizer.step()
    except RuntimeError as error:
        said = str(error)
    else:
        said = "skipped"
    same = all(torch.equal(a, b) for a, b in zip(values(param for _, param in params), before, strict=True))
    return [said, same, not any(optimizer.state.values())]


def life_of_a_group() -> None:
    """Copies share the group, pickles lose it, checkpoints do not have it, and it may be changed."""
    params = named(values(parameters(torch.float64)))
    optimizer = Modular(params, ClipNorm(0.1, dim="global"), SGD(0.1), process_group=group())
    assert copy.deepcopy(optimizer).process_group is optimizer.process_group is group()
    state = optimizer.state_dict()
    Modular(params, ClipNorm(0.1, dim="global"), SGD(0.1), process_group=group()).load_state_dict(state)
    torch.save(state, io.BytesIO())
    lost = pickle.loads(pickle.dumps(optimizer))
    for again in (lost, pickle.loads(pickle.dumps(lost))):
        for param in (p for g in again.param_groups for p in g["params"]):
            param.grad = torch.ones_like(param)
        for call in (again.step, lambda again=again: again.load_state_dict(state)):
            with pytest.raises(RuntimeError, match=r"set optimizer\.process_group"):
                call()
        again.process_group = None
        again.step()
        assert again.process_group is None
        again.process_group = group()
        again.step()
    assert "process_group" not in repr(optimizer)


def later_parameters() -> list[list[float]]:
    """The second process has no parameters at first, and then a group with or without names."""
    found: list[list[float]] = []
    for is_named in (True, False):
        name = str(dist.get_rank())
        own: list[Any] = [nn.Parameter(torch.zeros(2, dtype=torch.float64)) for _ in range(2)]
        given = [(f"{name}.{i}", param) for i, param in enumerate(own)] if is_named else own
        chain = [ClipNorm(1.0, dim="global"), *([ClipNorm(0.25).only("1.1")] if is_named else []), SGD(1.0)]
        optimizer = Modular(given if dist.get_rank() == 0 else [], chain, process_group=group())
        state = optimizer.state_dict()
        if dist.get_rank() == 1:
            for item in given:
                optimizer.add_param_group({"params": [item]})
        else:
            optimizer.load_state_dict(state)
        for param in own:
            param.grad = torch.full_like(param, 2.0)
        if dist.get_rank() == 1:
            optimizer.load_state_dict(optimizer.state_dict())
        optimizer.step()
        found += [param.tolist() for param in own]
    return found


def disagreement() -> str:
    """A checkpoint that fits on two of three processes."""
    params = named(values(parameters(torch.float64)))
    optimizer = Modular(params, ClipNorm(0.1, dim="global"), SGD(0.1, 0.9), process_group=group())
    state = optimizer.state_dict()
    if dist.get_rank() == 2:
        state["param_groups"][0]["max_norm"] = -1.0
    try:
        optimizer.load_state_dict(state)
    except ValueError as error:
        return str(error)
    return ""


def failing_loads() -> list[str]:
    """No checkpoint on one process; a hook that raises there; a checkpoint for all of them."""
    params = named(values(parameters(torch.float64)))
    optimizer = Modular(params, ClipNorm(0.1, dim="global"), SGD(0.1, 0.9), process_group=group())
    state: Any = optimizer.state_dict()
    said: list[str] = []

    def hook(*_: Any) -> None:
        if dist.get_rank() == 2 and len(said) == 1:
            raise OSError("lost")

    optimizer.register_load_state_dict_pre_hook(hook)
    for given in (None if dist.get_rank() == 2 else state, state, state):
        try:
            optimizer.load_state_dict(given)
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")
        else:
            said.append("")
    return said


def warnings_of_scopes() -> list[str]:
    """A name that matches on one process, and one that matches on none."""
    params = named(values(parameters(torch.float64)))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        Modular(params, ClipNorm(0.1).only("0"), ClipValue(1.0).only("nowhere"), SGD(0.1), process_group=group())
    return [str(warning.message) for warning in caught]


DIFFERENT: dict[str, tuple[Any, Any]] = {
    "one more": ([ClipNorm(1.0, dim="global")], [ClipNorm(1.0, dim="global"), ClipNorm(2.0, dim="global")]),
    "dim": ([ClipNorm(1.0, dim="global")], [ClipNorm(1.0)]),
    "inside": ([ClipValueByEMA(ema_tfm=Normalize(dim="global"))], [ClipValueByEMA(ema_tfm=Normalize())]),
    "a scope": ([ClipNorm(1.0, dim="global")], [ClipNorm(1.0, dim="global").without("1")]),
    "the loss": ([SkipStep(1.0)], [SkipStep(sigma=3.0)]),
    "nonfinite": ({}, {"nonfinite": "skip"}),
    "skips": ({"nonfinite": "skip"}, {"nonfinite": "skip", "max_consecutive_skips": 3}),
    "settings": ([ClipNorm(1.0, dim="global")], [ClipNorm(2.0, dim="global")]),
    "patterns": ([ClipNorm(1.0).only("0")], [ClipNorm(1.0).only("2", "3").without("3")]),
}
"""Chains or options of the first and the third process, and those of the second."""


def different_chains() -> dict[str, list[str]]:
    """What is said of processes with different chains, at construction and when the group is set."""
    said: dict[str, list[str]] = {}
    params = [(str(dist.get_rank()), nn.Parameter(torch.zeros(2)))]
    for name, both in DIFFERENT.items():
        own: Any = both[dist.get_rank() == 1]
        chain, options = ([], own) if isinstance(own, dict) else (own, {})
        later = Modular(params, chain, SGD(0.1), **options)
        calls: list[Callable[[], Any]] = [
            lambda c=chain, o=options: Modular(params, c, SGD(0.1), process_group=group(), **o),
            lambda later=later: setattr(later, "process_group", group()),
        ]
        said[name] = []
        for call in calls:
            try:
                call()
            except ValueError as error:
                said[name].append(str(error))
        assert (later.process_group is None) == bool(said[name])
    return said


def wrong_groups() -> list[str]:
    """What is said of groups that cannot be used."""
    rank = dist.get_rank()
    params = [nn.Parameter(torch.zeros(2))]
    other = dist.new_group([0, 1])
    third: Any = other if rank == 2 else "world"
    mesh = init_device_mesh("cpu", (3,))
    sharded = [nn.Parameter(DTensor.from_local(torch.zeros(2), mesh, [Shard(0)]))]
    said: list[str] = []
    calls: list[Callable[[], Any]] = [
        lambda: Modular(params, SGD(0.1), process_group=third),
        lambda: clip_grad_norm_(params, 1.0, process_group=third),
        lambda: Modular(sharded, SGD(0.1), process_group=dist.group.WORLD),
        lambda: get_total_norm(sharded, process_group=dist.group.WORLD),
        lambda: setattr(Modular(sharded, SGD(0.1)), "process_group", dist.group.WORLD),
        lambda: Modular(params, SGD(0.1), process_group=mesh),
    ]
    for call in calls:
        try:
            call()
        except (TypeError, ValueError) as error:
            said.append(f"{type(error).__name__}: {error}")
        else:
            said.append("")
    return said


SHARDED = [(4, 2), (4,), (6, 3)]
ON_A_MESH: dict[str, Callable[[], Any]] = {
    "joint": lambda: [ClipNorm(1.0, dim="global"), Adam(0.1)],
    "each": lambda: [ClipNorm(0.3), SGD(0.1)],
    "value": lambda: [ClipValue(0.3), Adam(0.1)],
    "AdaGC": lambda: [AdaGC(warmup_steps=1), Adam(0.1)],
    "statistics": lambda: [ClipNormByEMA(0.9), Adam(0.1)],
    "elements": lambda: [ClipValueByEMA(0.9), SGD(0.1)],
    "gate": lambda: [SkipStep(80.0), ClipNorm(1.0, dim="global"), Adam(0.1)],
    "joint statistic": lambda: [ZClip(), Adam(0.1)],
    "stateless": lambda: [ClipNorm(1.0, dim="global"), SGD(0.1)],
    "means": lambda: [Centralize("global"), SGD(0.1, momentum=0.5)],
    "after weight decay": lambda: [WeightDecay(0.5), ClipNorm(1.0, dim="global"), LR(0.1)],
    "after momentum": lambda: [SGD(0.1, momentum=0.9), Normalize(1.0, dim="global"), AdaGC(warmup_steps=3)],
    "of parameters": lambda: [ClipNorm(1.0, dim="global", target="params_direct"), SGD(0.1)],
    "a scope without gradients": lambda: [
        SkipStep(max_ratio=1.0001, beta=0.5).only(is_the_third),
        AutoClip(50.0).only(is_the_third),
        SGD(0.1),
    ],
    "both": lambda: [ClipNormByEMA(tensorwise=False), ClipNormByEMA(), AdamW(0.01, amsgrad=True)],
}


def is_the_third(param: Tensor) -> bool:
    return param.shape == SHARDED[2]


def has_gradient(rank: int, step: int, i: int) -> bool:
    """The second parameter is missing on one process in two steps, the third one everywhere in one step."""
    missing = (i == 1 and rank == 1 and step in (1, 2)) or (i == 2 and step == 3) or (i == 0 and rank == 0 and not step)
    return not (missing or (step == 4 and rank == 1))


def sharded_values(seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in SHARDED]


def missing_on_a_mesh() -> dict[str, Any]:
    mesh, rank, found = init_device_mesh("cpu", (2,)), dist.get_rank(), {}
    for name, make in ON_A_MESH.items():
        parts = [DTensor.from_local(value.chunk(2)[rank].clone(), mesh, [Shard(0)]) for value in sharded_values(0)]
        params = list(map(nn.Parameter, parts))
        optimizer = Modular(params, make())
        others = [torch.ones(1) for _ in params]  # state of another package, such as a wrapper's
        for param, value in zip(params, others, strict=True):
            optimizer.state[param] = {"slow": value}
        for step in range(5):
            for i, (param, grad) in enumerate(zip(params, sharded_values(step + 1), strict=True)):
                own = DTensor.from_local(grad.chunk(2)[rank].clone(), mesh, [Shard(0)])
                param.grad = own if has_gradient(rank, step, i) else None
            optimizer.step()
            assert [p.grad is not None for p in params] == [has_gradient(rank, step, i) for i in range(len(params))]
        assert [optimizer.state[param]["slow"].item() for param in params] == [1.0] * len(params)
        states = [{k: v for k, v in optimizer.state.get(p, {}).items() if not v.ndim} for p in params]
        found[name] = ([param.detach().to_local() for param in params], optimizer.metrics(), states)
    return found


def masked(name: str, rank: int) -> tuple[list[Tensor], dict[str, Tensor], list[Any]]:
    """The same in one process: a missing part counts as zeros. The part of ``rank`` is right in the result.

    Missing parts and their state do not move, but for the numbers of statistics.
    """
    params = list(map(nn.Parameter, sharded_values(0)))
    optimizer = Modular(params, ON_A_MESH[name]())
    statistics = tuple(f"{n.path}/" for n in optimizer.runner.nodes if n.transform.keeps_statistics)
    for step in range(5):
        kept: list[Any] = []
        for i, (param, grad) in enumerate(zip(params, sharded_values(step + 1), strict=True)):
            there = torch.zeros(param.shape, dtype=torch.bool)
            for r, part in enumerate(there.chunk(2)):
                part.fill_(has_gradient(r, step, i))
            param.grad = torch.where(there, grad, 0.0) if there.any() else None
            state = {key: value.clone() for key, value in optimizer.state.get(param, {}).items()}
            kept.append((param, there, not has_gradient(rank, step, i), param.detach().clone(), state))
        optimizer.step()
        for param, there, is_missing, value, state in kept:
            if there.any():
                param.data = torch.where(there, param.data, value)
                for key, now in list(optimizer.state.get(param, {}).items()):
                    if now.ndim:
                        now.copy_(torch.where(there, now, state.get(key, torch.zeros_like(now))))
                    elif is_missing and not key.startswith(statistics):
                        now.copy_(state.get(key, torch.zeros_like(now)))
    states = [{k: v for k, v in optimizer.state.get(p, {}).items() if not v.ndim} for p in params]
    return [param.detach().chunk(2)[rank] for param in params], optimizer.metrics(), states


def functions_with_missing() -> list[Tensor]:
    """`clip_grad_norm_`, where one process of a mesh has no gradient at all."""
    mesh, rank = init_device_mesh("cpu", (2,)), dist.get_rank()
    params: list[nn.Parameter] = []
    for value in sharded_values(0):
        part = DTensor.from_local(value.chunk(2)[rank].clone(), mesh, [Shard(0)])
        params.append(nn.Parameter(part))
        params[-1].grad = part.clone() if rank == 0 else None
    found = [clip_grad_norm_(params, 0.1, dim=dim) for dim in (None, "global")]
    found.append(normalize_grads_(params, 1.0, dim="global"))
    assert all((param.grad is None) == (rank == 1) for param in params)
    return found


def names_of_bad_gradients() -> list[Any]:
    """What each process says of gradients that are not finite on two of three processes."""
    rows = gradients(parameters(torch.float64), 1)
    rows[0][1][0], rows[0][2].view(-1)[0] = torch.nan, torch.inf
    params = named(values(parameters(torch.float64)))
    said: list[Any] = []
    for policy in ("skip", "raise"):
        optimizer = Modular(params, ClipNorm(0.1, dim="global"), nonfinite=policy, process_group=group())
        for (_, param), grad in zip(params, own_part(rows[0]), strict=True):
            param.grad = grad.clone()
        try:
            optimizer.step()
        except RuntimeError as error:
            said.append(str(error))
        said.append(optimizer.bad_gradients)
    try:
        clip_grad_norm_(params, 1.0, dim="global", error_if_nonfinite=True, process_group=group())
    except RuntimeError as error:
        said.append(str(error))
    return said
