"""Checkpoints of torch's optimizers for chains, and of chains for torch's optimizers."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, optim
from torch.optim import Optimizer

from torchzero_clip.checks import plain
from torchzero_clip.core.checkpoint import OPTIMIZER_KEYS, saved_groups
from torchzero_clip.core.modular import Modular
from torchzero_clip.core.namespace import GroupSettings
from torchzero_clip.core.param_groups import HOST_KEYS
from torchzero_clip.core.scope import Member, members
from torchzero_clip.core.transform import Transform
from torchzero_clip.optimizers.adam import Adam
from torchzero_clip.optimizers.muon import Muon
from torchzero_clip.optimizers.rmsprop import RMSprop
from torchzero_clip.optimizers.sgd import SGD
from torchzero_clip.optimizers.weight_decay import WeightDecay
from torchzero_clip.optimizers.wrap import Wrap

Group = dict[str, Any]

TORCHS: dict[type[Transform], type[Optimizer]] = {Adam: optim.Adam, SGD: optim.SGD, RMSprop: optim.RMSprop}
TORCHS[Muon] = optim.Muon

HOW = frozenset({"foreach", "fused", "capturable", "differentiable", "decoupled_weight_decay"})
"""What torch's groups say of how a step is computed, or what the place of `WeightDecay` says here."""


def from_torch_optim(state_dict: Mapping[str, Any], optimizer: Modular) -> dict[str, Any]:
    """Return a checkpoint for a chain that goes on where an optimizer of `torch.optim` stopped.

    The chain needs the same optimizer at its end, for the same parameters in the same groups: `Adam` and a
    `WeightDecay` after it for `torch.optim.AdamW`, before it for the ``weight_decay`` of `torch.optim.Adam`; `SGD`,
    `RMSprop` and `Muon` for their namesakes, `Wrap` for all others. Moments, step counts, learning rates, settings and
    what schedulers keep in the groups come from the checkpoint. Everything else is as in a chain that has not taken a
    step.

    Args:
        state_dict: The ``state_dict()`` of the old optimizer. It is not changed, and shares tensors with the result.
        optimizer: The one that will load the result; it is not changed.

    Returns:
        What ``optimizer.load_state_dict`` takes.

    Raises:
        ValueError: If the groups have other sizes, if a parameter has no optimizer in the chain or several, if state or
            settings are those of another optimizer, or if the checkpoint decays weights and the chain does not.

    Examples:
        >>> import torch
        >>> from torchzero_clip import LR, Adam, ClipNorm, Modular, WeightDecay, from_torch_optim
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> adamw = torch.optim.AdamW([weight], lr=0.1)
        >>> weight.grad = torch.tensor([1.0, -2.0])
        >>> adamw.step()
        >>> optimizer = Modular([weight], ClipNorm(10.0), Adam(), WeightDecay(0.0), LR(1.0))
        >>> optimizer.load_state_dict(from_torch_optim(adamw.state_dict(), optimizer))
        >>> optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["weight_decay"]
        (0.1, 0.01)
    """
    saved = saved_groups(state_dict, optimizer.param_groups)
    own = optimizer.state_dict()["param_groups"]
    groups: list[Group] = []
    state: dict[Any, dict[str, Any]] = {}
    for old, new, group in zip(saved, own, optimizer.param_groups, strict=True):
        known = [member for member, _ in members([group])]
        name = _optimizer_of(optimizer, known)
        groups.append({**new, **_settings_from(old, optimizer, name, known), "params": old["params"]})
        views = GroupSettings(groups[-1], optimizer.stored_as)
        for i, member in zip(old["params"], known, strict=True):
            if i in state_dict["state"]:
                fresh = optimizer.chain.state_in_scope(member, views)
                state[i] = fresh | _state_from(state_dict["state"][i], optimizer, name, member, views)
    return {"state": state, "param_groups": groups}


def to_torch_optim(optimizer: Modular, target: Optimizer) -> dict[str, Any]:
    """Return a checkpoint for an optimizer of `torch.optim` that goes on where a chain stopped.

    What the rest of the chain does (clipping, above all) and remembers is left out.

    Args:
        optimizer: The chain, with one optimizer for all its parameters.
        target: The one that will load the result, with the same parameters in the same groups; it is not changed.

    Returns:
        What ``target.load_state_dict`` takes; it shares no memory with the chain.

    Raises:
        ValueError: If the groups have other sizes, if the chain's optimizer is another than ``target``, or if weights
            decay in another way.
    """
    saved = saved_groups(optimizer.state_dict(), target.param_groups)
    groups: list[Group] = []
    state: dict[Any, dict[str, Any]] = {}
    kept = target.state_dict()["param_groups"]
    for old, new, group in zip(saved, kept, optimizer.param_groups, strict=True):
        known = [member for member, _ in members([group])]
        name = _optimizer_of(optimizer, known)
        transform = optimizer.transforms[name]
        expected = transform.optimizer_class if isinstance(transform, Wrap) else TORCHS[type(transform)]
        if not isinstance(target, expected):
            raise ValueError(f"{transform!r} is torch.optim.{expected.__name__}, not {type(target).__name__}")
        groups.append({**new, **_settings_to(group, new, optimizer, name, known), "params": old["params"]})
        for i, member in zip(old["params"], known, strict=True):
            own = optimizer.state.get(member.param, {})  # pyright: ignore[reportArgumentType, reportCallIssue]
            if mine := {k.removeprefix(f"{name}/"): v for k, v in own.items() if k.startswith(f"{name}/")}:
                # torch's loading takes tensors as they are; RMSprop counts steps, and does not use it
                state[i] = {"step": torch.zeros(())} if expected is optim.RMSprop else {}
                state[i].update({k: v.clone() if isinstance(v, Tensor) else v for k, v in mine.items()})
    return {"state": state, "param_groups": groups}


def _optimizer_of(optimizer: Modular, known: Sequence[Member]) -> str:
    """The name of the one transform that stands for an optimizer of torch for these parameters."""
    kinds = (*TORCHS, Wrap)
    found = {
        tuple(n for n, t in optimizer.transforms.items() if type(t) in kinds and t.scope.has(member))
        for member in known
    } or {()}
    if len(found) > 1 or len(names := found.pop()) != 1:
        raise ValueError(
            "torch.optim has one optimizer for all parameters of a group: the chain needs exactly one of "
            f"{', '.join(kind.__name__ for kind in kinds)} for them, got {optimizer.chain!r}"
        )
    return names[0]


def _settings_from(old: Group, optimizer: Modular, name: str, known: Sequence[Member]) -> Group:
    """A group of torch's optimizer, with the chain's keys."""
    transform = optimizer.transforms[name]
    result: Group = {}
    for key, value in old.items():
        if key == "params" or key in HOW:
            continue
        if f"{name}/{key}" in optimizer.stored_as:
            result[optimizer.stored_as[f"{name}/{key}"]] = plain(value)
        elif key == "weight_decay":
            result.update(_decay_from(old, optimizer, name, known))
        elif key == "lr" or key in HOST_KEYS:
            result[key] = value
        elif key in OPTIMIZER_KEYS or _has(transform, key):
            _check_same(key, value, _structure(key, optimizer, transform), transform)
        else:
            result[key] = value  # of schedulers and trainers
    return result


def _settings_to(group: Group, new: Group, optimizer: Modular, name: str, known: Sequence[Member]) -> Group:
    """A group of the chain, with the keys of torch's optimizer."""
    transform = optimizer.transforms[name]
    result: Group = {}
    for key, value in new.items():
        if f"{name}/{key}" in optimizer.stored_as:
            result[key] = group[optimizer.stored_as[f"{name}/{key}"]]
        elif key == "weight_decay":
            result[key] = _decay_to(group, new, optimizer, name, known)
        elif key not in (*HOW, *HOST_KEYS, "lr") and (key in OPTIMIZER_KEYS or _has(transform, key)):
            _check_same(key, value, _structure(key, optimizer, transform), transform)
    return result | {key: group[key] for key in (HOST_KEYS | {"lr"}) & group.keys() - {"params", "param_names"}}


def _has(transform: Transform, key: str) -> bool:
    return transform.structure(key) is not None if isinstance(transform, Wrap) else hasattr(transform, key)


def _structure(key: str, optimizer: Modular, transform: Transform) -> Any:
    """What of torch's settings is an attribute here."""
    if key == "maximize":
        return optimizer.maximize
    return transform.structure(key) if isinstance(transform, Wrap) else getattr(transform, key, None)


def _check_same(key: str, theirs: Any, ours: Any, transform: Transform) -> None:
    if plain(theirs) != plain(ours) and (theirs or ours):
        raise ValueError(f"torch's optimizer has {key}={theirs!r}, and the chain with {transform!r} {key}={ours!r}")


def _decays(optimizer: Modular, name: str, known: Sequence[Member], group: Group) -> tuple[list[str], list[str]]:
    """The transforms that decay these weights before their optimizer and after it, and where torch's would be."""
    names = list(optimizer.transforms)
    acting = [n for n, t in optimizer.transforms.items() if isinstance(t, WeightDecay) and t.scope.indices(known)]
    before, after = ([n for n in acting if (names.index(n) < names.index(name)) == early] for early in (True, False))
    decoupled = group.get("decoupled_weight_decay")
    if isinstance(optimizer.transforms[name], Adam):
        # checkpoints of older versions do not say which of the two it is
        decoupled = not before if decoupled is None else decoupled
    else:
        decoupled = isinstance(optimizer.transforms[name], Muon)
    return (after, before) if decoupled else (before, after)


def _decay_from(old: Group, optimizer: Modular, name: str, known: Sequence[Member]) -> Group:
    there, _ = _decays(optimizer, name, known, old)
    value = old["weight_decay"]
    if not there and value:
        side = "after" if old.get("decoupled_weight_decay") or type(optimizer.transforms[name]) is Muon else "before"
        raise ValueError(f"the checkpoint has weight_decay={value}: put WeightDecay({value}) {side} {name!r}")
    return {optimizer.stored_as[f"{there[0]}/weight_decay"]: value} if there else {}


def _decay_to(group: Group, new: Group, optimizer: Modular, name: str, known: Sequence[Member]) -> float:
    there, elsewhere = _decays(optimizer, name, known, new)
    values = [group[optimizer.stored_as[f"{n}/weight_decay"]] for n in (*there, *elsewhere)]
    if any(values[1 if there else 0 :]):
        raise ValueError(
            f"weights decay in the chain as they cannot in torch's optimizer: {optimizer.chain!r}. Before the "
            "optimizer WeightDecay is torch.optim.Adam's, after it torch.optim.AdamW's"
        )
    return values[0] if there else 0.0


def _state_from(
    saved: Mapping[str, Any], optimizer: Modular, name: str, member: Member, setting: Mapping[str, Any]
) -> dict[str, Any]:
    """The state of one parameter, with the chain's keys."""
    transform = optimizer.transforms[name]
    possible = optimizer.chain.state_in_scope(member, setting, possible=True)
    result: dict[str, Any] = {}
    for key, value in saved.items():
        if f"{name}/{key}" in possible:
            if value is not None:  # a momentum that has not begun
                result[f"{name}/{key}"] = _tensor(value) if key == "step" else value
        elif key != "step":  # RMSprop counts, and does not use it
            raise ValueError(f"the checkpoint has the state {key!r}, which {transform!r} does not: load it with Wrap")
    return result


def _tensor(step: float | Tensor) -> Tensor:
    """Step counts were numbers in older versions."""
    return step if isinstance(step, Tensor) else torch.tensor(float(step))
